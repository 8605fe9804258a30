"""Convert a model to another normalisation, and certify what that did to its function.

    python convert.py out/layer --to=rms --out=out/layer-rms
        LayerNorm or cbwc -> RMSNorm, gains of one_plus or lns -> plain gains: exact
    python convert.py out/taper --to=folded --out=out/taper-folded
        norms tapered away -> weights: exact
    python convert.py out/rms --to=weightless --out=out/rms-weightless
        gains and biases of norms -> the linears that alone read them: exact
    python convert.py out/mine --norm_file=my_norm.py --to=weightless --out=out/mine-weightless
        a model whose norm is in a file
    python convert.py out/rms --to=coupled --inexact --out=out/rms-coupled
        RMSNorm -> CoupledNorm, alpha calibrated
    python convert.py out/layer --analyze
        which LayerNorms can become RMSNorm, and why
    python convert.py openai-community/gpt2 --to=rms --out=out/gpt2-rms
        a model of transformers with RMSNorms: exact
    python convert.py facebook/opt-125m --to=rms --out=out/opt-rms
        any other model of transformers: exact
    python convert.py Qwen/Qwen3-0.6B --to=weightless --out=out/qwen3-weightless
        any model of transformers, written as it was with gains of 1: exact
    python convert.py google/gemma-3-1b-pt --to=rescaled --factor=2^-6 --out=out/gemma-float16
        any model of transformers whose residual stream is too large for float16: exact
    python convert.py Qwen/Qwen3-0.6B --to=rotated --out=out/qwen3-rotated
        any model of transformers with norms on its residual stream, for quantisation: exact
    python convert.py out/run --to=hf --out=FOLDER
        write it as transformers reads it

The first argument is the model: a run folder, a checkpoint file, a Hugging Face folder or hub name,
or random:gpt2 and the like. What comes from Hugging Face is written as transformers reads it.

Every conversion is done again on float64 copies, with the given weights and with random ones. One
that is not exact is refused without --inexact. Without --out nothing is written.

--to=rms, folded, weightless and coupled write a folder that every program reads (train.py by
--init_from): a checkpoint, config.json and certificate.json.

--to=hf writes a Hugging Face folder, tokenizer included; so do --to=rms and coupled of a Hugging
Face model that our GPT loads. The architecture is a standard one where it has such norms, else
coupled_gpt2, coupled_qwen3 or coupled_llama, whose code (hf/modeling_coupled.py) goes along:
transformers reads the folder with trust_remote_code=True.

A Hugging Face model that our GPT does not load is folded as transformers computes it. Then --out is
a folder of transformers. By trust_remote_code=True it is the model with its RMSNorms, and so is
hub.load(FOLDER) of fold/hub.py; without, transformers reads LayerNorms, and the same function.

--to=weightless leaves a Hugging Face model what it is: a folder of the same architecture and keys,
with gains of 1 (Gemma: 0, for 1 + weight). A head that is the embedding gets weights of its own, as
the final norm's gain goes into it; with --untie=False that gain stays. The certificate names what
stays and why.

--to=rescaled multiplies the residual stream by a power of two, eps of the norms by its square: a
stock folder whose float32 outputs are equal to the bit, and finite in float16. --factor=auto
measures the stream on --text=FILE.

--to=rotated does what weightless does, and multiplies the residual stream by a random orthogonal
matrix (--seed), so that no channel is larger than the others: a stock folder, for quantisation to
few bits.

With --json the last line of output is JSON.
"""

import gc
import json
import re
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import fold
from common.errors import ConfigError, FoldError, UserError, run_program
from common.hub import model_folder, read_config
from common.inputs import check_regular
from common.output import whole_folder
from configurator import key, parse_args
from fold import Report, gpt
from fold.certificate import FOLDED_USES, Certificate, certify
from fold.choice import LEFT
from fold.graph import Graph
from fold.hub import example_inputs, load_as_saved, no_cache, save, with_source
from fold.rescaling import automatic_factor, plan_rescaling, rescale
from fold.rotation import rotate
from hf.config import COUPLED, architecture, gpt_config
from hf.weights import export_hf
from load import load_model
from model import GPT
from norm_files import take_norm_file
from norm_types import SHARED
from posthoc.coupling import refusal, text_windows, to_coupled
from training.checkpoint import BEST, LAST
from training.run import write_model

