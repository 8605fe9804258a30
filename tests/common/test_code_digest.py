"""The digest of the code that trains.

python -m pytest tests/common/test_code_digest.py
"""

import shutil
import subprocess
import sys

from helpers import ROOT

from common.code_digest import code_digest, code_files, digest_of_commit, uncommitted_changes
from training.run import changes


def test_what_the_programs_import_is_in_it():
    listed = "import sys, train, distill; print(*(m.__file__ for m in sys.modules.values() "
    listed += "if getattr(m, '__file__', None)), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", listed], cwd=ROOT, capture_output=True, text=True)
    ours = {name for name in done.stdout.splitlines() if name.startswith(str(ROOT))}
    imported = {name for name in ours if "site-packages" not in name}
    assert f"{ROOT}/norms.py" in imported
    assert imported <= set(map(str, code_files()))


def test_every_file_counts_and_others_do_not(tmp_path):
    for path in code_files():
        there = tmp_path / path.relative_to(ROOT)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, there)
    seen = [code_digest(tmp_path)]
    assert seen[0] == code_digest()
    for name in ("report.py", "mine.py", "tests/test_a.py", "evidence/runs.py", "kernels/a.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
        assert code_digest(tmp_path) == seen[0]
    for name in ("norms.py", "training/untracked.py", "train.py"):
        with open(tmp_path / name, "a") as file:
            file.write("x = 1\n")
        seen.append(code_digest(tmp_path))
    (tmp_path / "training/untracked.py").rename(tmp_path / "training/renamed.py")
    seen.append(code_digest(tmp_path))
    assert len(set(seen)) == 5


def test_a_resumed_run_of_another_digest_is_told():
    """Two logs with digests are judged by them, others by their commits."""
    a, b = {"code": "a", "git": "one"}, {"code": "b", "git": "two"}
    assert changes(a, a | {"git": "two"}) == []
    assert changes(a, b) == ["git one -> two", "code a -> b"]
    assert changes({"git": "one"}, a) == []
    assert changes({"git": "another"}, a) == ["git another -> one"]


def test_the_diff_makes_the_code_from_the_commit(tmp_path):
    """What was edited, added or deleted, of the files that count; whatever the user's git shows."""

    def git(*words: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.check_output(["git", "-C", tmp_path, *names, *words], text=True).strip()

    def write(**texts: str) -> None:
        for name, text in texts.items():
            path = tmp_path / name.replace("__", "/").replace("_py", ".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    assert uncommitted_changes(tmp_path) == b""  # no repository
    git("init", "-q")
    write(model_py="a = 1\n", training__a_py="b = 1\n", training__b_py="c = 1\n", report_py="\n")
    git("add", ".")
    git("commit", "-qm", "first")
    git("config", "diff.noprefix", "true")
    assert digest_of_commit("HEAD", tmp_path) == ""
    commit = git("rev-parse", "HEAD")
    committed = code_digest(tmp_path)
    assert uncommitted_changes(tmp_path) == b""
    write(model_py="a = 2\n", training__new_py="d = 1\n", report_py="edited\n", mine_py="x\n")
    (tmp_path / "training/b.py").unlink()
    assert digest_of_commit(commit, tmp_path) == committed
    digest, diff = code_digest(tmp_path), uncommitted_changes(tmp_path)
    assert b"report.py" not in diff and b"mine.py" not in diff
    git("stash", "-uq")
    assert code_digest(tmp_path) != digest
    subprocess.run(["git", "-C", tmp_path, "apply"], input=diff, check=True)
    assert code_digest(tmp_path) == digest
