"""The stages of repro/gpu.py: one command each, in the order in which figures are wanted when there is little time."""

import dataclasses
from dataclasses import dataclass

MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "llama3.2-1b", "llama3.2-3b")


@dataclass(frozen=True)
class Stage:
    """One command. Fields in braces are filled in; `toy` are words that make it small, behind all others."""

    name: str
    minutes: float  # on an H200, compilation included: an estimate until stages.jsonl has it
    command: str
    toy: str = ""
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    toy_env: dict[str, str] = dataclasses.field(default_factory=dict)
    needs_data: bool = False
    needs: str = ""  # a package that not everyone has
    goes_on: bool = False  # stopped at its limit it is not lost: the next call continues it
    run_folder: str = ""  # in scratch; of a program that writes no results, what this run's log says at its end is kept
    keep: str = ""  # in this file in `out`


def tests(name: str, minutes: float, words: str, toy: str = "", **env: str) -> Stage:
    words = f"{{python}} -m pytest -p no:cacheprovider -rf {words}"
    return Stage(name, minutes, words, toy, {"OMP_NUM_THREADS": "1"} | env, dict.fromkeys(env, "0"))


def training_speed(
    name: str, words: str = "", arms: str = "rms; coupled; coupled coupled_impl=fold", toy: str = ""
) -> Stage:
    """Arms in one process at 124 M; 120 sequences a step."""
    return Stage(name, 9, "{python} -m bench.train config/rms.py --batch_size=60 --gradient_accumulation_steps=2 "
                 f"--rounds=40 --ledger=False --profile --arms='{arms}' --out={{out}}/{name} {words}",
                 "--n_layer=2 --n_head=2 --n_embd=64 --vocab_size=512 --block_size=32 --batch_size=4 --rounds=3 "
                 f"--compile=False --compile_mode=default {toy}")  # fmt: skip


def decoding(model: str, batch: int) -> Stage:
    """The arms of Figure 2 at one batch size; the issue of all this is batch 1. By reckoning compilations take five
    minutes, and a round four seconds, most of it Hugging Face's."""
    name = f"decode-{model}" if batch == 1 else f"decode-{model}-{batch}"
    fewer = ""
    if model == "qwen3-8b":  # by reckoning a round of all arms takes nine seconds
        fewer = " --arms=A,B,C,D --tokens=64" + (" --peers=false" if batch > 32 else "")
    return Stage(name, 8, f"repro/fig2.sh --batch={batch} --rounds=20 {{gpt_fast}}{fewer}",
                 "--tokens=2 --rounds=6 --compiled=false --peers=false --dtype=float32 --arms=A,C,D",
                 {"MODELS": f"random:{model}", "OUT": "{out}/decode"}, toy_env={"MODELS": "{tiny}"})  # fmt: skip


def folding(shape: str) -> Stage:
    size = "--batch=32" if shape == "vit" else "--batch=2 --lengths=256,1024,4096"
    return Stage(f"fold-{shape}", 6, f"{{python}} -m bench.fold hf:{shape} {size} --rounds=40 --sequential=50 "
                 f"--modes=eager,compiled,graph --out={{out}}/fold/{shape}.jsonl",
                 "--batch=1 --lengths=16 --rounds=6 --sequential=2 --modes=eager")  # fmt: skip


def distilling(model: str, minutes: float) -> Stage:
    return Stage(f"distill-{model}", minutes, "{python} distill.py config/distill_qwen3_0.6b.py "
                 f"--teacher=random:{model} --dataset=random --eval_blocks=8 --max_iters=10 --warmup_iters=2 "
                 f"--eval_interval=10 --shuffle=64 --out_dir={{scratch}}/distill/{model}",
                 "--teacher={tiny} --method=lora --rank=4 --batch_size=2 --block_size=32 --max_iters=2 "
                 "--gradient_accumulation_steps=1 --eval_interval=2", needs="peft", run_folder=f"distill/{model}",
                 keep="distill/distill.jsonl")  # fmt: skip


def sweep(name: str, minutes: float, scale: str, toy: str) -> Stage:
    return Stage(name, minutes, f"repro/table1.sh {scale} --data_dir={{data}} --sample_tokens=0", toy,
                 {"OUT": f"{{scratch}}/{name}", "KEEP": f"{{out}}/{name}/runs"}, {"SEEDS": "8 9"}, needs_data=True,
                 goes_on=True)  # fmt: skip


TOY_RUN = ("--n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=2 --gradient_accumulation_steps=1 "
           "--max_iters=8 --eval_interval=4 --eval_tokens=512 --warmup_iters=2")  # fmt: skip
KERNEL_TESTS = ("tests/kernels/test_kernels.py tests/kernels/test_binding.py tests/bench/test_kernels.py "
                "tests/kernels/test_decode.py")  # fmt: skip
NORMS = "rms_norm,layer_norm,add_rms_norm,taper_norm"
COUPLED = "shared_rms_scale,add_shared_rms_scale,scaled_gelu,scaled_swiglu"
TOY_KERNELS = "--channels=64,128 --rows=64 --rounds=6"
# In the order in which figures are wanted, when there is little time.
STAGES = (
    tests("tests-step", 3, "-s tests/bench/test_bytes.py tests/bench/test_train.py -k 'real_step or clear_line'"),
    tests("tests-kernels", 6, f"-n {{jobs}} {KERNEL_TESTS}", "-k opcheck", NANONORM_FULL="1/500"),
    tests("tests-decode", 8, "-n 8 tests/decode/test_graph.py"),
    training_speed("train", "{nanogpt}"),
    *(decoding(model, 1) for model in MODELS),
    training_speed("train_bfloat16", "--residual=autocast"),
    Stage("kernels-norms", 9, f"{{python}} -m bench.kernels --ops={NORMS} --out={{out}}/kernels/norms", TOY_KERNELS),
    Stage("kernels-coupled", 9, f"{{python}} -m bench.kernels --ops={COUPLED} --out={{out}}/kernels/coupled",
          TOY_KERNELS),
    Stage("taper", 5, "repro/taper_throughput.sh", "--ledger", {"OUT": "{out}/taper"}),
    *(folding(shape) for shape in ("gpt2", "bert", "opt")),
    distilling("qwen3-0.6b", 4),
    distilling("qwen3-8b", 8),
    sweep("table1_small", 30, "small", TOY_RUN),
    sweep("pair_124m", 12, "pair", TOY_RUN),
    training_speed("train_kernels", "--controls=False", "rms kernels=torch; rms kernels=triton; coupled kernels=torch; "
                   "coupled kernels=triton", toy="--arms='rms kernels=torch; coupled kernels=torch'"),
    Stage("trace", 8, "repro/fig4.sh", "--tokens=2 --compiled=false --dtype=float32 --batch=1", {"OUT": "{out}/trace"},
          {"MODEL": "{tiny}"}),
    # Without `layer`, for time: each of an arm's 216 products is tried in some twenty ways.
    training_speed("train_autotuned", "--residual=autocast --compile_mode=max-autotune-no-cudagraphs --rounds=20 "
                   "--controls=False", "rms; coupled; coupled coupled_impl=fold; rms-no-mlp-gamma"),
    *(folding(shape) for shape in ("bloom", "vit")),
    *(decoding(model, batch) for batch in (8, 32, 2, 4, 16, 64, 128) for model in MODELS),
    folding("phi"),  # folds and certifies 2.7 B parameters on the CPU first: by reckoning minutes, and 60 GB
)  # fmt: skip