# The most text that calibrates alpha and measures the KL divergence: windows, and tokens of each.
# Every second window calibrates, the others measure.
WINDOWS = 32
LENGTH = 256
# Conversions that models of transformers have, too; the last three leave its class as it is
OF_ANY_MODEL = ("rms", "weightless", "rescaled", "rotated")
STOCK = OF_ANY_MODEL[1:]


@dataclass(frozen=True)
class ConvertConfig:
    """Keys of convert.py."""

    to: str = key(
        "",
        "what to convert to",
        ("rms", "folded", "weightless", "rescaled", "rotated", "coupled", "hf"),
    )
    out: str = key("", "new folder for the converted model ('': check only)")
    inexact: bool = key(False, "allow a conversion that changes the model's function")
    analyze: bool = key(False, "print a verdict on every LayerNorm and convert nothing")
    rules: str = key(
        "exact", "analyze: exact, or paper to count as the CBWC paper does", ("exact", "paper")
    )
    transformers: bool = key(
        False, "rms, analyze: take transformers' model even if our GPT could load it"
    )
    untie: bool = key(
        True,
        "rms, weightless, rotated: a tied head gets weights of its own where the embedding is "
        "centred, or the head takes over a gain",
    )
    keep_final_gain: bool = key(
        False,
        "weightless, transformers' models: norms that the head reads keep their gains, so that "
        "AutoModel and hidden states are the same, too",
    )
    insert: bool = key(
        False,
        "rms, transformers' models: insert centrings where they fold more norms than they are",
    )
    inputs: str = key(
        "",
        "rms, weightless, rescaled, rotated, analyze, transformers' models: safetensors file of "
        "inputs ('': random ones)",
    )
    norm_plan: str = key(
        "",
        "coupled: the plan to convert to, e.g. 'RR Rs R' ('': Rs in every block but the first)",
    )
    text: str = key(
        "",
        "coupled: text file for calibration and KL ('': text that the model generates itself); "
        "rescaled: text on which factor=auto measures the stream",
    )
    factor: str = key(
        "auto",
        "rescaled: what the residual stream is multiplied by, a power of two as 2^-6; auto: the "
        "largest that keeps it at most a quarter of float16's range",
    )
    seed: int = key(0, "seed of random inputs, generated text and the rotation")
    json: bool = key(False, "print the result as a line of JSON at the end")

    def __post_init__(self) -> None:
        if bool(self.to) == self.analyze:
            raise ConfigError(
                "say what to do: --to=rms, folded, weightless, rescaled, rotated, coupled or hf; "
                "or --analyze"
            )
        if self.to == "hf" and not self.out:
            raise ConfigError("to=hf: say where to: --out=FOLDER")
        readers = {
            "out": ("rms", "folded", "weightless", "rescaled", "rotated", "coupled", "hf"),
            "rules": ("",),
            "norm_plan": ("coupled",),
            "text": ("coupled", "rescaled"),
            "factor": ("rescaled",),
            "insert": ("rms",),
            "untie": ("rms", "weightless", "rotated"),
            "keep_final_gain": ("weightless",),
            "transformers": ("rms", ""),
            "inputs": ("rms", "weightless", "rescaled", "rotated", ""),
        }
        if self.to == "rescaled" and (self.factor == "auto") != bool(self.text):
            raise ConfigError(
                "factor=auto measures the stream on a text: --text=FILE, or --factor=2^-6"
            )
        default = {field.name: field.default for field in fields(self)}
        for name, conversions in readers.items():
            if self.to not in conversions and getattr(self, name) != default[name]:
                known = ", ".join(f"--to={to}" if to else "--analyze" for to in conversions)
                raise ConfigError(f"{name} is a key of {known}: remove it")
        if self.out and any(Path(self.out).glob("*")):
            raise ConfigError(f"out={self.out}: there is something in it: choose a new folder")


# -------------------------------------------------------------------------------------- conversions


