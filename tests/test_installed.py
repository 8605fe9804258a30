"""What `pip install .` installs: nanonorm.fold and nanonorm.kernels, in a process that has torch
and not the clone; nanonorm.fold.hub in one that has transformers too.

    python -m pytest tests/test_installed.py
"""

import shutil
import tomllib

import pytest
from helpers import ROOT, run_python
from hf_models import needs_transformers

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

HUB = """
import torch, transformers
from nanonorm.fold import analyze, fold, hub

sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=24)
config = transformers.OPTConfig(vocab_size=50, word_embed_proj_dim=16, pad_token_id=0, **sizes)
transformers.OPTForCausalLM(config).save_pretrained("opt")
model = hub.load_pretrained("opt")
inputs = hub.example_inputs(model, 0)
folded, certificate = fold(model, analyze(model, inputs), untie=True)
assert certificate.ok and certificate.folded == 3, certificate
hub.save(folded, "rms", certificate, "opt")
again = hub.load("rms")
norms = [type(module).__name__ for module in again.modules()]
assert norms.count("FoldedNorm") == 3 and "LayerNorm" not in norms, norms
assert torch.equal(again(**inputs)[0], folded(**inputs)[0])
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what the wheel has, and nothing else."""
    place = tmp_path_factory.mktemp("installed")
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    for name in wheel["only-include"]:
        first, *rest = name.split("/")
        target = place.joinpath(wheel["sources"][first], *rest)
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)
    for name in wheel["exclude"]:
        (place / "nanonorm" / name).unlink()
    return place


def test_every_shipped_module_works_without_the_clone(installed):
    assert {path.name for path in installed.iterdir()} == {"nanonorm"}
    shipped = list((installed / "nanonorm").rglob("*.py"))
    printed = run_python("-c", PROGRAM, cwd=installed).stdout
    assert int(printed) == len(shipped)


@needs_transformers
def test_models_of_transformers_without_the_clone(installed):
    run_python("-c", HUB, cwd=installed)
