"""Print the table of docs/conventions.md: what norms the models of transformers have.

    python -m repro.conventions

Each family is made with a small random configuration; fold.norms_of says what its norms compute.
"""

from typing import NamedTuple

import torch

from common.hub import import_transformers
from common.output import markdown
from fold import norms_of
from fold.norm_probes import NormRow, pattern
from hf import coupled

hf = import_transformers()
coupled.register()

SMALL = dict(
    vocab_size=67,
    max_position_embeddings=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
HEAD = {**SMALL, "head_dim": 12}
MOE = {**HEAD, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT2 = dict(vocab_size=67, n_positions=64, n_embd=32, n_layer=2, n_head=4)
T5 = dict(vocab_size=67, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
MIXTRAL = {**SMALL, "num_local_experts": 4}
GPT_OSS = {**HEAD, "num_local_experts": 4, "layer_types": ["full_attention"] * 2}
BERT = {**SMALL, "num_key_value_heads": None, "pad_token_id": 0}
OPT = dict(vocab_size=67, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2)
OPT |= dict(num_attention_heads=4, max_position_embeddings=64, pad_token_id=0)

LOCAL = {**HEAD, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
LINEAR = {**HEAD, "layer_types": ["linear_attention", "full_attention"]}
LINEAR |= dict(linear_key_head_dim=8, linear_value_head_dim=8)
LINEAR |= dict(linear_num_key_heads=2, linear_num_value_heads=4)
GEMMA_4 = {**LOCAL, "vocab_size_per_layer_input": 67, "hidden_size_per_layer_input": 8}
# The norm before an MLP takes the statistic of the one before attention.
COUPLED = dict(norm_plan="Rs Rs R", coupled_alpha=(1.0,) * 5)

# name -> (config's class, or model_type of a coupled one; keys). What our GPT loads comes first.
FAMILIES = {
    "GPT-2": ("GPT2Config", GPT2),
    "Llama": ("LlamaConfig", SMALL),
    "Qwen3": ("Qwen3Config", HEAD),
    "OLMo 2": ("Olmo2Config", SMALL),
    "OLMo 3": ("Olmo3Config", SMALL),
    "Gemma 3": ("Gemma3TextConfig", HEAD),
    "Coupled GPT-2, ours": ("coupled_gpt2", {**GPT2, **COUPLED}),
    "Coupled Llama, ours": ("coupled_llama", {**SMALL, **COUPLED}),
    "Coupled Qwen3, ours": ("coupled_qwen3", {**HEAD, **COUPLED}),
    "BERT": ("BertConfig", BERT),
    "Cohere": ("CohereConfig", {**SMALL, "use_qk_norm": True}),
    "EXAONE 4": ("Exaone4Config", {**SMALL, "sliding_window": 12}),
    "Gemma": ("GemmaConfig", HEAD),
    "Gemma 2": ("Gemma2Config", HEAD),
    "Gemma 4": ("Gemma4TextConfig", GEMMA_4),
    "GLM-4": ("Glm4Config", HEAD),
    "GPT-NeoX": ("GPTNeoXConfig", SMALL),
    "gpt-oss": ("GptOssConfig", GPT_OSS),
    "Granite": ("GraniteConfig", SMALL),
    "Hunyuan": ("HunYuanDenseV1Config", HEAD),
    "Mistral": ("MistralConfig", SMALL),
    "Mixtral": ("MixtralConfig", MIXTRAL),
    "Nemotron": ("NemotronConfig", SMALL),
    "OLMo": ("OlmoConfig", SMALL),
    "OPT": ("OPTConfig", OPT),
    "Phi": ("PhiConfig", SMALL),
    "Phi-3": ("Phi3Config", {**SMALL, "pad_token_id": 0}),
    "Qwen2": ("Qwen2Config", SMALL),
    "Qwen3 MoE": ("Qwen3MoeConfig", MOE),
    "Qwen3-Next": ("Qwen3NextConfig", {**MOE, "shared_expert_intermediate_size": 24}),
    "Qwen3.5": ("Qwen3_5TextConfig", LINEAR),
    "SmolLM 3": ("SmolLM3Config", SMALL),
    "StableLM": ("StableLmConfig", {**SMALL, "qk_layernorm": True}),
    "T5 (encoder and decoder)": ("T5Config", T5),
}


class Cells(NamedTuple):
    """What the table says of one norm."""

    kind: str
    eps: str = ""
    gain: str = ""
    bias: str = ""
    # in bfloat16
    statistic: str = ""
    rounded: str = ""
    offset: str = ""


HEADER = (
    *("family", "norms", "kind", "eps", "gain", "bias"),
    *("in bfloat16: statistic", "rounded", "1 + w in"),
)


def rows_of(name: str) -> list[list[str]]:
    """Return the table's rows of one family, a row for all norms that are alike."""
    config_class, keys = FAMILIES[name]
    torch.manual_seed(0)
    if config_class.startswith("coupled"):
        model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(config_class, **keys))
    else:
        model = hf.AutoModel.from_config(getattr(hf, config_class)(**keys))
    model.eval()
    ids = torch.randint(3, 67, (2, 16), generator=torch.Generator().manual_seed(0))
    inputs = dict(input_ids=ids)
    if "T5" in config_class:
        inputs |= dict(decoder_input_ids=ids)
    groups: dict[Cells, list[str]] = {}
    for row in norms_of(model, {**inputs, "use_cache": False}, graph=False).rows:
        last = pattern(row.path).removesuffix(".*").rpartition(".")[2]
        groups.setdefault(cells(row), []).append(last)
    return [
        [name, ", ".join(f"`{path}`" for path in dict.fromkeys(paths)), *said]
        for said, paths in groups.items()
    ]


def cells(row: NormRow) -> Cells:
    """Return what the table says of one norm; its kind alone of one without a name."""
    kind = f"{row.kind} {row.note}".strip()
    if not row.is_named:
        return Cells(kind)
    eps = "none" if row.eps is None else f"{row.eps:.5g} {row.place}"
    rounding = row.norm.roundings[torch.bfloat16]
    order = {"gain before the rounding": "after the gain", "gain after the rounding": "before it"}
    return Cells(
        kind=kind,
        eps=eps,
        gain=row.gain,
        bias="yes" if row.bias else "no",
        statistic=rounding.statistic,
        rounded=order.get(rounding.gain, rounding.gain or "no gain"),
        offset=rounding.offset,
    )


def main() -> None:
    hf.logging.set_verbosity_error()
    rows = []
    for name in FAMILIES:
        try:
            rows += rows_of(name)
        except Exception as error:  # a configuration that this version does not take
            rows.append([name, f"cannot be made: {str(error)[:60]}", *[""] * 7])
    print(f"transformers {hf.__version__}, torch {torch.__version__}\n")
    print(markdown([*HEADER], rows))


if __name__ == "__main__":
    main()
