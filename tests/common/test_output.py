"""What programs leave on the disk.

python -m pytest tests/common/test_output.py
"""

import contextlib
import errno
import json
import os
import resource
import socket
import warnings

import pytest
import torch

import hellaswag
from common.errors import CheckpointError, HFError, UserError, cannot_write
from common.output import whole_folder, write_bytes_atomically, write_results
from hf.weights import export_hf
from model import GPT, GPTConfig
from training.checkpoint import save_checkpoint
from training.log import RunLog


def test_a_page_may_name_a_path_that_is_not_utf_8(tmp_path):
    write_results(tmp_path, "times", [{"out": "\udcff"}], "README.md", "--out=\udcff")
    assert (tmp_path / "README.md").read_text() == "--out=\\udcff\n"
    assert json.loads((tmp_path / "times.jsonl").read_text()) == {"out": "\udcff"}


def test_two_processes_do_not_write_one_folder(tmp_path):
    out = tmp_path / "out"
    (tmp_path / "out.tmp").mkdir()  # somebody's own folder
    with whole_folder(out) as folder:
        (folder / "file").touch()
        with pytest.raises(OSError, match="busy"), whole_folder(out):
            pass
    assert (out / "file").exists() and (tmp_path / "out.tmp").exists()


def test_a_folder_that_cannot_be_replaced_gets_the_content(tmp_path, monkeypatch):
    """An empty mount point."""
    out = tmp_path / "out"
    out.mkdir()

    def refuse(source, target):
        raise OSError(errno.EBUSY, "busy", str(target))

    monkeypatch.setattr("common.output.os.replace", refuse)
    with whole_folder(out) as folder:
        (folder / "file").touch()
    assert (out / "file").exists() and [path.name for path in tmp_path.iterdir()] == ["out"]


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


@pytest.mark.parametrize(
    "number, remedy",
    [
        (errno.ENOSPC, "make room"),
        (errno.EACCES, "get permission to write there"),
        (errno.EROFS, "get permission to write there"),
        (errno.EIO, "check path and disk"),
    ],
)
def test_a_refused_write_names_a_remedy(number, remedy):
    error = OSError(number, os.strerror(number))
    assert cannot_write("out=a", error, "b is untouched") == (
        f"out=a: cannot be written ({os.strerror(number)}); b is untouched: {remedy}, and repeat "
        "the command"
    )


def test_a_log_that_the_disk_does_not_confirm_is_one_line(tmp_path, monkeypatch):
    log = RunLog(tmp_path, {"wandb": "off"}, 10, active=True)
    log.open(None, {}, [])

    def refuse(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UserError, match=r"log\.jsonl: cannot be written .*checkpoint is untouched"):
        log.sync()
    with pytest.raises(UserError, match=r"log\.jsonl: cannot be written"):
        RunLog(tmp_path, {"wandb": "off"}, 10, active=True).open(0, {}, [])
    assert os.listdir(tmp_path) == ["log.jsonl"]


def test_what_follows_the_last_step_is_logged_once(tmp_path):
    """A distillation that is killed between its two last events does both again."""
    for resume_step in (None, 4):
        log = RunLog(tmp_path, {"wandb": "off"}, 4, active=True)
        log.open(resume_step, {}, [])
        if resume_step is None:
            log.event("eval", step=4)
        log.event("merged", step=4)
    found = [json.loads(line)["event"] for line in (tmp_path / "log.jsonl").open()]
    assert found == ["start", "eval", "resume", "merged"]


def test_a_folder_gets_its_name_when_it_is_whole(tmp_path):
    out = tmp_path / "new" / "out"
    (tmp_path / "new" / ".out.unfinished").mkdir(parents=True)
    (tmp_path / "new" / ".out.unfinished" / "old").touch()  # of a program that was killed
    with pytest.raises(KeyboardInterrupt), whole_folder(out) as folder:
        (folder / "file").touch()
        assert not out.exists()
        raise KeyboardInterrupt
    assert os.listdir(out.parent) == []
    with whole_folder(out) as folder:
        (folder / "file").touch()
    assert os.listdir(out.parent) == ["out"] and os.listdir(out) == ["file"]


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
