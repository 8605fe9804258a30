"""lm-evaluation-harness on our models: the harness asks for log-likelihoods, a GPT answers.

    python lm_eval_model.py out/teacher out/student --mmlu=mmlu_dev.jsonl.xz,mmlu_test.jsonl.xz --limit=20
    python lm_eval_model.py Qwen/Qwen3-0.6B out/distill --tasks=mmlu,gpqa_main_n_shot     with a network
    python lm_eval_model.py out/teacher --tasks=mine --include=folder/with/yaml

One or more models; from the second on, per-item differences to the first are printed with their 95 % interval. MMLU
offline is the harness's own 5-shot form over local rows (subject, question, choices, answer). Needs lm_eval: pip
install lm-eval. The last line of output is JSON.

Requests that differ in their last token alone share one forward pass: the four choices of a question, for example.
"""

import json
import lzma
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpoint import load_model
from configurator import key, parse_args
from data.shards import DataError
from data.tokenizers import load_tokenizer
from errors import ConfigError, UserError, run_program
from hf_coupled import import_transformers
from model import GPT
from ranks import faster_float32_products, find_device
from stats import paired

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{dev: {folder}/dev.jsonl, test: {folder}/test.jsonl}}}}
test_split: test
fewshot_split: dev
fewshot_config: {{sampler: first_n}}
output_type: multiple_choice
description: "The following are multiple choice questions (with answers) about {subject}.\\n\\n"
doc_to_text: "{{{{question.strip()}}}}\\nA. {{{{choices[0]}}}}\\nB. {{{{choices[1]}}}}\\nC. {{{{choices[2]}}}}\\n\
D. {{{{choices[3]}}}}\\nAnswer:"
doc_to_choice: ["A", "B", "C", "D"]
doc_to_target: answer
num_fewshot: 5
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@dataclass(frozen=True)
class EvalConfig:
    """Keys of lm_eval_model.py."""

    tasks: str = key("", "tasks of the harness, with commas between")
    mmlu: str = key("", "local MMLU: files of dev rows and test rows, jsonl or jsonl.xz, a comma between")
    include: str = key("", "folder of further task files")
    limit: int = key(0, "items a task (0: all)")
    batch_size: int = key(8, "contexts at once")
    device: str = key("auto", "auto: the first of cuda, mps, cpu that is there", ("auto", "cpu", "cuda", "mps"))
    out: str = key("", "JSONL file for one line an item ('': none)")

    def __post_init__(self) -> None:
        if bool(self.tasks) == bool(self.mmlu):
            raise ConfigError("say what to evaluate on: --tasks=NAMES, or --mmlu=DEV,TEST")
        if self.mmlu and len(self.mmlu.split(",")) != 2:
            raise ConfigError(f"mmlu={self.mmlu}: wants two files, dev rows and test rows")
        if self.limit < 0 or self.batch_size < 1:
            raise ConfigError("limit wants 0 or more, batch_size 1 or more")


