"""Fixtures; what tests import by name is in helpers.py."""

import gc
from pathlib import Path

import pytest
from helpers import Job, write_tiny_shards  # before any module of ours: it prepares Triton


def pytest_collection_finish() -> None:
    """What is imported by now stays until the end: the garbage collector need not go through it
    again and again.
    """
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or extension modules report leaks at the end


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
    """train_ok(*argv, ranks=1): run to the end, which must be exit code 0 on all ranks."""

    def run(*argv: object, ranks: int = 1, patch: tuple[str, dict] | None = None) -> Job:
        job = launch(*argv, ranks=ranks, patch=patch)
        assert set(job.wait()) == {0}, job.text()
        return job

    return run


@pytest.fixture(scope="session")
def trained_rms():
    import small_rms

    return small_rms.train()


@pytest.fixture(scope="session")
def run_folder(trained_rms, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import small_rms

    return small_rms.write_run(trained_rms, tmp_path_factory.mktemp("run"))
