"""Models of transformers, converted and loaded again in a fresh process, for
tests/fold/test_reloaded.py.

    PYTHONPATH=.:tests python tests/reloaded.py [ARCHITECTURE ...]
        all: twenty-one architectures, --to=rms, weightless and rescaled; a table at the end

Each folder is loaded by the class that saved it, by AutoModel, and where it has RMSNorms by
trust_remote_code=True, in a process that cannot import this repository. It is used otherwise than
in the check of its conversion: with another batch and length, with padding, with a cache, in a beam
search. The source's folder is used likewise. A cell of the table is one of

    equal       every use gives what the source gives (rescaled: to the bit)
    said        likewise, but for AutoModel, of which the certificate says that it is another
    refused     nothing was written, and why
    WRONG       another function, and the certificate does not say it
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import torch
from helpers import shake
from safetensors.torch import save_file
from tiny_configs import ENCODER_DECODER, OPT, SIZE, T5, WORDS

import convert
from common.errors import UserError
from common.hub import import_transformers

hf = import_transformers()
TO = ("rms", "weightless", "rescaled")
BERT = SIZE | WORDS
LLAMA = dict(num_key_value_heads=1, **BERT)
GPT2 = dict(n_embd=16, n_layer=1, n_head=2, n_positions=40, **WORDS)
BART = ENCODER_DECODER | dict(
    decoder_start_token_id=2, max_position_embeddings=40, forced_eos_token_id=None
)
WHISPER = BART | dict(
    num_mel_bins=8,
    max_source_positions=8,
    max_target_positions=40,
    begin_suppress_tokens=None,
    suppress_tokens=None,
)
VISION = dict(image_size=16, patch_size=8, **SIZE)
TWO_TOWERS = dict(
    text_config=dict(max_position_embeddings=40, **BERT), vision_config=VISION, projection_dim=8
)
# class -> (keys of its config, what it reads)
CAUSAL, MASKED, SEQ2SEQ, SPEECH, IMAGES, PAIRS = range(6)
ARCHITECTURES = {
    "GPT2LMHeadModel": (GPT2, CAUSAL),
    "OPTForCausalLM": (OPT | {"max_position_embeddings": 40}, CAUSAL),
    "BloomForCausalLM": (dict(hidden_size=16, n_layer=1, n_head=2, **WORDS), CAUSAL),
    "GPTNeoXForCausalLM": (BERT, CAUSAL),
    "PhiForCausalLM": (BERT, CAUSAL),
    "StableLmForCausalLM": (LLAMA, CAUSAL),
    "LlamaForCausalLM": (LLAMA | {"tie_word_embeddings": True}, CAUSAL),
    "Qwen3ForCausalLM": (LLAMA | {"head_dim": 8}, CAUSAL),
    "Olmo2ForCausalLM": (LLAMA, CAUSAL),
    "Gemma3ForCausalLM": (LLAMA | {"head_dim": 8}, CAUSAL),
    "MixtralForCausalLM": (
        LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
        CAUSAL,
    ),
    "BertForMaskedLM": (BERT, MASKED),
    "RobertaForMaskedLM": (BERT | {"max_position_embeddings": 40}, MASKED),
    "ElectraForMaskedLM": (BERT | {"embedding_size": 8}, MASKED),
    "BartForConditionalGeneration": (BART, SEQ2SEQ),
    "MBartForConditionalGeneration": (BART, SEQ2SEQ),
    "T5ForConditionalGeneration": (T5, SEQ2SEQ),
    "WhisperForConditionalGeneration": (WHISPER, SPEECH),
    "ViTForImageClassification": (VISION, IMAGES),
    "CLIPModel": (TWO_TOWERS, PAIRS),
    "SiglipModel": (TWO_TOWERS, PAIRS),
}
# What a fresh process runs. AutoModel adds parts that the folder has no weights of (the pooler of
# a BERT); with one seed they are the same on both sides.
FRESH = """
import importlib.util, json, sys
import torch
import transformers

assert not importlib.util.find_spec("fold")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)
CAUSAL, MASKED, SEQ2SEQ, SPEECH, IMAGES, PAIRS = range(6)


def load(name, folder, **options):
    torch.manual_seed(0)
    return getattr(transformers, name).from_pretrained(folder, **options).eval()


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def ids(batch, length):
    return torch.randint(3, 50, (batch, length), generator=torch.Generator().manual_seed(3))


def uses(model, kind, is_auto):
    "Yield (name of a use, tensors that it gives)."
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[0, :4] = 0
    if kind in (MASKED, SEQ2SEQ, PAIRS):
        mask = mask.flip(1)  # padding behind the text
    x = {"input_ids": ids(3, 9)}
    if kind in (SPEECH, SEQ2SEQ):
        x["decoder_input_ids"] = ids(3, 5)
    if kind == SPEECH:
        x["input_features"] = drawn(3, 8, 16)
        del x["input_ids"]
    if kind in (IMAGES, PAIRS):
        x["pixel_values"] = drawn(3, 3, 16, 16)
    if kind == IMAGES:
        del x["input_ids"]
    yield "another batch and length", model(**x)
    if "input_ids" in x:
        padded = x | {"input_ids": x["input_ids"] * mask, "attention_mask": mask}
        out = model(**padded)
        if kind == CAUSAL:  # what padded positions give, nobody reads
            out = {name: y[mask.bool()] for name, y in tensors(out) if y.shape[:2] == mask.shape}
        elif kind == MASKED:
            out = {name: y[mask.bool()] if y.dim() == 3 else y for name, y in tensors(out)}
        elif kind == SEQ2SEQ:
            out = {name: y for name, y in tensors(out) if "encoder" not in name}
        yield "padding", out
    if kind == CAUSAL:
        first = model(x["input_ids"][:, :6], use_cache=True)
        yield "cache", model(x["input_ids"][:, 6:], past_key_values=first.past_key_values)
    if not is_auto and kind in (CAUSAL, SEQ2SEQ, SPEECH):
        given = {name: x[name] for name in ("input_ids", "input_features") if name in x}
        if kind != SPEECH:
            given = {"input_ids": padded["input_ids"], "attention_mask": mask}
        yield "beam search", {"tokens": model.generate(
            **given, num_beams=3, max_new_tokens=8, do_sample=False, pad_token_id=0
        )}


