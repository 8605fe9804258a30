"""A program in place of Python that writes what train.py would, at once, for tests of studies.

FAKE_LOSSES=FILE names a JSON file: the start of a log; for each arm the lowest loss, the best
learning rate and how much the loss rises an octave from it; in "own" what a word adds. Noise is
drawn from the words, so the same run has the same loss wherever and whenever it is made. Hundreds
of these are started, so it imports little.
"""

import hashlib
import json
import math
import os
import random
import sys
import time


def main(argv: list[str]) -> None:
    with open(os.environ["FAKE_LOSSES"]) as file:
        plan = json.load(file)
    keys = dict(word[2:].split("=", 1) for word in argv if word.startswith("--") and "=" in word)
    folder = keys["out_dir"]
    start = plan["starts"][keys["norm_type"]]
    config = start["config"]
    for name, value in keys.items():
        if name in config:
            config[name] = typed(value, config[name])
    start["device"] = plan.get("device", start["device"])
    start["data"] = plan.get("data", start["data"])
    arm = arm_of(keys)
    seed = int(keys["seed"])
    with open(plan["trained"], "a") as file:
        file.write("/".join(folder.split("/")[-2:]) + "\n")
    time.sleep(float(plan.get("seconds", 0)))
    if arm in plan.get("fails", []):
        sys.exit("error: it fails")
    loss = loss_of(plan, arm, float(config["learning_rate"]), seed)
    loss += sum(plan.get("own", {}).get(word.removeprefix("--"), 0.0) for word in argv)
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/config.json", "w") as file:
        json.dump(config, file)
    events = [start]
    steps = config["max_iters"]
    for part in range(9):
        step = steps * part // 8
        value = None if math.isinf(loss) else loss + 0.2 * (1 - part / 8)
        events.append({"event": "eval", "step": step, "val_loss": value})
        events.append({"event": "step", "step": step, "loss": value, "tok_per_s": 1000.0})
    events.append({"event": "stability", "step": steps, "clipped": 0.1, "spikes": 0})
    if not math.isinf(loss):
        full = {"event": "val_full", "step": steps, "val_loss_full": loss}
        events.append(full)
    reason = "done" if not math.isinf(loss) else f"step {steps}: loss is not finite"
    events.append({"event": "end", "reason": reason, "step": steps, "tok_per_s": 1000.0})
    text = "".join(f"{json.dumps(event)}\n" for event in events)
    # Written as train.py does: whole lines, the end last.
    with open(f"{folder}/log.jsonl", "w") as file:
        file.write(text)
    print("done: best val loss")


def typed(text: str, before: object) -> object:
    """Return the value of a word, of the type that the key had."""
    if isinstance(before, bool):
        return text == "True"
    if isinstance(before, int | float):
        return type(before)(float(text)) if not isinstance(before, float) else float(text)
    return text


def arm_of(keys: dict[str, str]) -> str:
    """Return which arm of the plan a run is of."""
    gain = keys.get("initial_gain")
    return f"{keys['norm_type']} matched" if gain else keys["norm_type"]


def loss_of(plan: dict, arm: str, rate: float, seed: int) -> float:
    """Return a run's loss: a parabola over the logarithm of the rate, and noise."""
    lowest, best, bend = plan["arms"][arm]
    if rate > plan.get("diverges", {}).get(arm, math.inf):
        return math.inf
    words = f"{arm} {rate:g} {seed}"
    draw = random.Random(hashlib.sha256(words.encode()).hexdigest())
    return lowest + bend * math.log2(rate / best) ** 2 + draw.gauss(0, plan["sd"])


if __name__ == "__main__":
    main(sys.argv[1:])
