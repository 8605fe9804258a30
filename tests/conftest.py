"""Fixtures; what tests import by name is in helpers.py."""

import gc
import multiprocessing
from pathlib import Path

import first  # noqa: F401
import pytest
import small_rms  # it imports helpers first, which prepares Triton
import torch
import torch.distributed as dist
from helpers import Job, write_tiny_shards

from norm_plan import NORMS
from norm_types import NORM_TYPES


def pytest_itemcollected(item: pytest.Function) -> None:
    """Tests that share a fixture of their module run on one worker, so that it is made once."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    is_shared = any(found[-1].scope == "module" for found in fixtures)
    if is_shared and not item.get_closest_marker("xdist_group"):
        item.add_marker(pytest.mark.xdist_group(item.module.__name__))


def pytest_collection_finish() -> None:
    """What is imported by now stays until the end: the garbage collector need not go through it
    again and again.
    """
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or extension modules report leaks at the end
    for process in multiprocessing.active_children():  # or Python would wait for one that hangs
        process.kill()


@pytest.fixture
def one_rank():
    """A process group of this process alone.

    It outlives the models of a test: freed with one, it may wait for ever for its threads.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_shards(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def launch(tmp_path: Path):
    """launch(*argv, ranks=1, patch=None, program="train") -> Job.

    Paths in argv are as on the command line.
    """
    jobs: list[Job] = []

    def start(
        *argv: object, ranks: int = 1, patch: tuple[str, dict] | None = None, program: str = "train"
    ) -> Job:
        job = Job(tuple(map(str, argv)), ranks, tmp_path / f"job{len(jobs)}", patch, program)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        for process in job.processes:
            if process.is_alive():
                process.kill()


@pytest.fixture
def train_ok(launch):
    """train_ok(*argv, **how): run to the end, which must be exit code 0 on all ranks.

    `how` is for launch.
    """

    def run(*argv: object, timeout: float = 120, **how) -> Job:
        job = launch(*argv, **how)
        assert set(job.wait(timeout)) == {0}, job.text()
        return job

    return run


@pytest.fixture
def train_fails(launch):
    """train_fails(*argv, code=1, **how) -> the one error line of a run that must end so.

    `how` is for launch.
    """

    def run(*argv: object, code: int = 1, **how) -> str:
        job = launch(*argv, **how)
        assert set(job.wait()) == {code} and "Traceback" not in job.text(), job.text()
        [line] = [line for line in job.text().splitlines() if line.startswith("error:")]
        return line

    return run


@pytest.fixture
def registry():
    """What a norm file adds to the registries of this process goes again."""
    kept = [(table, dict(table)) for table in (NORMS, NORM_TYPES)]
    yield
    for table, before in kept:
        table.clear()
        table.update(before)


@pytest.fixture
def handlers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that runs in this process leaves its signal handlers alone."""
    monkeypatch.setattr("signal.signal", lambda *words: None)


@pytest.fixture(scope="session")
def trained_rms():
    return small_rms.train()


@pytest.fixture(scope="session")
def run_folder(trained_rms, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_rms.write_run(trained_rms, tmp_path_factory.mktemp("run"))
