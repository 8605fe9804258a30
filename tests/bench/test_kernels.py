"""bench/kernels.py: what it times, what it refuses to time, and what it writes. Nothing here
asserts a time.

    python -m pytest tests/bench/test_kernels.py
"""

import contextlib
import gc
import inspect
import json
import sys
import types
import weakref

import pytest
import torch

from bench import kernel_arms, kernels
from bench.kernel_arms import IN_PARTS, OPERATORS, UNFUSED, UNSCALED, arms_of, make_inputs
from bench.kernels import Case, KernelBenchConfig
from common.errors import ConfigError, UserError
from common.stats import paired_times

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TINY = ["--rows=8", "--channels=16,24", "--rounds=6", "--dtype=float32", "--device=cpu"]


def test_a_run_on_a_cpu_writes_table_plot_and_records(tmp_path, capsys):
    folder = tmp_path / "new" / "kernels"
    kernels.main([*TINY, f"--out={folder}"])
    output = capsys.readouterr().out
    assert output.startswith("no GPU: PyTorch references")
    summary = json.loads(output.splitlines()[-1])
    records = [json.loads(line) for line in (folder / "kernels.jsonl").read_text().splitlines()]
    expected = [
        (name, size, phase)
        for name in OPERATORS
        for size in (16, 24)
        for phase in ("forward", "backward")
    ]
    for rows in (summary, records):
        assert [(row["operator"], row["channels"], row["phase"]) for row in rows] == expected
    for row in records:
        arms = {"reference", "torch"} | (
            {UNSCALED} if row["operator"].startswith("scaled_") else set()
        )
        arms |= {UNFUSED} if row["operator"] in IN_PARTS else set()
        assert set(row["share"]) == set(row["seconds"]) == arms and row["ours"] == "reference"
        assert min(row["share"].values()) > 0 and row["copy_bytes_per_s"] > 0
        assert set(row["time_over_ours"]) == arms - {"reference"} and row["missing"] == []
        assert row["versions"]["torch"] == torch.__version__ and "git" in row and "device" in row
    readme = (folder / "README.md").read_text()
    assert readme.count("\n| rms_norm |") == 4 and "Triton kernels cannot run here" in readme
    assert (folder / "kernels.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        # (8, 16) tensors of 2 bytes that cannot be spared, and the statistics of 8 rows
        ("rms_norm", 2 * 256 + 32, 3 * 256 + 32),
        ("layer_norm", 2 * 256 + 64, 3 * 256 + 64),
        ("add_rms_norm", 4 * 256 + 32, 4 * 256 + 32),
        # the gradient of x is that of h, so it is not written again
        ("add_normed", 3 * 256 + 32, 3 * 256 + 32),
        # unfused: 6 forward, 7 backward; two statistics
        ("norm_add_norm", 4 * 256 + 64, 6 * 256 + 64),
        ("shared_rms_scale", 2 * 256 + 32, 3 * 256 + 32),
        ("add_shared_rms_scale", 4 * 256 + 32, 4 * 256 + 32),
        ("scaled_gelu", 2 * 256 + 32, 3 * 256 + 32),
        ("scaled_swiglu", 3 * 256 + 32, 5 * 256 + 32),  # two streams come in, one goes out
        ("taper_norm", 2 * 256 + 32, 3 * 256 + 32),
    ],
)
def test_fewest_bytes(name, forward, backward):
    assert Case(OPERATORS[name], 8, 16, torch.bfloat16, CPU).bytes == [forward, backward]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", OPERATORS)
def test_ours_and_the_plain_formula_agree(name, dtype):
    case = Case(OPERATORS[name], 64, 48, dtype, CPU)
    assert case.error(OPERATORS[name].ours("torch")) <= 4 * torch.finfo(dtype).eps
    if name in IN_PARTS:
        assert case.error(IN_PARTS[name]("torch")) <= 4 * torch.finfo(dtype).eps
    wanted = [value for value in case.sets[0] if value.requires_grad]
    assert {value.shape for value in wanted} <= {(64, 48), (64, 96), (48,)} and len(wanted) >= 1


def test_a_copy_moves_as_many_bytes_as_the_operator_must():
    case = Case(OPERATORS["add_rms_norm"], 8, 16, torch.bfloat16, CPU)
    case.bytes = [1024, 600]  # forward moves more
    case.copies = [torch.arange(2 * 512).remainder(255).to(torch.uint8).view(2, 512).clone()]
    for phase, half in (("backward", 300), ("forward", 512)):
        ((source, target),) = case.copies
        assert not torch.equal(source[:half], target[:half])
        case.copy(phase)
        assert torch.equal(source[:half], target[:half])
        assert half == 512 or not torch.equal(source[half:], target[half:])
        target += 1


