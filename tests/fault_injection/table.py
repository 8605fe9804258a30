"""The table of what survived, and the data behind it."""

from pathlib import Path
from typing import Any

from common.output import markdown, read_json, write_results
from tests.fault_injection.judge import MODES

TEXT = """# Faults: kills and refused writes at every call that changes a file

    make faults

A short run of each program is killed, or one of its calls fails, at each call in turn that opens a
file for writing, writes, truncates, forces to the disk, renames, links, makes or removes. Then the
same command runs again. It must end as the unbroken run: the same files and nothing else, the same
log but for times, the same weights, moments and plain values of each checkpoint to the last bit.
`log.jsonl.old`, to which a log without a checkpoint is put aside on purpose, is not compared.

- **kill**: the process ends before the call, as by SIGKILL. Several ranks: one of them; torchrun's
  part, to stop the others, is played by the harness. sweep.sh: all its processes at once.
- **torn**: half of a write is done, then the process is killed.
- **ENOSPC**, **EIO**, **EACCES**: this one call fails. Expected is exit code 1 or 2, one line that
  names the path and a remedy, no traceback, readable checkpoints, no half-written file; or, where
  the program can do without the call, exit code 0 and the result of the unbroken run.
- **full**: from this call on the disk has no room; the same is expected.

A cell: points survived / points tried (of all points, where not all were tried). In this table
{points}. Of a row of writes to one file, `--row=2` takes the first and the last; `--points=N` takes
N points of each mode, evenly spread.

{table}

{failed}

What this does not cover: calls that go past the C library (one here, the rename by which
safetensors gives its file a name, within a folder that has no name yet); what a failing disk loses
after fsync had confirmed it; a `close` that fails. Where each rank holds the whole model, only the
main one writes, so the others have points under FSDP alone.

{made}
"""


def write(folder: Path, records: list[dict[str, Any]], made: str) -> None:
    """Write faults.jsonl and README.md; what is there of other programs stays."""
    found = {key(record): record for record in read_json(folder / "faults.jsonl")}
    found |= {key(record): {**record, "made": made} for record in records}
    text = page(list(found.values()))
    write_results(folder, "faults", list(found.values()), "README.md", text)


def key(record: dict[str, Any]) -> tuple[str, int, str]:
    return record["program"], record["ranks"], record["mode"]


def page(records: list[dict[str, Any]]) -> str:
    """Describe all records."""
    cells = {key(record): cell(record) for record in records}
    rows = []
    for program, ranks in dict.fromkeys((record["program"], record["ranks"]) for record in records):
        rows.append(
            [f"`{program}`", ranks, *(cells.get((program, ranks, mode), "") for mode in MODES)]
        )
    lines = []
    for record in records:
        for point in record["failed"]:
            where = f"{record['program']}, {record['mode']}, {point['call']} of {point['path']}"
            lines.append(f"- {where} (rank {point['rank']}): {point['problem']}")
    failed = "No point failed."
    if lines:
        failed = "Failed:\n\n" + "\n".join(lines)
    made = "\n".join(dict.fromkeys(f"- {record['made']}" for record in records))
    tried, of = (sum(record[name] for record in records) for name in ("points", "of"))
    points = f"{tried:,} of {of:,} points were tried"
    table = markdown(["program", "ranks", *MODES], rows)
    return TEXT.format(points=points, table=table, failed=failed, made=f"Made by:\n\n{made}")


def cell(record: dict[str, Any]) -> str:
    """Return survived / tried, and of how many."""
    of = f" (of {record['of']})" if record["of"] > record["points"] else ""
    return f"{record['survived']} / {record['points']}{of}"
