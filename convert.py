"""Convert a model to another normalisation, with a certificate of what that did to its function.

    python convert.py out/layer --to=rms --out=out/layer-rms
        LayerNorm or cbwc -> RMSNorm: exact
    python convert.py out/taper --to=folded --out=out/taper-folded
        norms tapered away -> weights: exact
    python convert.py out/rms --to=coupled --inexact --out=out/rms-coupled
        RMSNorm -> CoupledNorm, alpha calibrated
    python convert.py out/rms-coupled --to=decode
        does its packed form decode the same?
    python convert.py out/layer --analyze
        which LayerNorms can become RMSNorm, and why
    python convert.py facebook/opt-350m --to=rms --out=out/opt-rms
        any model of transformers: exact
    python convert.py out/run --to=hf --out=FOLDER
        write it as transformers reads it

The first word is the model: a run folder, a checkpoint file, a Hugging Face folder or hub name, or
random:gpt2 and the like. A conversion is done again on float64 copies, with the given and with
random weights; what is not exact is refused without --inexact. DIR gets a checkpoint that every
program reads (train.py by --init_from), config.json and certificate.json; without --out nothing is
written. --to=decode has no --out: decode/step.py packs a model as it loads. --to=hf writes a
Hugging Face folder, tokenizer included: the stock architecture where all norms compute their own
statistic, else coupled_gpt2, coupled_qwen3 or coupled_llama (hf/coupled.py). A Hugging Face model
that our GPT does not load is folded as transformers computes it, as far as that goes, and DIR is a
folder of transformers with fold.json beside it: hub.load(DIR) of fold/hub.py is the model with its
RMSNorms, and transformers alone reads it as LayerNorms with the same function. The last line of
output is JSON.
"""

import json
import os
import shlex
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fold
from common.errors import ConfigError, FoldError, UserError, run_program
from common.output import write_bytes_atomically, writing
from configurator import key, parse_args
from decode.pack import pack
from decode.step import decode_logits
from fold import Report, gpt
from fold.certificate import Certificate, Inputs, certify, run, touched
from fold.choice import LEFT
from fold.hub import example_inputs, load, load_pretrained, read_inputs, save
from hf.config import COUPLED, gpt_config
from hf.hub import HUB_NAME, read_config, resolve_hub
from hf.weights import export_hf
from kernels.decode import reference as decode_reference
from load import load_model
from model import GPT, GPTConfig
from posthoc.coupling import text_windows, to_coupled
from training.checkpoint import BEST, LAST, save_checkpoint

WINDOWS, LENGTH = 32, 256  # of text, at most; every second one calibrates, the others judge


@dataclass(frozen=True)
class ConvertConfig:
    """Keys of convert.py."""

    to: str = key("", "what to convert to", ("rms", "folded", "coupled", "decode", "hf"))
    out: str = key("", "new folder for the converted model ('': check only)")
    inexact: bool = key(False, "allow a conversion that changes the model's function")
    analyze: bool = key(False, "print a verdict on every LayerNorm and convert nothing")
    rules: str = key(
        "exact", "analyze: exact, or paper, which counts as the CBWC paper does", ("exact", "paper")
    )
    transformers: bool = key(
        False, "rms, analyze: take transformers' model, also where our GPT could load it"
    )
    untie: bool = key(
        True, "rms: what is used elsewhere, too (a tied head), keeps uncentred weights of its own"
    )
    insert: bool = key(
        False,
        "rms, transformers' models: insert centrings where they fold more norms than they are",
    )
    inputs: str = key(
        "",
        "rms, analyze, transformers' models: safetensors file of example inputs ('': random ones)",
    )
    norm_plan: str = key(
        "", "coupled: the plan to convert to, e.g. 'RR Rs R' ('': Rs in every block)"
    )
    text: str = key(
        "", "coupled: file of text for alpha and KL ('': text that the model writes itself)"
    )
    seed: int = key(0, "of random tokens")

    def __post_init__(self) -> None:
        if bool(self.to) == self.analyze:
            raise ConfigError(
                "say what to do: --to=rms, folded, coupled, decode or hf; or --analyze"
            )
        if self.to == "decode" and self.out:
            raise ConfigError(
                f"out={self.out}: decode/step.py packs a model as it loads, there is no file: "
                "remove it"
            )
        if self.to == "hf" and not self.out:
            raise ConfigError("to=hf: say where to: --out=FOLDER")
        if self.to != "coupled" and (self.norm_plan or self.text):
            raise ConfigError("norm_plan and text are keys of --to=coupled: remove them")
        if self.to != "rms" and (self.insert or not self.untie):
            raise ConfigError("untie and insert are keys of --to=rms: remove them")
        if self.to not in ("rms", "") and (self.transformers or self.inputs):
            raise ConfigError(
                "transformers and inputs are keys of --to=rms and --analyze: remove them"
            )
        if self.to and self.rules != "exact":
            raise ConfigError(f"rules={self.rules} is for counting, with --analyze: remove it")
        if self.out and any(Path(self.out).glob("*")):
            raise ConfigError(f"out={self.out}: there is something in it: choose a new folder")


