"""Build small models with random weights, to count and fold their LayerNorms.

    build(name) -> (model in float64 and eval mode, every gain, bias and mean moved away from its
                    initial value; inputs)

TABLE3 and MODELS are those of the paper's Table 3, with their full number of layers, and many
others of transformers. ZOO names models of timm, torchvision and transformers, LIBRARY/MODEL.
Nothing is downloaded.
"""

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from common.hub import import_transformers
from fold.certificate import Inputs, randomize

hf = import_transformers()

BATCH = 2

# Table 3 of "Enjoy Your Layer Normalization": LayerNorms, foldable, foldable in practice.
# VMamba is in no library: its record is a dated result (fold_table.py).
TABLE3 = {
    "gpt2": (25, 0, 25),
    "bert": (25, 24, 25),
    "vit": (25, 0, 25),
    "phi": (25, 0, 25),
    "opt": (25, 0, 25),
    "bloom": (6, 5, 6),
    "vmamba": (51, 0, 36),
}

# Keys of configurations; each class takes those that it knows.
SMALL = dict(
    vocab_size=50,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=2,
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    ffn_dim=64,
    n_layer=2,
    n_embd=32,
    n_head=4,
    num_layers=2,
    num_heads=4,
    n_layers=2,
    n_heads=4,
    dim=32,
    hidden_dim=64,
    emb_dim=32,
    d_ff=64,
    d_kv=8,
    embedding_size=32,
    max_position_embeddings=64,
    n_positions=64,
    image_size=16,
    patch_size=8,
    num_channels=3,
    conv_dim=(16, 16),
    conv_stride=(4, 4),
    conv_kernel=(8, 4),
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    num_feat_extract_layers=2,
    num_experts=4,
    num_local_experts=4,
    type_vocab_size=2,
    num_mel_bins=8,
    projection_dim=16,
    decoder_hidden_size=16,
    use_cache=False,
)

TWELVE = dict(num_hidden_layers=12)
OPT = dict(num_hidden_layers=12, word_embed_proj_dim=32, max_position_embeddings=16)
SWIN = dict(embed_dim=16, depths=[2, 2], num_heads=[2, 2], num_attention_heads=[2, 2], patch_size=2)

# name -> (class, kind of input, keys besides SMALL)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Model", "ids", TWELVE),
    "gpt2_lm": ("GPT2LMHeadModel", "ids", TWELVE),
    "bert": ("BertModel", "both", TWELVE),
    "vit": ("ViTModel", "image", TWELVE),
    "phi": ("PhiModel", "ids", dict(num_hidden_layers=24, num_key_value_heads=4)),
    "opt": ("OPTModel", "ids", OPT),
    "opt_lm": ("OPTForCausalLM", "ids", OPT),
    "bloom": ("BloomModel", "ids", {}),
    "gpt_neox": ("GPTNeoXModel", "ids", {}),
    "gptj": ("GPTJModel", "ids", dict(rotary_dim=4)),
    "falcon": ("FalconModel", "ids", dict(num_kv_heads=2, new_decoder_architecture=True)),
    "mpt": ("MptModel", "ids", dict(max_seq_len=16)),
    "stablelm": ("StableLmModel", "ids", dict(qk_layernorm=True)),
    "olmo": ("OlmoModel", "ids", {}),
    "xglm": ("XGLMModel", "ids", dict(attention_heads=4)),
    "albert": ("AlbertModel", "both", dict(embedding_size=16)),
    "deberta_v2": (
        "DebertaV2Model",
        "both",
        dict(type_vocab_size=0, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    ),
    "fnet": ("FNetModel", "tokens", {}),
    "rwkv": ("RwkvModel", "ids", dict(attention_hidden_size=32)),
    "bart": ("BartModel", "seq2seq", {}),
    "mbart": ("MBartModel", "seq2seq", {}),
    "whisper": (
        "WhisperModel",
        "speech",
        dict(num_key_value_heads=4, max_source_positions=10, max_target_positions=16),
    ),
    "wav2vec2": (
        "Wav2Vec2Model",
        "wave",
        dict(do_stable_layer_norm=True, feat_extract_norm="layer"),
    ),
    "hubert": ("HubertModel", "wave", {}),
    "ast": (
        "ASTModel",
        "spectrum",
        dict(patch_size=4, frequency_stride=4, time_stride=4, max_length=16),
    ),
    "beit": ("BeitForImageClassification", "image", dict(use_relative_position_bias=True)),
    "dinov2": ("Dinov2Model", "image", dict(mlp_ratio=2)),
    "swin": ("SwinModel", "image", SWIN | dict(window_size=2)),
    "swinv2": ("Swinv2Model", "image", SWIN | dict(window_size=4)),
    "convnext": (
        "ConvNextModel",
        "image",
        dict(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, patch_size=2),
    ),
    "segformer": (
        "SegformerModel",
        "image",
        dict(
            num_encoder_blocks=2,
            depths=[2, 2],
            sr_ratios=[2, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[2, 2],
            num_attention_heads=[2, 4],
            mlp_ratios=[2, 2],
        ),
    ),
    "siglip": ("SiglipVisionModel", "image", {}),
    "clip": ("CLIPModel", "pair", dict(text_config=SMALL, vision_config=SMALL)),
    "detr": (
        "DetrModel",
        "image",
        dict(
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
        ),
    ),
    "vit_mae": ("ViTMAEModel", "image", dict(decoder_num_attention_heads=4)),
    "timesformer": ("TimesformerModel", "video", dict(num_frames=2)),
}

# Four stages of growing width
FOUR_STAGES = dict(
    image_size=64,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 2, 4],
)

