"""Plans parse and print, old configs mean what they meant, old layouts are built as they were.

python -m pytest tests/test_plan_grammar.py
"""

import json
import random
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import ROOT, close, random_sections

from common.errors import CheckpointError, ConfigError, run_program
from configurator import parse_args
from evidence.runs import by_arm, difference_in_settings, find_runs
from load import init_from, load_model
from model import GPT, GPTConfig
from norm_plan import NormConfig, NormPlan, foreign_keys, keys_of
from norm_types import NORM_TYPES
from norms import Norm
from train import TrainConfig
from train import main as train_main
from training.checkpoint import model_config, restore, save_checkpoint
from training.run import changed_keys

SHAPE = GPTConfig(vocab_size=32, block_size=8, n_layer=2, n_head=2, n_embd=8, bias=True)


def plan(norm_type: str, n_layer: int, norm_plan: str = "", **keys) -> NormPlan:
    config = NormConfig(norm_type=norm_type, norm_plan=norm_plan, **keys)
    return NormPlan(config, n_layer, 8, bias=False)


# ----------------------------------------------------------------------------- parsing and printing


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_random_plans_parse_and_print(norm_type):
    draw = random.Random(norm_type)
    for _ in range(60):
        n_layer = draw.randint(1, 9)
        sections = random_sections(draw, norm_type, n_layer)
        # Spaces mean nothing, and neither do sections at the end that are all I.
        spaced = ["".join(x + " " * draw.randint(0, 2) for x in letters) for letters in sections]
        while len(spaced) > 1 and set(sections[len(spaced) - 1]) == {"I"} and draw.random() < 0.5:
            spaced.pop()
        given = plan(norm_type, n_layer, "|".join(spaced))
        assert (given.letters, given.outputs, given.embedding) == sections
        printed = str(given)
        again = plan(norm_type, n_layer, printed)
        assert (again.letters, again.outputs, again.embedding) == sections
        assert str(again) == printed
        # The canonical form: nothing that could be left out, letters in pairs.
        last = printed.split(" | ")[-1]
        assert "|" not in printed or set(last) - {"I", " "}
        for letters in printed.split(" | "):
            assert all(len(pair) == 2 for pair in letters.split(" ")[:-1])
        is_plain = not set("PB") & set(sections[0]) and set(sections[1]) <= {"I"}
        assert given.adds_plainly == is_plain


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_a_default_plan_given_as_norm_plan_is_the_same(norm_type):
    for n_layer in range(1, 9):
        default = plan(norm_type, n_layer)
        given = plan(norm_type, n_layer, str(default))
        assert str(given) == str(default) and given.notes() == default.notes()
        assert (given.letters, given.outputs, given.embedding) == (
            default.letters,
            default.outputs,
            default.embedding,
        )


def test_a_middle_section_may_be_empty():
    assert str(plan("rms", 1, "RR R||R")) == "RR R | II | R"
    assert str(plan("rms", 1, "RR R | |")) == "RR R"


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_plans_are_those_of_the_manual(norm_type):
    """The third column of the table of docs/norms.md."""
    rows = (ROOT / "docs/norms.md").read_text().replace("&#124;", "!").splitlines()
    [row] = [row for row in rows if row.startswith(f"| `{norm_type}` |") and row.count(" | ") >= 5]
    printed = re.sub("</?code>|`", "", row.split(" | ")[2]).replace("!", "|")
    assert str(plan(norm_type, 4 if norm_type in ("coupled", "mixln") else 2)) == printed


