"""lm-evaluation-harness on our models: the harness asks for log-likelihoods, a GPT answers.

    python -m evals.lm_eval_model out/teacher out/student \\
      --mmlu=mmlu_dev.jsonl.xz,mmlu_test.jsonl.xz --limit=20
    python -m evals.lm_eval_model Qwen/Qwen3-0.6B out/distill \\
      --tasks=mmlu,gpqa_main_n_shot --num_fewshot=5                          (network)
    python -m evals.lm_eval_model out/teacher --tasks=mine --include=folder/with/yaml

One or more models, all in one dtype, all with the smallest context among them, all asked the very
same texts. MMLU offline is the harness's own 5-shot form over local rows (subject, question,
choices, answer). Needs lm-eval: pip install lm-eval. The last line of output is JSON.

Accuracy is a mean over items, for each of the harness's groups that has a mean (mmlu with its 57
subjects, weighted by size as there) and for each task in no such group. Its interval, and that of
the paired difference to the first model, is Student's t, 95 %, over the group's items: drawn
independently from questions of this kind, the models as they are. So it says nothing of other
training seeds, nothing of other prompts, and is of no width where all items agree.
"""

import json
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from common.environment import Precision, environment, faster_float32_products, find_device
from common.errors import ConfigError, UserError, run_program
from common.output import writing
from common.stats import paired
from configurator import check_least, key, parse_args
from evals.likelihood import Scorer
from evals.lm_eval_tasks import GENERATES, import_lm_eval, load_tasks
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
        "examples before a question (auto: as a task declares, 0 where it declares "
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
        check_least(self)
        if bool(self.tasks) == bool(self.mmlu):
            raise ConfigError("say what to evaluate on: --tasks=NAMES, or --mmlu=DEV,TEST")
        if self.mmlu and len(self.mmlu.split(",")) != 2:
            raise ConfigError(f"mmlu={self.mmlu}: wants two files, dev rows and test rows")


def harness_model(scorer: Scorer) -> Any:
    """`scorer` as the harness's model class."""
    lm_eval = import_lm_eval()

    class GPTModel(lm_eval.api.model.LM):
        def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
            return scorer.score([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list) -> list[float]:
            raise UserError(GENERATES)

        def generate_until(self, requests: list) -> list[str]:
            raise UserError(GENERATES)

    return GPTModel()


@dataclass(frozen=True)
class Marks:
    """Of one model on one group: {(task, item): correct, 0 or 1}, examples a question, tokens that
    fit, and counts.
    """

    items: dict[tuple[str, int], float]
    shots: list[int]
    context: int
    requests: int
    cut: int
    forwards: int


def evaluate(scorer: Scorer, tasks: list[Any], manager: Any, config: EvalConfig) -> Marks:
    """Marks of `scorer`'s model. Raises UserError for what the harness cannot run."""
    scorer.seen.clear()
    try:
        found = import_lm_eval().simple_evaluate(
            model=harness_model(scorer),
            tasks=tasks,
            task_manager=manager,
            num_fewshot=config.num_fewshot,
            limit=config.limit or None,
            bootstrap_iters=0,
        )
    except (KeyError, ValueError, OSError, AssertionError) as error:
        raise UserError(
            f"{tasks[0].task_name}, ...: the harness cannot run this ({str(error)[:200]!r})"
        ) from None
    items = {
        (task, sample["doc_id"]): float(sample["acc"])
        for task, samples in found["samples"].items()
        for sample in samples
        if "acc" in sample
    }
    seen = scorer.seen
    shots = sorted(set(found["n-shot"].values()))
    return Marks(items, shots, scorer.context, seen["requests"], seen["cut"], seen["forwards"])


def mean_and_interval(values: np.ndarray) -> tuple[float, list[float] | None]:
    """Mean of (n,) items and its 95 % t interval; no interval of one item."""
    return float(values.mean()), list(paired(values).interval()) if len(values) > 1 else None


def summarise(group: str, marks: dict[str, Marks]) -> list[dict[str, Any]]:
    """One record a model of its marks on a group, from the second on with the paired difference to
    the first.
    """
    records, base = [], next(iter(marks.values())).items
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
        records.append(
            record
            | {
                "context": own.context,
                "requests": own.requests,
                "cut": own.cut,
                "forwards": own.forwards,
            }
        )
    return records


def table(records: list[dict[str, Any]]) -> str:
    """The records of `summarise` as lines of text."""

    def cell(value: float | None, interval: list[float] | None, sign: str) -> str:
        limits = f" ({interval[0]:{sign}.4f} .. {interval[1]:{sign}.4f})" if interval else ""
        return "" if value is None else f"{value:{sign}.4f}{limits}"

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
    """{group: {model: its marks}}; prints what is left out, and the context."""
    groups, manager = load_tasks(config.tasks, config.mmlu, config.include, folder)
    # all, because the smallest context is every model's
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
        del model, scorer  # before the next one needs the room
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
    """One JSON line an item: group, task, item, and who was correct."""
    lines = []
    for group, own in marks.items():
        for task, item in next(iter(own.values())).items:
            correct = {spec: each.items[task, item] for spec, each in own.items()}
            lines.append(
                json.dumps({"group": group, "task": task, "item": item, "correct": correct}) + "\n"
            )
    with writing(path.parent):
        path.write_text("".join(lines), encoding="utf-8")


def main(argv: list[str]) -> None:
    specs = [word for word in argv if not word.startswith("-") and not word.endswith(".py")]
    config, _ = parse_args(EvalConfig, [word for word in argv if word not in specs], __doc__)
    if not specs:
        raise ConfigError(
            "name a model first: a run folder or a checkpoint file (--help says more)"
        )
    if len(set(specs)) < len(specs):
        raise ConfigError("a model is named twice: name each once")
    precision = Precision(config.dtype, find_device(config.device))
    if config.out:
        write_items(Path(config.out), {})  # whether it can be written is not found out after hours
    with tempfile.TemporaryDirectory() as folder:
        marks = run(specs, config, precision, Path(folder))
    if config.out:
        write_items(Path(config.out), marks)
    records = [record for group, own in marks.items() for record in summarise(group, own)]
    print(table(records))
    if any(record["cut"] for record in records):
        print(
            "cut: so many requests did not fit the context, the smallest of all models', and lost "
            "their beginning; their\nitems are judged on an incomplete prompt"
        )
    place = environment(precision.device)
    place["versions"]["lm_eval"] = version("lm_eval")
    dtype = str(precision.dtype).removeprefix("torch.")
    print(json.dumps({"models": specs, "dtype": dtype, "groups": records, **place}))


if __name__ == "__main__":
    run_program(main)