# kind of input -> classes that need no keys besides SMALL; MODELS has others
PLAIN = {
    "tokens": """
        BertGenerationEncoder BioGptModel CamembertModel CanineModel CLIPTextModel CohereModel
        Cohere2Model ConvBertModel CpmAntModel CTRLModel Data2VecTextModel DistilBertModel
        ElectraModel ErnieModel FlaubertModel GPTBigCodeModel GPTNeoXJapaneseModel IBertModel
        LayoutLMModel MarkupLMModel MegatronBertModel MPNetModel MraModel NomicBertModel
        OpenAIGPTModel PersimmonModel PhimoeModel RobertaModel RobertaPreLayerNormModel
        RoFormerModel SplinterModel Starcoder2Model VisualBertModel XLMModel XLMRobertaModel
        XLMRobertaXLModel
    """,
    "seq2seq": """
        BlenderbotModel BlenderbotSmallModel M2M100Model MarianModel MvpModel NllbMoeModel
        PegasusModel PLBartModel
    """,
    "image": """
        ChineseCLIPVisionModel CLIPVisionModel ConditionalDetrModel Data2VecVisionModel DeiTModel
        DINOv3ViTModel IJepaModel ViTMSNModel VitDetModel ViTForImageClassification
    """,
    "wave": """
        Data2VecAudioModel UniSpeechModel UniSpeechSatModel WavLMModel
    """,
}

# class -> (kind of input, keys besides SMALL)
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (kind, {}) for kind, names in PLAIN.items() for name in names.split()
} | {
    "BigBirdModel": ("tokens", dict(attention_type="original_full")),
    "BigBirdPegasusModel": ("seq2seq", dict(attention_type="original_full")),
    "CodeGenModel": ("tokens", dict(rotary_dim=4)),
    "ConvNextV2Model": ("image", dict(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2)),
    "DebertaModel": ("tokens", dict(relative_attention=True, pos_att_type=["p2c", "c2p"])),
    "Dinov2WithRegistersModel": ("image", dict(mlp_ratio=2)),
    "DINOv3ConvNextModel": ("picture", dict(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1])),
    "DPTModel": ("image", dict(backbone_out_indices=[0, 1, 1, 1], neck_hidden_sizes=[8] * 4)),
    "EsmModel": ("tokens", dict(position_embedding_type="rotary", mask_token_id=3)),
    "FocalNetModel": ("picture", dict(embed_dim=16, depths=[1, 1, 1, 1], patch_size=4)),
    "FunnelModel": ("tokens", dict(block_sizes=[1, 1], d_head=8, d_inner=64, n_head=4)),
    "GPTNeoModel": (
        "tokens",
        dict(attention_types=[[["global", "local"], 1]], window_size=4),
    ),
    "HieraModel": (
        "picture",
        dict(
            embed_dim=16,
            image_size=[64, 64],
            patch_size=[7, 7],
            depths=[1, 1, 1, 1],
            num_heads=[1, 2, 4, 8],
        ),
    ),
    "ImageGPTModel": ("tokens", dict(vocab_size=50)),
    "LEDModel": ("seq2seq", dict(attention_window=4)),
    "LiltModel": ("tokens", dict(hidden_size=48, channel_shrink_ratio=2)),
    "LongformerModel": ("tokens", dict(attention_window=4)),
    "LukeModel": ("tokens", dict(entity_vocab_size=10, entity_emb_size=16)),
    "MobileViTModel": ("picture", dict(hidden_sizes=[16, 16, 32], image_size=64, patch_size=2)),
    "ModernBertModel": ("tokens", dict(global_attn_every_n_layers=2, local_attention=4)),
    "NystromformerModel": ("tokens", dict(num_landmarks=7, segment_means_seq_len=7)),
    "PatchTSTModel": ("series", dict(context_length=32, patch_length=8, norm_type="layernorm")),
    "PegasusXModel": ("seq2seq", dict(block_size=4, num_global_tokens=2)),
    "PvtModel": ("picture", FOUR_STAGES),
    "PvtV2Model": ("picture", FOUR_STAGES),
    "ReformerModel": (
        "tokens",
        dict(
            attn_layers=["local", "local"],
            axial_pos_embds=False,
            attention_head_size=8,
            feed_forward_size=64,
            local_attn_chunk_length=7,
            is_decoder=False,
        ),
    ),
    "RemBertModel": ("tokens", dict(input_embedding_size=16)),
    "RoCBertModel": ("tokens", dict(enable_pronunciation=False, enable_shape=False)),
    "SEWModel": ("wave", dict(squeeze_factor=2)),
    "SqueezeBertModel": (
        "tokens",
        dict(q_groups=2, k_groups=2, v_groups=2, post_attention_groups=1),
    ),
    "VideoMAEModel": ("video", dict(num_frames=2)),
    "VivitModel": ("video", dict(num_frames=2, tubelet_size=[1, 8, 8])),
    "XLNetModel": ("tokens", dict(d_inner=64)),
    "XmodModel": ("tokens", dict(languages=["en"], default_language="en")),
    "YolosModel": ("image", dict(image_size=[16, 16], num_detection_tokens=3)),
    "YosoModel": ("tokens", dict(use_expectation=True)),
}

