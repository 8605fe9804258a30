"""README.md and docs/: every command is checked, and run at toy size where a CPU can.

    python -m pytest tests/test_docs.py

A command is a line of a fenced `sh` block. For each, the program and the files it names must exist,
and the program's own parser must accept its arguments. Then it is either in RUN, which says what to
append to it so that it ends within seconds, or in ONLY_CHECKED, which says why it is not run. A
command that is in neither fails; so does an entry whose command has gone. Runs take place in a copy
of the repository, with toy models under the names that the pages use.
"""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, write_items
from warm_python import warm_python

from configurator import parse_args
from norm_plan import NORMS, NormConfig
from norm_types import NORM_TYPES
from train import TrainConfig

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

SHAPE = """--n_layer=4 --n_head=2 --n_embd=32 --block_size=32 --batch_size=2
  --gradient_accumulation_steps=2 --dtype=float32 --device=cpu"""
TRAIN = f"""{SHAPE} --max_iters=4 --warmup_iters=1 --eval_interval=4 --eval_tokens=128
  --sample_tokens=0"""
DISTILL = """--block_size=16 --batch_size=2 --gradient_accumulation_steps=1 --max_iters=2
  --warmup_iters=1 --eval_interval=2 --eval_blocks=2 --calibration_blocks=2 --device=cpu"""
TOKENS = "--tokenizer=bytes --processes=1"  # GPT-2's tokenizer is a download

# What is appended to a command -> the commands. Training gets a folder of its own as well.
RUN = {
    "": """
python data/stdlib/prepare.py
python data/prepare.py input.txt --tokenizer=bytes --out_dir=data/mine
python report.py out/demo out/peri --plot=out/loss.png
python report.py --published
python -m evidence.archive results/cpu/table1/runs.tar.xz
python convert.py out/layer --to=rms --out=out/layer-rms
python convert.py out/taper --to=folded --out=out/taper-folded
python convert.py out/demo --to=weightless --out=out/weightless
python convert.py out/demo --to=coupled --inexact --out=out/coupled
python convert.py out/layer --analyze
python convert.py out/demo --to=hf --out=out/hf
python doctor.py out/demo --text=book.txt
python doctor.py out/layer --against=out/demo
python bench_decode.py random:qwen3-0.6b --ledger
repro/gpu.sh
python -m repro.which_norm
""",
    TOKENS: """
python data/prepare.py a.jsonl b.parquet --val_share=0.05 --out_dir=data/web
python data/prepare.py train.jsonl --val=val.jsonl --out_dir=data/given
python data/prepare.py train.jsonl --val=val.jsonl --out_dir=data/offline
""",
    TRAIN: """
python train.py config/demo.py
python train.py config/demo.py --norm_type=peri --out_dir=out/peri
python train.py config/demo.py --norm_type=coupled --seed=8 --init_std=0.08 --out_dir=out/coupled-8
python train.py config/demo.py --norm_type=coupled --coupled_first=1 --out_dir=out/first
python train.py config/demo.py --norm_type=coupled --norm_plan="Rs RR RR RR R" \
  --out_dir=out/block0
python train.py config/demo.py --norm_type=layer --out_dir=out/layer
python train.py config/demo.py --norm_type=taper --out_dir=out/taper
python train.py config/demo.py --norm_file=my_norm.py --norm_type=MeanAbs --out_dir=out/mine
python train.py config/demo.py --norm_type=taper --taper_final=True --taper_anchor=0.1 \
  --out_dir=out/no-norms
python train.py config/demo.py --init_from=out/layer --norm_type=taper --taper_base=layer \
  --taper_warmup=0.1 --learning_rate=1e-3 --out_dir=out/tapered
""",
    "--max_new_tokens=8 --device=cpu": """
python sample.py out/demo --prompt="def " --max_new_tokens=300
python sample.py out/demo/ckpt_last.pt --prompt=FILE:prompt.txt --temperature=0
""",
    "--pictures=False": """
python report.py out/small --baseline=rms
python report.py out/table1_cpu --baseline=rms
python report.py results/cpu/table1/runs.tar.xz --baseline=rms --out=out/table1
""",
    "--data=items.jsonl --device=cpu": """
python hellaswag.py out/small/rms-8
""",
    f"{SHAPE} --controls=False": """
python -m bench.train config/demo.py --arms="rms; coupled" --rounds=6 --compile=False
""",
    "--ops=rms_norm --channels=32 --rows=64 --rounds=6 --dtype=float32": """
python -m bench.kernels --out=out/kernels
""",
    "--windows=4 --length=16 --device=cpu": """
python -m posthoc.rms_stats out/demo --text=book.txt
""",
    DISTILL: """
python distill.py --teacher=out/demo --local=book.txt --method=full
""",
    "--arms=A,C --tokens=4 --device=cpu": """
python bench_decode.py out/demo --tokens=16 --rounds=6 --compiled=false --peers=false
""",
}

