"""What `pip install .` installs: nanonorm.fold and nanonorm.kernels, in a process that has torch
and not the clone.

    python -m pytest tests/test_installed.py
"""

import shutil
import subprocess
import sys
import tomllib

from helpers import ROOT

PROGRAM = """
import importlib, pkgutil, sys

others = ("triton", "numpy", "transformers", "scipy", "matplotlib", "tiktoken", "tqdm", "PIL")
for name in others:
    sys.modules[name] = None  # as if it were not installed
import nanonorm
names = [module.name for module in pkgutil.walk_packages(nanonorm.__path__, "nanonorm.")]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name == "triton", error
assert not {"fold", "kernels", "common", "model"} & set(sys.modules), "a bare name"

import torch
from torch import nn
from nanonorm.fold import analyze, fold
from nanonorm.kernels import reference, rms_norm

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.norm(input=self.first(x)))

torch.manual_seed(0)
model, x = Net().eval(), torch.randn(4, 5)
report = analyze(model, (x,))
folded, certificate = fold(model, report)
assert certificate.ok and certificate.folded == 1, certificate
# not the user's own commit
assert certificate.environment["git"].startswith("nanonorm "), certificate.environment
assert not isinstance(folded.norm, nn.LayerNorm)
assert (folded(x) - model(x)).abs().max() < 1e-5
y, inv_rms = rms_norm(x, None, 1e-5)
assert torch.equal(y, reference.rms_norm(x, None, None, 1e-5, 1, 5)[0])
print(len(names))
"""


def test_every_shipped_module_works_without_the_clone(tmp_path):
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    for name in wheel["only-include"]:
        first, *rest = name.split("/")
        target = tmp_path.joinpath(wheel["sources"][first], *rest)
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)
    for name in wheel["exclude"]:
        (tmp_path / "nanonorm" / name).unlink()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shipped = list((tmp_path / "nanonorm").rglob("*.py"))
    assert int(done.stdout) == len(shipped) and {path.name for path in tmp_path.iterdir()} == {
        "nanonorm"
    }
