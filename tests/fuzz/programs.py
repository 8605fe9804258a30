"""The programs: a short valid command of each, and the keys that mean how much work is done."""

from dataclasses import dataclass

from tests.fuzz.world import TRAINED


@dataclass(frozen=True)
class Program:
    """A program and a valid command of it.

    Attributes:
        name: how a case names it.
        module: what is imported; `main` is called.
        base: arguments of a short valid run in the folder of world.py.
        spec: whether the first argument is a model.
        configs: whether config files are arguments.
        amounts: keys whose large values are a long run, not a hang: Ctrl-C must end it. "*" stands
            for all keys, where the valid command itself takes long.
        imports: modules that it imports when it runs, which is not counted as time of a case.
        preset: attributes of the module, so that nothing is written outside the case's folder.
    """

    name: str
    module: str
    base: tuple[str, ...] = ()
    spec: bool = False
    configs: bool = True
    amounts: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    preset: tuple[tuple[str, str], ...] = ()

    def is_long(self, names: tuple[str, ...]) -> bool:
        """May a case of these keys take as long as it likes?"""
        return self.amounts == ALL or bool(set(names) & set(self.amounts))


ALL = ("*",)
SIZES = ("n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "n_inner", "vocab_size")
STEP = ("torch._dynamo", "torch.optim", "training.muon")
PICTURES = ("matplotlib.pyplot", "matplotlib.backends.backend_agg")
TRANSFORMERS = ("transformers", "transformers.models.auto.modeling_auto", "safetensors.torch")

PROGRAMS = (
    Program(
        "train",
        "train",
        (*TRAINED, "--out_dir=out"),
        amounts=(
            "max_iters",
            "gradient_accumulation_steps",
            "batch_size",
            "sample_tokens",
            "compile",
            *SIZES,
        ),
        imports=STEP,
    ),
    Program(
        "distill",
        "distill",
        (
            "--teacher=runs/rms-1",
            "--local=text.txt",
            "--val=other.txt",
            "--out_dir=out",
            "--rank=2",
            "--adapter_alpha=4",
            "--block_size=8",
            "--batch_size=2",
            "--max_iters=2",
            "--seed=1",
            "--gradient_accumulation_steps=1",
            "--eval_interval=2",
            "--calibration_blocks=2",
            "--eval_blocks=2",
            "--log_interval=1",
            "--warmup_iters=1",
            "--device=cpu",
            "--coupled_first=0",
            "--dtype=float32",
        ),
        amounts=("max_iters", "gradient_accumulation_steps", "batch_size", "rank"),
        imports=(*STEP, "peft", "datasets"),
    ),
    Program(
        "sample",
        "sample",
        ("run", "--prompt=the", "--max_new_tokens=3", "--device=cpu"),
        spec=True,
        amounts=("num_samples", "max_new_tokens"),
        imports=TRANSFORMERS,
    ),
    Program(
        "hellaswag",
        "hellaswag",
        ("run", "--data=items.jsonl", "--out=scores.jsonl", "--device=cpu", "--dtype=float32"),
        spec=True,
        imports=TRANSFORMERS,
    ),
    Program(
        "convert",
        "convert",
        ("run", "--to=rms", "--out=out"),
        spec=True,
        imports=(*STEP, *TRANSFORMERS),
    ),
    Program(
        "bench_decode",
        "bench_decode",
        (
            "run",
            "--tokens=2",
            "--rounds=6",
            "--compiled=False",
            "--peers=False",
            "--device=cpu",
            "--prompt=the",
            "--arms=A",
            "--dtype=float32",
            "--bandwidth=1e9",
        ),
        spec=True,
        amounts=("rounds", "batch", "peers", "compiled", "trace", "last_token"),
        imports=(*STEP, *PICTURES, *TRANSFORMERS, "scipy.stats"),
    ),
    Program("report", "report", ("run",), configs=False, imports=(*PICTURES, "scipy.stats")),
    Program(
        "report_baseline",
        "report",
        ("runs", "--baseline=rms", "--out=out", "--pictures=False"),
        configs=False,
        imports=(*PICTURES, "scipy.stats"),
    ),
    Program(
        "fineweb_edu",
        "data.fineweb_edu.prepare",
        (
            "--local=documents.jsonl",
            "--out_dir=out",
            "--tokenizer=bytes",
            "--shard_tokens=500",
            "--processes=1",
        ),
        amounts=("processes", "shard_tokens"),
        imports=("datasets", "pyarrow.parquet"),
    ),
    Program(
        "shakespeare_char",
        "data.shakespeare_char.prepare",
        ("--local=text.txt",),
        configs=False,
        preset=(("__file__", "out/prepare.py"),),
    ),
    Program("stdlib", "data.stdlib.prepare", (), configs=False, preset=(("__file__", "out/p.py"),)),
    Program(
        "bench.train",
        "bench.train",
        (
            *TRAINED,
            "--arms=rms",
            "--controls=False",
            "--rounds=2",
            "--ledger=False",
            "--compile=False",
            "--vocab_size=257",
            "--out=out",
        ),
        amounts=(
            *SIZES,
            "rounds",
            "steps",
            "gradient_accumulation_steps",
            "batch_size",
            "compile",
            "ledger",
        ),
        imports=(*STEP, *PICTURES, "scipy.stats"),
    ),
    Program(
        "bench.kernels",
        "bench.kernels",
        (
            "--ops=rms_norm",
            "--rows=8",
            "--channels=16",
            "--rounds=6",
            "--dtype=float32",
            "--device=cpu",
            "--out=out",
        ),
        amounts=("rounds", "rows", "channels", "ops", "compiled"),
        imports=(*STEP, *PICTURES, "scipy.stats"),
    ),
    Program(
        "bench.fold",
        "bench.fold",
        (
            "run",
            "--lengths=8",
            "--batch=1",
            "--rounds=6",
            "--device=cpu",
            "--dtype=float32",
            "--out=fold.jsonl",
        ),
        spec=True,
        amounts=("rounds", "sequential", "batch", "modes"),
        imports=(*STEP, *TRANSFORMERS, "scipy.stats"),
    ),
    Program(
        "bench.bytes",
        "bench.bytes",
        ("--n_embd=64", "--n_head=2", "--block_size=256", "--tokens=8192", "--out=out"),
        amounts=ALL,
        imports=(*STEP, "torch._inductor.compile_fx"),
    ),
    Program(
        "bench.aot",
        "bench.aot",
        ("--sm=90", "--channels=768", "--out=aot.md"),
        amounts=("sm", "channels"),
    ),
    Program(
        "bench.aot_decode",
        "bench.aot_decode",
        ("--batch=1", "--shapes=gpt2", "--out=aot.md"),
        amounts=ALL,
    ),
    Program(
        "rms_stats",
        "posthoc.rms_stats",
        ("run", "--text=text.txt", "--windows=4", "--length=8", "--device=cpu", "--out=s.jsonl"),
        spec=True,
        amounts=("windows",),
        imports=(*PICTURES, *TRANSFORMERS),
    ),
    Program(
        "lm_eval_model",
        "evals.lm_eval_model",
        (
            "run",
            "--mmlu=dev.jsonl,test.jsonl",
            "--limit=1",
            "--device=cpu",
            "--dtype=float32",
            "--out=i.jsonl",
        ),
        spec=True,
        imports=("lm_eval", "lm_eval.tasks", "datasets"),
    ),
    Program("archive", "evidence.archive", ("runs.tar.xz",), configs=False),
    Program("claim", "evidence.claim", ("claimed", "true"), configs=False),
)
