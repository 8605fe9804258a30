"""Plans parse and print, old configs mean what they meant, old layouts are built as they were.

python -m pytest tests/test_plan_grammar.py
"""

import json
import random
import re
from contextlib import nullcontext

import pytest
import torch
from helpers import ROOT, close, plan, random_sections

from common.errors import CheckpointError, ConfigError
from common.past import as_today
from configurator import parse_args
from evidence.runs import by_arm, difference_in_settings, find_runs
from load import load_model
from model import GPT, GPTConfig
from norm_plan import NormPlan, foreign_keys, keys_of
from norm_types import NORM_TYPES
from train import TrainConfig
from training.checkpoint import model_config, restore, save_checkpoint
from training.run import changed_keys

# ----------------------------------------------------------------------------- parsing and printing


def sections_of(given: NormPlan) -> tuple[str, str, str]:
    return given.letters, given.outputs, given.embedding


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_plans_parse_and_print(norm_type):
    """Random ones, with spaces that mean nothing, and the default of each depth."""
    draw = random.Random(norm_type)
    for n_layer in range(1, 9):
        for _ in range(8):
            sections = random_sections(draw, norm_type, n_layer)
            given = plan(norm_type, n_layer, "|".join(sections).replace("R", " R "))
            assert sections_of(given) == sections
            again = plan(norm_type, n_layer, str(given))
            assert sections_of(again) == sections and str(again) == str(given)
            is_plain = not set("PB") & set(sections[0]) and set(sections[1]) <= {"I"}
            assert given.adds_plainly == is_plain
        default = plan(norm_type, n_layer)
        given = plan(norm_type, n_layer, str(default))
        assert sections_of(given) == sections_of(default) and given.notes() == default.notes()


@pytest.mark.parametrize(("given", "printed"), [("RR R||R", "RR R | II | R"), ("RR R | |", "RR R")])
def test_a_middle_section_may_be_empty(given, printed):
    assert str(plan("rms", 1, given)) == printed


@pytest.mark.parametrize(
    ("norm_type", "keys", "notes"),
    [
        ("rms", {"paired_gains": 0.125}, ["gains in pairs, -+ 0.125"]),
        ("layer", {"initial_gain": 2.0}, ["initial gains 2.0"]),
        (
            "rms",
            {"initial_gain": 2.0, "norm_gain": "none"},
            ["gains none", "initial gains 2.0 (unused)"],
        ),
        ("peri", {}, ["eps 1e-06 in output norms"]),
        (
            "olmo2",
            {"qk_norm": "none"},
            [
                "eps 1e-06 in output norms",
                "weight decay on gains",
                "initial attn.proj 2 times the common",
                "initial mlp.down 2 times the common",
            ],
        ),
        ("olmo2", {"norm_recipe": "common", "qk_norm": "none"}, ["eps 1e-06 in output norms"]),
        ("rms", {"qk_norm": "head"}, ["norms of queries and keys (head)"]),
        ("post", {"norm_recipe": "common"}, ["RMSNorm at P and B, residual weights 1"]),
        (
            "mixln",
            {"norm_recipe": "common"},
            ["no block is Post-LN: give a larger mixln_share or more blocks"],
        ),
        (
            "keel",
            {"post_base": "layer", "norm_recipe": "common"},
            ["LayerNorm at P and B, residual weights 1, 4"],
        ),
        ("lns", {"norm_recipe": "common"}, ["gains of block l divided by sqrt(l)"]),
        ("rms", {"norm_gain": "one_plus"}, ["gains one_plus"]),
        ("taper", {"taper_final": True}, ["logits may grow: no taper_anchor"]),
        ("taper", {"taper_final": True, "taper_anchor": 0.1}, []),
        ("gatednorm", {}, ["gates of rank 16 (start: half)"]),
        (
            "dyt",
            {"norm_recipe": "common"},
            ["alpha 0.5, 0.5, 0.5 in attention, MLP and final norm"],
        ),
    ],
)
def test_notes_tell_what_letters_do_not(norm_type, keys, notes):
    assert plan(norm_type, 2, **keys).notes() == notes


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_plans_are_those_of_the_manual(norm_type):
    """The third column of the table of docs/norms.md."""
    rows = (ROOT / "docs/norms.md").read_text().replace("&#124;", "!").splitlines()
    found = [row for row in rows if row.startswith(f"| `{norm_type}` |") and row.count(" | ") >= 5]
    assert found, f"docs/norms.md has no row for {norm_type} in its table of norm types"
    [row] = found
    printed = re.sub("</?code>|`", "", row.split(" | ")[2]).replace("!", "|")
    assert str(plan(norm_type, 4 if norm_type in ("coupled", "mixln") else 2)) == printed


