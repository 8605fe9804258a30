"""Compare models on multiple choice: lm-evaluation-harness asks, our GPTs answer.

    python -m evals.lm_eval_model out/teacher out/student \\
      --mmlu=mmlu_dev.jsonl.xz,mmlu_test.jsonl.xz --limit=20
    python -m evals.lm_eval_model Qwen/Qwen3-0.6B out/distill \\
      --tasks=mmlu,gpqa_main_n_shot --num_fewshot=5                          (network)
    python -m evals.lm_eval_model out/teacher --tasks=mine --include=folder/with/yaml

One or more models, all in one dtype, all with the smallest context among them, all asked the same
texts. MMLU offline is the harness's own 5-shot form over local rows (subject, question,
choices, answer). Needs lm-eval: pip install lm-eval. With --json the last line of output is
JSON.

Accuracy is a mean over items, for each of the harness's groups that has a mean (mmlu with its 57
subjects, weighted by size as there) and for each task in no such group. Its interval, and that of
the paired difference to the first model, is Student's t, 95 %, over the group's items. It takes
items as independent draws from questions of this kind, and the models as fixed. So it says nothing
about other training seeds or other prompts, and its width is zero where all items agree.
"""

import functools
import json
import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from common.environment import environment, find_device
from common.errors import ConfigError, DataError, UserError, run_program
from common.output import check_replaceable, markdown, parse_json, write_bytes_atomically
from common.stats import paired
from configurator import key, parse_args
from data.documents import read_lines
from load import load_config

# (task, item) -> model -> 1.0 where it was correct, else 0.0
Marks = dict[tuple[str, int], dict[str, float]]
CHOICES = ["A", "B", "C", "D"]


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
    json: bool = key(False, "print the result as a line of JSON at the end")

    def __post_init__(self) -> None:
        if bool(self.tasks) == bool(self.mmlu):
            raise ConfigError("say what to evaluate on: --tasks=NAMES, or --mmlu=DEV,TEST")


