"""One point: a program meets its fault, is looked at, and runs again to its end."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.fault_injection.launch import Call, Ended, Fault, Place
from tests.fault_injection.programs import Program
from tests.fault_injection.state import LEFT, State, difference, names_in, state_of

KILLS = ("kill", "torn")
MODES = (*KILLS, "ENOSPC", "EIO", "EACCES", "full")
# What an error for people says to do, in any of the programs
REMEDY = re.compile(
    r"make room|permission|repeat the command|run it again|run the same command|choose another|"
    r"remove it|another disk"
)
ERROR = "error: |: FAILED with exit code"
NOT_READABLE = "not readable"


@dataclass(frozen=True)
class Unbroken:
    """A run without a fault: what it calls and what it leaves."""

    calls: list[list[Call]]  # of each rank
    state: State

    def points(self, mode: str, row: int = 0) -> list[Fault]:
        """List the points of a mode: every call of every rank that it can happen to.

        Args:
            row: of writes to one file with no other call between them, this many at most, the last
                among them (0: all).
        """
        found = []
        for rank, calls in enumerate(self.calls):
            place = 0  # of a write in its row
            for index, call in enumerate(calls):
                follows = index > 0 and call.target == calls[index - 1].target
                place = place + 1 if follows else 0
                is_last = index + 1 == len(calls) or call.target != calls[index + 1].target
                if row and call.name == "write" and place >= row - 1 and not is_last:
                    continue
                is_torn = call.name == "write" and call.bytes > 1
                if (mode == "torn" and not is_torn) or (mode == "full" and not call.needs_room):
                    continue
                found.append(Fault(mode, call.number, rank))
        return found


def unbroken(program: Program, place: Place) -> Unbroken:
    """Run a program without a fault."""
    place.clear()
    program.setup(place)
    ended = program.start(place, None)
    assert ended.is_good, (program.name, ended.codes, ended.texts)
    return Unbroken(ended.calls, state_of(place.files))


def problem_at(program: Program, place: Place, fault: Fault, whole: Unbroken) -> str:
    """Try one point. Returns what went wrong, or ""; "not reached" if the call never came."""
    place.clear()
    program.setup(place)
    given = names_in(place.files)
    ended = program.start(place, fault)
    if ended.hangs:
        return "hangs"
    if len(ended.calls[fault.rank]) < fault.point:
        return "not reached"
    if fault.mode not in KILLS:
        found = problem_of_error(program, ended, place, whole, given)
        # Where it did without the call, a program like convert.py does not run again: its work is
        # done.
        if found or (ended.is_good and not difference(state_of(place.files), whole.state)):
            return found
    elif ended.is_good:
        return "not killed"
    again = program.start(place, None)
    if not again.is_good:
        return f"the same command again ends with {again.codes}: {_last_line(again)}"
    found = difference(state_of(place.files), whole.state)
    return f"run again: {found}" if found else ""


def problem_of_error(
    program: Program, ended: Ended, place: Place, whole: Unbroken, given: set[str]
) -> str:
    """Look at a program whose call failed. Returns what is wrong, or ""."""
    left = state_of(place.files)
    for text in ended.texts:
        if "Traceback (most recent call last)" in text:
            return f"traceback: {text.strip().splitlines()[-1]}"
    for name, content in left.items():
        if isinstance(content, str) and content.startswith(NOT_READABLE):
            return f"{name} is {content}"
    # A folder that could not be removed may stay until the command runs again.
    if ended.is_good:
        given = given | left.keys()
    # A folder on the way to a file may stay.
    expected = {str(parent) for name in whole.state for parent in Path(name).parents}
    if rubble := left.keys() - whole.state.keys() - given - expected:
        return f"rubble: {', '.join(sorted(rubble))}"
    if ended.is_good:  # the program could do without that call
        found = difference(left, whole.state)
        # What could not be removed may stay until the command runs again.
        return f"exit code 0, but {found}" if found and not found.startswith(LEFT) else ""
    for text in ended.texts:
        if len(re.findall("^error: ", text, re.MULTILINE)) > 1 and not program.is_script:
            return "more than one line of error"
    # Within a line, too: sweep.sh repeats what a run has said, or says what failed.
    lines = [line for text in ended.texts for line in text.splitlines() if re.search(ERROR, line)]
    for line in lines:
        if str(place.files) in line and REMEDY.search(line):
            return ""
    return f"no line names path and remedy: {' | '.join(lines) or _last_line(ended)}"


def _last_line(ended: Ended) -> str:
    lines = [line for text in ended.texts for line in text.splitlines()[-1:]]
    return " | ".join(lines) or "no output"