def test_figures_are_medians_of_the_rounds_ratios(monkeypatch):
    """A machine that drifts: every round is slower than the last, and the ratios stay what they
    are.
    """
    drift = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    times = {"reference": 2.0, "torch": 3.0, UNSCALED: 1.5, "copy": 0.5}
    monkeypatch.setattr(
        kernels,
        "paired_times",
        lambda calls, *_, **__: {arm: [times[arm] * factor for factor in drift] for arm in calls},
    )
    forward, backward = kernels.measure(
        KernelBenchConfig(rows=8, rounds=6), "scaled_swiglu", 16, CPU
    )
    for row, fewest in ((forward, 3 * 256 + 32), (backward, 5 * 256 + 32)):
        assert row["share"] == {
            "reference": 0.25,
            "torch": pytest.approx(1 / 6),
            UNSCALED: pytest.approx(1 / 3),
        }
        assert row["time_over_ours"]["torch"] == {"median": 1.5, "low": 1.5, "high": 1.5}
        assert row["copy_bytes_per_s"] == fewest / (0.5 * 6.0)
    *_, line = kernels.table([forward]).splitlines()
    # what computes less is no rival
    assert line.endswith("| 25% | 17% | 33% | torch: 1.500 (1.500 .. 1.500) |")


def test_what_is_wrong_or_fails_is_not_timed(monkeypatch):
    plain = OPERATORS["rms_norm"].plain

    def without_gain(x, w):
        return plain(x, torch.ones_like(w)) + 0 * w

    def poisoned(x, w):
        return plain(x, w) * torch.where(w > 0, 1, torch.nan)

    def broken(x, w):
        raise RuntimeError("no kernel image\nand much more")

    calls = []

    def once(x, w):
        calls.append(x)
        if len(calls) > 1:  # right, but cannot be captured in a graph
            raise RuntimeError("stream is capturing")
        return plain(x, w)

    arms = {
        "reference": OPERATORS["rms_norm"].ours("torch"),
        "torch": plain,
        "Liger": without_gain,
        "quack": broken,
        "flash-attn": poisoned,
        "compiled": once,
    }
    monkeypatch.setattr(kernels, "arms_of", lambda *_: (dict(arms), []))
    config = KernelBenchConfig(rows=8, rounds=6, dtype="float32")
    for row in kernels.measure(config, "rms_norm", 16, CPU):
        assert set(row["share"]) == {"reference", "torch"}
        wrong, failed, nan, late = row["missing"]
        assert wrong.startswith("Liger: ValueError: wrong, relative error")
        assert failed == "quack: RuntimeError: no kernel image"
        assert nan == "flash-attn: ValueError: wrong, relative error inf"
        assert late == "compiled: RuntimeError: stream is capturing"
    arms["reference"] = without_gain
    with pytest.raises(UserError, match="rms_norm at C = 16: our own reference is wrong"):
        kernels.measure(config, "rms_norm", 16, CPU)


def test_other_libraries_take_part_where_they_are_installed(monkeypatch):
    for module in ("liger_kernel", "quack", "flash_attn"):
        monkeypatch.setitem(sys.modules, module, None)  # what Python does for a missing module
    arms, missing = arms_of("rms_norm", CUDA, compiled=False)
    assert list(arms) == ["triton", "reference", "torch"]
    assert [reason.split(":")[0] for reason in missing] == ["Liger", "quack", "flash-attn"]
    assert arms_of("taper_norm", CUDA, compiled=False)[1] == []  # they have no such operator
    fake = types.SimpleNamespace(
        rmsnorm=lambda x, w, eps, residual=None, prenorm=False: (x, w, eps, residual, prenorm)
    )
    monkeypatch.setitem(sys.modules, "quack", fake)
    assert arms_of("rms_norm", CUDA, False)[0]["quack"]("x", "w") == ("x", "w", 1e-5, None, False)
    assert arms_of("add_rms_norm", CUDA, False)[0]["quack"]("x", "a", "w") == (
        "x",
        "w",
        1e-5,
        "a",
        True,
    )
    assert "quack" not in arms_of("rms_norm", CPU, False)[0]  # they need a GPU


def test_liger_is_called_as_it_wants():
    functional = pytest.importorskip(
        "liger_kernel.transformers.functional", reason="liger-kernel is not installed"
    )
    for name, wanted in (
        ("liger_rms_norm", ["X", "W", "eps"]),
        ("liger_layer_norm", ["X", "W", "B", "eps"]),
        ("liger_fused_add_rms_norm", ["X", "R", "W", "eps"]),
    ):
        names = list(inspect.signature(getattr(functional, name)).parameters)
        assert names[: len(wanted)] == wanted and (
            "in_place" in names or name == "liger_layer_norm"
        )


