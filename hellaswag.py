"""Score a trained model on HellaSwag (evals/hellaswag.py says what is scored, and how).

    # the items are downloaded once, into data/hellaswag/
    python hellaswag.py out/small/rms-8
    # a model whose norm is in a file
    python hellaswag.py out/mine --norm_file=my_norm.py
    python hellaswag.py openai-community/gpt2 --data=hellaswag_val.jsonl.xz
    torchrun --standalone --nproc_per_node=8 hellaswag.py out/gpt2

Writes one line of JSON per item (choices, label), not with --items. With --json the last line of
output is JSON. Of a run folder the best checkpoint is scored, whereas training scores its last
weights. GPT-2 124M, raw items: acc 0.286, acc_norm 0.296.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from common.distributed import Ranks
from common.environment import Precision
from common.errors import run_program
from common.output import check_replaceable
from configurator import key, parse_args
from data.tokenizers import tokenizer_of
from evals.hellaswag import BATCH_SIZE, ITEMS_FILE, HellaSwag
from load import load_model
from norm_files import take_norm_file

OWN_ITEMS = rb'{"item": .*"acc_choice"'  # how a file of per-item results begins


@dataclass(frozen=True)
class HellaSwagConfig:
    """Keys of hellaswag.py."""

    data: str = key(
        "", "file of items, jsonl or jsonl.xz ('': downloaded once into data/hellaswag)"
    )
    items: int = key(0, "score this many items, spread evenly over the file (0: all)", least=0)
    batch_size: int = key(BATCH_SIZE, "endings scored at once", least=1)
    device: str = key(
        "auto", "auto: the first available of cuda, mps, cpu", ("auto", "cpu", "cuda", "mps")
    )
    dtype: str = key(
        "auto", "of the computation (auto: bfloat16 on CUDA)", ("auto", "float32", "bfloat16")
    )
    out: str = key(
        "",
        f"file for per-item results ('': a run's {ITEMS_FILE}, unless it has one or items is set)",
    )
    json: bool = key(False, "print the result as a line of JSON at the end")


def target_file(config: HellaSwagConfig, spec: str) -> Path | None:
    """Decide where per-item results are written: None for nowhere."""
    if config.out:
        return Path(config.out)
    path = Path(spec)
    folder = path if path.is_dir() else path.parent
    target = folder / ITEMS_FILE
    # Results that training wrote stay, and a trial on some items is not the score of the run.
    is_run = (folder / "log.jsonl").exists()
    return target if is_run and not target.exists() and not config.items else None


def main(argv: list[str]) -> None:
    config, spec = parse_args(HellaSwagConfig, take_norm_file(argv), __doc__, spec=True)
    if config.out:
        check_replaceable(Path(config.out), OWN_ITEMS)  # now, not after the scoring
    with Ranks.start(config.device) as ranks:
        model = load_model(spec).to(ranks.device)
        tokenizer = tokenizer_of(model)
        autocast = Precision(config.dtype, ranks.device).autocast
        scorer = HellaSwag(config.data, config.items, tokenizer, ranks, autocast, config.batch_size)
        scores = scorer(model)
    if ranks.is_main:
        target = target_file(config, spec)
        if target is not None:
            scores.write(target)
            print(f"wrote {target}")
        print(f"{scores} (standard errors; {len(scorer.items):,} items)")
        if config.json:
            print(json.dumps({"spec": spec, **scores.summary()}))


if __name__ == "__main__":
    run_program(main)