@pytest.mark.parametrize(
    ("norm_type", "given", "keys", "words"),
    [
        ("rms", "RR R", {}, "2 blocks of norm_type=rms need 5 letters, each one of R"),
        ("rms", "RR RR RR", {}, "need 5 letters"),
        ("rms", "RR RR R | RR R", {}, "need 4 letters of the outputs"),
        ("rms", "RR RR R | RR RR | RR", {}, "need 1 letters of the embedding"),
        ("rms", "RR RR R | RR RR | R | R", {}, "of the embedding"),
        ("rms", "RR RX R", {}, "each one of R"),
        ("rms", "RR Rr R", {}, "each one of R"),
        ("lns", "RR LR R", {}, "each one of R"),
        ("post", "IP PB P", {}, "each one of IPRL"),
        ("keel", "Rs BB P", {}, "each one of IPBRL"),
        ("layer", "RR RR R", {}, "each one of L"),
        ("coupled", "Rs Rs R | Rs RR", {}, "of the outputs, each one of RI"),
        ("rms", "RR RR R | RR RR | L", {}, "of the embedding, each one of RI"),
        # Outputs and embedding norms that a type refuses
        ("cbwc", "RR RR R | RR RR", {}, "of the outputs, each one of I"),
        ("taper", "TT TT R | RR RR", {}, "of the outputs, each one of I"),
        ("olmo2", "II II R | RR RR | R", {}, "of the embedding, each one of I"),
        ("cupled", "", {}, "did you mean coupled?"),
        # s without an R before it
        ("coupled", "sR Rs R", {}, "position 0"),
        ("bhyt", "Rh Hh R", {}, "position 1 shares a statistic that no H computed"),
        ("seednorm", "", {"norm_gain": "none"}, "norm_gain=none"),
        ("coupled", "", {"coupled_first": 5}, "need 5 letters"),
        ("coupled", "Rs Rs R | RR RR", {"coupled_impl": "fold"}, "coupled_impl=fold"),
        ("coupled", "", {"coupled_alpha": (1.0, 1.1)}, "coupled_alpha needs one number or 5"),
        ("coupled", "", {"coupled_alpha": 0.0}, "coupled_alpha=0.0"),
        ("coupled", "", {"coupled_alpha": (1.0, 1.0, 1.0, 1.0, -1.0)}, "coupled_alpha"),
        ("rms", "", {"initial_gain": (1.0,) * 4}, "initial_gain needs one number or 5 or 10"),
        ("taper", "", {"norm_gain": "one_plus"}, "norm_gain=one_plus"),
        ("lns", "", {"norm_gain": "none"}, "norm_gain=none"),
        ("taper", "", {"taper_end": 1.0}, "taper_end=1"),
        ("rms", "", {"norm_groups": 0}, "norm_groups=0"),
        ("layer", "", {"norm_eps": float("nan")}, "norm_eps=nan"),
    ],
    ids=str,
)
def test_malformed_plans_are_refused(norm_type, given, keys, words):
    with pytest.raises(ConfigError) as caught:
        plan(norm_type, 2, given, **keys)
    assert words in str(caught.value) and "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------ older configs


# All norm keys of a config before the plan had outputs, with their defaults.
OLDER = {
    "norm_plan": "",
    "norm_eps": 1e-5,
    "norm_affine": True,
    "qk_norm": False,
    "kernels": "auto",
}
SIZES = {"vocab_size": 32, "block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 8, "bias": True}


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ({"qk_norm": True}, {"qk_kind": "head"}),
        # What is none anyway is the default: the run has no other name, and goes on.
        ({"qk_norm": False}, {"qk_kind": "none", "qk_norm": None}),
        ({"norm_affine": True}, {"norm_gain": "plain"}),
        ({"norm_affine": False}, {"norm_gain": "none"}),
        # convert.py wrote v_norm out, also where the type had it anyway.
        ({"v_norm": False}, {"has_v_norm": False}),
        ({"v_norm": True, "norm_type": "hybrid", "qk_norm": None}, {"has_v_norm": True}),
    ],
    ids=str,
)
def test_a_saved_key_of_before(old, today, tmp_path):
    saved = OLDER | SIZES | {"norm_type": "rms"} | old
    config = model_config(saved, tmp_path)
    assert {name: getattr(config, name) for name in today} == today
    if "v_norm" in old:
        with pytest.raises(CheckpointError, match="v_norm"):
            model_config(saved | {"v_norm": not old["v_norm"]}, tmp_path)


# (a retired key, its old default, another value, is a run with that one loaded?)
GONE = [
    ("qk_gain", True, False, False),
    ("v_norm", None, True, False),
    ("decay_gains", None, True, True),
    ("hellaswag_interval", 0, 20, True),
    ("compile_mode", "default", "max-autotune-no-cudagraphs", True),
    ("wandb_project", "nanonorm", "ours", None),
    ("wandb", "off", "offline", None),
]