def tensors(out):
    return [(name, y) for name, y in out.items() if isinstance(y, torch.Tensor)]


def difference(a, b):
    "The largest, relative to the largest number; infinite for other shapes and tokens."
    if a.shape != b.shape or not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    largest = float((a - b).abs().max() / a.abs().max())
    return largest if largest == largest else float("inf")  # max() would drop a NaN


@torch.no_grad()
def compared(name, source, folder, kind, **options):
    "Use -> largest difference of what the two folders give."
    models = load(name, source), load(name, folder, **options)
    pairs = zip(*(uses(model, kind, name == "AutoModel") for model in models), strict=True)
    found = {}
    for (use, before), (_, after) in pairs:
        before, after = dict(tensors(before)), dict(tensors(after))
        assert before and before.keys() == after.keys(), use
        found[use] = max(difference(y, after[key]) for key, y in before.items())
    return found


found = {}
for source, folder, name, kind in json.loads(sys.argv[1]):
    found[folder] = {
        loader: compared(loader, source, folder, kind) for loader in (name, "AutoModel")
    }
    # With its RMSNorms
    for loader in json.load(open(f"{folder}/config.json")).get("auto_map", ()):
        found[folder][f"{loader}, trust_remote_code"] = compared(
            loader, source, folder, kind, trust_remote_code=True
        )
json.dump(found, open("found.json", "w"))
"""


@dataclass(frozen=True)
class Outcome:
    """What became of a conversion: a word of the table, and why."""

    word: str
    why: str = ""

    @property
    def is_right(self) -> bool:
        return self.word != "WRONG"


@torch.no_grad()
def write_source(name: str, folder: Path) -> None:
    """Write a float32 model whose gains, biases and means are not initial."""
    torch.manual_seed(0)
    keys, kind = ARCHITECTURES[name]
    cls = getattr(hf, name)
    model = shake(cls(cls.config_class(**keys))).float()
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())  # gains of few bits, so that 1 + weight is exact
    model.save_pretrained(folder)
    if kind == SPEECH:
        ids = torch.ones(2, 5, dtype=torch.int64)
        save_file(
            {"input_features": torch.randn(2, 8, 16), "decoder_input_ids": ids},
            folder / "inputs.safetensors",
        )


def write_converted(name: str, source: Path, to: str, out: Path) -> Outcome:
    """Convert by the command line."""
    words = ["--factor=2^-6"] if to == "rescaled" else []
    words += ["--transformers"] if to == "rms" else []  # a GPT-2 is folded as the others are
    if (source / "inputs.safetensors").exists():
        words.append(f"--inputs={source / 'inputs.safetensors'}")
    try:
        with redirect_stdout(StringIO()):
            convert.main([str(source), f"--to={to}", f"--out={out}", *words])
    except UserError as error:
        return Outcome("refused", str(error).removeprefix(f"{source}: "))
    return Outcome("written")


def judge(name: str, to: str, out: Path, found: dict[str, dict[str, float]]) -> Outcome:
    """Say whether the uses of a folder are equal, or said to be another function."""
    told = json.loads((out / "certificate.json").read_text())["not_covered"]
    # A T5 has no base model of its own: its AutoModel returns what are hidden states here.
    line = "hidden states" if name.startswith("T5") else "AutoModel of this folder"
    is_said = any(use.startswith(line) for use in told)
    bound = 0.0 if to == "rescaled" else 1e-5
    off = [
        (loader, f"{loader}, {use}: off by {difference:.1e}")
        for loader, differences in found.items()
        for use, difference in differences.items()
        if not difference <= bound
    ]
    whys = "; ".join(why for _, why in off)
    if not off:
        return Outcome("equal")
    if is_said and all(loader == "AutoModel" for loader, _ in off):
        return Outcome("said", whys)
    return Outcome("WRONG", whys)


def outcomes(names: list[str], folder: Path) -> dict[tuple[str, str], Outcome]:
    """(architecture, conversion) -> what became of it."""
    results = {}
    written = []
    for name in names:
        source = folder / name / "source"
        write_source(name, source)
        for to in TO:
            out = folder / name / to
            results[name, to] = write_converted(name, source, to, out)
            if results[name, to].word == "written":
                written.append((str(source), str(out), name, ARCHITECTURES[name][1]))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-c", FRESH, json.dumps(written)],
        cwd=folder,
        env=environment | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")},
        check=True,
    )
    found = json.loads((folder / "found.json").read_text())
    for name, to in results:
        out = folder / name / to
        if str(out) in found:
            results[name, to] = judge(name, to, out, found[str(out)])
    return results


def main() -> None:
    names = sys.argv[1:] or [*ARCHITECTURES]
    with tempfile.TemporaryDirectory() as folder:
        results = outcomes(names, Path(folder))
    for (name, to), outcome in results.items():
        if outcome.why:
            print(f"{name} --to={to}: {outcome.word}: {outcome.why}")
    print(f"\n{'':32}", *(f"{to:12}" for to in TO))
    for name in names:
        print(f"{name:32}", *(f"{results[name, to].word:12}" for to in TO))
    right = sum(outcome.is_right for outcome in results.values())
    print(f"{right} of {len(results)} equal, said or refused")


if __name__ == "__main__":
    main()
