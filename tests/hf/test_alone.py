"""Exported coupled folders in processes that have never seen this repository.

python -m pytest tests/hf/test_alone.py
"""

import json
import os
import re
import shutil
import string
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import ROOT, shake
from hf_models import edit_json, needs_transformers, safetensors, tokens, transformers

from data.tokenizers import load_tokenizer
from fold import gpt
from hf import weights
from hf.config import ARCHITECTURES
from hf.coupled import register
from model import GPT, GPTConfig
from posthoc.text import load_chat_tokenizer

pytestmark = needs_transformers
SOURCE = ROOT / "hf/modeling_coupled.py"
CHARS = {"tokenizer": "chars", "chars": string.ascii_letters + string.digits + " .,:;"}  # 67
TEXT = "Norms: 2, not 3."
GPT2 = GPTConfig(
    vocab_size=67,
    block_size=96,
    n_layer=3,
    n_head=4,
    n_embd=32,
    n_inner=48,
    init_std=0.35,
    activation="gelu_tanh",
    bias=True,
    norm_type="coupled",
)
LLAMA = replace(GPT2, position="rope", activation="swiglu", bias=False, n_kv_head=2)
SHAPES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "qwen3": replace(LLAMA, qk_norm="head", head_dim=12, tie_embeddings=False),
}
ALPHAS = tuple(1 + 0.1 * position for position in range(7))
CASES = [f"{family}_{how}" for family in SHAPES for how in ("0_alpha", "1_absorbed")]
STOCK = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SMALL = 20_000  # bytes of a shard


def coupled_model(case: str) -> GPT:
    """A random model of a case, gains and biases away from 1 and 0."""
    family, first, alpha = case.split("_")
    config = replace(SHAPES[family], coupled_first=int(first), coupled_alpha=ALPHAS)
    model = shake(GPT(config)).float().eval()
    if alpha == "absorbed":
        model = gpt.absorb_alpha(model)
    model.meta = CHARS
    return model


@pytest.fixture(scope="module")
def models() -> dict[str, GPT]:
    return {case: coupled_model(case) for case in CASES}


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory) -> Path:
    """A folder of exported folders; those with alphas are in shards."""
    root = tmp_path_factory.mktemp("exported")
    for case, model in models.items():
        more = {"max_shard_size": SMALL} if case.endswith("_alpha") else {}
        weights.export_hf(model, root / case, **more)
    return root


ALONE = """
import contextlib, importlib.util, json, sys
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

assert not importlib.util.find_spec("hf")
torch.set_num_threads(1)
given = load_file("given.safetensors")
small, text, *cases = sys.argv[1:]
outcomes = []
for case in cases:
    for name in ("AutoModelForCausalLM", STOCK[case.partition("_")[0]]):
        try:
            with contextlib.redirect_stdout(sys.stderr):  # the question of transformers
                getattr(transformers, name).from_pretrained(case)
            outcomes.append("ran")
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
json.dump(outcomes, open("outcomes.json", "w"))
found = {}
for case in cases:
    model, report = AutoModelForCausalLM.from_pretrained(
        case, trust_remote_code=True, output_loading_info=True
    )
    assert not any(report.values()), report
    tokenizer = AutoTokenizer.from_pretrained(case, trust_remote_code=True)
    found[f"{case}/text"] = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        found[f"{case}/logits"] = model(given["idx"]).logits
    if case.endswith("_0_alpha"):
        model.save_pretrained(f"{case}_again", max_shard_size=int(small))
        tokenizer.save_pretrained(f"{case}_again")
        cases.append(f"{case}_again")
    model.double()
    words = dict(max_new_tokens=32, do_sample=False, pad_token_id=0)
    found[f"{case}/greedy"] = model.generate(given["prompt"], **words)
    words |= dict(cache_implementation="static", disable_compile=True)
    assert torch.equal(model.generate(given["prompt"], **words), found[f"{case}/greedy"])
save_file({name: tensor.contiguous() for name, tensor in found.items()}, "found.safetensors")
exec(open("served.py").read())
"""