@pytest.mark.parametrize(("name", "default", "other", "loads"), GONE)
def test_a_key_that_is_gone(name, default, other, loads, tmp_path, capsys, monkeypatch):
    """In a checkpoint its old default is ignored, and another value refused by name.

    A key of the training alone is refused where the run would go on. What wandb said, tracker says.
    """
    if name != "wandb_project":  # nanoGPT has it too, so it is translated
        monkeypatch.setattr("sys.argv", ["train.py", f"--{name}={other}"])
        with pytest.raises(SystemExit) as caught:
            run_program(train_main)
        assert caught.value.code == 2 and name in capsys.readouterr().err
    today = TrainConfig(**SIZES, norm_type="rms")
    model = GPT(today)
    state = {"step": 1, "model": model.state_dict(), "best_val_loss": 1.0}
    path = tmp_path / "ckpt_last.pt"
    for value in (default, other):
        state["config"] = vars(today) | {name: value}
        is_refused = value == other and loads is not None
        save_checkpoint(path, state)
        for use, refuses in (
            (lambda: load_model(str(path)), is_refused and not loads),
            (lambda: restore(path, state, today, model), is_refused),
        ):
            with pytest.raises(CheckpointError, match=name) if refuses else nullcontext():
                use()
        changed = changed_keys(state["config"], vars(today), {})
        told = {
            "wandb": "tracker wandb -> off",
            "wandb_project": "tracker_project ours -> nanonorm",
        }
        assert changed == ([told[name]] if value == other and name in told else [])


def test_an_older_dyt_checkpoint_computes_the_same(tmp_path):
    """It has alpha 0.5 everywhere and no scaled embeddings; the loss is that of its own program."""
    today = GPTConfig(**SIZES, norm_type="dyt", norm_recipe="common", init_std=0.2)
    weights = GPT(today, seed=5).state_dict()
    assert not any(name.startswith("norm_e") for name in weights)
    saved = OLDER | SIZES | {"norm_type": "dyt", "init_std": 0.2}
    save_checkpoint(tmp_path / "old.pt", {"step": 1, "config": saved, "model": weights})
    model = load_model(str(tmp_path / "old.pt")).double()
    assert model.config == today and model.norm_e is None
    idx = torch.arange(7)[None] * 3 % 32
    # Computed by commit ae00747
    close(model(idx, idx.roll(-1, 1))[0], torch.tensor(3.4532634462171226, dtype=torch.float64))


@pytest.mark.parametrize("norm_type", ["layer", "rms", "coupled", "cbwc", "taper", "none"])
def test_an_older_run_that_goes_on_has_changed_nothing(norm_type):
    today = parse_args(TrainConfig, [f"--norm_type={norm_type}", "--qk_norm=head"])[0]
    saved = {"norm_type": norm_type} | OLDER | {"qk_norm": True, "max_iters": today.max_iters}
    assert changed_keys(saved, {**vars(today)}, {}) == []


def write_log(folder: Path, norm_type: str, keys: dict, **start) -> Path:
    folder.mkdir(parents=True)
    config = {"norm_type": norm_type, "seed": 1, "max_iters": 10} | keys
    first = {
        "event": "start",
        "config": config,
        "versions": {"torch": "2.13.0"},
        "device": "cpu",
        "tokens_per_step": 1,
        **start,
    }
    (folder / "log.jsonl").write_text(
        json.dumps(first) + "\n" + json.dumps({"event": "rms", "step": 0})
    )
    return folder


COUPLED = {"coupled_first": 0, "coupled_span": 1}


