"""Hugging Face folders -> GPT, against transformers on tiny random models.

python -m pytest tests/hf/test_weights.py
"""

import json
import shutil
import sys
import unittest.mock
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from helpers import ROOT, run_python
from hf_models import (
    DEFAULT_ROPE,
    LLAMA,
    LLAMA3,
    MODELS,
    YARN,
    edit_json,
    edit_tensors,
    needs_transformers,
    safetensors,
    save,
    tiny,
    tokens,
    transformers,
)

from common.errors import HFError, UserError
from common.hub import resolve_hub
from hf import weights as hf
from hf.config import SHAPES, random_model, shape_config
from model import GPT, KVCache, rope_tables

# ------------------------------------------------------------------------- parity with transformers


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_and_greedy_tokens_are_those_of_transformers(name, tmp_path):
    theirs = tiny(name)
    ours = hf.load_hf(save(theirs, tmp_path))
    assert not ours.training and ours.wte.weight.dtype == torch.float32
    idx = tokens(3, 64)
    expected, got = theirs(idx).logits, ours(idx)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert expected.std() > 0.1  # not trivially equal

    theirs, ours, prompt = (
        theirs.double(),
        ours.double(),
        tokens(2, 9, seed=2),
    )
    greedy = theirs.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)
    expected = theirs(greedy).logits[:, 8:-1]
    found = ours(greedy)[:, 8:-1]
    best, difference = expected.topk(2).values, (found - expected).abs().max()
    # no near tie that rounding could turn
    assert (best[..., 0] - best[..., 1]).min() > 2 * difference
    for use_cache in (True, False):
        assert torch.equal(ours.generate(prompt, 40, temperature=0, use_cache=use_cache), greedy)


@torch.no_grad()
def test_dtype_is_the_stored_one_unless_asked(tmp_path):
    folder, idx = save(tiny("llama").to(torch.bfloat16), tmp_path), tokens(2, 30)
    stored, wide = hf.load_hf(folder), hf.load_hf(str(folder), torch.float64)
    assert {tensor.dtype for tensor in stored.state_dict().values()} == {torch.bfloat16}
    assert wide(idx).dtype == torch.float64


