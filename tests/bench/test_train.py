"""bench/train.py: what its arms are, that their steps are train.py's, what it writes. Nothing here
asserts a time.

    python -m pytest tests/bench/test_train.py
"""

import dataclasses
import json
import math
import types

import pytest
import torch
from helpers import TINY, draw, json_lines

from bench import train, train_arms, train_profile
from bench.train import AGAIN, TrainBenchConfig, all_arms, make_batches
from bench.train_arms import build_step, parse_arms, settle
from common import environment as environment_module
from common.errors import ConfigError
from common.stats import paired_ratio
from configurator import parse_args
from model import GPT
from training.dataloader import Blocks, TrainLoader

CPU = torch.device("cpu")
EAGER = ("--compile=False", "--vocab_size=64", "--rounds=3")
UPSTREAM = """
import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool


class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)
        print("number of parameters")

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)

    def forward(self, idx, targets):
        logits = self.table(idx)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def config_of(*words: str) -> TrainBenchConfig:
    return parse_args(TrainBenchConfig, [*TINY, *EAGER, *words])[0]


@pytest.fixture
def upstream(tmp_path) -> str:
    """A folder that looks like nanoGPT's clone, with a model that takes no time."""
    (tmp_path / "nanogpt").mkdir()
    (tmp_path / "nanogpt" / "model.py").write_text(UPSTREAM)
    return str(tmp_path / "nanogpt")


@pytest.fixture
def models(monkeypatch) -> list[GPT]:
    """The models that arms build from now on."""
    built: list[GPT] = []

    def build(*args):
        built.append(GPT(*args))
        return built[-1]

    monkeypatch.setattr(train_arms, "GPT", build)
    return built


@pytest.fixture
def precision():
    """Of float32 products, which a test may change."""
    yield
    torch.set_float32_matmul_precision("highest")


# --------------------------------------------------------------------------------------------- arms


def test_arms_differ_in_what_they_say_alone():
    arms = {
        arm.name: arm
        for arm in all_arms(
            config_of(
                "--norm_type=cbwc",  # of a config file: the arms say which it is
                "--arms=coupled;  coupled   coupled_span=2;layer compile=True kernels=torch; "
                "rms norm_eps=1e-6 ;",
            )
        )
    }
    base = dataclasses.asdict(arms["layer"].config)
    differences = {
        "coupled": {"norm_type": "coupled"},
        "coupled coupled_span=2": {"norm_type": "coupled", "coupled_span": 2},
        "layer compile=True kernels=torch": {"compile": True, "kernels": "torch"},
        "rms norm_eps=1e-6": {"norm_type": "rms", "norm_eps": 1e-6},
        "rms": {"norm_type": "rms"},
        "rms-no-mlp-gamma": {"norm_type": "rms"},
        "layer": {},
        "coupled" + AGAIN: {"norm_type": "coupled"},
    }
    assert list(arms) == list(differences)
    for name, arm in arms.items():
        now = dataclasses.asdict(arm.config)
        assert {key: now[key] for key in now if now[key] != base[key]} == differences[name], name
        assert arm.mlp_gamma == (name != "rms-no-mlp-gamma") and not arm.is_nanogpt


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--arms=rsm"], "'rsm': unknown norm_type"),
        (["--arms=coupled coupled_spam=2"], "'coupled_spam'"),
        (["--arms=coupled coupled_span=two"], "coupled_span must be int"),
        (["--arms=rms n_embd=64"], "n_embd"),
        (["--arms=coupled norm_plan=Rs"], "norm_plan 'Rs'"),
        (["--arms=nanogpt"], "needs --nanogpt=FOLDER"),
        (["--arms=nanogpt norm_eps=0.1"], "'nanogpt norm_eps=0.1': norm_eps"),
        (["--arms=nanogpt", "--activation=swiglu"], "activation=swiglu"),
        (["--arms=nanogpt", "--optimizer=muon"], "optimizer=muon"),
        (["--rounds=1"], "rounds=1"),
    ],
)
def test_what_cannot_be_timed_is_refused(words, named):
    with pytest.raises(ConfigError, match=named):
        all_arms(config_of(*words))


def test_no_mlp_gamma_takes_just_those_gains_away(models):
    config = config_of()
    names = []
    for arm in parse_arms("rms; rms-no-mlp-gamma", config):
        build_step(arm, make_batches(config, CPU), CPU, "")()
        names.append({name for name, _ in models[-1].named_parameters()})
    assert (
        names[0] - names[1] == {"blocks.0.norm2.norm.weight", "blocks.1.norm2.norm.weight"}
        and names[1] < names[0]
    )