class Scorer:
    """Log-likelihoods of continuations under a GPT. Texts that do not fit lose their beginning."""

    def __init__(self, model: GPT, batch_size: int):
        self.model, self.batch_size = model.eval(), batch_size
        self.tokenizer, self.forwards = load_tokenizer(model.meta), 0

    def encode(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both; a space at the context's end belongs to the continuation, as the harness has it."""
        spaces = len(context) - len(context.rstrip())
        context, continuation = context[: len(context) - spaces], context[len(context) - spaces :] + continuation
        whole, start = (self.tokenizer.encode_ordinary(text) for text in (context + continuation, context))
        return whole[: len(start)], whole[len(start) :]

    @torch.no_grad()
    def score(self, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation, is it what greedy decoding gives) of each (context, continuation)."""
        size, groups = self.model.config.block_size, defaultdict(list)  # ids but the last -> [(request, ids, how many)]
        for number, (context, continuation) in enumerate(pairs):
            start, tokens = self.encode(context, continuation)
            if not tokens:
                raise DataError("a task asks for the likelihood of no text: check its choices")
            ids = ([0] * (not start) + start + tokens)[-(size + 1) :]  # something must come before the first token
            groups[tuple(ids[:-1])].append((number, ids[-1], min(len(tokens), len(ids) - 1)))
        found: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        ordered = sorted(groups, key=len)  # of about one length, so that little is padding
        for at in range(0, len(ordered), self.batch_size):
            rows = ordered[at : at + self.batch_size]
            longest = len(rows[-1])
            idx = torch.tensor([list(row) + [0] * (longest - len(row)) for row in rows])  # padding comes after, unseen
            hidden = self.model.hidden(idx.to(self.model.wte.weight.device))  # (B, T, C)
            self.forwards += len(rows)
            for row, states in zip(rows, hidden, strict=True):
                most = max(count for _, _, count in groups[row])
                log_p = self.model.logits(states[len(row) - most : len(row)]).float().log_softmax(-1).cpu()  # (most, V)
                for number, last, count in groups[row]:
                    found[number] = self._read(log_p[-count:], [*row[len(row) - count + 1 :], last])
        return found

    @staticmethod
    def _read(log_p: Tensor, tokens: list[int]) -> tuple[float, bool]:
        targets = torch.tensor(tokens)
        return float(log_p.gather(1, targets[:, None]).sum()), bool((log_p.argmax(1) == targets).all())


def import_lm_eval() -> Any:
    import_transformers()  # before the harness does, so that it does not take our kernels/ for another package
    try:
        import lm_eval
        import lm_eval.tasks
    except ImportError as error:
        raise UserError(f"this needs a package ({error.name or error} is missing): pip install lm-eval") from None
    return lm_eval


def harness_model(scorer: Scorer) -> Any:
    """`scorer` as the harness's model class."""
    lm_eval = import_lm_eval()

    class GPTModel(lm_eval.api.model.LM):
        def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
            return scorer.score([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list) -> list[float]:
            return [scorer.score([("", request.args[0])])[0][0] for request in requests]

        def generate_until(self, requests: list) -> list[str]:
            raise UserError("a task wants generated text: this model answers multiple choice and likelihood tasks")

    return GPTModel()


def local_mmlu(files: str, folder: Path) -> list[str]:
    """Task files in `folder`, one a subject, for dev and test rows; their names."""
    rows: dict[str, dict[str, list[str]]] = defaultdict(lambda: {"dev": [], "test": []})
    for split, name in zip(("dev", "test"), files.split(","), strict=True):
        try:
            with lzma.open(name, "rt") if name.endswith(".xz") else open(name, encoding="utf-8") as lines:
                for line in lines:
                    row = json.loads(line)
                    if len(row["choices"]) != 4 or row["answer"] not in range(4):
                        raise ValueError
                    rows[row["subject"]][split].append(json.dumps(row))
        except (OSError, EOFError, lzma.LZMAError) as error:
            raise DataError(f"{name}: cannot be read ({error}): it should be MMLU rows as jsonl or jsonl.xz") from None
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{name}: no MMLU rows: want subject, question, four choices, answer 0 to 3") from None
    for subject, splits in rows.items():
        data = folder / subject
        data.mkdir()
        for split, lines in splits.items():
            (data / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        task = TASK.format(name=f"local_mmlu_{subject}", folder=data, subject=subject.replace("_", " "))
        (folder / f"{subject}.yaml").write_text(task, encoding="utf-8")
    return [f"local_mmlu_{subject}" for subject in sorted(rows)]


def evaluate(spec: str, tasks: list[str], include: Path | None, config: EvalConfig) -> tuple[dict[str, float], int]:
    """({task/item: correct, 0 or 1}, forward passes) of one model."""
    lm_eval = import_lm_eval()
    model, device = load_model(spec), find_device(config.device)
    if device.type == "cpu":
        faster_float32_products(model.config.n_embd, model.config.head_channels)
    scorer = Scorer(model.to(device), config.batch_size)
    manager = lm_eval.tasks.TaskManager(include_path=str(include) if include else None)
    try:
        found = lm_eval.simple_evaluate(model=harness_model(scorer), tasks=tasks, task_manager=manager, num_fewshot=5,
                                        limit=config.limit or None, bootstrap_iters=0, verbosity="ERROR")  # fmt: skip
    except (KeyError, ValueError, OSError) as error:
        raise UserError(f"tasks={','.join(tasks)[:80]}: the harness cannot run them ({str(error)[:200]!r})") from None
    items = {f"{task}/{sample['doc_id']}": float(sample["acc"])
             for task, samples in found["samples"].items() for sample in samples if "acc" in sample}  # fmt: skip
    if not items:
        raise UserError(f"tasks={','.join(tasks)[:80]}: no item with an accuracy: choose multiple-choice tasks")
    return items, scorer.forwards


def main(argv: list[str]) -> None:
    specs = [word for word in argv if not word.startswith("-") and not word.endswith(".py")]
    config, _ = parse_args(EvalConfig, [word for word in argv if word not in specs], __doc__)
    if not specs:
        raise ConfigError("name a model first: a run folder or a checkpoint file (--help says more)")
    results: dict[str, dict[str, float]] = {}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        include = Path(folder) if config.mmlu else Path(config.include) if config.include else None
        tasks = local_mmlu(config.mmlu, Path(folder)) if config.mmlu else config.tasks.split(",")
        for spec in specs:
            results[spec], forwards = evaluate(spec, tasks, include, config)
            line = {"model": spec, "acc": float(np.mean(list(results[spec].values()))), "items": len(results[spec]),
                    "forwards": forwards}  # fmt: skip
            shown = f"{spec}: acc {line['acc']:.4f} on {line['items']} items, {forwards} forward passes"
            if spec != specs[0]:
                base = results[specs[0]]
                estimate = paired(np.array([results[spec][item] - base[item] for item in base]))
                low, high = estimate.interval()
                line |= {"difference": estimate.mean, "interval": [low, high]}
                shown += f"; {estimate.mean:+.4f} ({low:+.4f} .. {high:+.4f}) against {specs[0]}"
            print(shown, flush=True)
            lines.append(line)
    if config.out:
        with open(config.out, "w", encoding="utf-8") as file:
            for item in results[specs[0]]:
                file.write(json.dumps({"item": item, **{spec: results[spec][item] for spec in specs}}) + "\n")
    print(json.dumps({"models": lines}))


if __name__ == "__main__":
    run_program(main)