def convert(model: GPT, config: ConvertConfig) -> tuple[GPT, Certificate]:
    """Convert a model of ours, by all but --to=hf.

    Returns:
        (converted model, certificate)

    Raises:
        FoldError: the conversion does not fit the model, or is not exact and not allowed to be.
    """
    if config.insert or config.inputs or config.keep_final_gain:
        raise ConfigError(
            "insert, inputs and keep_final_gain are for models of transformers: remove them"
        )
    if config.to in ("rescaled", "rotated"):
        raise ConfigError(
            f"--to={config.to} is for stock models of transformers: --to=hf writes a run of ours "
            "as one where its norms are stock, too, and coupled ones are not"
        )
    tokens = random_tokens(model, config.seed)
    exact = True  # for any weights
    if config.to == "rms":
        is_tied = model.config.tie_embeddings and gpt.centers_embeddings(model)
        if is_tied and not config.untie:
            raise FoldError(
                "the head is the embedding, which has to be centred: "
                "--untie gives it weights of its own"
            )
        rewrite = gpt.to_rms
    elif config.to == "folded":
        exact = not config.inexact
        rewrite = partial(gpt.to_folded, exact=exact)
    elif config.to == "weightless":
        folds, left = gpt.gain_folds(model, config.untie)
        rewrite = partial(gpt.to_weightless, folds=folds, untie=config.untie)
    elif SHARED in model.plan.letters:
        rewrite = gpt.absorb_alpha
    else:
        if why := refusal(model):  # before text is generated
            raise FoldError(why)
        if not config.inexact:
            raise FoldError(
                "--to=coupled changes this model's function: add --inexact to convert it anyway"
            )
        exact = False
        tokens = sample_tokens(model, config)
        rewrite = partial(to_coupled, plan=config.norm_plan, idx=tokens[::2])
        tokens = tokens[1::2]
    what = f"{model.config.norm_type} -> {config.to}"
    after, certificate = certify(model, rewrite, (tokens,), what=what, random_weights=exact)
    if not certificate.ok and not config.inexact:
        raise FoldError(
            f"{what} is not exact ({certificate.reason}): --inexact writes it nevertheless"
        )
    # Folded norms are counted for gains alone.
    told = {"kl": mean_kl(model, after, tokens), "folded": None, "to": config.to}
    if config.to == "rms":
        told |= {"not_covered": ["hidden states between blocks: they are those of centred weights"]}
    if config.to == "weightless":
        told |= {"folded": len(folds), "refusals": left}
        if any(target.name.startswith("lm_head.") for one in folds for target in one.targets):
            use = "the last hidden state (AutoModel, output_hidden_states): the head has its gain"
            told |= {"not_covered": [use]}
    return after, replace(certificate, **told)


@torch.no_grad()
def mean_kl(before: GPT, after: GPT, tokens: Tensor) -> float:
    """Return the KL(before || after) of next-token distributions in nats a token."""
    p, q = (one(tokens).double().log_softmax(-1) for one in (before, after))
    return float((p.exp() * (p - q)).sum(-1).mean())


def random_tokens(model: GPT, seed: int) -> Tensor:
    """Draw token ids (2, T), T at most 64."""
    shape = (2, min(model.config.block_size, 64))
    return torch.randint(model.n_vocab, shape, generator=torch.Generator().manual_seed(seed))


def sample_tokens(model: GPT, config: ConvertConfig) -> Tensor:
    """Return windows of the text file, or of text that the model generates.

    Returns:
        Token ids (N, T), N even and at most WINDOWS, T at most LENGTH.
    """
    length = min(model.config.block_size, LENGTH)
    if config.text:
        return text_windows(config.text, model.meta, length, WINDOWS)
    generator = torch.Generator().manual_seed(config.seed)
    start = torch.randint(model.n_vocab, (WINDOWS, 1), generator=generator)
    return model.generate(start, length - 1, generator=generator)


# --------------------------------------------------------------------------- models of transformers


def is_of_hub(spec: str) -> bool:
    """Is a model a Hugging Face folder or a hub name, and not a run's folder?"""
    folder = model_folder(spec)
    is_run = (folder / BEST).exists() or (folder / LAST).exists()
    return (folder / "config.json").exists() and not is_run


def is_foreign(spec: str, config: ConvertConfig) -> bool:
    """Tell whether transformers' model is meant, not ours.

    That is a Hugging Face model that our GPT does not load, or any with --transformers, or a stock
    one for --to=weightless, which leaves it what it is.
    """
    if not is_of_hub(spec):
        if config.transformers:
            raise ConfigError(
                f"transformers=True: {spec} is no Hugging Face folder or hub name: leave it out"
            )
        return False
    hf = read_config(model_folder(spec))
    try:
        gpt_config(hf, spec)
    except UserError:
        return True
    is_stock = not architecture(hf).startswith(COUPLED)
    return config.transformers or (config.to in STOCK and is_stock)