OLD_LLAMA3 = {key: LLAMA3[key] for key in LLAMA3 if key not in ("rope_type", "rope_theta")}
OLD_KEYS = [
    ("llama", {"rope_theta": 100, "rope_scaling": {**OLD_LLAMA3, "rope_type": "llama3"}}),
    ("llama", {"rope_theta": 100, "rope_scaling": {**OLD_LLAMA3, "type": "llama3"}}),
    (
        "gemma3",
        {
            "layer_types": ...,
            "sliding_window_pattern": 2,
            "rope_theta": 100.0,
            "rope_local_base_freq": 10.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    # One base, which is 5e5 in all published files: transformers 5 reads no other one here.
    ("olmo3", {"layer_types": ..., "rope_theta": 5e5, "rope_scaling": YARN | {"rope_theta": 5e5}}),
]


@needs_transformers
@pytest.mark.parametrize(("name", "old"), OLD_KEYS)
@torch.no_grad()
def test_old_keys_are_the_same_config(name, old, tmp_path):
    """As transformers 4 wrote them. The model is also what transformers makes of them."""
    folder = save(tiny(name), tmp_path)
    new = hf.load_hf(folder).config
    assert new.local_blocks == {"gemma3": "lg", "olmo3": "lllg", "llama": ""}[name]
    if name == "olmo3":
        new = replace(new, rope_theta=5e5, local_rope_theta=0.0)
    edit_json(folder / "config.json", rope_parameters=..., **old)
    ours = hf.load_hf(folder)
    assert ours.config == new
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = theirs(tokens(2, 40)).logits
    assert (ours(tokens(2, 40)) - expected).abs().max() <= 1e-5 * expected.abs().max()


@needs_transformers
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama3.2-1b", "llama3.2-3b"])
def test_rotary_tables_are_bit_for_bit_those_of_transformers(name):
    family = "Qwen3" if name.startswith("qwen3") else "Llama"
    theirs = getattr(transformers, f"{family}Config")(**SHAPES[name])
    module = getattr(transformers.models, family.lower())
    rotary = getattr(getattr(module, f"modeling_{family.lower()}"), f"{family}RotaryEmbedding")(
        theirs
    )
    ours = shape_config(name)
    positions = torch.tensor([0, 1, 2, 1000, 8191, 8192, 40959, ours.block_size - 1])
    for table, expected in zip(
        rope_tables(ours), rotary(torch.zeros(1), positions[None]), strict=True
    ):
        assert torch.equal(table[positions], expected[0])


# ------------------------------------------------------------------------------ layouts in the wild


@torch.no_grad()
def test_gpt2_folder_as_published(tmp_path):
    """No `transformer.` prefix, causal masks among the weights, no tie_word_embeddings in the
    config.
    """
    model, idx = tiny("gpt2"), tokens(2, 20)
    folder = save(model, tmp_path)

    def published(weights):
        masks = {f"h.{block}.attn.bias": torch.ones(1, 1, 64, 64) for block in range(3)}
        return {
            name.removeprefix("transformer."): tensor for name, tensor in weights.items()
        } | masks

    edit_tensors(folder, published)
    edit_json(
        folder / "config.json",
        tie_word_embeddings=...,
        activation_function=...,
        layer_norm_epsilon=...,
    )
    torch.testing.assert_close(hf.load_hf(folder)(idx), model(idx).logits, rtol=1e-5, atol=1e-5)


def test_tied_head_may_be_stored_twice_but_must_be_the_embedding(tmp_path):
    folder = save(tiny("qwen3"), tmp_path)
    edit_tensors(
        folder,
        lambda weights: weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()},
    )
    assert hf.load_hf(folder).config.tie_embeddings
    edit_tensors(
        folder, lambda weights: weights | {"lm_head.weight": weights["lm_head.weight"] + 1}
    )
    refused(folder, r"lm_head\.weight")


def test_meta_names_the_tokenizer_and_loading_needs_no_transformers(tmp_path, monkeypatch):
    folder = save(tiny("qwen3"), tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert hf.load_hf(folder).meta == {"tokenizer": "hf", "path": str(folder), "vocab_size": 67}


# ------------------------------------------------------------------------------------- named shapes


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("gpt2", 124_439_808),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-8b", 8_190_735_360),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("olmo2-1b", 1_484_916_736),
        ("gemma3-1b", 999_885_952),
    ],
)
def test_named_shapes_have_the_published_number_of_parameters(name, parameters):
    with torch.device("meta"):
        assert GPT(shape_config(name)).num_params() == parameters


def test_an_unknown_shape_is_refused():
    with pytest.raises(HFError, match=r"there are .*llama3\.2-1b"):
        random_model("llama-3.2-1b")


@torch.no_grad()
def test_generating_from_a_long_context_model_allocates_little(monkeypatch):
    monkeypatch.setitem(
        SHAPES, "long", {"model_type": "llama", **LLAMA, "max_position_embeddings": 131072}
    )
    model, room = random_model("long"), set()
    monkeypatch.setattr(
        KVCache, "extend", lambda cache, block, k, v: room.add(cache.blocks.shape[-2]) or (k, v)
    )
    model.generate(tokens(1, 5), 1)
    assert room == {6}


# ------------------------------------------------------------------------------------------- errors


def refused(folder, named):
    """load_hf refuses the folder in one line that names what is wrong."""
    with pytest.raises(UserError, match=named) as caught:
        hf.load_hf(folder)
    assert "\n" not in str(caught.value)