@pytest.mark.parametrize(
    ("norm_type", "given", "keys", "words"),
    [
        ("rms", "RR R", {}, "2 blocks of norm_type=rms need 5 letters, each one of R"),
        ("rms", "RR RR R | RR R", {}, "need 4 letters of the outputs"),
        ("rms", "RR RR R | RR RR | RR", {}, "need 1 letters of the embedding"),
        ("rms", "RR RR R | RR RR | R | R", {}, "of the embedding"),
        ("rms", "RR RX R", {}, "each one of R"),
        ("keel", "Rs BB P", {}, "each one of IPBRL"),
        ("layer", "RR RR R", {}, "each one of L"),
        ("coupled", "Rs Rs R | Rs RR", {}, "of the outputs, each one of RI"),
        # Outputs and embedding norms that a type refuses
        ("cbwc", "RR RR R | RR RR", {}, "of the outputs, each one of I"),
        ("olmo2", "II II R | RR RR | R", {}, "of the embedding, each one of I"),
        ("cupled", "", {}, "did you mean coupled?"),
        # s without an R before it
        ("coupled", "sR Rs R", {}, "position 0"),
        ("bhyt", "Rh Hh R", {}, "position 1 shares a statistic that no H computed"),
        ("coupled", "", {"coupled_first": 5}, "need 5 letters"),
        ("coupled", "Rs Rs R | RR RR", {"coupled_impl": "fold"}, "coupled_impl=fold"),
        ("coupled", "", {"coupled_alpha": (1.0, 1.1)}, "coupled_alpha needs one number or 5"),
        ("coupled", "", {"coupled_alpha": (1.0, 1.0, 1.0, 1.0, -1.0)}, "coupled_alpha"),
        ("rms", "", {"initial_gain": (1.0,) * 4}, "initial_gain needs one number or 5 or 10"),
        ("post", "", {"paired_gains": 0.1}, "needs two gains in each block, not IP PP"),
        ("rms", "", {"paired_gains": 0.1, "norm_gain": "none"}, "paired_gains needs two gains"),
        ("post", "RR RR R", {"residual_weight": 3.0}, "acts where a norm replaces the stream"),
        ("taper", "", {"norm_gain": "one_plus"}, "norm_gain=one_plus"),
        ("taper", "", {"taper_end": 1.0}, "taper_end=1"),
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
    config = model_config(as_today(saved), tmp_path)
    assert {name: getattr(config, name) for name in today} == today
    if "v_norm" in old:
        with pytest.raises(CheckpointError, match="v_norm"):
            model_config(as_today(saved) | {"v_norm": not old["v_norm"]}, tmp_path)


# (a retired key, its old default, another value, does a run with that one load?)
GONE = [
    ("qk_gain", True, False, False),
    ("v_norm", None, True, False),
    ("decay_gains", None, True, True),
    ("hellaswag_interval", 0, 20, True),
    ("compile_mode", "default", "max-autotune-no-cudagraphs", True),
]


@pytest.mark.parametrize(("name", "default", "other", "loads"), GONE)
def test_a_key_that_is_gone(name, default, other, loads, tmp_path):
    """In a checkpoint its old default is ignored, and another value refused by name.

    A key of the training alone is refused where the run would go on.
    """
    with pytest.raises(ConfigError, match=name):
        parse_args(TrainConfig, [f"--{name}={other}"])
    today = TrainConfig(**SIZES, norm_type="rms")
    model = GPT(today)
    state = {"step": 1, "model": model.state_dict(), "best_val_loss": 1.0}
    path = tmp_path / "ckpt_last.pt"
    for value in (default, other):
        config = vars(today) | {name: value}
        save_checkpoint(path, state | {"config": config})
        with nullcontext() if loads or value == default else pytest.raises(CheckpointError):
            load_model(str(path))
        is_refused = pytest.raises(CheckpointError, match=name)
        with nullcontext() if value == default else is_refused:
            restore(path, state | {"config": config}, today, model)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("wandb", "offline", "tracker wandb -> off"),
        ("wandb_project", "ours", "tracker_project ours -> nanonorm"),
    ],
)
def test_what_wandb_said_tracker_says(name, value, told):
    today = vars(TrainConfig())
    assert changed_keys(as_today(today | {name: value}), today, {}) == [told]


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
    assert changed_keys(as_today(saved), {**vars(today)}, {}) == []


@pytest.mark.parametrize(
    ("norm_type", "keys", "arm", "now"),
    [
        ("rms", {"norm_eps": 1e-6}, "rms --norm_eps=1e-06", {"norm_eps": 1e-6}),
        # A renamed key names the arm as the command line of today does.
        ("layer", {"qk_norm": True}, "layer --qk_norm=head", {"qk_norm": "head"}),
        (
            "dyt",
            {"norm_affine": False},
            "dyt --norm_gain=none --norm_recipe=common",
            {"norm_gain": "none", "norm_recipe": "common"},
        ),
        (
            "coupled",
            {"coupled_first": 0, "coupled_span": 2},
            "coupled --coupled_span=2",
            {"coupled_span": 2},
        ),
    ],
    ids=str,
)
def test_arms_of_older_logs(norm_type, keys, arm, now, tmp_path):
    """An older run and one of today with the same norms are one arm, and differ in nothing."""
    today = TrainConfig(norm_type=norm_type, **now)
    names = {"norm_type", *keys_of(norm_type), *foreign_keys(norm_type)}
    new = {name: value for name, value in vars(today).items() if name in names}
    told = {
        "norm_keys": keys_of(norm_type),
        "other_norm_keys": sorted(foreign_keys(norm_type)),
    }
    for folder, config, more in (
        ("old", {"norm_type": norm_type, "seed": 1} | OLDER | keys, {}),
        ("new", new | {"seed": 2}, told),
    ):
        rates = {"learning_rate": 6e-4, "min_lr": 6e-5, "warmup_iters": 2000}
        config = config | {"max_iters": 10} | rates
        start = {"event": "start", "config": config, "versions": {"torch": "2.13.0"}}
        start |= {"device": "cpu", "tokens_per_step": 1, **more}
        (tmp_path / folder).mkdir()
        lines = [json.dumps(start), json.dumps({"event": "rms", "step": 0, "rms": [1.0]})]
        (tmp_path / folder / "log.jsonl").write_text("\n".join(lines))
    runs = find_runs([tmp_path / "old", tmp_path / "new"])
    assert list(by_arm(runs)) == [arm] and difference_in_settings(*runs, but=("seed",)) == ""
