"""Read the log of a run and what it chose on HellaSwag, and refuse those that are damaged.

Everything that a report reads of an event is checked here, so that whoever reads it later need not.
"""

from collections.abc import Callable
from typing import Any

from common.errors import UserError
from common.output import parse_json

LARGEST = 1e300  # of a number; JSON may have 1e999, and integers of any length

Check = Callable[[Any], bool]


def is_text(value: Any) -> bool:
    """Is it a text?"""
    return isinstance(value, str)


def is_number(value: Any) -> bool:
    """Is it a finite number?"""
    return type(value) in (int, float) and -LARGEST < value < LARGEST


def is_count(value: Any) -> bool:
    """Is it a whole number, not below zero?"""
    return type(value) is int and 0 <= value < LARGEST


def is_size(value: Any) -> bool:
    """Is it a whole number above zero?"""
    return is_count(value) and value > 0


def is_speed(value: Any) -> bool:
    """Is it a number above zero?"""
    return is_number(value) and value > 0


def is_versions(value: Any) -> bool:
    """Does it tell the version of PyTorch?"""
    return isinstance(value, dict) and is_text(value.get("torch"))


def is_object(value: Any) -> bool:
    """Is it a JSON object?"""
    return isinstance(value, dict)


def or_null(check: Check) -> Check:
    """Let null pass too: a number that was not finite, or is not known."""
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    """Check a list's parts."""
    return lambda value: isinstance(value, list) and all(map(check, value))


NUMBER = or_null(is_number)
NUMBERS = list_of(NUMBER)

# Kind of event -> what each one has
NEEDED: dict[str, dict[str, Check]] = {
    "start": {"config": is_object},
    "step": {"step": is_count, "loss": NUMBER, "tok_per_s": or_null(is_speed)},
    "eval": {"step": is_count, "val_loss": NUMBER},
    "rms": {"step": is_count, "rms": NUMBERS},
    "end": {"reason": is_text},
}
# Kind of event -> what some have: older logs, or runs with certain keys, do not
OPTIONAL: dict[str, dict[str, Check]] = {
    "start": {
        "device": is_text,
        "versions": is_versions,
        "git": or_null(is_text),
        "code": is_text,
        "n_params": is_count,
        "tokens_per_step": is_size,
        "data": or_null(is_text),
        "norm_keys": is_object,
        "other_norm_keys": list_of(is_text),
    },
    "rms": {
        "drift": NUMBERS,
        "spread": NUMBERS,
        "mean_share": NUMBERS,
        "logit_norm": NUMBER,
        "radial_gradient": NUMBER,
    },
    "resume": {
        "changed": list_of(lambda change: is_text(change) and bool(change.strip())),
        "same_code": list_of(is_text),
    },
    "stability": {"clipped": NUMBER, "spikes": NUMBER, "attention_logit": NUMBER},
    "val_full": {
        "step": is_count,
        "val_loss_full": NUMBER,
        "document_tokens": list_of(is_speed),
        "document_nats": NUMBERS,
    },
}
STEP = ("event", *NEEDED["step"])  # what is kept of a step
# What the start event of a run of train.py has, and its config, for a report
OF_START = ("device", "versions", "git", "n_params", "tokens_per_step")
OF_CONFIG = ("norm_type", "seed", "max_iters", "learning_rate", "min_lr", "warmup_iters")
CONFIG: dict[str, Check] = {
    "norm_type": is_text,
    "seed": is_count,
    "max_iters": is_count,
    "learning_rate": is_number,
    "min_lr": is_number,
    "warmup_iters": is_number,
    "arm": is_text,
    "study": is_text,
    "same_code": list_of(is_text),
    "data_dir": is_text,
    "planned_seeds": is_count,
    "jobs": is_count,
    "delta_val_loss": is_number,
    "delta_train_loss": is_number,
    "delta_hellaswag_acc": is_number,
    "delta_hellaswag_acc_norm": is_number,
    "delta_tok_per_s": is_number,
}
ITEM: dict[str, Check] = {
    "item": is_count,
    "label": is_count,
    "acc_choice": is_count,
    "acc_norm_choice": is_count,
}


def parse_log(content: bytes, name: str) -> list[dict[str, Any]]:
    """Parse the events of a log, of a step STEP alone; a last line that a kill cut off is left out.

    Raises UserError, which calls the log `name`, if it is damaged.
    """
    events: list[dict[str, Any]] = []
    lines = content.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            event = parse_json(line)
        except ValueError:
            if number < len(lines):
                raise damaged(name, f"line {number} of its log") from None
            continue
        if wrong := problem_of(event):
            raise damaged(name, f"line {number} of its log ({wrong})")
        if event["event"] == "step":  # most of a log, and most of the memory of many runs
            event = {name: event[name] for name in STEP}
        events.append(event)
    if not events or events[0]["event"] != "start":
        raise UserError(
            f"{name}: does not begin with a start event: no run's log, or damaged: leave it out"
        )
    if wrong := problem_of_series(events):
        raise damaged(name, f"its log ({wrong})")
    return events


def parse_items(content: bytes, name: str) -> list[dict[str, Any]]:
    """Parse what a run chose on HellaSwag, one line an item. Raises UserError if it is damaged."""
    rows = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not is_object(row) or first_wrong(row, ITEM, {}):
            raise damaged(name, f"line {number} of hellaswag.jsonl")
        rows.append(row)
    return rows


def damaged(name: str, what: str) -> UserError:
    """Return the error of a run that cannot be read."""
    return UserError(f"{name}: {what} is damaged: leave this run out, or train it again")


def problem_of(event: Any) -> str:
    """Name the first field of an event that is missing or of another kind; "" if all are right."""
    if not is_object(event) or not is_text(event.get("event")):
        return "event"
    kind = event["event"]
    if wrong := first_wrong(event, NEEDED.get(kind, {}), OPTIONAL.get(kind, {})):
        return wrong
    return first_wrong(event["config"], {}, CONFIG) if kind == "start" else ""


def lacking(start: dict[str, Any]) -> str:
    """Name the first thing that a start event lacks for a report; "" if it has all."""
    missing = [name for name in OF_START if name not in start]
    missing += [name for name in OF_CONFIG if name not in start["config"]]
    return missing[0] if missing else ""


def first_wrong(record: dict[str, Any], needed: dict[str, Check], some: dict[str, Check]) -> str:
    """Name the first field of a record that is missing or of another kind; "" if all are right."""
    for name, check in needed.items():
        if name not in record or not check(record[name]):
            return name
    return next(
        (name for name, check in some.items() if name in record and not check(record[name])), ""
    )


def problem_of_series(events: list[dict[str, Any]]) -> str:
    """Name a field of which the events of a log do not have as many numbers as they should."""
    sizes: dict[str, set[int]] = {}
    for event in events:
        if event["event"] == "rms":
            for name, value in event.items():
                if isinstance(value, list):
                    sizes.setdefault(name, set()).add(len(value))
        elif event["event"] == "val_full":
            tokens, nats = (event.get(name, []) for name in ("document_tokens", "document_nats"))
            if len(tokens) != len(nats):
                return "document_nats"
    return next((name for name, its in sizes.items() if len(its) > 1 or 0 in its), "")