# -------------------------------------------------------------------------------------- conversions


class DecodeForm(nn.Module):
    """What decode/step.py runs, fully fused, with the face of a model: token ids (B, T) -> logits
    (B, T, n_vocab).
    """

    def __init__(self, model: GPT):
        super().__init__()
        self.packed = pack(model, "fused")

    def forward(self, idx: Tensor) -> Tensor:
        packed, (batch, length) = self.packed, idx.shape
        shape = batch, packed.config.kv_heads, length, packed.config.head_channels
        caches = [tuple(packed.wte.new_zeros(shape) for _ in range(2)) for _ in packed.blocks]
        return decode_logits(
            decode_reference, packed, caches, idx, torch.arange(length, device=idx.device)
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The packed weights, for the certificate: entries and exits in the order of the step."""
        found = {"wte.weight": self.packed.wte, "wpe.weight": self.packed.wpe}
        for kind, parts in (("entry", self.packed.entries), ("exit", self.packed.exits)):
            for index, part in enumerate(parts):
                found |= {f"{kind}.{index}.weight": part.weight, f"{kind}.{index}.bias": part.bias}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def convert(model: GPT, config: ConvertConfig) -> tuple[GPT | DecodeForm, Certificate]:
    """The converted model and its certificate. Raises FoldError for a model that the conversion
    does not fit, and for one that is not exact and not allowed to be.
    """
    tokens, exact = random_tokens(model, config.seed), True
    if config.insert or config.inputs:
        raise ConfigError("insert and inputs are for models of transformers: remove them")
    if config.to == "rms":
        if model.config.tie_embeddings and not config.untie:
            raise FoldError(
                "the head is the embedding, which has to be centred: "
                "--untie gives it weights of its own"
            )
        rewrite = gpt.to_rms
    elif config.to == "folded":
        rewrite, exact = partial(gpt.to_folded, exact=not config.inexact), not config.inexact
    elif config.to == "decode":
        rewrite = DecodeForm
    elif model.config.norm_type == "coupled":
        rewrite = gpt.absorb_alpha
    else:
        if not config.inexact:
            raise FoldError(
                "--to=coupled changes this model's function: add --inexact to have it all the same"
            )
        tokens, exact = sample_tokens(model, config), False
        rewrite, tokens = partial(to_coupled, plan=config.norm_plan, idx=tokens[::2]), tokens[1::2]
    what = f"{model.config.norm_type} -> {config.to}"
    after, certificate = certify(
        model, rewrite, (tokens,), what=what, random_weights=exact, logits=lambda out: out
    )
    if not certificate.ok and not config.inexact:
        raise FoldError(
            f"{what} is not exact ({certificate.reason}): --inexact writes it all the same"
        )
    if isinstance(after, DecodeForm):
        folded = sum(entry.norm is None for entry in after.packed.entries)
    else:
        before, now = model.plan.letters, after.plan.letters
        folded = {"rms": len(now), "folded": before.count("T"), "coupled": now.count("s")}[
            config.to
        ]
    return after, replace(certificate, folded=folded)


def random_tokens(model: GPT, seed: int) -> Tensor:
    """Token ids (2, T), T at most 64."""
    shape = 2, min(model.config.block_size, 64)
    return torch.randint(model.n_vocab, shape, generator=torch.Generator().manual_seed(seed))


def sample_tokens(model: GPT, config: ConvertConfig) -> Tensor:
    """Token ids (N, T), N even and at most WINDOWS, T at most LENGTH: of the text file, or what the
    model writes.
    """
    length = min(model.config.block_size, LENGTH)
    if not config.text:
        start = torch.randint(
            model.n_vocab, (WINDOWS, 1), generator=torch.Generator().manual_seed(config.seed)
        )
        return model.generate(
            start, length - 1, generator=torch.Generator().manual_seed(config.seed)
        )
    return text_windows(config.text, model.meta, length, WINDOWS)


# --------------------------------------------------------------------------- models of transformers


def is_foreign(spec: str, config: ConvertConfig) -> bool:
    """Is it transformers' model that is meant: one that our GPT does not load, or shall not?"""
    folder = (
        resolve_hub(spec) if not Path(spec).exists() and HUB_NAME.fullmatch(spec) else Path(spec)
    )
    if (
        not (folder / "config.json").exists()
        or (folder / BEST).exists()
        or (folder / LAST).exists()
    ):
        if config.transformers:
            raise ConfigError(
                f"transformers=True: {spec} is no Hugging Face folder or hub name: leave it out"
            )
        return False
    try:
        gpt_config(read_config(folder), spec)
    except UserError:
        return True
    return config.transformers


def foreign_inputs(model: nn.Module, config: ConvertConfig) -> dict[str, Any]:
    return (
        read_inputs(config.inputs, model) if config.inputs else example_inputs(model, config.seed)
    )


def convert_foreign(spec: str, config: ConvertConfig) -> tuple[nn.Module, Certificate, Report]:
    """Fold a model of transformers; with `out`, what is written is loaded again and compared.
    Raises FoldError where nothing folds, or not exactly.
    """
    model = load_pretrained(spec)
    inputs = foreign_inputs(model, config)
    report = fold.analyze(model, inputs)
    after, certificate = fold.fold(model, report, untie=config.untie, insert=config.insert)
    if not certificate.ok:
        raise FoldError(f"{spec}: the fold is not exact ({certificate.reason})")
    if not certificate.folded:
        first = next((row.reason for row in report.rows), "it has none")
        raise FoldError(
            f"{spec}: none of {report.total} LayerNorms folds{ways(report, config)}: {first}"
        )
    if config.out:
        write_foreign(after, Path(config.out).resolve(), certificate, spec, inputs)
    return after, certificate, report


def write_foreign(
    model: nn.Module, out: Path, certificate: Certificate, spec: str, inputs: Inputs
) -> None:
    """Save under another name, load, compare, and only then rename. Raises UserError."""
    with writing(out.parent), TemporaryDirectory(dir=out.parent, prefix=f"{out.name}-") as folder:
        save(model, Path(folder) / out.name, certificate, spec)
        again = load(Path(folder) / out.name)
        if touched(model, again) or not same(run(model, inputs, False), run(again, inputs, False)):
            raise UserError(
                f"out={out}: nothing written: loaded again, {spec} would be another model: "
                "tell us of it"
            )
        os.replace(Path(folder) / out.name, out)


def same(first: Any, second: Any) -> bool:
    """Do two outputs hold the same tensors?"""
    pairs = zip(tree_leaves(first), tree_leaves(second), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))