# -------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("norm", ["coupled", "taper"])
def test_a_step_is_train_pys(norm, train_ok, tiny_data, tmp_path, models):
    """Two steps of train.py on its own batches leave the parameters that two steps of the arm
    leave, bit for bit.
    """
    words = [
        *TINY,
        "--lr_schedule=constant",
        "--warmup_iters=0",
        "--vocab_size=64",
        f"--data_dir={tiny_data}",
        "--compile=False",
        "--max_iters=2",
        "--dtype=float64",
        "--grad_clip=0.1",
    ]
    keys = ["taper_warmup=1", "taper_end=3"] if norm == "taper" else []
    train_ok(
        *words,
        *("--" + key for key in keys),
        f"--norm_type={norm}",
        f"--out_dir={tmp_path / 'run'}",
    )
    trained = torch.load(tmp_path / "run" / "ckpt_last.pt", weights_only=True)["model"]

    config, _ = parse_args(
        TrainBenchConfig, [*words, f"--arms={' '.join([norm, *keys])}", "--controls=False"]
    )
    loader = TrainLoader(Blocks(str(tiny_data), "train", 16, 60), 2, 2, config.seed)
    stream = loader.batches(1, 0, 1, pin=False)
    batches = [next(stream) for _ in range(2)]
    # train.py takes the vocabulary from the data
    arm = all_arms(dataclasses.replace(config, n_vocab=60))[0]
    step = build_step(settle(arm, CPU), batches, CPU, "")
    step()
    batches[:] = [next(stream) for _ in range(2)]
    step()
    mine = models[-1].state_dict()
    assert mine.keys() == trained.keys()
    for name, value in mine.items():
        assert torch.equal(value, trained[name]), name


def test_nanogpts_step_is_a_mean_over_micro_batches(upstream):
    """With the stand-in, whose gradient is known: accumulation, clipping, update."""
    config = config_of(
        f"--nanogpt={upstream}", "--grad_clip=0.01", "--weight_decay=0.0", "--dtype=float64"
    )
    arm, batches = parse_arms("nanogpt", config)[0], make_batches(config, CPU)
    module = train_arms.module(upstream, "model", "nanogpt")
    torch.manual_seed(config.seed)
    shape = {name: getattr(config, name) for name in train_arms.NANOGPT_SHAPE}
    reference = module.GPT(module.GPTConfig(**shape)).double()
    optimizer = torch.optim.AdamW(
        reference.parameters(), config.learning_rate, (0.9, 0.95), weight_decay=0.0
    )
    losses = []
    for _ in range(2):
        x, y = (torch.cat(parts) for parts in zip(*batches))
        optimizer.zero_grad()
        reference(x, y)[1].backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        losses.append(reference(*batches[-1])[1].item())
        optimizer.step()
    step = build_step(arm, batches, CPU, upstream)
    assert [step().item(), step().item()] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("name", ["rms", "nanogpt"])
def test_in_ddp_of_one_rank_a_step_is_the_same(name, upstream, monkeypatch, request):
    """And gradients are reduced after the last micro-batch alone."""
    config = config_of("--merge_micro_batches=1", "--gradient_accumulation_steps=3")
    arm, batches = settle(parse_arms(name, config)[0], CPU), make_batches(config, CPU)
    step = build_step(arm, batches, CPU, upstream)
    alone = [step().item(), step().item()]
    reduces, forward = [], torch.nn.parallel.DistributedDataParallel.forward

    def spy(model, *tensors):
        reduces.append(model.require_backward_grad_sync)
        return forward(model, *tensors)

    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "forward", spy)
    request.getfixturevalue("one_rank")
    step = build_step(arm, batches, CPU, upstream)
    assert [step().item(), step().item()] == alone
    assert reduces == 2 * [False, False, True]


def test_a_run_writes_table_and_records(tmp_path, capsys, upstream):
    folder = tmp_path / "new" / "train"
    words = ["--arms=coupled; layer", f"--nanogpt={upstream}", f"--out={folder}"]
    train.main([*TINY, *EAGER, *words])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    records = {row["arm"]: row for row in json_lines(folder / "steps.jsonl")}
    names = ["coupled", "layer", "rms", "rms-no-mlp-gamma", "nanogpt", "coupled" + AGAIN]
    assert list(records) == [row["arm"] for row in told] == names
    for name, row in records.items():
        own = row["seconds"]
        assert len(own) == 3 and min(own) > 0
        assert row["tokens_per_s"] == pytest.approx(2 * 2 * 16 / sorted(own)[1])
        assert set(row["speed_over"]) == {"coupled", "rms", "nanogpt"} - {name}
        for base, ratio in row["speed_over"].items():
            assert ratio == paired_ratio(records[base]["seconds"], own)
        assert row["dtype"] == "float32" and row["config"]["n_embd"] == 32 and "git" in row
    # The same weights and batches: arms that compute the same have the same loss
    assert records["coupled"]["first_loss"] == records["coupled" + AGAIN]["first_loss"]
    assert records["layer"]["first_loss"] == pytest.approx(math.log(64), rel=0.05)
    readme = (folder / "README.md").read_text()
    assert readme.count("\n| ") == 2 + len(names) and "3 rounds," in readme and "MFU" not in readme