def test_folder_errors(tmp_path):
    refused(tmp_path / "nowhere", "config.json")
    for text in ("{", "3", "[" * 200_000, "{}"):
        (tmp_path / "config.json").write_text(text)
        refused(tmp_path, "config.json|GPT2LMHeadModel")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA}))
    refused(tmp_path, "safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    refused(tmp_path, r"model\.safetensors.*torn")


UNSUPPORTED = {
    "llama": [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": {"a": 1}}, "architecture"),
        ({"architectures": ..., "model_type": "mistral"}, "mistral"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"sliding_window": 8}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {**YARN, "truncate": False}}, "truncate"),
        ({"rope_parameters": ..., "rope_scaling": {**YARN, "mscale": 1.0}}, "mscale"),
        ({"rope_parameters": {"full_attention": LLAMA3}}, "rope"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position"),
        ({"rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"is_causal": False}, "is_causal"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_attention_heads": 0}, "n_head=0"),
        ({"num_key_value_heads": 3}, "n_kv_head"),
        ({"intermediate_size": 44}, r"gate_proj.*\(48, 32\).*\(44, 32\)"),
        ({"num_hidden_layers": 4}, r"layers\.3"),
        ({"num_hidden_layers": 1 << 30}, "1073741824"),
        ({"num_hidden_layers": 2}, r"layers\.2"),
        ({"tie_word_embeddings": False}, r"lm_head\.weight"),
        ({"attention_bias": True}, "bias"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}, "q_norm"),
    ],
    "gemma3": [
        ({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}, "Condit"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"num_key_value_heads": ...}, "num_key_value_heads"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"sliding_window": None}, "window"),
        ({"rope_parameters": DEFAULT_ROPE}, "full_attention"),
        ({"rope_parameters": {"full_attention": YARN}}, "full_attention"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        (
            {"rope_parameters": {"full_attention": DEFAULT_ROPE, "sliding_attention": YARN}},
            "sliding_attention",
        ),
        ({"num_hidden_layers": 3, "layer_types": ...}, r"layers\.3"),
    ],
    "gpt2": [
        ({"activation_function": "relu"}, "activation_function"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_configs_that_would_run_wrongly_are_refused(name, tmp_path):
    folder = save(tiny(name), tmp_path)
    content = (folder / "config.json").read_text()
    for change, named in UNSUPPORTED[name]:
        edit_json(folder / "config.json", **change)
        refused(folder, named)
        (folder / "config.json").write_text(content)


NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: {name: w[name] for name in w if name != NORM}, r"norm\.weight.*missing"),
        (lambda w: w | {"model.extra.weight": torch.ones(3)}, r"extra\.weight"),
        (lambda w: w | {QUERY: w[QUERY][:-1].clone()}, r"q_proj.*\(31, 32\).*\(32, 32\)"),
        (lambda w: w | {QUERY: w[QUERY].to(torch.int8)}, "q_proj.*int8"),
        (lambda w: w | {QUERY: w[QUERY].to(torch.float8_e4m3fn)}, "q_proj.*float8"),
        (lambda w: w | {QUERY: w[QUERY] / 0}, "q_proj.*finite"),
    ],
)
def test_tensor_errors(change, named, tmp_path):
    folder = save(tiny("llama"), tmp_path / "whole")
    edit_tensors(folder, change)
    refused(folder, named)


@torch.no_grad()
def test_shards_whole_and_missing(tmp_path):
    model, idx = tiny("llama-untied-biases"), tokens(2, 20)
    folder = save(model, tmp_path, max_shard_size="20KB")
    torch.testing.assert_close(hf.load_hf(folder)(idx), model(idx).logits, rtol=1e-5, atol=1e-5)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()
    refused(folder, "missing")


STALE = "model-00002-of-00009.safetensors"  # of an older version, not in the index


