"""Build small models with random weights, to count and fold their LayerNorms.

They are the seven of the paper's Table 3 with their full number of layers, and many others.

    build(name) -> (model in float64 and eval mode, every gain, bias and mean moved away from its
                    initial value; inputs)
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fold.certificate import randomize
from hf.hub import import_transformers

hf = import_transformers()

# Table 3 of "Enjoy Your Layer Normalization": LayerNorms, foldable, foldable in practice.
TABLE3 = {
    "gpt2": (25, 0, 25),
    "bert": (25, 24, 25),
    "vit": (25, 0, 25),
    "phi": (25, 0, 25),
    "opt": (25, 0, 25),
    "bloom": (6, 5, 6),
    "vmamba": (51, 0, 36),
}

VOCAB = dict(vocab_size=50, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SIZE = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4)
IMAGE = dict(image_size=16, patch_size=8)
SEQ2SEQ = dict(
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    decoder_start_token_id=2,
    **VOCAB,
)
AUDIO = dict(
    conv_dim=(16, 16),
    conv_stride=(4, 4),
    conv_kernel=(8, 4),
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    num_feat_extract_layers=2,
)
PYRAMID = dict(
    num_encoder_blocks=2,
    sr_ratios=[2, 1],
    hidden_sizes=[16, 32],
    patch_sizes=[7, 3],
    strides=[2, 2],
    num_attention_heads=[2, 4],
    mlp_ratios=[2, 2],
)
SWIN = dict(embed_dim=16, depths=[2, 2], num_heads=[2, 2], image_size=16, patch_size=2)

TWELVE = dict(n_layer=12, n_embd=32, n_head=4, n_positions=16, **VOCAB)
DEEP = {**SIZE, "num_hidden_layers": 12}
OPT = dict(
    num_hidden_layers=12,
    hidden_size=32,
    ffn_dim=64,
    num_attention_heads=4,
    word_embed_proj_dim=32,
    max_position_embeddings=16,
    **VOCAB,
)


def entry(name: str, inputs: str, **config: Any) -> tuple[str, dict[str, Any], str]:
    """A row of MODELS: class, configuration, kind of input."""
    return name, config, inputs


# name -> (class, configuration, kind of input)
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": entry("GPT2Model", "ids", **TWELVE),
    "gpt2_lm": entry("GPT2LMHeadModel", "ids", **TWELVE),
    "bert": entry("BertModel", "both", **DEEP, **VOCAB),
    "vit": entry("ViTModel", "image", **DEEP, **IMAGE),
    "phi": entry("PhiModel", "ids", **{**SIZE, **VOCAB, "num_hidden_layers": 24}),
    "opt": entry("OPTModel", "ids", **OPT),
    "opt_lm": entry("OPTForCausalLM", "ids", **OPT),
    "bloom": entry("BloomModel", "ids", n_layer=2, hidden_size=32, n_head=4, **VOCAB),
    "gpt_neox": entry("GPTNeoXModel", "ids", **SIZE, **VOCAB),
    "gptj": entry(
        "GPTJModel", "ids", n_layer=2, n_embd=32, n_head=4, rotary_dim=4, n_positions=16, **VOCAB
    ),
    "falcon": entry(
        "FalconModel",
        "ids",
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        **VOCAB,
    ),
    "mpt": entry("MptModel", "ids", n_layers=2, d_model=32, n_heads=4, max_seq_len=16, **VOCAB),
    "stablelm": entry(
        "StableLmModel", "ids", **SIZE, num_key_value_heads=2, qk_layernorm=True, **VOCAB
    ),
    "olmo": entry("OlmoModel", "ids", **SIZE, num_key_value_heads=2, **VOCAB),
    "xglm": entry(
        "XGLMModel",
        "ids",
        num_layers=2,
        d_model=32,
        ffn_dim=64,
        attention_heads=4,
        max_position_embeddings=16,
        **VOCAB,
    ),
    "albert": entry("AlbertModel", "both", **SIZE, embedding_size=16, **VOCAB),
    "deberta_v2": entry(
        "DebertaV2Model",
        "both",
        **SIZE,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        **VOCAB,
    ),
    "fnet": entry(
        "FNetModel", "fnet", num_hidden_layers=2, hidden_size=32, intermediate_size=64, **VOCAB
    ),
    "rwkv": entry(
        "RwkvModel",
        "ids",
        hidden_size=32,
        num_hidden_layers=2,
        attention_hidden_size=32,
        intermediate_size=64,
        **VOCAB,
    ),
    "bart": entry("BartModel", "seq2seq", **SEQ2SEQ, max_position_embeddings=16),
    "mbart": entry("MBartModel", "seq2seq", **SEQ2SEQ, max_position_embeddings=16),
    "whisper": entry(
        "WhisperModel",
        "speech",
        **SEQ2SEQ,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
    ),
    "wav2vec2": entry(
        "Wav2Vec2Model",
        "wave",
        **SIZE,
        **AUDIO,
        do_stable_layer_norm=True,
        feat_extract_norm="layer",
    ),
    "hubert": entry("HubertModel", "wave", **SIZE, **AUDIO),
    "ast": entry(
        "ASTModel",
        "spectrum",
        **SIZE,
        patch_size=4,
        frequency_stride=4,
        time_stride=4,
        max_length=16,
        num_mel_bins=8,
    ),
    "beit": entry(
        "BeitForImageClassification", "image", **SIZE, **IMAGE, use_relative_position_bias=True
    ),
    "dinov2": entry(
        "Dinov2Model",
        "image",
        num_hidden_layers=2,
        hidden_size=32,
        mlp_ratio=2,
        num_attention_heads=4,
        **IMAGE,
    ),
    "swin": entry("SwinModel", "image", **SWIN, window_size=2),
    "swinv2": entry("Swinv2Model", "image", **SWIN, window_size=4),
    "convnext": entry(
        "ConvNextModel", "image", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, patch_size=2
    ),
    "segformer": entry("SegformerModel", "image", **PYRAMID, depths=[2, 2]),
    "siglip": entry("SiglipVisionModel", "image", **SIZE, **IMAGE),
    "clip": entry(
        "CLIPModel",
        "pair",
        text_config=dict(**SIZE, max_position_embeddings=16, **VOCAB),
        vision_config=dict(**SIZE, **IMAGE),
        projection_dim=16,
    ),
    "detr": entry(
        "DetrModel",
        "image",
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        num_queries=5,
        backbone_config=dict(
            model_type="resnet",
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            out_features=["stage2"],
        ),
        **{
            name: value
            for name, value in SEQ2SEQ.items()
            if name not in VOCAB and "token" not in name
        },
    ),
    "vit_mae": entry(
        "ViTMAEModel",
        "image",
        **SIZE,
        **IMAGE,
        decoder_num_attention_heads=4,
        decoder_hidden_size=16,
    ),
    "timesformer": entry("TimesformerModel", "video", **SIZE, **IMAGE, num_frames=2),
}


def inputs_of(kind: str) -> dict[str, Any]:
    """Random inputs, two examples; float64 where they are floats."""
    torch.manual_seed(1)
    ids = torch.randint(3, 50, (2, 7))
    image = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0  # the last token is padding
    return {
        "ids": dict(input_ids=ids, use_cache=False),
        "both": dict(input_ids=ids, attention_mask=mask),
        "fnet": dict(input_ids=ids),
        "image": dict(pixel_values=image),
        "video": dict(pixel_values=torch.stack([image, image.flip(0)], 1)),
        "pair": dict(input_ids=ids, pixel_values=image),
        "seq2seq": dict(input_ids=ids, decoder_input_ids=ids[:, :5], use_cache=False),
        "speech": dict(
            input_features=torch.randn(2, 8, 20).double(), decoder_input_ids=ids, use_cache=False
        ),
        "wave": dict(input_values=torch.randn(2, 400, dtype=torch.float64)),
        "spectrum": dict(input_values=image[:, 0, :, :8]),
    }[kind]


def build(name: str) -> tuple[nn.Module, dict[str, Any] | tuple]:
    """Return (model, inputs) of one of MODELS, or `vmamba`."""
    if name == "vmamba":
        torch.manual_seed(0)
        model = VMamba()
        inputs = (torch.randn(2, 3, 32, 32, dtype=torch.float64),)
    else:
        hf.logging.set_verbosity_error()
        kind, config, given = MODELS[name]
        torch.manual_seed(0)
        if isinstance(config.get("backbone_config"), dict):
            backbone = hf.AutoConfig.for_model(**config["backbone_config"])
            config = {**config, "backbone_config": backbone}
        model_class = getattr(hf, kind)
        model = model_class(model_class.config_class(**config))
        inputs = inputs_of(given)
    model = model.double().eval()
    randomize(model)
    return model, inputs


# --------------------------------------------------------------------------------- a selective scan


class SelectiveScan(nn.Module):
    """SS2D of VMamba (Liu et al. 2024) over two directions, with its `out_norm`.

    (B, H, W, C) -> (B, H, W, C).

    h_t = exp(delta_t A) h_{t-1} + delta_t B_t x_t, y_t = C_t h_t + D x_t (Mamba, equation 2),
    written as one product with decays exp(A (s_t - s_u)), s the running sum of delta: fine for the
    few positions here.
    """

    def __init__(self, channels: int, states: int = 2):
        super().__init__()
        inner = 2 * channels
        self.in_proj = nn.Linear(channels, 2 * inner)
        self.conv = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.x_proj = nn.Linear(inner, inner + 2 * states)
        self.A_log = nn.Parameter(torch.zeros(inner, states))
        self.D = nn.Parameter(torch.ones(inner))
        self.states = states
        self.out_norm = nn.LayerNorm(inner)
        self.out_proj = nn.Linear(inner, channels)

    def scan(self, x: Tensor) -> Tensor:
        """(B, L, D) -> (B, L, D)."""
        sizes = [x.shape[-1], self.states, self.states]
        delta, b, c = self.x_proj(x).split(sizes, -1)  # (B, L, D), (B, L, N), (B, L, N)
        delta = F.softplus(delta)
        time = delta.cumsum(1)  # (B, L, D)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        gaps = (time[:, :, None] - time[:, None]).masked_fill(~later[:, :, None], 0)  # (B, L, L, D)
        # (B, L, L, D, N)
        decay = torch.exp(-gaps[..., None] * self.A_log.exp()) * later[:, :, None, None]
        mixed = torch.einsum("btudn,btn,bun->btud", decay, c, b)
        return torch.einsum("btud,bud->btd", mixed, delta * x) + self.D * x

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.in_proj(x).chunk(2, -1)
        x = F.silu(self.conv(x.permute(0, 3, 1, 2))).flatten(2).transpose(1, 2)  # (B, L, D)
        y = self.scan(x) + self.scan(x.flip(1)).flip(1)
        return self.out_proj(self.out_norm(y).view(gate.shape) * F.silu(gate))


class ScanBlock(nn.Module):
    """Selective scan and MLP, each after a LayerNorm, on a residual stream (B, H, W, C)."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.op = SelectiveScan(channels)
        self.norm2 = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.op(self.norm(x))
        return x + self.mlp(self.norm2(x))


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class VMamba(nn.Module):
    """The norms of VMamba-T in a small model: 51.

    15 blocks have three each, one of them after the scan. Two are in the stem, three after the
    convolutions that halve the image, one before the head.
    """

    def __init__(self, depths: tuple[int, ...] = (2, 2, 9, 2), channels: int = 4):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, 2, 1),
            LayerNorm2d(channels),
            nn.GELU(),
            nn.Conv2d(channels, channels, 3, 2, 1),
            LayerNorm2d(channels),
        )
        widths = [channels * 2**stage for stage in range(len(depths))]
        self.stages = nn.ModuleList(
            nn.Sequential(*[ScanBlock(width) for _ in range(depth)])
            for width, depth in zip(widths, depths)
        )
        self.halve = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, 1), LayerNorm2d(2 * width))
            for width in widths[:-1]
        )
        self.norm = nn.LayerNorm(widths[-1])
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)  # (B, C, H, W)
        for i, stage in enumerate(self.stages):
            x = stage(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            if i < len(self.halve):
                x = self.halve[i](x)
        return self.head(self.norm(x.permute(0, 2, 3, 1)).mean((1, 2)))
