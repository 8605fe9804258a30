"""Which norms other people's models have by their source, and what is said of them.

    PYTHONPATH=.:tests python tests/norm_kinds.py
        all models of transformers in results/fold, with two layers each

The lists were made by hand, from the classes of transformers 5.24. tests/test_doctor.py takes some
of the models.
"""

import copy
import sys
import warnings
from collections import Counter

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from fold import norms_of
from fold.alignment import Comparison, compare_found
from fold.certificate import Inputs
from fold.norm_probes import NormsFound
from repro.fold_models import MODELS, ZOO, build

# LayerNorms over the last axis -> models
LAYERNORMS = {
    3: "CodeGenModel CohereModel Cohere2Model phi gptj albert",
    4: "Data2VecVisionModel OpenAIGPTModel PatchTSTModel VideoMAEModel VitDetModel XLNetModel",
    5: """
        BertGenerationEncoder BigBirdModel BioGptModel CamembertModel CLIPTextModel ConvBertModel
        CTRLModel Data2VecTextModel DebertaModel DeiTModel Dinov2WithRegistersModel DINOv3ViTModel
        DistilBertModel DPTModel ElectraModel ErnieModel EsmModel FlaubertModel GPTBigCodeModel
        GPTNeoModel GPTNeoXJapaneseModel IBertModel IJepaModel LayoutLMModel LongformerModel
        LukeModel MarkupLMModel MegatronBertModel ModernBertModel MPNetModel MraModel NomicBertModel
        NystromformerModel PhimoeModel ReformerModel RemBertModel RobertaModel RoCBertModel
        RoFormerModel SplinterModel Starcoder2Model VisualBertModel ViTForImageClassification
        ViTMSNModel VivitModel XLMModel XLMRobertaModel XLMRobertaXLModel XmodModel YolosModel
        YosoModel gpt2 gpt2_lm bert vit opt opt_lm gpt_neox falcon mpt olmo xglm deberta_v2 fnet ast
        beit dinov2 vit_mae ConvNextV2Model convnext DINOv3ConvNextModel
    """,
    6: """
        ChineseCLIPVisionModel CLIPVisionModel RobertaPreLayerNormModel SEWModel
        UniSpeechModel UniSpeechSatModel WavLMModel hubert bloom rwkv siglip
    """,
    7: "timesformer",
    8: "wav2vec2",
    9: "FunnelModel HieraModel PersimmonModel",
    10: "LiltModel MarianModel",
    11: "CanineModel swin swinv2 clip detr",
    12: """
        BigBirdPegasusModel BlenderbotModel BlenderbotSmallModel Data2VecAudioModel LEDModel
        M2M100Model MvpModel NllbMoeModel PegasusModel PLBartModel bart whisper
    """,
    13: "FocalNetModel",
    14: "PegasusXModel mbart segformer",
    16: "PvtModel",
    17: "stablelm",
    19: "PvtV2Model",
    21: "MobileViTModel",
}
# A tanh behind the first token's vector
TANH = """
    BigBirdModel CamembertModel CanineModel Data2VecTextModel DeiTModel DPTModel ErnieModel EsmModel
    IBertModel LayoutLMModel LiltModel LongformerModel LukeModel MarkupLMModel MegatronBertModel
    MPNetModel RemBertModel RobertaModel RobertaPreLayerNormModel RoCBertModel SqueezeBertModel
    VisualBertModel VivitModel XLMRobertaModel XLMRobertaXLModel XmodModel YolosModel albert bert
    fnet vit
"""
CHANNELS_FIRST = "LayerNorm (axis 1 of 4)"
WEIGHT = "RMSNorm (axes 0, 1 of 3)"  # a weight norm of a convolution
# A GroupNorm with a group for each channel normalises over the last axis, which is time.
SPEECH = {"LayerNorm": 1, WEIGHT: 1}
# Further norms, and modules that are none
MORE = {
    "clip": {"L2": 2},  # text and picture, before their product
    "convnext": {CHANNELS_FIRST: 2},
    "ConvNextV2Model": {CHANNELS_FIRST: 2},
    "CpmAntModel": {"RMSNorm": 5, "not a norm": 2},  # softmax
    "DINOv3ConvNextModel": {CHANNELS_FIRST: 4},
    "hubert": SPEECH,
    "ImageGPTModel": {"RMSNorm": 5},
    "PatchTSTModel": {"LayerNorm (axis 1 of 3)": 1},  # what scales its inputs
    "PhimoeModel": {"unknown formula": 2},  # its router divides scores by the largest one
    "SEWModel": SPEECH,
    "SqueezeBertModel": {"LayerNorm": 1, "LayerNorm (axis 1 of 3)": 4, "not a norm": 2},
    "swinv2": {"L2": 8},  # queries and keys
    "UniSpeechModel": SPEECH,
    "UniSpeechSatModel": SPEECH,
    "wav2vec2": {WEIGHT: 1},
    "WavLMModel": SPEECH,
    "YosoModel": {"L2": 6},  # queries, keys and what attention returns
}


def by_source(name: str) -> Counter:
    """Count the norms of a model by kind, as its source has them."""
    counts = Counter()
    counts["LayerNorm"] = sum(n for n, names in LAYERNORMS.items() if name in names.split())
    counts["point-wise tanh(a x)"] = TANH.split().count(name)
    counts.update(MORE.get(name, {}))
    return +counts


def small(name: str) -> tuple[nn.Module, Inputs]:
    """Build a model of results/fold with two layers, and inputs, in float32."""
    if name in MODELS:
        kind, inputs, keys = MODELS[name]
        layers = min(2, keys.get("num_hidden_layers", 2))
        MODELS[name] = kind, inputs, {**keys, "num_hidden_layers": layers}
    model, inputs = build(f"transformers/{name}")
    single = tree_map_only(
        torch.Tensor, lambda x: x.float() if x.is_floating_point() else x, inputs
    )
    return model.float(), single


def check(name: str) -> tuple[NormsFound, Counter, Comparison]:
    """Return a model's norms, their number by kind, and a comparison with a copy."""
    model, inputs = small(name)
    found = norms_of(model, inputs)
    other = copy.deepcopy(model)
    # The graph again, only where it is needed
    again = norms_of(other, inputs, graph=any(row.by_hand for row in found.rows))
    comparison = compare_found(found, again, model, other, inputs, inputs)
    return found, Counter(row.kind for row in found.rows), comparison


def main() -> None:
    warnings.filterwarnings("ignore")
    good = total = 0
    for name in sys.argv[1:] or [n.split("/")[1] for n in ZOO if n.startswith("transformers/")]:
        try:
            found, counts, comparison = check(name)
        except ImportError as error:
            print(f"{name}: cannot be made: {str(error).strip().splitlines()[0]}")
            continue
        total += 1
        is_right = counts == by_source(name) and not comparison.has_difference
        good += is_right
        print("ok " if is_right else "NOT", name, dict(counts), found.unread[:60], flush=True)
        if counts != by_source(name):
            print(f"by its source {dict(by_source(name))}\n{found}")
        if comparison.has_difference:
            print(comparison)
    print(good, "of", total)
    sys.exit(good < total)


if __name__ == "__main__":
    main()