def test_an_arm_is_on_disk_as_soon_as_it_is_ready(tmp_path, monkeypatch):
    """The machine is taken away while the second arm compiles."""
    built = []

    def build(arm, *given):
        if built:
            raise KeyboardInterrupt
        built.append(arm.name)
        return build_step(arm, *given)

    monkeypatch.setattr(train, "build_step", build)
    with pytest.raises(KeyboardInterrupt):
        train.main([*TINY, *EAGER, "--arms=rms; coupled", f"--out={tmp_path}"])
    [row] = json_lines(tmp_path / "unpaired.jsonl")
    assert row["arm"] == "rms" and len(row["seconds"]) == train.ALONE and "git" in row
    assert row["tokens_per_s"] > 0 and {"mfu", "peak_memory"} <= row.keys()


def test_without_rounds_each_arm_is_timed_by_itself(tmp_path, capsys):
    words = ["--arms=rms; coupled", "--controls=False", "--rounds=0", f"--out={tmp_path}"]
    train.main([*TINY, *EAGER, *words])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["arm"] for row in told] == ["rms", "coupled"]
    assert [path.name for path in tmp_path.iterdir()] == ["unpaired.jsonl"]


@pytest.mark.parametrize(
    ("cpu", "channels", "expected"),
    [
        ("vendor_id : AuthenticAMD\nflags : avx2 avx512f", 128, "medium"),
        # attention's products are too small
        ("vendor_id : AuthenticAMD\nflags : avx2 avx512f", 127, "highest"),
        ("vendor_id : AuthenticAMD\nflags : avx2", 128, "highest"),
        # it would round to bfloat16
        ("vendor_id : AuthenticAMD\nflags : avx2 avx512f amx_bf16", 128, "highest"),
        ("vendor_id : GenuineIntel\nflags : avx2 avx512f", 128, "highest"),
    ],
)
def test_who_gets_onednns_products(cpu, channels, expected, monkeypatch, precision):
    monkeypatch.setattr(
        environment_module,
        "Path",
        lambda name: types.SimpleNamespace(read_text=lambda encoding: cpu),
    )
    environment_module.faster_float32_products(channels, 64)
    assert torch.get_float32_matmul_precision() == expected


def test_float32_products_stay_exact(precision):
    """All three products of a linear, at this CPU's setting; bfloat16 would be off by 3e-3."""
    shapes = ((300, 1024), (96, 1024), (300, 96))
    x, w, dy = (draw(*shape, seed=seed).float() for seed, shape in enumerate(shapes))
    environment_module.faster_float32_products(1024, 64)
    for a, b in ((x, w.t()), (dy, w), (dy.t(), x)):
        exact = a.double() @ b.double()
        assert (a @ b - exact).norm() <= 2e-6 * exact.norm()


def test_the_profile_says_where_an_arms_time_goes():
    """Every kernel has a kind; their milliseconds and the rest are the step's; arms do the same
    products.
    """
    config = config_of(
        "--n_layer=1", "--arms=rms; coupled", "--rounds=2", "--controls=False", "--profile"
    )
    _, steps = train.measure(config, {}, CPU)
    kernels = {arm: train_profile.profile_step(step, CPU) for arm, step in steps.items()}
    assert set(kernels) == {"rms", "coupled", f"rms{AGAIN}"}
    for found in kernels.values():
        parts = train_profile.by_class(found, 1e6)
        assert {kernel["class"] for kernel in found} <= set(train_profile.NAMES)
        assert parts["product"][0] > 0
        assert sum(ms for ms, _ in parts.values()) == pytest.approx(1e3)  # of a step of one second
    products = {
        arm: sum(kernel["launches"] for kernel in found if "aten::mm" in kernel["name"])
        for arm, found in kernels.items()
    }
    assert products["rms"] == products["coupled"] > 0
    table = train_profile.profile_table({"rms": parts})
    assert "| kind | rms |" in table and "| rest of the step |" in table


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200 NVL", 836e12), ("NVIDIA H200", 989e12), ("NVIDIA B300", 2250e12), ("GTX", None)],
)
def test_peaks(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert environment_module.peak_flops(torch.device("cuda")) == peak
    assert environment_module.peak_flops(CPU) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "product"),
        ("triton_tem_fused_addmm_0", "product"),
        ("triton_poi_fused_addmm_gelu_3", train_profile.ELEMENTWISE),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("triton_red_fused__log_softmax_nll_loss_forward_7", "loss"),
        ("cudnn_generated_native_sdpa_sm90", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 64>", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4>", train_profile.ELEMENTWISE),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert train_profile.kernel_class(name) == kind