# One small variant of each architecture, or several that differ in their norms.
TIMM = """
    beit_base_patch16_224 beitv2_base_patch16_224 cait_xxs24_224 coat_tiny coat_lite_tiny
    convit_tiny convnext_atto convnext_atto_ols convnextv2_atto convnext_nano_ols crossvit_tiny_240
    crossvit_9_dagger_240 csatv2 davit_tiny deit_tiny_patch16_224 deit_tiny_distilled_patch16_224
    deit3_small_patch16_224 edgenext_xx_small edgenext_small_rw efficientformer_l1
    efficientformerv2_s0 eva02_tiny_patch14_224 eva02_base_patch16_clip_224
    vit_small_patch16_dinov3 vit_small_patch16_rope_224 fastvit_mci0 focalnet_tiny_srf
    gcvit_xxtiny hiera_tiny_224 hieradet_small sam2_hiera_tiny inception_next_atto
    mambaout_femto coatnet_nano_rw_224 coatnet_0_224 maxvit_tiny_rw_224 maxvit_tiny_tf_224
    maxxvit_rmlp_nano_rw_256 coatnext_nano_rw_224 caformer_s18 convformer_s18 poolformer_s12
    poolformerv2_s12 gmixer_12_224 gmlp_ti16_224 mixer_s32_224 resmlp_12_224 mobilevit_xxs
    mobilevitv2_050 mvitv2_tiny mvitv2_small_cls naflexvit_base_patch16_gap
    naflexvit_base_patch16_map nest_tiny nest_tiny_jx nextvit_small pit_ti_224 pit_ti_distilled_224
    pvt_v2_b0 pvt_v2_b2_li rdnet_tiny sequencer2d_s swiftformer_xs swin_tiny_patch4_window7_224
    swin_s3_tiny_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224 swinv2_cr_tiny_ns_224
    tiny_vit_5m_224 tnt_s_patch16_224 tnt_s_legacy_patch16_224 twins_pcpvt_small twins_svt_small
    visformer_tiny vit_tiny_patch16_224 vit_small_patch16_18x2_224 vit_base_patch32_clip_224
    vit_base_patch16_siglip_224 vit_base_patch16_rpn_224 vit_xsmall_patch16_clip_224
    vit_tiny_r_s16_p8_224 vit_relpos_small_patch16_224 vit_relpos_small_patch16_rpn_224
    vit_srelpos_small_patch16_224 samvit_base_patch16_224 vit_small_plus_patch16_dinov3
    vit_base_patch16_xp_224 vit_intern300m_patch14_448 vitamin_small_224 volo_d1_224
    xcit_nano_12_p16_224 xcit_tiny_12_p16_224 levit_128s resnetv2_50d_gn
    test_vit_relpos qwen3_vit_88m shvit_s1 iformer_t efficientvim_m1 lowformer_b0
"""

TORCHVISION = """
    convnext_tiny maxvit_t swin_t swin_v2_t swin3d_t vit_b_32
"""

ZOO = [
    *(f"transformers/{name}" for name in (*sorted(TRANSFORMERS, key=str.lower), *MODELS)),
    *(f"timm/{name}" for name in TIMM.split()),
    *(f"torchvision/{name}" for name in TORCHVISION.split()),
]

# Few blocks and small pictures, as far as an architecture takes the arguments
SMALLER = (
    dict(img_size=64, depth=3),
    dict(img_size=64, depths=(1, 1, 2, 1)),
    dict(img_size=64),
    dict(depth=3),
    {},
)