@pytest.mark.parametrize("records_keys", [True, False])
@pytest.mark.parametrize(
    ("norm_type", "keys", "arm", "now"),
    [
        ("layer", {}, "layer", {}),
        ("rms", {"norm_eps": 1e-6}, "rms --norm_eps=1e-06", {"norm_eps": 1e-6}),
        ("taper", {}, "taper", {}),
        # A renamed key names the arm as the command line of today does.
        ("layer", {"qk_norm": True}, "layer --qk_norm=head", {"qk_norm": "head"}),
        ("rms", {"norm_affine": False}, "rms --norm_gain=none", {"norm_gain": "none"}),
        (
            "rms",
            {"norm_affine": False, "qk_norm": True},
            "rms --norm_gain=none --qk_norm=head",
            {"norm_gain": "none", "qk_norm": "head"},
        ),
        ("dyt", {}, "dyt --norm_recipe=common", {"norm_recipe": "common"}),
        (
            "dyt",
            {"norm_affine": False},
            "dyt --norm_gain=none --norm_recipe=common",
            {"norm_gain": "none", "norm_recipe": "common"},
        ),
        (
            "coupled",
            {"norm_affine": False, "coupled_span": 2},
            "coupled --norm_gain=none --coupled_span=2",
            {"norm_gain": "none", "coupled_span": 2},
        ),
    ],
    ids=str,
)
def test_arms_of_older_logs(norm_type, keys, arm, now, records_keys, tmp_path):
    """An older run and one of today with the same norms are one arm, and differ in nothing."""
    own = OLDER | (COUPLED if norm_type == "coupled" else {})
    start = {"norm_keys": own, "other_norm_keys": []} if records_keys else {}
    old = write_log(tmp_path / "old", norm_type, OLDER | COUPLED | keys, **start)
    today = TrainConfig(norm_type=norm_type, **now)
    names = {"norm_type", *keys_of(norm_type), *foreign_keys(norm_type)}
    config = {name: value for name, value in vars(today).items() if name in names}
    new = write_log(
        tmp_path / "new",
        norm_type,
        config | {"seed": 2},
        norm_keys=keys_of(norm_type),
        other_norm_keys=sorted(foreign_keys(norm_type)),
    )
    runs = find_runs([old, new])
    assert [run.arm for run in runs] == [arm, arm]
    assert len(by_arm(runs)[arm]) == 2
    assert difference_in_settings(*runs, but=("seed",)) == ""


def write_model(folder: Path, **keys) -> tuple[GPT, str]:
    """A model whose gains are not those at the start, and its checkpoint."""
    model = GPT(replace(SHAPE, **{"norm_type": "rms", **keys}))
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, Norm) and norm.weight is not None:
                norm.weight.add_(0.3 * torch.randn(norm.channels))
    state = {"step": 1, "config": vars(model.config), "model": model.state_dict()}
    save_checkpoint(folder / "source.pt", state)
    return model, str(folder / "source.pt")


@pytest.mark.parametrize(
    ("source", "keys", "words"),
    [
        ({"qk_norm": "head"}, {}, "qk_norm=head, and this run none"),
        ({"qk_norm": "head"}, {"qk_norm": "full"}, "qk_norm=head, and this run full"),
        ({"norm_type": "dyt"}, {}, "multiplies its embeddings by a learned number"),
        ({}, {"norm_type": "derf"}, "this run multiplies its embeddings"),
        (
            {"norm_type": "peri", "output_eps": 1e-4},
            {"norm_type": "peri"},
            "output_eps=0.0001 there, 1e-06 here",
        ),
    ],
    ids=str,
)
def test_init_from_refuses_another_function(source, keys, words, tmp_path):
    """Its tensors have the same names, or none, and another meaning."""
    model, path = write_model(tmp_path, **source)
    with pytest.raises(CheckpointError, match=words):
        init_from(GPT(replace(SHAPE, **{"norm_type": "rms", **keys})), path)
    same = GPT(replace(SHAPE, **{"norm_type": "rms", **source}), seed=1)
    init_from(same, path)
    idx = torch.arange(8)[None]
    assert torch.equal(same(idx), model(idx))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"norm_gain": "one_plus"}, {}),
        ({}, {"norm_gain": "one_plus"}),
        ({"norm_type": "lns"}, {}),
        ({"norm_type": "lns", "norm_gain": "one_plus"}, {"norm_type": "coupled"}),
        ({}, {"norm_type": "lns"}),
        ({"norm_type": "lns"}, {"norm_type": "taper"}),
        ({"norm_type": "lns"}, {"norm_type": "rms", "norm_plan": "RR RR R | RR RR"}),
        ({"norm_type": "peri", "norm_gain": "one_plus", "output_eps": 1e-4}, {}),
        ({"qk_norm": "head", "norm_gain": "one_plus"}, {"qk_norm": "head"}),
    ],
    ids=str,
)
def test_init_from_keeps_gains_however_they_are_stored(source, target, tmp_path):
    model, path = write_model(tmp_path, **source)
    new = GPT(replace(SHAPE, **{"norm_type": "rms", **target}))
    init_from(new, path)
    for old, place in zip(model.places(), new.places(), strict=True):
        torch.testing.assert_close(place.core.exact_gain, old.core.exact_gain, rtol=1e-6, atol=1e-7)
    if "qk_norm" in source:
        pair = (gpt.blocks[0].attn.q_norm.exact_gain for gpt in (new, model))
        torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-7)