class FakeGraph:
    """A CUDA graph that a CPU can play: runs what was captured, once at capture and at every
    replay.
    """

    replays = 0

    def replay(self):
        FakeGraph.replays += 1


class FakeEvent:
    is_busy = False

    def __init__(self, enable_timing):
        assert enable_timing

    @classmethod
    def keep_busy(cls, cycles):
        cls.is_busy = True

    def record(self):
        assert self.is_busy, "the GPU would wait for the host between the events"
        self.at = FakeGraph.replays

    def synchronize(self):
        FakeEvent.is_busy = False

    def elapsed_time(self, end):
        return 1000.0 * (end.at - self.at)


def test_the_gpus_path_up_to_the_gpu(monkeypatch):
    """Streams, graphs and events replaced: every phase is captured after a warm-up, replayed and
    timed once a call.
    """
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    graph_context = contextlib.contextmanager(lambda graph, stream: (yield))
    for name, value in {
        "Stream": lambda: stream,
        "stream": contextlib.nullcontext,
        "CUDAGraph": FakeGraph,
        "current_stream": lambda: stream,
        "synchronize": lambda: None,
        "Event": FakeEvent,
        "graph": graph_context,
        "_sleep": FakeEvent.keep_busy,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    case, calls, made = Case(OPERATORS["add_rms_norm"], 8, 16, torch.float32, CPU), [], []

    def arm(x, a, w):
        calls.append(x)
        outputs = OPERATORS["add_rms_norm"].plain(x, a, w)
        made.extend(weakref.ref(output) for output in outputs)
        return outputs

    forward = kernels.runner(case, arm, "forward", CUDA)
    assert len(calls) == 3 and [output.shape for output in forward.__self__.outputs[0]] == [
        (8, 16),
        (8, 16),
    ]
    backward = kernels.runner(case, arm, "backward", CUDA)
    assert len(calls) == 4  # once, outside the graph
    gc.collect()
    # a replay reads what this forward saved
    assert all(output() is not None for output in made[-2:])
    assert [gradient.shape for gradient in backward.__self__.outputs[0]] == [
        (8, 16),
        (8, 16),
        (16,),
    ]
    assert kernels.gpu_seconds(forward) == 1.0
    times = paired_times({"forward": forward, "backward": backward}, 3, measure=kernels.gpu_seconds)
    assert times == {"forward": [1.0] * 3, "backward": [1.0] * 3}


def test_inputs_are_constants_or_leaves():
    x, a, s, w, g, z = make_inputs("xaswgz", 8, 16, torch.bfloat16, CPU)
    assert [value.requires_grad for value in (x, a, s, w, g, z)] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]
    assert (
        s.shape == (8, 1)
        and g.shape == (2,)
        and s.dtype == g.dtype == torch.float32
        and s.min() > 0
    )
    assert (
        z.shape == (8, 32)
        and x.dtype == a.dtype == z.dtype == torch.bfloat16
        and w.dtype == torch.float32
    )
    assert kernel_arms.EPS > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ops=rmsnorm"], "'rmsnorm' is none of rms_norm"),
        (["--rounds=5"], "rounds"),
        (["--channels=0"], "channels"),
        (["--channels=1.5"], "channels"),
        (["--rows=0"], "rows"),
        (["--dtype=int8"], "dtype is one of"),
        (["--channel=8"], "did you mean channels"),
    ],
)
def test_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        kernels.main(words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused():
    with pytest.raises(ConfigError, match="no GPU here"):
        KernelBenchConfig(device="cuda")


def test_what_is_measured_stays_when_time_runs_out(tmp_path, monkeypatch):
    cases, measure = [], kernels.measure

    def until_the_second(*words):
        cases.append(words)
        if len(cases) > 1:
            raise KeyboardInterrupt
        return [row | {"time_over_ours": {}} for row in measure(*words)]  # nobody to compare with

    monkeypatch.setattr(kernels, "measure", until_the_second)
    with pytest.raises(KeyboardInterrupt):
        kernels.main([*TINY, "--ops=rms_norm,layer_norm", f"--out={tmp_path}"])
    records = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
    assert [(row["operator"], row["phase"]) for row in records] == [
        ("rms_norm", "forward"),
        ("rms_norm", "backward"),
    ]
    assert (tmp_path / "README.md").read_text().count("| rms_norm |") == 2


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        kernels.main([*TINY, "--ops=rms_norm", f"--out={tmp_path / 'file'}"])


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: CUDA graphs, Triton kernels"
)
def test_a_run_on_a_gpu(tmp_path):
    kernels.main(["--rows=4096", "--channels=768", "--rounds=6", f"--out={tmp_path}"])
    records = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
    assert {row["ours"] for row in records} == {"triton"}
    assert all({"triton", "reference", "torch", "compiled"} <= set(row["share"]) for row in records)