def mmlu_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of MMLU; blank lines do not count.

    Raises DataError that names file and line.
    """
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            texts = [row["subject"], row["question"], *row["choices"]]
            is_good = (
                len(texts) == 2 + len(CHOICES)
                and all(isinstance(text, str) for text in texts)
                and type(row["answer"]) is int
                and row["answer"] in range(len(CHOICES))
            )
        except (ValueError, KeyError, TypeError):
            is_good = False
        if not is_good:
            raise DataError(
                f"{path}:{number}: no row of MMLU; needs JSON with subject, question, four choices "
                "and an answer from 0 to 3"
            )
        yield {name: row[name] for name in ("subject", "question", "choices", "answer")}


def local_mmlu(files: str, shots: int) -> list[dict[str, Any]]:
    """Return tasks of the harness, one for each subject of local test rows.

    Args:
        files: a file of dev rows and a file of test rows, with a comma between.
        shots: dev rows that go before each question.

    Raises:
        ConfigError: there are not two files.
        DataError: a file cannot be read, or holds other or too few rows.
    """
    from datasets import Dataset  # which the harness needs too

    names = files.split(",")
    if len(names) != 2:
        raise ConfigError(f"mmlu={files}: name two files, DEV,TEST")
    rows: dict[str, dict[str, list[Any]]] = defaultdict(lambda: {"dev": [], "test": []})
    for split, name in zip(("dev", "test"), names, strict=True):
        for row in mmlu_rows(Path(name)):
            rows[row["subject"]][split].append(row)
    asked = {subject: found for subject, found in rows.items() if found["test"]}
    if not asked:
        raise DataError(f"{names[1]}: no rows: check the file")
    for subject, found in asked.items():
        if len(found["dev"]) < shots:
            raise DataError(
                f"{names[0]}: {len(found['dev'])} rows of {subject}, and {shots} examples go "
                "before each question: add rows, or lower --num_fewshot"
            )
    tasks = []
    for subject, found in sorted(asked.items()):
        about = subject.replace("_", " ")
        splits = {split: Dataset.from_list(lines) for split, lines in found.items()}
        task = {
            "task": f"local_mmlu_{subject}",
            "custom_dataset": functools.partial(dict, splits),
            "test_split": "test",
            "fewshot_split": "dev",
            "fewshot_config": {"sampler": "first_n"},
            "output_type": "multiple_choice",
            "description": "The following are multiple choice questions (with answers) about "
            f"{about}.\n\n",
            "doc_to_text": "{{question.strip()}}\n"
            + "\n".join(f"{choice}. {{{{choices[{i}]}}}}" for i, choice in enumerate(CHOICES))
            + "\nAnswer:",
            "doc_to_choice": CHOICES,
            "doc_to_target": "answer",
            "num_fewshot": shots,
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        tasks.append(task)
    return tasks


def load_tasks(config: EvalConfig) -> tuple[Any, list[Any], dict[str, str]]:
    """Load the tasks that the config names.

    Returns:
        The harness's manager, its tasks, and {task: its group}, the outermost one with a mean; a
        task in no such group is a group of its own.

    Raises:
        UserError: a task cannot be loaded, or needs more than choices.
    """
    from lm_eval.tasks import TaskManager

    names = config.tasks.split(",")
    if config.mmlu:
        names = local_mmlu(config.mmlu, 5 if config.num_fewshot is None else config.num_fewshot)
    try:
        manager = TaskManager(include_path=config.include or None, include_defaults=not config.mmlu)
        loaded = manager.load(names)
    except (KeyError, ValueError, OSError, ImportError) as error:
        raise UserError(
            f"tasks={config.tasks[:80]}: the harness cannot load them ({str(error)[:200]!r})"
        ) from None
    for name, task in loaded["tasks"].items():
        if task.OUTPUT_TYPE in ("generate_until", "loglikelihood_rolling"):
            raise UserError(f"{name}: needs more than the likelihoods of choices: leave it out")
        prepare_once(task)
    group_of = {name: "local_mmlu" if config.mmlu else name for name in loaded["tasks"]}
    # A group comes before those within it.
    for name, group in reversed(loaded["groups"].items()):
        if group.has_aggregation:
            group_of |= {task.task_name: name for task in group.get_all_tasks()}
    return manager, list(loaded["tasks"].values()), group_of


def prepare_once(task: Any) -> None:
    """Have a task of the harness prepare its documents once, not each time it reads them.

    GPQA's choices are shuffled by a generator that continues at every reading (lm-eval 0.4.13).
    Questions would be asked in one order and marked in another, and the next model would be asked a
    third.
    """
    process = task.config.process_docs
    if process is None:
        return
    once = functools.cache(process)
    task.config.process_docs = once
    if task.fewshot_cfg.process_docs is process:
        task.fewshot_cfg.process_docs = once
    if hasattr(task, "sampler"):
        # The sampler leaves a question out of its own examples by comparing the two.
        task.sampler.replace_df(list(task.fewshot_docs()))


def ask(
    specs: list[str], tasks: list[Any], manager: Any, config: EvalConfig
) -> tuple[Marks, dict[str, Any]]:
    """Have the harness ask all models, and return their marks and a record of the evaluation."""
    import lm_eval

    from evals.lm_eval import NanonormLM

    context = min(load_config(spec).block_size for spec in specs)  # for every model
    marks: Marks = defaultdict(dict)
    record: dict[str, Any] = {"context": context, "requests": {}}
    for spec in specs:
        model = NanonormLM(spec, config.dtype, context, config.batch_size, config.device)
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=config.num_fewshot,
            limit=config.limit or None,
            bootstrap_iters=0,
        )
        for task, samples in found["samples"].items():
            for sample in samples:
                if "acc" in sample:
                    marks[task, sample["doc_id"]][spec] = float(sample["acc"])
        record["shots"] = found["n-shot"]
        record["dtype"] = model.get_model_info()["model_dtype"]
        record["requests"][spec] = dict(model.seen)
        del model  # before the next one needs the memory
    for task in sorted(record["shots"].keys() - {task for task, _ in marks}):
        print(f"{task}: left out, because it has no accuracy (acc)")
    return marks, record


def estimate(values: np.ndarray) -> dict[str, Any]:
    """Return the mean of (n,) items and its 95 % t interval, which one item does not have."""
    interval = list(paired(values).interval()) if len(values) > 1 else None
    return {"mean": float(values.mean()), "interval": interval}


def summarise(marks: Marks, group_of: dict[str, str], specs: list[str]) -> list[dict[str, Any]]:
    """Return one record a group and model.

    From the second model on, a record has the paired difference to the first.
    """
    records: list[dict[str, Any]] = []
    for group in dict.fromkeys(group_of[task] for task, _ in marks):
        own = [correct for (task, _), correct in marks.items() if group_of[task] == group]
        for spec in specs:
            acc = np.array([correct[spec] for correct in own])  # (items,)
            record = {"group": group, "model": spec, "items": len(own), "acc": estimate(acc)}
            if spec != specs[0]:
                differences = acc - [correct[specs[0]] for correct in own]
                record["difference"] = estimate(differences)
                record["differing"] = int(np.count_nonzero(differences))
            records.append(record)
    return records


def shown(value: dict[str, Any] | None, sign: str) -> str:
    """Return an estimate as text."""
    if value is None:
        return ""
    text = f"{value['mean']:{sign}.4f}"
    if value["interval"]:
        low, high = value["interval"]
        text += f" ({low:{sign}.4f} .. {high:{sign}.4f})"
    return text


def write_items(path: Path, marks: Marks, group_of: dict[str, str]) -> None:
    """Write one JSON line an item: group, task, item, and which models were correct."""
    lines = []
    for (task, item), correct in marks.items():
        record = {"group": group_of[task], "task": task, "item": item, "correct": correct}
        lines.append(json.dumps(record) + "\n")
    write_bytes_atomically(path, "".join(lines).encode())


def main(argv: list[str]) -> None:
    """Run the program with these command-line arguments."""
    specs = [arg for arg in argv if not arg.startswith("-") and not arg.endswith(".py")]
    config, _ = parse_args(EvalConfig, [arg for arg in argv if arg not in specs], __doc__)
    if not specs or len(set(specs)) < len(specs):
        raise ConfigError("name one or more models, run folders or checkpoints, each of them once")
    if config.out:  # now, not after hours
        check_replaceable(Path(config.out), rb'{"group": .*"correct"')
        Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    import evals.lm_eval  # noqa: F401  the harness, with our models

    # It warns of every task whose num_fewshot we set.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager, tasks, group_of = load_tasks(config)
    marks, record = ask(specs, tasks, manager, config)
    if not marks:
        raise UserError(f"tasks={config.tasks[:80]}: no item with an accuracy")
    records = summarise(marks, group_of, specs)
    rows = []
    for each in records:
        seen = record["requests"][each["model"]]
        cut = f"{seen.get('requests_cut', 0):,} of {seen.get('requests', 0):,}"
        cells = (shown(each["acc"], ""), shown(each.get("difference"), "+"), cut)
        rows.append([each["group"], each["items"], each["model"], *cells])
    lost = f"requests that lost their beginning (context {record['context']:,})"
    header = ["group", "items", "model", "accuracy (95 %)", "difference (95 %)", lost]
    print(markdown(header, rows))
    if config.out:
        write_items(Path(config.out), marks, group_of)
    if config.json:
        place = environment(find_device(config.device))
        place["versions"]["lm_eval"] = version("lm_eval")
        print(json.dumps({"models": specs, **record, "groups": records, **place}))


if __name__ == "__main__":
    run_program(main)
