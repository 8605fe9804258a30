"""data/fineweb_edu/prepare.py with the real `datasets`, which reads from a hub on this machine.

    python -m pytest tests/data/test_hub.py

The hub can get a new commit at any moment, cut connections and answer with errors.
"""

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from helpers import ROOT

from data.shards import find_shards, open_shard, read_meta

pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

NAME = "HuggingFaceFW/fineweb-edu"
CARD = b"""---
configs:
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""
LAST = "sample/10BT/003.parquet"
OLD, NEW = "a" * 40, "b" * 40


class Hub(ThreadingHTTPServer):
    """What `datasets` asks of the hub: one data set, with all of its commits."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.commits: dict[str, dict[str, bytes]] = {}
        self.newest = ""
        # (path) -> a status, "cut" or None for the right answer; may block
        self.fault: Callable[[str], int | str | None] = lambda path: None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def publish(self, commit: str, texts: list[str]) -> None:
        """Make this the newest commit: 4 parquet files."""
        self.commits[commit] = {"README.md": CARD}
        size = -(-len(texts) // 4)
        for part in range(4):
            file = io.BytesIO()
            parquet.write_table(pa.table({"text": texts[part * size : (part + 1) * size]}), file)
            self.commits[commit][f"sample/10BT/{part:03d}.parquet"] = file.getvalue()
        self.newest = commit


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def send(self, body: bytes, status: int = 200, cut: bool = False, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = cut

    def do_GET(self) -> None:
        hub = self.server
        path = unquote(urlsplit(self.path).path)
        fault = hub.fault(path)
        if isinstance(fault, int):
            self.send(b"", fault, Retry_After="0")
        elif path.startswith(f"/api/datasets/{NAME}"):
            kind, _, rest = path.removeprefix(f"/api/datasets/{NAME}").strip("/").partition("/")
            commit, _, folder = rest.partition("/")
            self.answer_api(kind, commit or hub.newest, folder)
        elif path.startswith(f"/datasets/{NAME}/resolve/"):
            commit, _, name = path.split("/resolve/")[1].partition("/")
            self.send_file(hub.newest if commit == "main" else commit, name, fault == "cut")
        else:
            self.send(b"", 404)

    do_HEAD = do_GET

    def answer_api(self, kind: str, commit: str, folder: str) -> None:
        if commit not in self.server.commits:
            self.send(b"{}", 404, X_Error_Code="RevisionNotFound")
            return
        files = self.server.commits[commit]
        answer: object = {"id": NAME, "sha": commit, "siblings": [], "private": False}
        if kind == "tree":
            answer = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in files.items()
                if str(Path(name).parent) == folder
            ]
            if folder == "sample":
                answer = [{"type": "directory", "path": "sample/10BT", "oid": "0" * 40}]
        self.send(json.dumps(answer).encode(), Content_Type="application/json")

    def send_file(self, commit: str, name: str, cut: bool) -> None:
        content = self.server.commits.get(commit, {}).get(name)
        if content is None:
            self.send(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return
        headers = {"X_Repo_Commit": commit, "ETag": f'"{commit}{name}"'}
        status = 200
        if asked := self.headers.get("Range"):
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            headers["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
            content = content[first : last + 1]
            status = 206
        self.send(content, status, cut, **headers)


@pytest.fixture
def hub():
    server = Hub()
    server.publish(OLD, texts_of("old"))
    yield server
    server.shutdown()


def texts_of(name: str) -> list[str]:
    return [f"{name} {number} " * 30 for number in range(200)]


def start(
    hub: Hub, out: Path, *words: object, script: str = "data/fineweb_edu/prepare.py"
) -> subprocess.Popen:
    settings = ["--tokenizer=bytes", "--shard_tokens=9000", "--processes=1", f"--out_dir={out}"]
    env = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(out.parent / "hf"),
        "HF_HUB_OFFLINE": "0",
        "USE_TORCH": "0",  # which datasets would import for nothing
    }
    return subprocess.Popen(
        [sys.executable, str(ROOT / script), *settings, *map(str, words)],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(job: subprocess.Popen) -> tuple[int, str]:
    """Exit code and all that it printed."""
    text = job.communicate(timeout=120)[0]
    return job.returncode, text


def documents(out: Path) -> list[str]:
    paths = [path for split in ("val", "train") for path in find_shards(out, split)]
    tokens = np.concatenate([open_shard(path) for path in paths])
    return [
        bytes(part[1:].tolist()).decode()
        for part in np.split(tokens, np.flatnonzero(tokens == 256)[1:])
    ]


def test_a_resumed_preparation_keeps_to_its_commit(hub, tmp_path):
    out = tmp_path / "out"
    hub.fault = lambda path: 403 if path.endswith(LAST) else None
    code, text = finish(start(hub, out))
    assert code == 1 and "Traceback (most" not in text and len(list(out.glob("*.bin"))) > 2, text
    hub.publish(NEW, texts_of("new"))
    hub.fault = lambda path: None
    code, text = finish(start(hub, out))
    assert code == 0, text
    assert documents(out) == texts_of("old")
    assert read_meta(out) == {"tokenizer": "bytes", "vocab_size": 257, "revision": OLD}
    # The hub has that commit no more.
    max(out.glob("*.bin")).unlink()
    del hub.commits[OLD]
    code, text = finish(start(hub, out))
    assert code == 1 and OLD in text.splitlines()[-1] and "Traceback (most" not in text, text


def test_a_hub_that_fails_for_a_moment_changes_nothing(hub, tmp_path):
    faults = dict(zip(sorted(hub.commits[OLD]), [None, "cut", 500, 429, "cut"], strict=True))

    def once(path: str) -> int | str | None:
        return faults.pop(path.split(OLD)[-1].strip("/"), None)

    hub.fault = once
    code, text = finish(start(hub, tmp_path / "out"))
    assert code == 0 and faults.keys() <= {"README.md"}, text
    assert documents(tmp_path / "out") == texts_of("old")


def test_two_preparations_do_not_write_in_one_folder(hub, tmp_path):
    """The second has other text. It begins before the first one has a shard."""
    out = tmp_path / "out"
    source = tmp_path / "a.txt"
    source.write_text("of another kind " * 2000)
    reached, go_on = threading.Event(), threading.Event()

    def wait(path: str) -> None:
        if path.endswith(".parquet"):
            reached.set()
            go_on.wait(120)

    hub.fault = wait
    first = start(hub, out)
    assert reached.wait(120)
    second = start(hub, out, source, script="data/prepare.py")
    for line in second.stdout:  # until it waits, or ends
        if "another process" in line:
            break
    go_on.set()
    assert finish(first)[0] == 0
    code, text = finish(second)
    assert code == 1 and "other settings (files, val" in text and "Traceback (most" not in text
    assert documents(out) == texts_of("old")
