"""Load tasks for evals/lm_eval_model.py, and sort them into groups.

They are the harness's own, those of a folder, or MMLU from local rows.
"""

import json
import logging
import lzma
from collections import defaultdict
from pathlib import Path
from typing import Any

from common.errors import DataError, UserError
from common.output import parse_json
from hf.hub import import_transformers

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{dev: {folder}/dev.jsonl, test: {folder}/test.jsonl}}}}
test_split: test
fewshot_split: dev
fewshot_config: {{sampler: first_n}}
output_type: multiple_choice
description: "The following are multiple choice questions (with answers) about {subject}.\\n\\n"
doc_to_text: "{{{{question.strip()}}}}\\n\
A. {{{{choices[0]}}}}\\nB. {{{{choices[1]}}}}\\n\
C. {{{{choices[2]}}}}\\nD. {{{{choices[3]}}}}\\nAnswer:"
doc_to_choice: ["A", "B", "C", "D"]
doc_to_target: answer
num_fewshot: 5
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
GROUP = """\
group: {name}
task: [{tasks}]
aggregate_metric_list: [{{metric: acc, weight_by_size: true}}]
"""
LOCAL_MMLU = "local_mmlu"
GENERATES = (
    "a task needs generated text, or the likelihood of whole documents: "
    "this program answers multiple choice"
)


def import_lm_eval() -> Any:
    """Import the harness. Raises UserError if it is missing or too old."""
    # Before the harness does it, so that our kernels/ is not taken for another package.
    import_transformers()
    try:
        import lm_eval
        import lm_eval.api.model
        import lm_eval.api.registry
        import lm_eval.models
        import lm_eval.tasks
    except ImportError as error:
        raise UserError(
            f"this needs a package ({error.name or error} is missing): pip install lm-eval"
        ) from None
    if not hasattr(lm_eval.tasks.TaskManager, "load"):
        raise UserError("this needs lm-eval 0.4.12 or later: pip install --upgrade lm-eval")
    # It warns of every task whose num_fewshot we set.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return lm_eval


def local_mmlu(files: str, folder: Path) -> None:
    """Write task files into `folder`: one a subject, and one for their group LOCAL_MMLU.

    Args:
        files: a file of dev rows and a file of test rows, with a comma between.

    Raises:
        DataError: a file cannot be read, or has other rows.
    """
    rows: dict[str, dict[str, list[str]]] = defaultdict(lambda: {"dev": [], "test": []})
    for split, name in zip(("dev", "test"), files.split(","), strict=True):
        try:
            opened = lzma.open if name.endswith(".xz") else open
            with opened(name, "rt", encoding="utf-8") as lines:
                for line in lines:
                    row = parse_json(line)
                    if len(row["choices"]) != 4 or row["answer"] not in range(4):
                        raise ValueError
                    rows[row["subject"]][split].append(json.dumps(row))
        except (OSError, EOFError, lzma.LZMAError) as error:
            raise DataError(
                f"{name}: cannot be read ({error}): it should be MMLU rows as jsonl or jsonl.xz"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"{name}: no MMLU rows: they need subject, question, four choices, answer 0 to 3"
            ) from None
    names = {subject: f"{LOCAL_MMLU}_{subject}" for subject in sorted(rows)}
    for subject, name in names.items():
        data = folder / subject
        data.mkdir()
        for split, lines in rows[subject].items():
            (data / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        task = TASK.format(name=name, folder=data, subject=subject.replace("_", " "))
        (folder / f"{subject}.yaml").write_text(task, encoding="utf-8")
    (folder / "group.yaml").write_text(
        GROUP.format(name=LOCAL_MMLU, tasks=", ".join(names.values())), encoding="utf-8"
    )


def load_groups(names: list[str], manager: Any) -> dict[str, list[Any]]:
    """Load tasks, groups and tags of the harness: {group: its tasks}.

    A task that no group averages is a group of its own. Raises UserError for a task that needs more
    than choices.
    """

    def parts(item: Any) -> dict[str, list[Any]]:
        if not hasattr(item, "get_all_tasks"):
            return {item.task_name: [item]}
        if item.has_aggregation:
            return {item.name: item.get_all_tasks()}
        return {name: tasks for child in item for name, tasks in parts(child).items()}

    groups: dict[str, list[Any]] = {}
    for name in names:
        loaded = manager.load([name])
        items = loaded["tasks"].values()
        if name in loaded["groups"]:
            items = [loaded["groups"][name]]
        for item in items:
            groups |= parts(item)
    for tasks in groups.values():
        for task in tasks:
            if task.get_config("output_type") in ("generate_until", "loglikelihood_rolling"):
                raise UserError(f"{task.task_name}: {GENERATES}")
            prepare_once(task)
    return groups


def prepare_once(task: Any) -> None:
    """Have a task of the harness prepare its documents once, not each time it reads them.

    GPQA's choices are shuffled by a generator that continues at every reading (lm-eval 0.4.13).
    Questions would be asked in one order and marked in another, and the next model would be asked a
    third.
    """
    process = task.config.process_docs
    if process is None:
        return
    made: dict[int, tuple[Any, Any]] = {}  # id of a split -> the split, its documents

    def once(split: Any) -> Any:
        if id(split) not in made:
            # The split is kept, so that no other object can have its id.
            made[id(split)] = (split, process(split))
        return made[id(split)][1]

    task.config.process_docs = once
    if task.fewshot_cfg.process_docs is process:
        task.fewshot_cfg.process_docs = once
    if hasattr(task, "sampler"):
        # The sampler leaves a question out of its own examples by comparing the two.
        task.sampler.replace_df(list(task.fewshot_docs()))


def load_tasks(
    names: str, mmlu: str, include: str, folder: Path
) -> tuple[dict[str, list[Any]], Any]:
    """Load the tasks of the program's keys tasks, mmlu and include.

    Args:
        folder: for the task files that `mmlu` needs.

    Returns:
        {group: its tasks}, and the harness's manager of them.

    Raises:
        UserError, DataError: they cannot be loaded.
    """
    if mmlu:
        local_mmlu(mmlu, folder)
        names = LOCAL_MMLU
        include = str(folder)
    lm_eval = import_lm_eval()
    try:
        manager = lm_eval.tasks.TaskManager(include_path=include or None, include_defaults=not mmlu)
        return load_groups(names.split(","), manager), manager
    except (KeyError, ValueError, OSError, ImportError) as error:
        raise UserError(
            f"tasks={names[:80]}: the harness cannot load them ({str(error)[:200]!r})"
        ) from None