def foreign_inputs(model: nn.Module, config: ConvertConfig) -> dict[str, Any]:
    """Return example inputs of a transformers model: of the file --inputs, or random ones."""
    if not config.inputs:
        return example_inputs(model, config.seed)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_regular(Path(config.inputs))
    try:
        inputs = load_file(config.inputs)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"inputs={config.inputs}: not a safetensors file that can be read ({error}): write one "
            "with safetensors.torch.save_file"
        ) from None
    name = model.main_input_name
    if name not in inputs and "inputs_embeds" not in inputs:
        raise ConfigError(
            f"inputs={config.inputs}: no {name} in it, which {type(model).__name__} reads; it has "
            f"{', '.join(inputs) or 'nothing'}: name the tensors as the model's arguments"
        )
    return inputs | no_cache(model)


class Folded(NamedTuple):
    """A model of transformers that was converted.

    Attributes:
        inputs: on which it was checked.
        lines: about it.
        how: it is read once it is written.
    """

    model: nn.Module
    certificate: Certificate
    inputs: dict[str, Any]
    lines: list[str]
    how: str


def convert_foreign(spec: str, config: ConvertConfig) -> tuple[Certificate, list[str]]:
    """Fold a model of transformers, and write it if `out` is set.

    Returns:
        The certificate, and lines about it.

    Raises:
        FoldError: nothing folds, or the fold is not exact.
    """
    folded = fold_foreign(spec, config)
    lines = folded.lines
    if config.out:
        gc.collect()  # the model before, of which the analysis was in a cycle
        save(folded.model, config.out, folded.certificate, spec, folded.inputs)
        lines = [f"wrote {config.out}; {folded.how}", *lines]
    return folded.certificate, lines


def fold_foreign(spec: str, config: ConvertConfig) -> Folded:
    """Convert a model of transformers. The model before is let go.

    Raises:
        FoldError: nothing folds, or the fold is not exact.
    """
    model = load_as_saved(spec)
    inputs = foreign_inputs(model, config)
    how = f"what loads {spec} loads it"
    lines: list[str] = []
    if config.to == "weightless":
        after, certificate = fold.fold_gains(model, inputs, config.untie, config.keep_final_gain)
        lines = left_lines(certificate)
    elif config.to == "rescaled":
        factor = scale_factor(model, inputs, spec, config)
        after, certificate = rescale(model, inputs, factor)
    elif config.to == "rotated":
        after, certificate = rotate(model, inputs, config.seed, config.untie)
        lines = left_lines(certificate)
    else:
        report = fold.analyze(model, inputs)
        after, certificate = fold.fold(model, report, untie=config.untie, insert=config.insert)
        counts = (
            f"of {report.total} LayerNorms ({report.untied} fold untied, {report.practical} with "
            "centrings inserted)"
        )
        lines = [f"folded {certificate.folded} {counts}"]
        if certificate.ok and not certificate.folded:
            first = next((row.reason for row in report.rows), "it has none")
            raise FoldError(f"{spec}: none {counts} folds: {first}")
        more = report.analysis.choose(config.untie, insert=True, hooks=True)
        if len(more.norms) > certificate.folded:
            inserted = len(more.centrings())
            lines.append(f"with --insert {len(more.norms)} fold ({inserted} centrings inserted)")
        how = (
            f"transformers reads it with LayerNorms (the same function), with RMSNorms by "
            f"trust_remote_code=True, or `from fold import hub; hub.load({config.out!r})`"
        )
    if not certificate.ok:
        raise FoldError(f"{spec}: the fold is not exact ({certificate.reason})")
    return Folded(after, certificate, inputs, lines, how)


def scale_factor(
    model: nn.Module, inputs: dict[str, Any], spec: str, config: ConvertConfig
) -> float:
    """Return the factor that the key says, as 2^-6; or measure the stream on the text (auto)."""
    if config.factor == "auto":
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        meta = {"tokenizer": "hf", "path": str(model_folder(spec))}
        windows = text_windows(config.text, meta, min(most or LENGTH, LENGTH), WINDOWS)
        names = [name for name in ("input_ids", "decoder_input_ids") if name in inputs]
        examples = [inputs | dict.fromkeys(names, window[None]) for window in windows]
        return automatic_factor(model, examples, plan_rescaling(Graph(model, inputs)))
    found = re.fullmatch(r"2\^(-?\d+)", config.factor)
    if not found:
        raise ConfigError(f"factor={config.factor}: it is a power of two, as 2^-6, or auto")
    return 2.0 ** int(found[1])


def left_lines(certificate: Certificate) -> list[str]:
    """Say which parameters stay and why, one line for all blocks with the same reason."""
    kinds = Counter(
        (re.sub(r"\.\d+\.", ".N.", name), re.sub(r"\.\d+(?=\.|\b)", ".N", why))
        for name, why in certificate.refusals.items()
    )
    return [
        f"left: {name}{f' ({count})' if count > 1 else ''}: {why}"
        for (name, why), count in kinds.items()
    ]