# Why they are not run -> the commands
ONLY_CHECKED = {
    "network": """
git clone https://github.com/karpathy/nanoGPT ../nanoGPT
git clone https://github.com/meta-pytorch/gpt-fast ../gpt-fast
pip install datasets
pip install lm-eval
pip install liger-kernel quack-kernels
pip install peft
pip install safetensors huggingface_hub
pip install transformers
python data/shakespeare_char/prepare.py
python data/fineweb_edu/prepare.py
python data/wheels/prepare.py
python sample.py random:gpt2 --prompt="Hello"
python hellaswag.py random:gpt2 --items=1
python train.py config/shakespeare_char.py
python train.py config/layer.py --init_from=gpt2
python convert.py openai-community/gpt2 --analyze
python convert.py openai-community/gpt2 --to=rms --out=out/gpt2-rms
python convert.py facebook/opt-125m --to=rms --out=out/opt-rms
python convert.py google/gemma-3-1b-pt --to=rescaled --factor=2^-6 --out=out/gemma
python data/prepare.py mine.txt --tokenizer=gpt2 --out_dir=data/mine
python train.py --init_from=gpt2 --data_dir=data/mine --out_dir=out/tuned --dropout=0.1 \
  --max_iters=200 --warmup_iters=20 --learning_rate=6e-5 --min_lr=6e-6 --batch_size=4 \
  --gradient_accumulation_steps=8 --eval_interval=50 --eval_tokens=32768
python convert.py out/tuned --to=hf --out=out/tuned-hf
python hellaswag.py out/distill
python convert.py Qwen/Qwen3-0.6B --to=weightless --out=out/qwen3
python convert.py Qwen/Qwen3-0.6B --to=rotated --out=out/qwen3-rotated
python doctor.py Qwen/Qwen3-0.6B --against=ours:Qwen/Qwen3-0.6B
python -m posthoc.rms_stats Qwen/Qwen3-0.6B --text=book.txt --across --plot=fig3.png
python distill.py config/distill_qwen3_0.6b.py
python distill.py config/distill_qwen3_0.6b.py --estimate
python -m evals.lm_eval_model out/demo out/distill --tasks=mmlu,gpqa_main_n_shot --num_fewshot=5
python -m evals.lm_eval --model nanonorm --model_args spec=out/demo --tasks arc_easy,piqa \
  --num_fewshot 5 --output_path out/marks.json
repro/fig3.sh TEXT
""",
    "GPU": """
make gpu
repro/gpu.sh train 'decode-*'
torchrun --standalone --nproc_per_node=8 train.py config/coupled.py
torchrun --standalone --nproc_per_node=8 train.py config/coupled.py --parallel=fsdp
torchrun --standalone --nproc_per_node=8 train.py config/coupled.py --parallel=fsdp \
  --max_iters=200 --out_dir=out/fsdp
torchrun --standalone --nproc_per_node=8 train.py config/coupled.py --parallel=ddp \
  --max_iters=200 --out_dir=out/ddp
torchrun --standalone --nproc_per_node=8 train.py config/taper.py
torchrun --standalone --nproc_per_node=8 train.py config/taper.py --taper_warmup=0.1 \
  --out_dir=out/taper-early
python -m bench.train config/rms.py --arms="rms; coupled; coupled coupled_impl=fold" \
  --rounds=40 --out=out/speed
python bench_decode.py random:llama3.2-1b --gpt_fast=../gpt-fast
python bench_decode.py random:qwen3-1.7b --arms=A,C,D --batch=8,16,32,64,128 --tuning=off \
  --library_from=1 --peers=false --out=results/h100/library_from/1
ARMS="'rms --learning_rate=6e-4' 'rms --learning_rate=1.2e-3' \
  'peri --learning_rate=6e-4' 'peri --learning_rate=1.2e-3'" \
  SEEDS=1 OUT=out/rates NPROC=8 ./sweep.sh config/rms.py --max_iters=2000 --study=rates
ARMS="'rms --learning_rate=6e-4' 'peri --learning_rate=1.2e-3'" \
  SEEDS="2 3 4 5" OUT=out/verdict NPROC=8 ./sweep.sh config/rms.py --study=verdict
python report.py out/verdict --baseline=rms
repro/fig2.sh
repro/fig4.sh
repro/table1.sh full
repro/table2.sh
repro/taper_finetune.sh gpt2
repro/taper_table.sh
repro/taper_throughput.sh
""",
    "a cluster": """
sbatch --nodes=4 --gpus-per-node=8 --cpus-per-task=32 --time=8:00:00 \
  slurm/train.sbatch config/coupled.py --out_dir=out/coupled
ARMS="rms coupled" SEEDS="8 9 10 11" OUT=out/small \
  sbatch --array=1-8 --gpus=1 --cpus-per-task=8 --time=8:00:00 slurm/sweep.sbatch config/small.py
ARMS="rms coupled" SEEDS="8 9 10 11 12 13 14 15" OUT=out/table1 NPROC=8 HELLASWAG=auto \
  sbatch --array=1-4 --exclusive --gpus=8 --cpus-per-task=64 --time=8:00:00 \
  slurm/sweep.sbatch config/rms.py --full_val=True --planned_seeds=8 --delta_val_loss=0.001
""",
    "minutes or hours of a CPU": """
make demo
make test
python bench_decode.py random:gpt2 --tokens=16 --batch=1,4
OUT=out/taper_launches repro/taper_throughput.sh --ledger
python -m repro.fold_table
repro/cbwc_centering.sh
repro/cbwc_classify.sh
repro/cbwc_table3.sh
repro/cbwc_training.sh
repro/mygpt.sh
repro/posthoc.sh FOLDER
repro/init_std.sh
repro/muon_rate.sh curve
repro/rivals.sh W
repro/layer_coupled.sh CODE
repro/bfloat16.sh ../nanoGPT
repro/taper_finetune.sh cbwc
repro/span.sh
repro/table1.sh cpu
repro/taper.sh
repro/taper_finetune.sh cpu
repro/layer_coupled.sh CODE
repro/which_norm.sh cpu verdict W
repro/leads.sh CODE rates W
repro/lasts.sh CODE S
repro/point_wise.sh CODE rates
""",
    "another test runs the program at toy size": """
python doctor.py mine.py:trained --against=mine.py:exported
python sample.py out/mine --norm_file=my_norm.py
python judge.py --norm_file=my_norm.py --arms="rms MeanAbs" config/demo.py --out=out/judge
python judge.py --norm_file=my_norm.py --arms="rms MeanAbs" config/demo.py --dry_run=True
sbatch --array=1-8 --gpus=1 --cpus-per-task=8 --time=8:00:00 \
  slurm/judge.sbatch --arms="rms peri" config/small.py --out=out/judge --jobs=1
python judge.py --out=out/judge --keep=results/judged/mine
python train.py config/demo.py --data_dir=data/mine --out_dir=out/mine
pip install .
torchrun --standalone --nproc_per_node=2 train.py config/demo.py
torchrun --standalone --nproc_per_node=8 hellaswag.py out/small/rms-8
ARMS="rms coupled" SEEDS="8 9 10 11" ./sweep.sh config/table1_cpu.py --init_std=0.08
ARMS="rms coupled 'coupled --coupled_span=2'" SEEDS="8 9 10 11 12 13 14 15" \
  ./sweep.sh config/small.py
ARMS="'rms --learning_rate=0.006' 'peri --learning_rate=0.003'" SEEDS="1 2 3 4" OUT=out/rates \
  ./sweep.sh config/demo.py --study="peri, rates from seed 100"
ARMS=peri SEEDS="8 9 10 11" ./sweep.sh config/demo.py --same_code=3f0c9a71b2d4
python report.py out/demo --baseline=rms --same_code=3f0c9a71b2d4,90ab12cd34ef
python -m bench.aot --sm=90 --channels=768
python -m bench.aot --sm=90 --batch=1,31
python -m bench.bytes --n_embd=768 --tokens=65536
python -m bench.kernels --host=True
python -m bench.fold random:gpt2 --lengths=256,1024
python -m evals.lm_eval_model out/demo out/distill --mmlu=DEV,TEST --limit=20
""",
}


