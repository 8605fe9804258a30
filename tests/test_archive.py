"""evidence/archive.py: archives that other programs wrote, whole or damaged, and hostile ones.

    python -m pytest tests/test_archive.py

What is read is complete, or the archive is refused and left as it is.
"""

import io
import lzma
import tarfile
from pathlib import Path

import pytest

from common.errors import UserError
from evidence import archive

LOG = b'{"event": "start", "config": {}}\n'
BLOCK = tarfile.BLOCKSIZE


def member(name: str, content: bytes = LOG, kind: bytes = tarfile.REGTYPE, **pax: object) -> bytes:
    """A member's header and content; `pax` are fields of an extended header, `__` for a dot."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = "rms-3/log.jsonl" if kind in (tarfile.LNKTYPE, tarfile.SYMTYPE) else ""
    info.size = len(content) if kind == tarfile.REGTYPE else 0
    info.pax_headers = {key.replace("__", "."): str(value) for key, value in pax.items()}
    header = info.tobuf(tarfile.PAX_FORMAT)
    return header + content[: info.size] + bytes(-info.size % BLOCK)


RMS, LAYER = member("rms-3/log.jsonl"), member("layer-3/log.jsonl")
END = bytes(2 * BLOCK)
BOTH = {"rms-3/log.jsonl": LOG, "layer-3/log.jsonl": LOG}


def packed(*streams: bytes) -> bytes:
    return b"".join(map(lzma.compress, streams))


WHOLE = {
    "one stream": packed(RMS + LAYER + END),
    "two streams": packed(RMS, LAYER + END),
    "streams that end in a header": packed(RMS + LAYER[:100], LAYER[100:] + END),
    "two archives": packed(RMS + END, LAYER + END),  # cat a.tar.xz b.tar.xz
    "padding": packed(RMS + END) + bytes(8) + packed(LAYER + END) + bytes(4),
    "twice the same": packed(RMS + RMS + LAYER + END),
    "other names": packed(member("./rms-3/log.jsonl") + member("/layer-3/log.jsonl") + END),
    "a folder": packed(member("rms-3", kind=tarfile.DIRTYPE) + RMS + LAYER + END),
}


@pytest.mark.parametrize("content", WHOLE.values(), ids=WHOLE)
def test_an_archive_of_another_program_is_read_whole(tmp_path: Path, content: bytes):
    """And `add` keeps all of it. Uncommitted code is added only if somebody says so."""
    path, run = tmp_path / "runs.tar.xz", tmp_path / "taper-3"
    path.write_bytes(content)
    assert archive.read(path) == BOTH
    assert archive.by_run(archive.read(path)).keys() == {"rms-3", "layer-3"}
    run.mkdir()
    (run / "log.jsonl").write_bytes(LOG)
    (run / "uncommitted.diff").write_bytes(b"diff --git ")
    archive.add(path, run)
    assert archive.read(path) == BOTH | {"taper-3/log.jsonl": LOG}
    archive.main([str(path), "--diff", str(run)])
    kept = {"taper-3/log.jsonl": LOG, "taper-3/uncommitted.diff": b"diff --git "}
    assert archive.read(path) == BOTH | kept


def damaged_sum(header: bytes) -> bytes:
    return b"X" + header[1:]


SPARSE = {"GNU__sparse__size": 10**10, "GNU__sparse__map": "0,1"}
BAD_MAP = {"GNU__sparse__size": 10**10, "GNU__sparse__map": "x"}
BAD_SUM = b"X" + LAYER[1:]  # the header's checksum is another one
# what is wrong: the archive, and what the message names
DAMAGED = {
    "cut between members": (packed(RMS), "cut off"),
    "cut before its first member": (packed(b""), "torn"),
    "half an end": (packed(RMS + END[:BLOCK]), "cut off"),
    "cut in a member": (packed(RMS + LAYER[:-BLOCK] + b"x"), "cut off"),
    "second stream torn": (packed(RMS) + packed(LAYER + END)[:-20], "cut off"),
    "no stream": (packed(RMS + END) + b"something else", "torn"),
    "second header": (packed(RMS + BAD_SUM + END), "damaged header"),
    "second archive's header": (packed(RMS + END, BAD_SUM + END), "checksum"),
    "two of one name": (packed(RMS + member("rms-3/log.jsonl", b"{}") + END), "twice"),
    "two names for one": (packed(RMS + member("./rms-3/log.jsonl", b"{}") + END), "twice"),
    "hard link": (packed(RMS + member("rms-4/log.jsonl", kind=tarfile.LNKTYPE) + END), "link"),
    "symbolic link": (packed(RMS + member("rms-4/log.jsonl", kind=tarfile.SYMTYPE) + END), "link"),
    "name of elsewhere": (packed(member("rms-4/../log.jsonl") + END), "folder of a run"),
    "no folder": (packed(member("log.jsonl") + END), "folder of a run"),
    "sparse": (packed(member("rms-3/log.jsonl", **SPARSE) + END), "sparse"),
    "sparse, damaged": (packed(member("rms-3/log.jsonl", **BAD_MAP) + END), "torn"),
    "25 digits": (packed(member("rms-3/log.jsonl", size=10**25) + END), "cut off"),
    "negative": (packed(member("rms-3/log.jsonl", size=-1536) + END), "torn"),
}


@pytest.mark.parametrize(("content", "named"), DAMAGED.values(), ids=DAMAGED)
def test_what_is_not_whole_is_refused_and_kept(tmp_path: Path, content: bytes, named: str):
    path, run = tmp_path / "runs.tar.xz", tmp_path / "taper-3"
    path.write_bytes(content)
    run.mkdir()
    (run / "log.jsonl").write_bytes(LOG)
    for call in (lambda: archive.read(path), lambda: archive.add(path, run)):
        with pytest.raises(UserError, match=rf"runs\.tar\.xz: .*{named}"):
            call()
    assert path.read_bytes() == content


def test_what_several_streams_unpack_to_is_counted_together(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MOST", 3 * BLOCK)
    path = tmp_path / "runs.tar.xz"
    path.write_bytes(packed(RMS, LAYER + END))
    with pytest.raises(UserError, match="more than 1,536 bytes"):
        archive.read(path)


def test_our_archives_are_read_by_tarfile(tmp_path):
    path = tmp_path / "runs.tar.xz"
    archive.write(path, BOTH)
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(path.read_bytes()))) as file:
        assert set(file.getnames()) == BOTH.keys()


def test_a_run_is_called_by_its_folder_however_that_is_written(tmp_path, monkeypatch):
    """`.` is no name that an archive may have. Of two runs with one name one would be lost."""
    path = tmp_path / "runs.tar.xz"
    for name in ("a/rms-3", "b/rms-3", "a/layer-3"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "log.jsonl").write_bytes(LOG)
    monkeypatch.chdir(tmp_path / "a/rms-3")
    for run in (".", "../layer-3/../layer-3/."):
        archive.add(path, Path(run))
    assert archive.read(path) == BOTH
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"b/rms-3: two runs are named rms-3"):
        archive.add(path, tmp_path / "a/rms-3", tmp_path / "b/rms-3")
    assert path.read_bytes() == before
