"""Run lm-evaluation-harness on our models: it asks for log-likelihoods, a GPT answers.

    python -m evals.lm_eval_model out/teacher out/student \\
      --mmlu=mmlu_dev.jsonl.xz,mmlu_test.jsonl.xz --limit=20
    python -m evals.lm_eval_model Qwen/Qwen3-0.6B out/distill \\
      --tasks=mmlu,gpqa_main_n_shot --num_fewshot=5                          (network)
    python -m evals.lm_eval_model out/teacher --tasks=mine --include=folder/with/yaml

One or more models, all in one dtype, all with the smallest context among them, all asked the same
texts. MMLU offline is the harness's own 5-shot form over local rows (subject, question,
choices, answer). Needs lm-eval: pip install lm-eval. The last line of output is JSON.

Accuracy is a mean over items, for each of the harness's groups that has a mean (mmlu with its 57
subjects, weighted by size as there) and for each task in no such group. Its interval, and that of
the paired difference to the first model, is Student's t, 95 %, over the group's items. It takes
items as independent draws from questions of this kind, and the models as fixed. So it says nothing
about other training seeds or other prompts, and its width is zero where all items agree.
"""

import common.interrupt  # noqa: F401

import json
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from common.environment import Precision, environment, faster_float32_products, find_device
from common.errors import ConfigError, UserError, run_program
from common.output import check_replaceable, write_bytes_atomically, writing
from common.stats import paired
from configurator import check_ranges, key, parse_args
from evals.likelihood import Scorer
from evals.lm_eval_tasks import import_lm_eval, load_tasks
from load import load_model


@dataclass(frozen=True)
class EvalConfig:
    """Keys of evals/lm_eval_model.py."""

    tasks: str = key("", "tasks and groups of the harness, with commas between")
    mmlu: str = key(
        "", "local MMLU: files of dev rows and test rows, jsonl or jsonl.xz, a comma between"
    )
    include: str = key("", "folder of further task files")
    num_fewshot: int | None = key(
        None,
        "examples before a question (auto: as a task declares, 0 if it declares "
        "none, as mmlu and gpqa; a task that declares 0 keeps it)",
        least=0,
    )
    limit: int = key(0, "items a task (0: all)", least=0)
    batch_size: int = key(8, "contexts at once", least=1)
    device: str = key(
        "auto", "auto: the first of cuda, mps, cpu that is there", ("auto", "cpu", "cuda", "mps")
    )
    dtype: str = key(
        "auto",
        "of all models' computation (auto: bfloat16 on CUDA)",
        ("auto", "float32", "bfloat16"),
    )
    out: str = key("", "JSONL file for one line an item ('': none)")

    def __post_init__(self) -> None:
        check_ranges(self)
        if bool(self.tasks) == bool(self.mmlu):
            raise ConfigError("say what to evaluate on: --tasks=NAMES, or --mmlu=DEV,TEST")
        if self.mmlu and len(self.mmlu.split(",")) != 2:
            raise ConfigError(f"mmlu={self.mmlu}: needs two files, dev rows and test rows")


@dataclass(frozen=True)
class Marks:
    """How one model did on one group of tasks."""

    items: dict[tuple[str, int], float]  # (task, item) -> 1 if correct, else 0
    shots: list[int]  # numbers of examples before a question
    context: int  # tokens that fit
    requests: int
    cut: int  # requests that did not fit
    forwards: int  # forward passes


def evaluate(scorer: Scorer, tasks: list[Any], manager: Any, config: EvalConfig) -> Marks:
    """Let the harness mark `scorer`'s model. Raises UserError for what it cannot run."""
    # Here, because it needs the harness, which --help and bad input do not.
    from evals.harness_model import HarnessModel

    scorer.seen.clear()
    try:
        found = import_lm_eval().simple_evaluate(
            model=HarnessModel(scorer),
            tasks=tasks,
            task_manager=manager,
            num_fewshot=config.num_fewshot,
            limit=config.limit or None,
            bootstrap_iters=0,
        )
    except (KeyError, ValueError, OSError, AssertionError) as error:
        raise UserError(
            f"{tasks[0].task_name}, ...: the harness cannot run this with num_fewshot="
            f"{config.num_fewshot}, limit={config.limit} ({str(error)[:200]!r})"
        ) from None
    items = {}
    for task, samples in found["samples"].items():
        for sample in samples:
            if "acc" in sample:
                items[task, sample["doc_id"]] = float(sample["acc"])
    return Marks(
        items=items,
        shots=sorted(set(found["n-shot"].values())),
        context=scorer.context,
        requests=scorer.seen["requests"],
        cut=scorer.seen["cut"],
        forwards=scorer.seen["forwards"],
    )


def mean_and_interval(values: np.ndarray) -> tuple[float, list[float] | None]:
    """Return the mean of (n,) items and its 95 % t interval; None as the interval of one item."""
    interval = list(paired(values).interval()) if len(values) > 1 else None
    return float(values.mean()), interval