def build(name: str) -> tuple[nn.Module, Inputs]:
    """Return (model, inputs) of one of MODELS or ZOO."""
    library, _, model_name = name.rpartition("/")
    torch.manual_seed(0)
    if library in ("timm", "torchvision"):
        model, size = (timm_model if library == "timm" else torchvision_model)(model_name)
        inputs = (torch.randn(BATCH, 3, *size, dtype=torch.float64),)
    else:
        model, inputs = transformers_model(model_name)
    model = model.double().eval()
    if library:
        enlarge(model)
    randomize(model)
    return model, inputs


def transformers_model(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Build a model of transformers, of MODELS or TRANSFORMERS; return it and its inputs."""
    hf.logging.set_verbosity_error()
    class_name, kind, config = MODELS.get(name) or (name, *TRANSFORMERS[name])
    model_class = getattr(hf, class_name)
    known = model_class.config_class.__dataclass_fields__.keys()
    known |= model_class.config_class.attribute_map.keys()
    config = {name: value for name, value in SMALL.items() if name in known} | config
    if isinstance(config.get("backbone_config"), dict):
        backbone = hf.AutoConfig.for_model(**config["backbone_config"])
        config = {**config, "backbone_config": backbone}
    return model_class(model_class.config_class(**config)), inputs_of(kind)


@torch.no_grad()
def enlarge(model: nn.Module) -> None:
    """Draw weights anew that are almost zero at the start, as some heads are.

    Behind such a head no error would show.
    """
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point() and parameter.std() < 0.01:
            parameter.normal_(0, 0.05)


def timm_model(name: str) -> tuple[nn.Module, tuple[int, int]]:
    """Build a model of timm, as small as it lets itself be made; return it and its picture size."""
    timm = importlib.import_module("timm")
    for smaller in SMALLER:
        try:
            model = timm.create_model(name, pretrained=False, num_classes=10, **smaller).eval()
            size = smaller.get("img_size") or model.pretrained_cfg["input_size"][-1]
            with torch.no_grad():
                model(torch.zeros(BATCH, 3, size, size))
        except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            if not smaller:
                raise
            continue
        return model, (size, size)
    raise AssertionError("the last attempt has no arguments: it raises or returns")


def torchvision_model(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Build a model of torchvision; return it and the size of its input behind the channels."""
    size = 224 if name == "maxvit_t" else 64  # its windows fit this size alone
    more = {"image_size": size} if name.startswith("vit") else {}
    models = importlib.import_module("torchvision.models")
    model = models.get_model(name, weights=None, num_classes=10, **more)
    return model, (4, 32, 32) if name == "swin3d_t" else (size, size)


def inputs_of(kind: str) -> dict[str, Any]:
    """Random inputs, two examples; float64 where they are floats."""
    torch.manual_seed(1)
    ids = torch.randint(3, 50, (BATCH, 7))
    image = torch.randn(BATCH, 3, 16, 16, dtype=torch.float64)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0  # the last token is padding
    return {
        "ids": dict(input_ids=ids, use_cache=False),
        "both": dict(input_ids=ids, attention_mask=mask),
        "tokens": dict(input_ids=ids),
        "image": dict(pixel_values=image),
        "picture": dict(pixel_values=torch.randn(BATCH, 3, 64, 64, dtype=torch.float64)),
        "video": dict(pixel_values=torch.stack([image, image.flip(0)], 1)),
        "pair": dict(input_ids=ids, pixel_values=image),
        "seq2seq": dict(input_ids=ids, decoder_input_ids=ids[:, :5], use_cache=False),
        "speech": dict(
            input_features=torch.randn(BATCH, 8, 20).double(),
            decoder_input_ids=ids,
            use_cache=False,
        ),
        "wave": dict(input_values=torch.randn(BATCH, 400, dtype=torch.float64)),
        "spectrum": dict(input_values=image[:, 0, :, :8]),
        "series": dict(past_values=torch.randn(BATCH, 32, 1, dtype=torch.float64)),
    }[kind]


def other_batch(inputs: Inputs, examples: int = 1) -> Inputs:
    """Draw fresh inputs with more examples.

    Floats are drawn anew, and token ids from those of the example inputs' range. Masks repeat
    their first rows.

    Args:
        inputs: of two examples.
        examples: how many more.
    """
    generator = torch.Generator().manual_seed(77)

    def fresh(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.dim() or x.shape[0] != BATCH:
            return x
        size = (BATCH + examples, *x.shape[1:])
        if x.is_floating_point():
            return torch.randn(size, generator=generator, dtype=x.dtype)
        if len(x.unique()) <= 2:  # a mask
            return torch.cat([x, x[:examples]])
        return torch.randint(3, 50, size, generator=generator)

    return tree_map(fresh, inputs)