def ways(report: Report, config: ConvertConfig) -> str:
    """What other keys would fold, in words."""
    untie = not config.untie and report.untied > report.strict
    more = [f"--untie {report.untied}"] if untie else []
    folded = report.untied if config.untie else report.strict
    insert = report.worth and not config.insert and report.practical > folded
    more += [f"--insert {report.practical}"] if insert else []
    return f" ({', '.join(more)} would fold)" if more else ""


def analyze(spec: str, config: ConvertConfig) -> Report:
    """fold/__init__.py's verdicts on the LayerNorms of a model, ours or transformers'.

    Our tied head is taken as a module that shares the embedding's weights: --to=rms can give it
    weights of its own.
    """
    if is_foreign(spec, config):
        model = load_pretrained(spec)
        return fold.analyze(model, foreign_inputs(model, config), config.rules)
    model = load_model(spec)
    if model.lm_head is None:
        with torch.device("meta"):
            model.lm_head = nn.Linear(*reversed(model.wte.weight.shape), bias=False)
        model.lm_head.weight = model.wte.weight
        model.logits = lambda hidden: model.lm_head(hidden)[..., : model.n_vocab]
    report = fold.analyze(model, (random_tokens(model, config.seed),), config.rules)
    rows = [replace(row, reason=row.reason.partition(LEFT)[0]) for row in report.rows]
    # fold.gpt.to_rms folds our norms, with the addition that is in them
    return replace(report, rows=rows)