# -------------------------------------------------------------------------------- reading the pages


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a page in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def lines_of(text: str) -> list[str]:
    """The commands in a text: comments removed, continued lines joined, one blank between words."""
    text = re.sub(r"(^|\s+)#.*$", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def by_command(table: dict[str, str]) -> dict[str, str]:
    """{command: key of the table}."""
    return {command: key for key, text in table.items() for command in lines_of(text)}


RUNS, NOT_RUN = by_command(RUN), by_command(ONLY_CHECKED)
COMMANDS = {
    command for page in PAGES for block in blocks(page, "sh") for command in lines_of(block)
}


# Batch script -> the program that gets its arguments
BATCH = {
    "slurm/train.sbatch": "train",
    "slurm/sweep.sbatch": "./sweep.sh",
    "slurm/judge.sbatch": "judge",
}


def split_command(command: str) -> tuple[dict[str, str], str, list[str]]:
    """(environment, program, arguments). A Python program is its module: `train`, `bench.train`."""
    words, environment = shlex.split(command), {}
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    program = words.pop(0)
    if program == "torchrun":
        while words[0].startswith("-"):
            option = words.pop(0)
            assert re.fullmatch(r"--standalone|--nproc_per_node=\d+|--", option), option
    if program == "sbatch":
        while words[0].startswith("-"):
            words.pop(0)
        program = BATCH[words.pop(0)]
    if program in ("python", "torchrun"):
        program = words.pop(0)
        if program == "-m":
            return environment, words[0], words[1:]
        assert (ROOT / program).is_file(), f"{program}: no such program"
        return environment, program.removesuffix(".py").replace("/", "."), words
    return environment, program, words


# ------------------------------------------------------------------------------------- all commands


def test_every_command_is_in_one_table():
    known = [*RUNS, *NOT_RUN]
    assert not COMMANDS - set(known), "put these into RUN, or into ONLY_CHECKED"
    assert not set(known) - COMMANDS, "no page has these commands any more"
    assert len(known) == len(set(known))


class Parsed(Exception):
    """The arguments were accepted."""


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_program_files_and_arguments_of_a_command(command, house, monkeypatch, registry):
    """The program's main runs until its own parser has accepted the arguments, and no further."""
    monkeypatch.chdir(house)
    environment, program, words = split_command(command)
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in words)
    elif program.endswith(".sh"):
        check_script(program, environment, words)
    elif program not in ("pip", "git", "evals.lm_eval"):  # those have options of others
        module = importlib.import_module(program)
        if not hasattr(module, "parse_args"):
            assert command in RUNS or not words, "a parser of its own: only a run can tell"
            return

        def parse_and_stop(*arguments, **more):
            more.pop("complete", None)  # may read a model, from the hub
            parse_args(*arguments, **more)
            raise Parsed

        monkeypatch.setattr(module, "parse_args", parse_and_stop)
        with pytest.raises(Parsed):
            module.main(words)


