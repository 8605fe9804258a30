"""What programs leave on the disk.

python -m pytest tests/common/test_output.py
"""

import errno
import os
import re
from unittest import mock

import pytest
from helpers import ROOT, TINY, json_lines

import distill
import hellaswag
import report
from bench import fold as bench_fold
from common.errors import UserError
from common.output import whole_folder, write_bytes_atomically, write_results
from evals import lm_eval_model
from posthoc import rms_stats
from training.checkpoint import save_checkpoint
from training.log import RunLog


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_not_replaced(kind, tmp_path):
    """Each would be gone, and with it /dev/null for root."""
    path = tmp_path / "it"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
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
    assert os.listdir(tmp_path) == ["it"]


RUN = "results/cpu/taper_finetune/runs.tar.xz"
# Program, its words before the file, and how a file begins that it has written.
WRITERS = {
    "hellaswag": (hellaswag.main, ["nowhere", "--out="], '{"item": 24, "acc_choice": 1}'),
    "lm_eval": (
        lm_eval_model.main,
        ["nowhere", "--mmlu=a,b", "--out="],
        '{"group": "a", "task": "a", "item": "0", "correct": {}}',
    ),
    "rms_stats": (
        rms_stats.main,
        ["nowhere", "--text=nowhere", "--out="],
        '{"spec": "x", "blocks": []}',
    ),
    "bench/fold": (bench_fold.main, ["nowhere", "--out="], '{"spec": "x", "folded": 1}'),
}


@pytest.mark.parametrize(("main", "words", "own"), WRITERS.values(), ids=WRITERS)
def test_a_file_that_the_user_names_is_kept_unless_it_is_the_programs_own(
    main, words, own, tmp_path
):
    """A checkpoint, settings, a text or a program's own input are not its output."""
    path = tmp_path / "out.png"
    command = [*words[:-1], f"{words[-1]}{path}"]
    for content in (
        b"PK\x03\x04checkpoint",
        b'{\n "n_layer": 2\n}\n',
        b'{"ind": 1, "ctx": "", "label": 0}\n',
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=re.escape(str(path))):
            main(command)
        assert path.read_bytes() == content
    path.write_text(own)
    # It goes on, to the next thing that is wrong.
    with pytest.raises(UserError, match=r"nowhere|a: cannot be read"):
        main(command)


def test_pages_and_tables_of_somebody_else_are_kept(tmp_path):
    """In a folder that the user names; a page of our own is written again."""
    for name in ("README.md", "report.md"):
        (tmp_path / name).write_text("# My own\n")
    with pytest.raises(UserError, match=r"README\.md"):
        write_results(tmp_path, "times", [{}], "README.md", "# Times\n")
    with pytest.raises(UserError, match=r"report\.md"):
        report.main([str(ROOT / RUN), "--baseline=layer", f"--out={tmp_path}", "--pictures=False"])
    for name in ("README.md", "report.md"):
        assert (tmp_path / name).read_text() == "# My own\n"
    for text in ("# Times\n\n1\n", "# Times\n\n2\n"):
        write_results(tmp_path / "times", "times", [{}], "README.md", text)
    assert (tmp_path / "times" / "README.md").read_text() == text


def test_a_run_does_not_write_over_the_model_that_it_starts_from(tmp_path, train_fails, tiny_data):
    """Nor over the config.json of another model's folder."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{\n "model_type": "gpt2"\n}\n')
    words = [*TINY, f"--data_dir={tiny_data}", f"--out_dir={model}"]
    for code, init_from in ((2, model), (2, model / "ckpt_best.pt"), (1, "")):
        assert str(model) in train_fails(*words, f"--init_from={init_from}", code=code)
    with pytest.raises(UserError, match="out_dir"):
        distill.main([f"--teacher={model}", *words[-1:], "--dataset=random", "--device=cpu"])
    assert (model / "config.json").read_text() == '{\n "model_type": "gpt2"\n}\n'


def test_a_log_that_cannot_be_written_is_one_line(tmp_path):
    log = RunLog(tmp_path, 10, active=True)
    log.open({}, None, {}, [])
    refused = OSError(errno.EIO, "Input/output error")
    told = r"log\.jsonl: cannot be written .*checkpoint is untouched"
    with mock.patch("os.fsync", side_effect=refused), pytest.raises(UserError, match=told):
        log.sync()
    log.file = mock.Mock(write=mock.Mock(side_effect=refused))
    with pytest.raises(UserError, match=told):
        log.event("step", step=1, loss=2.0)
    log.event("step", step=2, loss=2.0)  # closed: nothing is tried again
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1


def test_what_follows_the_last_step_is_logged_once(tmp_path):
    """A distillation that is killed between its two last events does both again."""
    for resume_step in (None, 4):
        log = RunLog(tmp_path, 4, active=True)
        log.open({}, resume_step, {}, [])
        if resume_step is None:
            log.event("eval", step=4)
        log.event("merged", step=4)
    found = [record["event"] for record in json_lines(tmp_path / "log.jsonl")]
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
        with pytest.raises(OSError, match="busy"), whole_folder(out):
            pass
    assert os.listdir(out.parent) == ["out"] and os.listdir(out) == ["file"]
