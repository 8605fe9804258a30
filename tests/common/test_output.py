"""What programs leave on the disk.

python -m pytest tests/common/test_output.py
"""

import contextlib
import os
import resource
import socket
import warnings

import pytest
import torch

import hellaswag
from common.errors import CheckpointError, HFError, UserError
from common.output import write_bytes_atomically
from hf.weights import export_hf
from model import GPT, GPTConfig
from training.checkpoint import save_checkpoint
from training.log import RunLog


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


@contextlib.contextmanager
def no_room(size: int):
    """No file grows beyond `size` bytes, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_on_a_full_disk_leaves_the_old_one(tmp_path):
    path = tmp_path / "ckpt_last.pt"
    save_checkpoint(path, {"model": {"weight": torch.ones(2)}})
    before = path.read_bytes()
    with (
        no_room(10_000),
        pytest.raises(CheckpointError, match=r"last\.pt: cannot be written .*make room"),
    ):
        save_checkpoint(path, {"model": {"weight": torch.ones(100_000)}})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["ckpt_last.pt"]


def test_a_log_on_a_full_disk_is_one_line(tmp_path):
    log = RunLog(tmp_path, {"wandb": "off"}, 10, active=True)
    log.open(None, {}, [])
    with (
        no_room((tmp_path / "log.jsonl").stat().st_size + 3),
        pytest.raises(UserError, match=r"log\.jsonl: cannot be written .*make room"),
    ):
        log.event("step", step=1, loss=2.0)
    log.event("step", step=2, loss=2.0)  # closed: nothing is tried again
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) <= 2


def test_an_export_on_a_full_disk_leaves_nothing(tmp_path):
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=64, vocab_size=64, norm_type="layer"))
    with no_room(20_000), pytest.raises(HFError, match=r"hf: cannot be written .*make room"):
        export_hf(model, tmp_path / "hf")
    assert os.listdir(tmp_path) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_hf(model, tmp_path / "hf")
    assert os.listdir(tmp_path) == ["hf"]


def test_a_file_and_a_new_name_are_written(tmp_path):
    for content in (b"old", b"new"):
        write_bytes_atomically(tmp_path / "it", content[:1], content[1:])
        assert (tmp_path / "it").read_bytes() == content
    assert os.listdir(tmp_path) == ["it"]
