"""What programs leave on the disk.

python -m pytest tests/common/test_output.py
"""

import os
import socket

import pytest

import hellaswag
from common.errors import UserError
from common.output import write_bytes_atomically
from training.checkpoint import save_checkpoint


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "socket", "folder"])
def test_what_is_no_file_is_not_replaced(kind, tmp_path, monkeypatch):
    """Each would be gone, and with it /dev/null for root."""
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    path = tmp_path / "it"
    if kind == "folder":
        path.mkdir()
    elif kind == "socket":
        server = socket.socket(socket.AF_UNIX)
        server.bind("it")
    else:
        target = path if kind == "pipe" else tmp_path / "pipe"
        os.mkfifo(target)
        if target != path:
            path.symlink_to(target)
    before = os.lstat(path)
    for write in (
        lambda: write_bytes_atomically(path, b"x"),
        lambda: save_checkpoint(path, {"model": {}}),
        lambda: hellaswag.main(["nowhere", f"--out={path}"]),
    ):
        with pytest.raises(UserError, match=r"it: this is a .*name a file"):
            write()
    after = os.lstat(path)
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
    assert sorted(os.listdir(tmp_path)) == sorted({"it", *(["pipe"] if "link" in kind else [])})


def test_a_file_and_a_new_name_are_written(tmp_path):
    for content in (b"old", b"new"):
        write_bytes_atomically(tmp_path / "it", content[:1], content[1:])
        assert (tmp_path / "it").read_bytes() == content
    assert os.listdir(tmp_path) == ["it"]
