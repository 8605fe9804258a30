"""One worker of the study "which norm?": repro/which_norm.sh starts it.

The plan is repro/which_norm.toml. A worker asks the present stage which runs it wants, has sweep.sh
train those that nobody has finished or claimed, waits for other workers where it must, writes what
the stage concludes, and goes on to the next stage.
"""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from common.environment import environment, find_device
from common.errors import ConfigError, UserError, run_program
from common.output import markdown, write_bytes_atomically, writing
from configurator import parse_args
from evidence.families import largest_deviation
from evidence.stages import (
    CheckStage,
    Conclusions,
    InitStage,
    MarginStage,
    MuonStage,
    RateStage,
    Stage,
    TokensStage,
    VerdictStage,
    recommend,
)
from evidence.study import CHOOSING, PLACE, Plan, Results, Shape, Wanted
from train import TrainConfig
from training.choices import slow_bfloat16

PLAN = Path("repro/which_norm.toml")
LEDGER = Path("results/cpu/bytes/ledger.jsonl")  # bytes that norms move in training
STREAM = "float32 stream"  # the residual stream of the runs
WAIT = 20  # seconds between two looks at what other workers do
STAGES = (InitStage, RateStage, MarginStage, VerdictStage, CheckStage, TokensStage, MuonStage)