@torch.no_grad()
@pytest.mark.parametrize(
    "layout", ["stale shard", "other names", "subfolder", "file and index", "named by config"]
)
def test_the_files_that_transformers_reads_are_read(layout, tmp_path):
    """Files that the index does not name, as of an older version of the model, do not count."""
    model, idx = tiny("llama-untied-biases"), tokens(2, 20)
    folder = save(model, tmp_path / "new", max_shard_size="20KB")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    old = save(model, tmp_path / "old", max_shard_size="1GB") / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if layout == "stale shard":
        old.rename(folder / STALE)
    elif layout in ("other names", "subfolder"):
        new = "weights-" if layout == "other names" else "part/model-"
        (folder / "part").mkdir()
        shards = json.loads(index.read_text())["weight_map"]
        for name in {*shards.values()}:
            (folder / name).rename(folder / name.replace("model-", new))
        renamed = {key: name.replace("model-", new) for key, name in shards.items()}
        edit_json(index, weight_map=renamed)
        old.rename(folder / STALE)
    elif layout == "file and index":
        old.rename(folder / "model.safetensors")
    else:
        old.rename(folder / "model.safetensors")
        edit_json(folder / "config.json", transformers_weights=index.name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)(idx).logits
    torch.testing.assert_close(hf.load_hf(folder)(idx), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("index", "named"),
    [
        (None, "index.json"),  # shards alone
        ({}, "index.json"),
        ({"weight_map": {}}, "index.json"),
        ({"weight_map": {"a": "../new/x.safetensors"}}, "index.json"),
        ({"weight_map": {"a": 3}}, "index.json"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors is missing"),
    ],
)
def test_an_index_that_leads_nowhere_is_named(index, named, tmp_path):
    folder = save(tiny("llama"), tmp_path, max_shard_size="20KB")
    path = folder / "model.safetensors.index.json"
    path.unlink()
    if index is not None:
        path.write_text(json.dumps(index))
    refused(folder, named)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = save(tiny("llama"), tmp_path, max_shard_size="20KB")
    one, two = sorted(folder.glob("model-*.safetensors"))[:2]
    name, tensor = next(iter(safetensors.load_file(one).items()))
    safetensors.save_file(safetensors.load_file(two) | {name: tensor * 2}, two)
    refused(folder, "stored twice")


@torch.no_grad()
def test_what_the_index_names_is_fetched(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    model, idx = tiny("llama"), tokens(2, 20)
    there = save(model, tmp_path / "there", max_shard_size="20KB")
    index = there / "model.safetensors.index.json"
    shards = json.loads(index.read_text())["weight_map"]
    for name in {*shards.values()}:
        (there / name).rename(there / f"weights-{name}")
    edit_json(index, weight_map={key: f"weights-{name}" for key, name in shards.items()})
    (there / STALE).write_bytes(b"")
    here = tmp_path / "here"
    here.mkdir()

    def fetch(name, allow_patterns, revision="here"):
        assert revision == "here"
        for path in there.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copy(path, here)
        return str(here)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    torch.testing.assert_close(
        hf.load_hf(resolve_hub("an/owner"))(idx), model(idx).logits, rtol=1e-5, atol=1e-5
    )
    assert not (here / STALE).exists()


def test_hub_without_network(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    no_network = unittest.mock.Mock(side_effect=ConnectionError("several\nlines"))
    monkeypatch.setattr(hub, "snapshot_download", no_network)
    with pytest.raises(HFError, match="ConnectionError") as caught:
        resolve_hub("Qwen/Qwen3-0.6B")
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------------------- a package named kernels

FIRST = ["hub", *(["adapters"] if find_spec("peft") else [])]  # what imports transformers first
# Each case in a process of its own: a copy of one that has imported what neither transformers nor
# kernels is part of.
USE_BOTH = """
import os, sys
import scipy.optimize, sympy, torch, torch._dynamo, torch.distributed.tensor
assert not {"hf", "kernels", "transformers"} & set(sys.modules)
for first, paths in CASES:
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            sys.exit(1)
    else:
        break
else:
    sys.exit()
sys.path[:0] = paths
if first == "adapters":  # peft imports transformers
    from model import GPT, GPTConfig
    from posthoc.adapters import add_adapters
    config = GPTConfig(n_layer=1, n_embd=8, n_head=2, vocab_size=8, block_size=8)
    add_adapters(GPT(config), 2, 4.0, True)
from hf.coupled import register
from common.hub import import_transformers
from hf.weights import load_hf
register()
LlamaForCausalLM = import_transformers().LlamaForCausalLM
from transformers import LlamaConfig
LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                             num_attention_heads=2)).save_pretrained("saved")
load_hf("saved")
import kernels
print(first, len(paths), kernels.rms_norm.__module__, hasattr(kernels, "WHOSE"))
"""


@needs_transformers
def test_transformers_works_beside_our_folder_named_kernels(tmp_path):
    """And with Hugging Face's package of that name, of any content, installed as well."""
    site = tmp_path / "site"
    # one that it would use
    version = getattr(transformers.utils.import_utils, "KERNELS_MIN_VERSION", "0.10.0")
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("WHOSE = 'theirs'\n")
    about = site / f"kernels-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    cases = [(first, [str(ROOT), str(site)]) for first in FIRST]
    program = f"CASES = {cases}\n" + USE_BOTH
    done = run_python("-c", program, cwd=tmp_path)

    assert done.stdout.splitlines() == [
        f"{first} {len(paths)} kernels False" for first, paths in cases
    ]
