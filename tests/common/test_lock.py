"""common/lock.py on a file system without locks: owners that live, and one that stood still.

python -m pytest tests/common/test_lock.py
"""

import errno

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
    first.lease._stop_heartbeat()  # gives no sign of life any more
    with FolderLock(tmp_path) as second:
        second.check()
        with pytest.raises(UserError, match="another one works there now"):
            first.check()
        first.release()
        second.check()  # what the first one does at its end changes nothing