class Worker:
    """A worker of the study.

    Args:
        plan: the plan at one scale.
        out: folder of the run folders.
        kept: folder of the archives and of what the stages conclude.
    """

    def __init__(self, plan: Plan, out: Path, kept: Path):
        self.plan = plan
        self.out = out
        self.kept = kept
        self.config, _ = parse_args(TrainConfig, [plan.config])
        self.steps = self.config.max_iters
        self.warmup = self.config.warmup_iters

    # Stages and what they concluded

    def stages(self) -> list[type[Stage]]:
        """Return the stages of this scale: stage 0 only where the plan has no init_std."""
        is_known = all("init_std" in shape.keys for shape in self.plan.shapes)
        return [kind for kind in STAGES if kind is not InitStage or not is_known]

    def stage(self, kind: type[Stage]) -> Stage:
        """Make a stage."""
        before = self.before()
        found = before.get(InitStage.name, {}).get("init_std", {})
        for shape in self.plan.shapes:
            if kind is not InitStage and shape.name in found:
                shape.keys["init_std"] = found[shape.name]
        return kind(self.plan, before, self.steps, self.warmup)

    def before(self) -> Conclusions:
        """Read what the stages have concluded, and apply the rule of the recommendation."""
        before: Conclusions = {}
        for kind in STAGES:
            path = self.conclusion_of(kind.name)
            if path.exists():
                before[kind.name] = json.loads(path.read_text())
                if before[kind.name]["study"] not in self.plan.studies(kind.name):
                    raise UserError(f"{path}: of another plan: bring that plan back, or move it")
        if VerdictStage.name in before:
            arm, why = recommend(self.plan, before, moved_bytes())
            before["recommendation"] = {"arm": arm, "why": why}
        return before

    def conclusion_of(self, stage: str) -> Path:
        """Return the file with what a stage concludes."""
        return self.kept / f"{stage}.json"

    def results(self, stage: Stage) -> Results:
        """Read all finished runs of a stage."""
        places = {
            shape.name: [self.archive(stage, shape), self.folder(stage, shape)]
            for shape in self.plan.shapes
        }
        conditions = [
            stage.before[kind.name]["conditions"] for kind in STAGES if kind.name in stage.before
        ]
        return Results(self.plan, {stage.name: places}, conditions[0] if conditions else None)

    def folder(self, stage: Stage, shape: Shape) -> Path:
        """Return the folder of a stage's run folders."""
        return self.out / stage.name / shape.name

    def archive(self, stage: Stage, shape: Shape) -> Path:
        """Return the archive of a stage's finished runs."""
        return self.kept / f"{stage.name}-{shape.name}.tar.xz"

    # Training

    def own(self, stage: Stage, runs: list[Wanted], results: Results) -> list[Wanted]:
        """Return those of the runs that this machine may train now.

        Runs of one seed and shape are compared, so they belong to the kind of processor that began
        the first of them. Each call claims one seed more. Stages that choose settings are free.

        Raises:
            UserError: all of them belong to others.
        """
        if stage.name in CHOOSING:
            return runs
        place = environment(find_device(self.config.device))
        here = {name: place.get(name) for name in PLACE}
        groups: dict[tuple[str, int], list[Wanted]] = {}
        for run in runs:
            groups.setdefault((run.shape, run.seed), []).append(run)
        own = []
        has_claimed = False
        for (shape, seed), group in groups.items():
            claim = self.out / stage.name / shape / f"seed-{seed}.json"
            is_new = not claim.exists()
            if results.place_of(group[0]) not in (None, here) or (is_new and has_claimed):
                continue
            has_claimed = has_claimed or is_new
            if is_first(claim, json.dumps(here)):
                own += group
        if not own:
            first = runs[0]
            raise UserError(
                f"{stage.name}, {first.shape}: seed {first.seed} was begun on another processor "
                f"than {here['device']}: finish it there; or remove seed-{first.seed}.json and "
                "move its runs away (of an archive: python -m evidence.archive FILE --remove RUN)"
            )
        return own

    def do(self, stage: Stage) -> None:
        """Train until the stage wants nothing more, and write what it concludes."""
        while True:
            results = self.results(stage)
            missing = results.missing(stage.wanted(results))
            if not missing:
                break
            before = len(results.found)
            failed = self.train(stage, self.own(stage, missing, results))
            after = len(self.results(stage).found)
            if failed and after == before:
                raise UserError(
                    f"{self.out / stage.name}: runs fail and none gets done: see train.txt in "
                    "their folders"
                )
            if after == before:
                time.sleep(WAIT)  # other workers train what is left
        self.conclude(stage, results)

    def train(self, stage: Stage, runs: list[Wanted]) -> bool:
        """Have sweep.sh train runs. Returns whether one of them failed, or diverged."""
        if warning := slow_bfloat16(self.config, find_device(self.config.device)):
            print(warning, file=sys.stderr, flush=True)
        failed = False
        for shape in self.plan.shapes[::-1]:
            by_seed: dict[int, list[str]] = {}
            for run in runs:
                if run.shape == shape.name:
                    by_seed.setdefault(run.seed, []).append(run.words)
            for seeds, arms in together(by_seed):
                code = self.sweep(stage, shape, arms, seeds)
                if code == 2 or code >= 128:
                    sys.exit(code)
                failed = failed or code != 0
        return failed

    def sweep(self, stage: Stage, shape: Shape, arms: list[str], seeds: list[int]) -> int:
        """Start sweep.sh. Returns its exit code."""
        settings = {
            "ARMS": " ".join(f'"{words}"' for words in arms),
            "SEEDS": " ".join(map(str, seeds)),
            "OUT": str(self.folder(stage, shape)),
            "KEEP": str(self.archive(stage, shape)),
            "HELLASWAG": "off",
        }
        keys = [f"--{name}={value}" for name, value in shape.keys.items()]
        keys.append(f"--study={self.plan.study}")
        command = ["./sweep.sh", self.plan.config, *keys]
        print(
            f"{stage.name}, {shape.name}: {len(arms)} arms, seeds {settings['SEEDS']}", flush=True
        )
        sweep = subprocess.Popen(command, env=os.environ | settings)
        while True:
            try:
                return sweep.wait()
            except KeyboardInterrupt:
                pass  # sweep.sh has got it too, and says when its runs are saved

    def conclude(self, stage: Stage, results: Results) -> None:
        """Write what a stage concludes; a file that is there already must say the same."""
        path = self.conclusion_of(stage.name)
        old = json.loads(path.read_text()) if path.exists() else None
        found = {
            "study": old["study"] if old else self.plan.study,
            "commits": results.commits(stage.name),
            "conditions": results.conditions(),
        }
        text = json.dumps(found | stage.conclusion(results), indent=1) + "\n"
        if old and not alike(old, json.loads(text)):
            raise UserError(
                f"{path}: the runs now give another conclusion than this file, which later stages "
                "rest on: find out which run changed"
            )
        if not old:
            with writing(self.kept):
                write_bytes_atomically(path, text.encode())
        print(f"{stage.name}: done; {path} has what follows: commit it")

    # What lies ahead

    def forecast(self, until: str = "") -> str:
        """Return a table of the stages: runs, those that are finished, core-minutes; and power.

        Args:
            until: the last stage to list; "" for all.
        """
        minutes = self.minutes()
        rows: list[list[Any]] = []
        total = {"runs": 0, "tokens": 0.0, "minutes": 0.0, "done": 0}
        for kind in self.stages():
            stage = self.stage(kind)
            done = len(self.results(stage).found)
            total["done"] += done
            for shape, parts in stage.planned().items():
                count = sum(runs for runs, _ in parts)
                length = sum(runs * length for runs, length in parts)
                time = length * minutes.get(shape, math.nan)
                total["runs"] += count
                total["tokens"] += length * self.tokens
                total["minutes"] += time
                rows.append([stage.name, shape, *self._cost(count, length * self.tokens, time), ""])
            rows[-1][-1] = done
            if stage.name == until:
                break
        cost = self._cost(total["runs"], total["tokens"], total["minutes"])
        rows.append(["total", "", *cost, total["done"]])
        header = ["stage", "shape", "runs planned", "M tokens", "core-minutes"]
        table = markdown([*header, "runs finished, all shapes"], rows)
        return (
            f"{table}\n\nStage rates adds runs where the best rate lies at an end of the grid, so "
            "more may be finished than were planned. Core-minutes are by the speed of its finished "
            f"runs.\n\n{self.power_text()}"
        )

    @staticmethod
    def _cost(runs: int, tokens: float, minutes: float) -> list[Any]:
        """Return runs, tokens and minutes as a row of the forecast shows them."""
        time = "?" if math.isnan(minutes) else f"{minutes:,.0f}"
        return [runs, f"{tokens / 1e6:,.0f}", time]

    @property
    def tokens(self) -> int:
        """Training tokens of a run of length 1."""
        return self.steps * self.sequences * self.config.block_size

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.config.batch_size * self.config.gradient_accumulation_steps

    def minutes(self) -> dict[str, float]:
        """Return shape -> minutes that a run of length 1 trains, by those of stage 1."""
        found: dict[str, list[float]] = {}
        for (_, shape, _, _), result in self.results(self.stage(RateStage)).found.items():
            run = result.run
            if not run.diverged and "tok_per_s" in run.metrics:
                tokens = self.steps * run.start["tokens_per_step"]
                found.setdefault(shape, []).append(tokens / run.metrics["tok_per_s"] / 60)
        return {shape: float(np.mean(times)) for shape, times in found.items()}

    def power_text(self) -> str:
        """Say what the verdicts can show."""
        rules = self.plan.plan["verdict"]
        seeds, level = len(rules["seeds"]), rules["level"]
        margin = self.before().get(MarginStage.name)
        if margin is None:
            share = largest_deviation(
                rules["power"], len(self.plan.shapes), seeds, level / rules["arms"]
            )
            return (
                f"Power: with {seeds} seeds and {rules['arms']} arms an arm like "
                f"{self.plan.baseline} is shown to be non-inferior in {len(self.plan.shapes)} "
                f"shapes with a chance of {rules['power']:.0%} if the SD of a paired difference is "
                f"at most {share:.2f} margins. Stage margin measures both."
            )
        chances = ", ".join(f"{arms} arms {chance:.3f}" for arms, chance in margin["power"].items())
        return (
            f"Power to show that an arm like {self.plan.baseline} is non-inferior in all shapes, "
            f"with {seeds} seeds and a margin of {margin['margin']:.4f}: {chances}."
        )


