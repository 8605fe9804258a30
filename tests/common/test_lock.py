"""common/lock.py on a file system without locks: owners that live, stand still, or come together.

python -m pytest tests/common/test_lock.py
"""

import errno
from concurrent.futures import ThreadPoolExecutor

import pytest

from common import lock
from common.errors import UserError
from common.lock import FolderLock


@pytest.fixture(autouse=True)
def no_locks(monkeypatch):
    """Beats are quick, and the system has no locks."""

    def fail(file, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", fail)
    for name, seconds in {"BEAT": 0.05, "STALE": 1.0, "POLL": 0.02, "PATIENCE": 2.0}.items():
        monkeypatch.setattr(lock, name, seconds)


def test_an_owner_that_lives_keeps_others_out(tmp_path):
    with FolderLock(tmp_path) as first:
        with pytest.raises(UserError, match="another process is working there"):
            FolderLock(tmp_path)
        first.check()
    FolderLock(tmp_path).release()  # at once
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_an_owner_that_stood_still_writes_nothing_more(tmp_path):
    first = FolderLock(tmp_path)
    first.ended.set()  # gives no sign of life any more
    with FolderLock(tmp_path) as second:
        second.check()
        with pytest.raises(UserError, match="another one works there now"):
            first.check()
        first.release()
        second.check()  # what the first one does at its end changes nothing


def test_one_of_two_that_take_it_over_at_once_has_it(tmp_path):
    FolderLock(tmp_path).ended.set()
    with ThreadPoolExecutor(4) as pool:
        attempts = [pool.submit(FolderLock, tmp_path) for _ in range(4)]
    owners = []
    for attempt in attempts:
        # refused at once, or it finds another name in the file later
        told = "another process is working there" if attempt.exception() else "stood still"
        try:
            attempt.result().check()
            owners.append(attempt.result())
        except UserError as error:
            assert told in str(error)
    assert len(owners) == 1
    owners[0].release()
