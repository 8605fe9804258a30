"""The import rule of the house: who may import whom. Imports inside functions count.

    python -m pytest tests/test_house.py

A package, or a file of the root, belongs to one level. It imports itself and lower levels: nothing
above, nothing beside. So there is no circle between packages, and programs do not import one
another.
"""

import ast
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT, run_python

LEVELS = (
    ("common",),
    ("configurator",),
    ("kernels", "data"),
    ("norms",),
    ("taper", "norm_types"),
    ("norm_plan",),
    ("norm_files", "model"),
    ("training", "hf", "evidence"),
    ("load",),
    ("fold", "evals"),
    ("decode", "posthoc", "study"),
    (
        *("train", "sample", "hellaswag", "report", "convert", "distill", "doctor"),
        *("bench_decode", "judge"),
    ),
    ("bench",),
    ("repro",),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
# These need little of the house, so that they can be used without the rest of it; one file each
# knows more.
ALONE = {"kernels": {"common"}, "fold": {"common", "kernels"}, "evidence": {"common"}}
KNOWS_MORE = {
    "fold/gpt.py": {"norms", "taper", "norm_types", "norm_plan", "model", "load"},
}
# The one way to transformers, which must not take our kernels/ for the package of that name; and
# the files that are copied into exported folders.
TO_TRANSFORMERS = {"common/hub.py", "hf/modeling_coupled.py", "fold/modeling_folded.py"}


def sources() -> dict[str, str]:
    """Path -> content of the Python files at the root and in the packages; not of tests and
    recipes.
    """
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    names = listed.stdout.split()
    names = [
        name for name in names if not name.startswith(("tests/", "config/", "norms_of_others/"))
    ]
    return {name: (ROOT / name).read_text() for name in names if (ROOT / name).exists()}


def imported(file: str, source: str) -> list[tuple[int, str]]:
    """(line, dotted name from the root) of all that a file imports, by import_module too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = Path(file).parts[: -node.level] if node.level else ()
            base = [*parents, *(node.module or "").split(".")]
            found += [
                (node.lineno, ".".join(filter(None, [*base, alias.name]))) for alias in node.names
            ]
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__", "run_module", "run_path"):
                # "" for the value of a variable
                found.append((node.lineno, getattr(node.args[0], "value", "")))
    return found


def violations(files: dict[str, str]) -> list[str]:
    """Each line of `files` (path -> source) that breaks the rule, as `path:line: what is wrong`."""
    wrong = []
    for file, source in files.items():
        room = file.split("/")[0].removesuffix(".py")
        if room not in LEVEL:
            wrong.append(f"{file}:1: {room} has no level: add it to LEVELS, or move the file")
            continue
        names = imported(file, source)
        for line, name in names:
            its_file = "/".join(name.split(".")[:2]) + ".py"
            if its_file in KNOWS_MORE and name.startswith(f"{room}.") and file not in KNOWS_MORE:
                wrong.append(
                    f"{file}:{line}: imports {its_file}, and the rest of {room} has to do without"
                )
        for line, target in sorted({(line, name.split(".")[0]) for line, name in names}):
            where = f"{file}:{line}: {room} imports {target}"
            if target in ("tests", "config") or (ROOT / "tests" / f"{target}.py").exists():
                wrong.append(f"{where}, which is for tests and recipes")
            if target == "transformers" and file not in TO_TRANSFORMERS:
                wrong.append(f"{where}: call import_transformers() of common/hub.py")
            if target == room or target not in LEVEL:
                continue
            where = f"{file}:{line}: {room} imports {target}"
            if LEVEL[target] > LEVEL[room]:
                wrong.append(f"{where}, which stands above it")
            elif LEVEL[target] == LEVEL[room]:
                wrong.append(f"{where}, which stands beside it")
            elif room in ALONE and target not in ALONE[room] | KNOWS_MORE.get(file, set()):
                wrong.append(f"{where}, and has to do without")
    return wrong


def test_the_house_keeps_the_import_rule():
    broken = violations(sources())
    assert not broken, "\n".join(broken)


def test_the_root_holds_what_people_run_or_read_first():
    root = [file for file in sources() if "/" not in file]
    assert len(root) <= 17, root


# modules -> what is not loaded with them; all but the first may load torch
DO_WITHOUT = {
    "report": {"torch", "model"},
    "fold": {"model", "norms", "hf", "load", "transformers"},
    "kernels": {"model", "norms", "fold"},
    "hf.weights train sample convert bench.fold": {"transformers"},
}
# Each in a copy of a process that has nothing of ours, and loads torch once.
LOADS = f"""
import importlib, os, sys
for names in {[*DO_WITHOUT]}:
    if not os.fork():
        for name in names.split():
            importlib.import_module(name)
        print(names, *sys.modules, sep=",")
        break
    os.wait()
    import torch
"""


def test_what_a_part_does_without_is_not_loaded():
    lines = run_python("-c", LOADS).stdout.splitlines()
    for line, (names, absent) in zip(lines, DO_WITHOUT.items(), strict=True):
        first, *modules = line.split(",")
        assert first == names and not absent & set(modules)


PLANTED = {
    "upwards": (
        {"kernels/a.py": "x = 1\nfrom model import GPT\n"},
        "kernels/a.py:2: kernels imports model, which stands above",
    ),
    "inside a function": (
        {"common/a.py": "def f():\n    import train\n"},
        "common/a.py:2: common imports train, which stands above",
    ),
    "sideways": (
        {"training/a.py": "import torch\nfrom hf import config\n"},
        "training/a.py:2: training imports hf, which stands beside",
    ),
    "two programs": (
        {"sample.py": "from hellaswag import main\n"},
        "sample.py:1: sample imports hellaswag, which stands beside",
    ),
    "by import_module": (
        {"data/a.py": "from importlib import import_module\nimport_module('train')\n"},
        "data/a.py:2: data imports train, which stands above",
    ),
    "not alone": (
        {"fold/lines.py": "from model import GPT\n"},
        "fold/lines.py:1: fold imports model, and has to do without",
    ),
    "not alone, by a back door": (
        {"fold/lines.py": "from fold.gpt import rebuild\n"},
        "fold/lines.py:1: imports fold/gpt.py, and the rest of fold has to do without",
    ),
    "evidence of a model": (
        {"evidence/runs.py": "def f():\n    import model\n"},
        "evidence/runs.py:2: evidence imports model, and has to do without",
    ),
    "what tests share": (
        {"data/a.py": "from helpers import ROOT\n"},
        "data/a.py:1: data imports helpers, which is for tests",
    ),
    "transformers": (
        {"bench/a.py": "def f():\n    from transformers import AutoConfig\n"},
        "bench/a.py:2: bench imports transformers: call import_transformers()",
    ),
    "a new drawer": ({"utils/a.py": ""}, "utils/a.py:1: utils has no level"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_violation_is_named(kind):
    files, message = PLANTED[kind]
    (line,) = violations(files)
    assert line.startswith(message)