def is_first(path: Path, text: str) -> bool:
    """Write `text` as a file, unless there is one. Returns whether the file has this text now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    try:
        os.link(partial, path)  # whole at once, and refused if the name is taken
    except FileExistsError:
        pass
    finally:
        partial.unlink()
    return path.read_text(encoding="utf-8") == text


def alike(first: Any, second: Any) -> bool:
    """Are two conclusions the same but for rounding?"""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(alike(first[k], second[k]) for k in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(alike, first, second))
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-15)
    return first == second


def moved_bytes() -> dict[str, float]:
    """Read the ledger of bytes: name of the norms -> bytes for each token and block."""
    rows = [json.loads(line) for line in LEDGER.read_text().splitlines()]
    return {row["norms"]: row["bytes_per_token"][STREAM] for row in rows}


def together(by_seed: dict[int, list[str]]) -> list[tuple[list[int], list[str]]]:
    """Put seeds that want the same arms into one sweep: (seeds, arms)."""
    sweeps: list[tuple[list[int], list[str]]] = []
    for seed, arms in by_seed.items():
        for seeds, others in sweeps:
            if others == arms:
                seeds.append(seed)
                break
        else:
            sweeps.append(([seed], arms))
    return sweeps


def parse(argv: list[str]) -> tuple[str, bool, str]:
    """Return scale, whether this is a dry run, and the stage to stop after ("": the last)."""
    scale, until, is_dry = "", "", False
    names = [stage.name for stage in STAGES]
    for word in argv:
        if word == "--dry-run":
            is_dry = True
        elif word.startswith("--until=") and word.removeprefix("--until=") in names:
            until = word.removeprefix("--until=")
        elif word.startswith("-") or scale:
            raise ConfigError(
                f"{word}: give a scale, --dry-run, --until=STAGE; stages: {', '.join(names)}"
            )
        else:
            scale = word
    if not scale:
        raise ConfigError("give a scale: cpu, 30m or 124m")
    return scale, is_dry, until


def main(argv: list[str]) -> None:
    scale, is_dry, until = parse(argv)
    out = Path(os.environ.get("OUT", f"out/which_norm/{scale}"))
    kept = Path(os.environ.get("RESULTS", f"results/{scale}/which_norm"))
    worker = Worker(Plan(PLAN, scale), out, kept)
    names = [kind.name for kind in worker.stages()]
    if until and until not in names:
        raise ConfigError(f"--until={until}: {scale} has no such stage; its: {', '.join(names)}")
    if is_dry:
        print(worker.forecast(until))
        return
    for kind in worker.stages():
        stage = worker.stage(kind)
        worker.do(stage)
        if stage.name == until:
            return


if __name__ == "__main__":
    run_program(main, __doc__)