def logits_of_head(model: GPT, hidden: Tensor) -> Tensor:
    """Return logits (..., n_vocab) by the head as a module; hidden states are (..., C)."""
    return model.lm_head(hidden)[..., : model.n_vocab]


def analyze(spec: str, config: ConvertConfig) -> Report:
    """Analyse the LayerNorms of a model, ours or transformers', as fold.analyze does."""
    if is_foreign(spec, config):
        model = load_as_saved(spec)
        return fold.analyze(model, foreign_inputs(model, config), config.rules)
    model = load_model(spec)
    if model.lm_head is None:
        # Our tied head is the embedding itself. As a module that shares the embedding's weights it
        # can be untied in the analysis, as --to=rms does it.
        with torch.device("meta"):
            model.lm_head = nn.Linear(*reversed(model.wte.weight.shape), bias=False)
        model.lm_head.weight = model.wte.weight
        model.logits = MethodType(logits_of_head, model)  # a copy gets its own
    report = fold.analyze(model, (random_tokens(model, config.seed),), config.rules)
    if set(model.plan.letters) <= set("LRPBI"):
        # What fold.fold cannot write into our norms, which add as well, fold.gpt.to_rms can.
        rows = [replace(row, reason=row.reason.partition(LEFT)[0]) for row in report.rows]
        report = replace(report, rows=rows)
    return report


# ------------------------------------------------------------------------------------------ program


def export(model: GPT, out: str, certificate: bytes) -> str:
    """Write a model of ours as a Hugging Face folder. Returns how to read it."""
    folder = export_hf(model, out, certificate=certificate)
    written = read_config(folder)
    trust = ", trust_remote_code=True" if "auto_map" in written else ""
    return (
        f"wrote {folder} ({written['architectures'][0]}); import transformers; "
        f"transformers.AutoModelForCausalLM.from_pretrained({str(folder.resolve())!r}{trust})"
        + ("; AutoTokenizer needs trust_remote_code=True too" if trust else "")
    )


def convert_ours(spec: str, config: ConvertConfig) -> tuple[Certificate, list[str]]:
    """Convert a model of ours, and write it if `out` is set; as convert_foreign."""
    after, certificate = convert(load_model(spec), config)
    lines = left_lines(certificate)
    if config.to == "coupled" and SHARED in after.plan.letters:
        is_shared = np.array([*after.plan.letters]) == SHARED
        alpha = np.broadcast_to(after.config.coupled_alpha, is_shared.shape)[is_shared]
        lines.append(
            f"norm plan {after.plan}, alpha of each {SHARED} in turn: "
            f"{', '.join(f'{a:.4g}' for a in alpha)}"
        )
    if is_of_hub(spec):  # our own models have no adapters
        uses = [*certificate.not_covered, *FOLDED_USES]
        certificate = replace(certificate, not_covered=uses)
    if config.out:
        wrote = f"wrote {config.out}"
        told = with_source(certificate, spec)
        if is_of_hub(spec):
            wrote = export(after, config.out, told)
        else:  # a run folder without a run: weights, config.json and certificate.json
            with whole_folder(Path(config.out)) as folder:
                (folder / "certificate.json").write_bytes(told)
                write_model(after, folder)
        train = f"to train on: python train.py --init_from={config.out} --data_dir=..."
        lines = [wrote, f"{train} and the settings of training", *lines]
    return certificate, lines


def main(argv: list[str]) -> None:
    config, spec = parse_args(ConvertConfig, take_norm_file(argv), __doc__, spec=True)
    told = {"spec": spec, "to": config.to, "out": config.out}
    if config.to == "hf":
        path = Path(spec, "certificate.json")
        print(export(load_model(spec), config.out, path.read_bytes() if path.is_file() else b""))
    elif config.analyze:
        report = analyze(spec, config)
        print(report)
        told |= json.loads(report.to_json())
    else:
        foreign = config.to in OF_ANY_MODEL and is_foreign(spec, config)
        certificate, lines = (convert_foreign if foreign else convert_ours)(spec, config)
        print(*lines, certificate, sep="\n")
        names = ("ok", "max_rel", "folded", "inserted", "kl")
        told |= {name: getattr(certificate, name) for name in names}
    if config.json:
        print(json.dumps(told))


if __name__ == "__main__":
    run_program(main)
