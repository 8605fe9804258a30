"""Tiny random models of transformers, and folders of them."""

import json

import pytest
import torch

from common.hub import import_transformers

transformers, reason = None, ""
try:
    transformers = import_transformers()
except ImportError as error:
    reason = str(error)
needs_transformers = pytest.mark.skipif(bool(reason), reason=reason)
safetensors = pytest.importorskip("safetensors.torch")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GPT2 = dict(
    vocab_size=67,
    n_positions=64,
    n_embd=32,
    n_layer=3,
    n_head=4,
    bos_token_id=None,
    eos_token_id=None,
)
LLAMA = dict(
    vocab_size=67,
    max_position_embeddings=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=None,
    eos_token_id=None,
)
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    # pairs of 8 channels turn 2.5, 0.8, 0.25 and 0.08 times: kept, mixed and stretched
    "beta_fast": 2.0,
    "beta_slow": 0.2,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.3,
}
WINDOW = 12
MODELS = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-exact-gelu": (
        "GPT2",
        {**GPT2, "activation_function": "gelu", "n_inner": 40, "layer_norm_epsilon": 1e-3},
    ),
    "gpt2-untied": ("GPT2", {**GPT2, "tie_word_embeddings": False}),
    "qwen3": (
        "Qwen3",
        {**LLAMA, "head_dim": 12, "rope_parameters": DEFAULT_ROPE, "tie_word_embeddings": True},
    ),
    "qwen3-untied-bias": (
        "Qwen3",
        {**LLAMA, "head_dim": 16, "rms_norm_eps": 1e-3, "attention_bias": True},
    ),
    "llama": ("Llama", {**LLAMA, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-untied-biases": (
        "Llama",
        {
            **LLAMA,
            "rope_parameters": LLAMA3,
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 1,
        },
    ),
    "llama-plain": ("Llama", {**LLAMA, "num_key_value_heads": None, "rms_norm_eps": 1e-5}),
    "olmo2": ("Olmo2", {**LLAMA, "rope_parameters": DEFAULT_ROPE, "pad_token_id": None}),
    "olmo3": (
        "Olmo3",
        {
            **LLAMA,
            "num_hidden_layers": 4,  # the last is global
            "sliding_window": WINDOW,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT_ROPE},
            "attention_bias": True,
            "pad_token_id": None,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **LLAMA,
            "num_hidden_layers": 4,
            "head_dim": 12,
            "query_pre_attn_scalar": 10,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            },
            "pad_token_id": None,
        },
    ),
}
# Their config classes, and the others' are named after the model
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


@torch.no_grad()
def tiny(name):
    """A transformers model in eval mode whose every parameter, gains and biases too, has a
    non-trivial value.
    """
    if transformers is None:
        pytest.skip(reason)
    family, shape = MODELS[name]
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**shape)
    model = getattr(
        transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    )(config).eval()
    stream = torch.Generator().manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        gain = parameter.dim() == 1 and parameter_name.endswith("weight")
        parameter.normal_(1.0 if gain else 0.0, 0.25, generator=stream)
    return model


def save(model, folder, **options):
    model.save_pretrained(folder, **options)
    return folder


def tokens(batch, length, seed=0):
    return torch.randint(67, (batch, length), generator=torch.Generator().manual_seed(seed))


def edit_json(path, **changes):
    """Set keys of a JSON file; `...` removes one."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def edit_tensors(folder, change):
    weights = safetensors.load_file(folder / "model.safetensors")
    safetensors.save_file(change(weights), folder / "model.safetensors", metadata={"format": "pt"})