def summarise(group: str, marks: dict[str, Marks]) -> list[dict[str, Any]]:
    """Return one record a model of its marks on a group.

    From the second model on, a record has the paired difference to the first.
    """
    records: list[dict[str, Any]] = []
    base = next(iter(marks.values())).items
    for spec, own in marks.items():
        acc, interval = mean_and_interval(np.array([own.items[item] for item in base]))
        record = {
            "group": group,
            "model": spec,
            "items": len(base),
            "shots": own.shots,
            "acc": acc,
            "interval": interval,
        }
        if records:
            differences = np.array([own.items[item] - base[item] for item in base])
            record["difference"], record["difference_interval"] = mean_and_interval(differences)
            record["differing"] = int(np.count_nonzero(differences))
        record["context"] = own.context
        record["requests"] = own.requests
        record["cut"] = own.cut
        record["forwards"] = own.forwards
        records.append(record)
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Return the records of `summarise` as lines of text."""

    def cell(value: float | None, interval: list[float] | None, sign: str) -> str:
        if value is None:
            return ""
        text = f"{value:{sign}.4f}"
        if interval:
            low, high = interval
            text += f" ({low:{sign}.4f} .. {high:{sign}.4f})"
        return text

    rows = [["group", "items", "shots", "model", "accuracy (95 %)", "difference (95 %)", "cut"]]
    for record in records:
        rows.append(
            [
                record["group"],
                f"{record['items']:,}",
                "/".join(map(str, record["shots"])),
                record["model"],
                cell(record["acc"], record["interval"], ""),
                cell(record.get("difference"), record.get("difference_interval"), "+"),
                f"{record['cut']:,} of {record['requests']:,}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def run(
    specs: list[str], config: EvalConfig, precision: Precision, folder: Path
) -> dict[str, dict[str, Marks]]:
    """Mark all models: {group: {model: its marks}}. Prints the context, and what is left out.

    Args:
        folder: for files that the tasks need.

    Raises:
        UserError: a task cannot be run, or has no accuracy.
    """
    groups, manager = load_tasks(config.tasks, config.mmlu, config.include, folder)
    # All are loaded first, because the smallest context is used for every model.
    models = {spec: load_model(spec) for spec in specs}
    context = min(model.config.block_size for model in models.values())
    print(
        f"{precision.device.type}, {str(precision.dtype).removeprefix('torch.')}, "
        f"context {context:,}",
        flush=True,
    )
    marks: dict[str, dict[str, Marks]] = {group: {} for group in groups}
    for spec in specs:
        model = models.pop(spec)
        if precision.device.type == "cpu":
            faster_float32_products(model.config.n_embd, model.config.head_channels)
        scorer = Scorer(model, precision, config.batch_size, context)
        for group, tasks in groups.items():
            marks[group][spec] = evaluate(scorer, tasks, manager, config)
        del model, scorer  # before the next one needs the memory
    for group, tasks in groups.items():
        marked = {task for task, _ in marks[group][specs[0]].items}
        for name in sorted({task.task_name for task in tasks} - marked):
            print(f"{name}: left out, because it has no accuracy (acc)")
        if not marked:
            del marks[group]
    if not marks:
        raise UserError(
            f"tasks={config.tasks[:80]}: no item with an accuracy: choose multiple-choice tasks"
        )
    return marks


def write_items(path: Path, marks: dict[str, dict[str, Marks]]) -> None:
    """Write one JSON line an item: group, task, item, and which models were correct."""
    lines = []
    for group, own in marks.items():
        first = next(iter(own.values()))
        for task, item in first.items:
            correct = {spec: each.items[task, item] for spec, each in own.items()}
            record = {"group": group, "task": task, "item": item, "correct": correct}
            lines.append(json.dumps(record) + "\n")
    with writing(path.parent):
        write_bytes_atomically(path, "".join(lines).encode())


def main(argv: list[str]) -> None:
    """Run the program with these command-line arguments."""
    specs = [arg for arg in argv if not arg.startswith("-") and not arg.endswith(".py")]
    config, _ = parse_args(EvalConfig, [arg for arg in argv if arg not in specs], __doc__)
    if not specs:
        raise ConfigError(
            "name a model first: a run folder or a checkpoint file (--help says more)"
        )
    if len(set(specs)) < len(specs):
        raise ConfigError("a model is named twice: name each once")
    precision = Precision(config.dtype, find_device(config.device))
    if config.out:
        # Now, not after hours.
        check_replaceable(Path(config.out), rb'{"group": .*"correct"')
        with writing(Path(config.out).parent):
            open(config.out, "ab").close()
    with tempfile.TemporaryDirectory() as folder:
        marks = run(specs, config, precision, Path(folder))
    if config.out:
        write_items(Path(config.out), marks)
    records = [record for group, own in marks.items() for record in summarise(group, own)]
    print(table(records))
    if any(record["cut"] for record in records):
        print(
            "cut: this many requests did not fit the context, the smallest of all models', and "
            "lost their beginning; their\nitems are judged on an incomplete prompt"
        )
    place = environment(precision.device)
    place["versions"]["lm_eval"] = version("lm_eval")
    dtype = str(precision.dtype).removeprefix("torch.")
    print(json.dumps({"models": specs, "dtype": dtype, "groups": records, **place}))


if __name__ == "__main__":
    run_program(main)