def check_script(program: str, environment: dict[str, str], words: list[str]) -> None:
    """The script prints its help, reads these variables and knows these modes; sweep.sh's keys are
    those of train.py."""
    python = os.environ | {"PYTHON": warm_python()}
    helped = subprocess.run(["bash", program, "--help"], env=python, capture_output=True, text=True)
    assert helped.returncode == 0 and Path(program).name in helped.stdout, helped.stderr
    source = Path(program).read_text()
    if program.endswith("sweep.sh"):
        source = Path("study/sweep.py").read_text()
        assert all(f'("{name}"' in source for name in environment)
        for arm in shlex.split(environment["ARMS"]):
            norm_type, *keys = shlex.split(arm)
            parse_args(TrainConfig, [*words, f"--norm_type={norm_type}", *keys])
    else:
        assert all(f"{name}:-" in source for name in environment)
        assert all(re.search(rf"(?<!\w){re.escape(word.strip('*-'))}\b", source) for word in words)


# --------------------------------------------------------------------------------------------- runs


def run(house: Path, program: str, words: list[str]) -> None:
    """The program in a process of its own, in the copy of the repository; it must exit with 0."""
    python = warm_python()
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": python, "OMP_NUM_THREADS": "1"}
    if program.startswith("data."):  # which find their way alone: no module of ours is loaded yet
        python = sys.executable
    start = [program] if program.endswith(".sh") else [python, f"{program.replace('.', '/')}.py"]
    done = subprocess.run(
        [*start, *words], cwd=house, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """A copy of the repository with data, texts, and toy models named as in the pages."""
    folder = tmp_path_factory.mktemp("docs") / "house"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "out", "tests", "*.bin", "meta.json")
    shutil.copytree(ROOT, folder, ignore=skipped)
    text = "It was a dark and stormy night; the rain fell in torrents, except at intervals. " * 60
    for name in ("book.txt", "input.txt"):
        (folder / name).write_text(text)
    (folder / "prompt.txt").write_text("def ")
    (folder / "my_norm.py").write_text(blocks(ROOT / "docs/norms.md", "python")[0])
    for name in ("train.jsonl", "val.jsonl", "a.jsonl"):
        (folder / name).write_text(f'{{"text": "{text}"}}\n' * 3)
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": [text] * 3}), folder / "b.parquet")
    write_items(folder / "items.jsonl", 4)

    from data.shards import write_meta, write_shard

    for split in ("train", "val"):
        shard = folder / f"data/stdlib/stdlib_{split}_000000.bin"
        write_shard(shard, np.frombuffer(text.encode(), dtype=np.uint8))
    write_meta(folder / "data/stdlib", {"tokenizer": "bytes", "vocab_size": 257})
    for norm_type in ("rms", "peri", "layer", "taper"):
        words = ["config/demo.py", f"--norm_type={norm_type}", f"--out_dir=out/{norm_type}"]
        run(folder, "train", [*words, *TRAIN.split()])
    shutil.move(folder / "out/rms", folder / "out/demo")
    with tarfile.open(folder / "results/cpu/table1/runs.tar.xz") as archive:
        some = [file for file in archive if re.match(r"(./)?(rms|coupled)-(8|9|10)\b", file.name)]
        archive.extractall(folder / "out/small", some)
    shutil.copytree(folder / "out/small", folder / "out/table1_cpu")
    shutil.copy(folder / "out/demo/ckpt_best.pt", folder / "out/small/rms-8")
    return folder


