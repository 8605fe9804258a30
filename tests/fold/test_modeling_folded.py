"""fold/modeling_folded.py: a folded folder has its RMSNorms in a process that has transformers and
not this repository.

    python -m pytest tests/fold/test_modeling_folded.py
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import close, shake
from tiny_configs import ENCODER_DECODER, OPT, SIZE, WORDS

pytest.importorskip("transformers")
from safetensors.torch import load_file

import convert
from common.errors import ConfigError
from common.hub import import_transformers
from fold import hub

hf = import_transformers()
MBART = ENCODER_DECODER | {"max_position_embeddings": 32}
VIT = dict(image_size=16, patch_size=8, **SIZE)
# class -> (keys, words of convert.py, Auto class)
CASES = {
    "OPTForCausalLM": (OPT, ["--untie=False", "--insert"], "AutoModelForCausalLM"),
    "GPTNeoXForCausalLM": (SIZE | WORDS, [], "AutoModelForCausalLM"),
    "MBartForConditionalGeneration": (MBART, [], "AutoModelForSeq2SeqLM"),
    "ViTForImageClassification": (VIT, [], "AutoModelForImageClassification"),
}
EMBEDDED = ("OPTForCausalLM", "GPTNeoXForCausalLM", "MBartForConditionalGeneration")
ALONE = """
import importlib.util, json, sys
import torch
import transformers
from safetensors.torch import load_file, save_file

assert not importlib.util.find_spec("fold")
transformers.logging.disable_progress_bar()
told = {}
found = {}


def refusal(load, *words):
    try:
        load(*words)
    except RuntimeError as error:
        return str(error)
    return "loaded"


for name, auto in json.loads(sys.argv[1]).items():
    x = load_file(f"{name}.x")
    cls = getattr(transformers, auto)
    folded, report = cls.from_pretrained(
        name, trust_remote_code=True, output_loading_info=True
    )
    assert not any(report.values()), report
    model = {"folded": folded.eval(), "stock": cls.from_pretrained(name).eval()}
    with torch.no_grad():
        for kind, one in model.items():
            found[f"{name}/{kind}"] = one(**x)[0]
    if f"{name}.given" in sys.argv:
        with torch.no_grad():
            found[f"{name}/given"] = folded(**load_file(f"{name}.given"))[0]
    told[name] = {
        kind: sum(type(part).__name__ == "FoldedRMSNorm" for part in one.modules())
        for kind, one in model.items()
    }
    # One step of training moves the means.
    with torch.no_grad():
        for parameter in folded.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    trained = f"{name}_trained"
    folded.save_pretrained(trained)
    told[name]["refusals"] = [
        refusal(cls.from_pretrained, trained),
        refusal(getattr(transformers, name).from_pretrained, trained),
    ]
    again = cls.from_pretrained(trained, trust_remote_code=True).eval()
    with torch.no_grad():
        assert torch.equal(again(**x)[0], folded(**x)[0])
    again.save_pretrained(trained)  # and once more
    again = cls.from_pretrained(trained, trust_remote_code=True).eval()
    with torch.no_grad():
        assert torch.equal(again(**x)[0], folded(**x)[0])
save_file({key: y.contiguous() for key, y in found.items()}, "found.safetensors")
json.dump(told, open("told.json", "w"))
"""


@torch.no_grad()
def run(model, inputs):
    return model.eval()(**inputs)[0]


def tensors(inputs):
    return {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}


def given_by_hand(x):
    """Embeddings whose means are not 0, in the place of token ids."""
    embeddings = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)) + 1
    return {name: y for name, y in x.items() if name != "input_ids"} | {"inputs_embeds": embeddings}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Class -> (source model, inputs, what the folder alone computes, what it has)."""
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("folded")
    models = {}
    given = []
    for name, (keys, words, _) in CASES.items():
        torch.manual_seed(0)
        cls = getattr(hf, name)
        source = root / f"{name}_source"
        shake(cls(cls.config_class(**keys))).float().save_pretrained(source)
        convert.main([str(source), "--to=rms", f"--out={root / name}", *words])
        model = hub.load_pretrained(source)
        x = tensors(hub.example_inputs(model, seed=5))
        x = {key: y.clone() for key, y in x.items()}
        save_file(x, root / f"{name}.x")
        if name in EMBEDDED:
            save_file(given_by_hand(x), root / f"{name}.given")
            given.append(f"{name}.given")
        models[name] = (model, x)
    autos = {name: auto for name, (_, _, auto) in CASES.items()}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(root / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, json.dumps(autos), *given],
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((root / "told.json").read_text())
    return root, models, load_file(root / "found.safetensors"), told


@pytest.mark.parametrize("name", CASES)
def test_a_folder_alone_has_its_rms_norms(name, sources):
    root, models, found, told = sources
    model, x = models[name]
    certificate = json.loads((root / name / "certificate.json").read_text())
    assert certificate["folded"] >= 2
    for kind, norms in (("folded", certificate["folded"]), ("stock", 0)):
        close(found[f"{name}/{kind}"], run(model, x), 1e-5)
        assert told[name][kind] == norms
    if name in EMBEDDED:
        close(found[f"{name}/given"], run(model, given_by_hand(x)), 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_what_was_trained_on_is_refused_by_stock_classes(name, sources):
    """They would read LayerNorms, another function by now."""
    root, _, _, told = sources
    assert all("mismatch" in refusal for refusal in told[name]["refusals"])
    with pytest.raises(ConfigError, match="mismatch"):
        hub.load_pretrained(root / f"{name}_trained")