# ------------------------------------------------------------------------------------------ program


def write(out: Path, model: GPT, certificate: Certificate) -> None:
    """A run folder without a run: checkpoint (weights alone), config.json, certificate.json."""
    config = asdict(model.config)
    with writing(out):
        write_bytes_atomically(out / "config.json", (json.dumps(config, indent=1) + "\n").encode())
        write_bytes_atomically(out / "certificate.json", (certificate.to_json() + "\n").encode())
    save_checkpoint(
        out / BEST, {"step": 0, "config": config, "meta": model.meta, "model": model.state_dict()}
    )


def model_keys(model: GPT) -> str:
    """The keys of a model that are not train.py's defaults, as the command line takes them; its
    data set the rest.
    """
    ours, default = asdict(model.config), asdict(GPTConfig())
    words = {
        name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in ours.items()
        if value != default[name] and name != "n_vocab"
    }
    return " ".join(f"--{name}={shlex.quote(word)}" for name, word in words.items())


def export(spec: str, out: str) -> None:
    """Write a model of ours as a Hugging Face folder, and say how it is read."""
    folder = export_hf(load_model(spec), out)
    written = read_config(folder)
    is_coupled = written["model_type"].startswith(COUPLED)
    where = (
        f"with {Path(__file__).parent} on PYTHONPATH: from hf.coupled import register; register(); "
    )
    print(
        f"wrote {folder} ({written['architectures'][0]}); {where if is_coupled else ''}import "
        "transformers; "
        f"transformers.AutoModelForCausalLM.from_pretrained({str(folder.resolve())!r})"
    )
    print(
        json.dumps(
            {"spec": spec, "to": "hf", "out": out, "architecture": written["architectures"][0]}
        )
    )


def main(argv: list[str]) -> None:
    config, spec = parse_args(ConvertConfig, argv, __doc__, spec=True)
    if config.to == "hf":
        return export(spec, config.out)
    if config.analyze:
        report = analyze(spec, config)
        print(report)
        print(json.dumps(json.loads(report.to_json()) | {"spec": spec}))
        return
    if config.to == "rms" and is_foreign(spec, config):
        after, certificate, report = convert_foreign(spec, config)
        print(certificate)
        print(f"folded {certificate.folded} of {report.total} LayerNorms{ways(report, config)}")
        if config.out:
            print(
                f"wrote {config.out}; read it with `from fold import hub; "
                f"hub.load({config.out!r})`, or, with LayerNorms, transformers"
            )
    else:
        model = load_model(spec)
        after, certificate = convert(model, config)
        print(certificate)
        if config.out:
            write(Path(config.out), after, certificate)
            print(
                f"wrote {config.out}; to train on: python train.py --init_from={config.out} "
                f"{model_keys(after)} --data_dir=... and the settings of training"
            )
    judged = certificate.checks[0]
    print(
        json.dumps(
            {
                "spec": spec,
                "to": config.to,
                "out": config.out,
                "ok": certificate.ok,
                "max_rel": certificate.max_rel,
                "kl": judged.kl,
                "argmax_agreement": judged.argmax_agreement,
                "folded": certificate.folded,
                "inserted": certificate.inserted,
            }
        )
    )


if __name__ == "__main__":
    run_program(main)