@pytest.mark.parametrize("command", RUNS)
def test_a_command_runs_at_toy_size(command, house, tmp_path):
    _, program, words = split_command(command)
    words += shlex.split(RUNS[command])
    if program == "train":
        words.append(f"--out_dir={tmp_path / 'run'}")
    run(house, program, words)
    if program == "train":
        assert (tmp_path / "run/ckpt_last.pt").exists()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name
)
def test_python_code_of_a_page_runs(page):
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), {"__name__": "docs"})


# ------------------------------------------------------------------------------------- links, sizes


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def numbered(kind: str, last: int) -> list[str]:
    """Kind 1, kind 2, ... as a paper numbers them."""
    return [f"{kind} {number}" for number in range(1, last + 1)]


# Heading of docs/seeds.md -> the items of that source that must have a row each
SOURCES = {
    "CoupledNorm": numbered("Table", 2) + numbered("Figure", 4),
    "RMSNorm, the article": [
        *("Partial RMSNorm", "Gated RMSNorm", "Group RMSNorm", "QK normalisation"),
        *("Formulation", "Overview", "Motivation", "Relation", "Placement", "Empirical"),
    ],
    "Chapter 24": numbered("Section 24.11,", 4) + numbered("Section 24.12,", 4),
    "Enjoy Your Layer Normalization": [
        *numbered("Table", 25),
        *numbered("Figure", 21),
        "Algorithm 1",
    ],
    "TaperNorm": ['Table "Complexity"', 'Table "Throughput"', "Proposition 4.1", "Proposition 4.2"],
}


@pytest.mark.parametrize("source", SOURCES)
def test_each_item_of_a_source_has_a_row(source):
    """With a state; a page where it is shown, and a test that is there where it only works."""
    page = (ROOT / "docs/seeds.md").read_text()
    section = re.search(rf"^## {source}$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)[1]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"][2:]
    for item in SOURCES[source]:
        assert any(re.match(rf"{item}\b|{item}$", row[0]) for row in rows), item
    for item, _, state, where in rows:
        assert state in ("shown", "stand-in", "works", "not done"), item
        assert state not in ("shown", "stand-in") or "](" in where, item
        named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", where)
        assert state != "works" or named, item
        for file, name in named:
            assert f"def {name}" in (ROOT / file).read_text(), f"{item}: {file} {name}"


def test_each_norm_type_and_letter_is_described():
    readme = (ROOT / "README.md").read_text()
    norms = (ROOT / "docs/norms.md").read_text()
    help_text = str(NormConfig.__dataclass_fields__["norm_type"].metadata)
    for name in NORM_TYPES:
        is_named = f"`{name}`" in readme and re.search(rf"\b{name}\b", help_text)
        assert is_named, f"{name} is not in README.md, or not in the help of norm_type"
        assert f"| `{name}` |" in norms, f"{name} has no row in docs/norms.md"
    for letter in NORMS:
        assert f"`{letter}`: " in norms


def test_sizes():
    lines = (ROOT / "README.md").read_text().splitlines()
    first = lines.index("```sh")  # the first command: below 30 lines and 300 words
    assert first < 30 and len(" ".join(lines[:first]).split()) < 300
    for name, count in re.findall(r"^\| \[([\w/]+\.py)\].*?\| (\d+) \|", "\n".join(lines), re.M):
        there = len((ROOT / name).read_text().splitlines())
        assert abs(there - int(count)) < 0.15 * there, f"{name}: {there} lines"