@pytest.fixture(scope="module")
def found(folders) -> dict[str, torch.Tensor]:
    """What the folders compute in a process without anything of ours on its path.

    outcomes.json: what stock loaders make of them; served.txt: what is printed there.
    """
    given = {"idx": tokens(2, 80), "prompt": tokens(2, 9, seed=2)}
    safetensors.save_file(given, folders / "given.safetensors")
    page = (ROOT / "docs/convert-and-fold.md").read_text()
    block, _ = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (folders / "served.py").write_text(block)
    shutil.copytree(folders / "qwen3_0_alpha", folders / "out/hf")
    done = subprocess.run(
        [sys.executable, "-c", f"STOCK = {STOCK}\n{ALONE}", str(SMALL), TEXT, *CASES],
        cwd=folders,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        | {"HF_HOME": str(folders / "cache"), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,  # nobody answers transformers' question
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (folders / "served.txt").write_text(done.stdout)
    return safetensors.load_file(folders / "found.safetensors")


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_folder_alone_gives_our_logits_and_tokens(case, models, folders, found):
    model = models[case]
    assert (model.plan.letters[1] == "s") == ("_0_" in case)
    for ours in (model, weights.load_hf(folders / case)):
        expected = ours(tokens(2, 80))
        assert expected.std() > 0.1  # not trivially equal
        assert (found[f"{case}/logits"] - expected).abs().max() <= 1e-5 * expected.abs().max()
    # Statistics in float64 on both sides, so no rounding turns a near tie.
    greedy = weights.load_hf(folders / case).double().generate(tokens(2, 9, seed=2), 32, 0)
    assert greedy.shape == (2, 41) and len(greedy[:, 9:].unique()) > 8
    assert torch.equal(found[f"{case}/greedy"], greedy)
    ids = load_tokenizer(CHARS).encode_ordinary(TEXT)
    assert found[f"{case}/text"].tolist() == [ids]


@pytest.mark.parametrize("family", SHAPES)
@torch.no_grad()
def test_what_transformers_saves_stands_alone_too(family, models, folders, found):
    """And it is read back by us: transformers has saved it in shards, with our file."""
    case = f"{family}_0_alpha"
    again = folders / f"{case}_again"
    assert (again / SOURCE.name).read_bytes() == SOURCE.read_bytes()
    for what in ("logits", "greedy", "text"):
        assert torch.equal(found[f"{case}_again/{what}"], found[f"{case}/{what}"])
    for folder in (folders / case, again):
        assert len(list(folder.glob("model-*.safetensors"))) > 2
        assert torch.equal(weights.load_hf(folder)(tokens(2, 80)), models[case](tokens(2, 80)))


def test_the_manual_serves_a_folder(folders, found):
    """The code of docs/convert-and-fold.md has run there; it samples, so its text is random."""
    block = (folders / "served.py").read_text()
    prompt = re.search(r'generate\("(.*?)"', block)[1]
    printed = (folders / "served.txt").read_text().removesuffix("\n")
    assert printed.startswith(prompt) and len(printed) > len(prompt)


def test_our_process_runs_the_same_file(folders):
    """`register()` takes its classes, without trust."""
    register()
    for family in SHAPES:
        model = transformers.AutoModelForCausalLM.from_pretrained(folders / f"{family}_1_absorbed")
        assert Path(sys.modules[type(model).__module__].__file__).samefile(SOURCE)
        assert ARCHITECTURES[type(model).__name__] == model.config.model_type


def test_our_programs_ask_nothing_about_the_code(folders, tmp_path, monkeypatch):
    """A chat template is read from a folder whose classes transformers does not know."""
    folder = shutil.copytree(folders / "llama_0_alpha", tmp_path / "chats")
    edit_json(folder / "config.json", model_type="coupled_elsewhere")  # not registered
    edit_json(folder / "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    questions = []
    monkeypatch.setattr("builtins.input", questions.append)
    tokenizer = load_chat_tokenizer({"tokenizer": "hf", "path": str(folder)})
    assert tokenizer.apply_chat_template([{"content": TEXT}], tokenize=False) == TEXT
    assert not questions


def test_stock_loaders_refuse_a_coupled_model(folders, found):
    """By the Auto class without trust_remote_code, and by the class it was made of."""
    outcomes = json.loads((folders / "outcomes.json").read_text())
    assert len(outcomes) == 2 * len(CASES)
    for auto, stock in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert auto.startswith("ValueError") and "trust_remote_code=True" in auto
        assert stock.startswith("RuntimeError") and "mismatch" in stock
