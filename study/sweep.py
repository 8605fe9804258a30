"""Train every arm with every seed: one run folder for each, ready for report.py.

    ./sweep.sh config/small.py [config files ...] [--key=value ...]
    ARMS="rms coupled 'coupled --coupled_span=2'" SEEDS="8 9 10" NPROC=8 ./sweep.sh config/small.py

    ARMS       norm types, each with any norm keys after it    (layer rms coupled cbwc taper)
               NAME: before one gives it a name, for folders, tables and pictures:
               ARMS="rms 'wide:coupled --coupled_span=2'"
    SEEDS      numbers with blanks between                     (8 9 10 11 12 13 14 15)
    OUT        folder of the run folders                       (out/, first config file's name)
    HELLASWAG  off, auto (downloads the items) or their file   (off)
    KEEP       archive (a name in .tar.xz) for each finished run's config, log and HellaSwag items;
               runs that are over in it are skipped, if they have the sweep's settings
    KEEP_DIFF  1: keep there, too, the changes of the code that no commit has
    NPROC      processes a run, started by torchrun            (1)
    JOBS       runs side by side, one CPU core each; on a machine with GPUs and NPROC=1 they take
               the GPUs in turn                                (1)
    PYTHON     the Python that trains                          (.venv/bin/python, else python3)

Before the first run it checks every arm and seed, and what is in OUT and KEEP already; and it
prints which differences its seeds will find with 80 % power.

All arms of a seed run one after the other, each time beginning with another arm, so that a drift
of the machine's speed affects all alike. After an interruption, run it again: finished runs are
skipped, and those that diverged, which they would again; the interrupted one continues where it
stopped. Each run's output is in its folder's train.txt; its last line is shown, once a minute if
there is no terminal. Exit codes: 1 if a run failed or diverged now (the others are still done), 2
at once if a setting is wrong, 130 if it was stopped.

A worker claims a run before it starts it, and passes over runs that others have claimed. So
several sweeps, also on several machines, can work on one OUT. All runs of a seed are made on one
kind of device: a worker leaves seeds that were begun on another kind to that, and where nothing
trains there any more, begins them again whole (what was there goes to OUT-left). With JOBS above 1
a run's speed depends on its neighbours: its log says jobs=JOBS, and report.py does not judge it.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import torch

from common.environment import environment, find_device
from common.errors import ConfigError, UserError, run_program
from common.norm_file import PIN, default_norm_file, split_norm_file
from evals.hellaswag import load_items
from evidence.archive import SUFFIX, by_run, read
from evidence.runs import Run

from .arms import in_order, read_arms, read_seeds
from .checks import check_sweep, parse
from .workers import STOPPED, Job, Sweep, machine_of, state_by_log

ARMS = "layer rms coupled cbwc taper"
SEEDS = "8 9 10 11 12 13 14 15"


def variable(name: str, default: str) -> str:
    """Return an environment variable; one that is empty is as one that is not there."""
    return os.environ.get(name) or default


def count(name: str) -> int:
    """Return a variable that is a number from 1 on. Raises ConfigError."""
    text = variable(name, "1")
    if not re.fullmatch("[1-9][0-9]*", text, re.ASCII):
        raise ConfigError(f"{name}={text}: needs a number from 1 on")
    return int(text)


def out_folder(config: str) -> Path:
    """Return OUT, the folder of the run folders. Raises ConfigError for that of a run."""
    out = Path(variable("OUT", f"out/{Path(config).stem}"))
    if (out / "config.json").is_file():
        raise ConfigError(
            f"OUT={out} is the folder of a run: give the sweep another one, OUT=out/sweep"
        )
    return out


def archive_to_keep() -> Path | None:
    """Return KEEP, the archive for finished runs. Raises ConfigError."""
    text = variable("KEEP", "")
    if text and not text.endswith(SUFFIX):
        raise ConfigError(f"KEEP={text}: needs an archive's name, such as runs.tar.xz")
    return Path(text) if text else None


def runs_in(archive: Path) -> set[str]:
    """Return the names of the runs in an archive that are over. Others will replace theirs."""
    runs = by_run(read(archive))
    return {
        name for name, files in runs.items() if state_by_log(files.get("log.jsonl", b"")).is_over
    }


def check_hellaswag(text: str) -> None:
    """Read the items that HELLASWAG names, or download them. Raises ConfigError."""
    if text == "off":
        return
    try:
        load_items("" if text == "auto" else text)
    except UserError as error:
        raise ConfigError(f"HELLASWAG={text}: {error}") from None


def pin_norm_file(argv: list[str]) -> list[str]:
    """Add the digest of the norm file, if one is named, so that all runs have the same norm.

    Somebody may edit it while the sweep trains: the next run then ends the sweep.
    """
    _, file = split_norm_file(argv, default_norm_file())
    return [*argv, f"--{PIN}={file.sha256}"] if file else list(argv)


def command(python: str, processes: int) -> tuple[str, ...]:
    """Return how a run is started, up to train.py."""
    if processes == 1:
        return (python, "train.py")
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
    return (python, *launcher, "train.py")


def gpus_of_workers(processes: int, jobs: int) -> tuple[str, ...]:
    """Name for each worker the GPU that it has alone; () where there is nothing to share out."""
    if jobs == 1 or processes > 1 or not torch.cuda.is_available():
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (
        tuple(visible.split(",")) if visible else tuple(map(str, range(torch.cuda.device_count())))
    )


def machine_here(device: str) -> str:
    """Name the kind of device on which runs with this key `device` train here."""
    return machine_of(environment(find_device(device)))


def next_command(out: Path, keep: Path | None, first: str) -> str:
    """Return how a finished sweep is reported.

    Args:
        out, keep: folder of its run folders, and archive.
        first: name of a run of the baseline, which report.py may call in another way.
    """
    # Of this run alone: others in the folder may be damaged, or not of this sweep.
    in_folder = (out / first / "log.jsonl").exists()
    run = (
        Run(out / first) if in_folder or not keep else Run(keep / first, by_run(read(keep))[first])
    )
    return f"python report.py {shlex.quote(str(keep or out))} --baseline={shlex.quote(run.arm)}"


def main(argv: list[str]) -> int:
    """Check the sweep, train its runs, and say what is done. Returns the exit code."""
    config = argv[0] if argv else ""
    if not Path(config).is_file():
        raise ConfigError(f"{config}: no such file; the first argument is a config file")
    out, keep = out_folder(config), archive_to_keep()
    processes, jobs = count("NPROC"), count("JOBS")
    arms, seeds = read_arms(variable("ARMS", ARMS)), read_seeds(variable("SEEDS", SEEDS))
    hellaswag = variable("HELLASWAG", "off")
    common = pin_norm_file(argv)
    device = parse([*common, *arms[0].words], out).device
    line = check_sweep(common, arms, seeds, out, keep)
    check_hellaswag(hellaswag)
    if line:
        print(line, flush=True)
    if jobs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        common.append(f"--jobs={jobs}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"OUT={out}: cannot be made ({error.strerror}): check permissions and disk, or choose "
            "another OUT"
        ) from None
    kept = runs_in(keep) if keep else set()
    job = Job(
        command=command(variable("PYTHON", sys.executable), processes),
        common=tuple(common),
        hellaswag=hellaswag,
        out=out,
        keep=keep,
        diff=variable("KEEP_DIFF", "") == "1",
        gpus=gpus_of_workers(processes, jobs),
        machine=machine_here(device),
    )
    sweep = Sweep(job, in_order(arms, seeds), kept)
    code = sweep.run(jobs)
    if left := sweep.left_to_others():
        print(f"others are training: {' '.join(left)}; if one of them dies, run this again")
    done, first = len(sweep.done()), sweep.runs[0].name
    is_finished = done == len(sweep.runs)
    following = f"; next: {next_command(out, keep, first)}" if is_finished else ""
    print(f"{done} of {len(sweep.runs)} runs done{following}")
    if code == STOPPED:
        print("stopped; run it again to go on")
    return code


if __name__ == "__main__":
    run_program(main, __doc__)
