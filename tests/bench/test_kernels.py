"""bench/kernels.py and decode/timing.py: what they time, what they refuse to time, and what they
write. Nothing here asserts a time.

    python -m pytest tests/bench/test_kernels.py
"""

import json
import os
import signal
import sys
import time

import pytest
import torch
from helpers import json_lines, run_python

from bench import kernel_arms, kernels
from bench.copy_kernel import copy
from bench.kernel_arms import OPERATORS, UNSCALED, arms_of
from bench.kernels import Case, KernelBenchConfig
from common.errors import ConfigError, UserError
from configurator import parse_args
from decode import timing

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = ["--rows=8,6", "--channels=16", "--rounds=6", "--dtype=float32", "--device=cpu"]


def test_a_run_on_a_cpu_writes_table_and_records(tmp_path, capsys):
    folder = tmp_path / "new" / "kernels"
    kernels.main([*SMALL, f"--out={folder}"])
    output = capsys.readouterr().out
    records = json_lines(folder / "kernels.jsonl")
    expected = [
        (name, rows, phase)
        for name in OPERATORS
        for rows in (8, 6)
        for phase in ("forward", "backward")
    ]
    for found in (json.loads(output.splitlines()[-1]), records):
        assert [(row["operator"], row["rows"], row["phase"]) for row in found] == expected
    for row in records:
        arms = {"reference", "torch"}
        arms |= {UNSCALED} if row["operator"].startswith("scaled_") else set()
        assert set(row["share"]) == set(row["seconds"]) == arms and row["ours"] == "reference"
        assert set(row["time_over_ours"]) == arms - {"reference"} and row["missing"] == []
        assert row["versions"]["torch"] == torch.__version__ and row["torch_runs_quack"] is False
    readme = (folder / "README.md").read_text()
    assert readme.count("\n| rms_norm |") == 4 and "no Triton kernels here" in readme


@pytest.mark.parametrize(
    ("cache", "told"),
    [(0, "CUDA graphs, cold L2 cache."), (700, "L2 cache not cold in 1 of 2 rows.")],
)
def test_a_cold_cache_is_told_only_of_sizes_beyond_it(cache, told, monkeypatch):
    """One set of inputs a size moves 132 bytes a row: 264 and 4,224."""
    monkeypatch.setattr(kernels, "l2_bytes", lambda device: cache)
    config = KernelBenchConfig(dtype="float32", device="cpu", rounds=6)
    rows = []
    for count in (2, 32):
        case = Case("rms_norm", count, 16, torch.float32, CPU)
        arms = arms_of("rms_norm", CPU)[0]
        rows.append(kernels.record(config, case, "forward", arms, []))
    for row in rows:
        row |= {"ours": "triton", "torch_runs_quack": False}
    monkeypatch.setattr(kernels, "card", lambda row: "A card")
    monkeypatch.setattr(kernels, "table", lambda records: "")
    assert told in kernels.report(config, rows)


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
def test_fewest_bytes_and_the_plain_formula(name, forward, backward):
    assert Case(name, 8, 16, torch.bfloat16, CPU).bytes == [forward, backward]
    for dtype in (torch.float16, torch.float32):
        case = Case(name, 32, 48, dtype, CPU)
        assert case.error(OPERATORS[name].ours("torch")) <= 4 * torch.finfo(dtype).eps


def nbytes(tensors):
    """Bytes of the storages of these tensors, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def kept_bytes(case, arm):
    """What forward leaves for backward: outputs and saved tensors of one set."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        (outputs,) = case.forward(arm)
    return nbytes([*outputs, *saved, *case.sets[0]]) - nbytes(case.sets[0])


def peak_bytes(case, count):
    """The most that a GPU would need for a case with `count` sets.

    All sets have inputs, gradients of outputs, and two buffers to copy. Forward's graphs share
    their memory, so that one arm's counts; backward's share theirs too, but forward's outputs and
    saved tensors of all arms are there, for their graphs read them. Arms that need a GPU count as
    the reference does (compiled), or as outputs and one more tensor that is as large.
    """
    kept = [kept_bytes(case, arm) for arm in arms_of(case.name, CPU)[0].values()]
    kept += [kept[0], *[2 * nbytes(case.gradients[0])] * (1 + len(kernel_arms.PEERS))]
    gradients = sum(value.nbytes for value in case.sets[0] if value.requires_grad)
    shared = nbytes([*case.sets[0], *case.gradients[0], *case.copies])
    return count * (shared + max(max(kept), sum(kept) + gradients))


@pytest.mark.parametrize("rows", KernelBenchConfig.rows)
@pytest.mark.parametrize("channels", KernelBenchConfig.channels)
def test_every_default_case_fits_on_80_gb(rows, channels):
    for name in OPERATORS:
        case = Case(name, 64, channels, torch.bfloat16, CPU)
        scale = min(rows, kernels.LARGEST // (2 * channels)) / 64
        count = kernels.sets_of(int(min(case.bytes) * scale))
        assert peak_bytes(case, count) * scale < 0.85 * 80e9, name
    largest = Case("rms_norm", 65536, 1 << 20, torch.bfloat16, torch.device("meta"))
    assert largest.rows == 256


def test_a_copy_moves_as_many_bytes_as_the_operator_must():
    case = Case("add_rms_norm", 8, 16, torch.bfloat16, CPU)
    case.bytes = [1024, 600]  # forward moves more
    for function in (copy, torch.Tensor.copy_):
        case.copies = [torch.arange(2 * 512).remainder(255).to(torch.uint8).view(2, 512).clone()]
        ((source, target),) = case.copies
        case.moving(function, "backward")()
        assert torch.equal(source[:300], target[:300])
        assert (source[300:] != target[300:]).all()


def test_figures_are_medians_of_the_rounds_ratios(monkeypatch):
    """A machine that drifts: every round is slower than the last, and the ratios stay what they
    are. The faster copy is the limit.
    """
    drift = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    times = {"reference": 2.0, "torch": 3.0, UNSCALED: 1.5, "copy: cudaMemcpy": 0.5}

    def time_arms(calls, *_, **__):
        return {arm: [times[arm] * factor for factor in drift] for arm in calls}

    monkeypatch.setattr(kernels, "time_arms", time_arms)
    config = KernelBenchConfig(rounds=6)
    forward, backward = kernels.measure(config, "scaled_swiglu", 8, 16, CPU)
    for row, fewest in ((forward, 3 * 256 + 32), (backward, 5 * 256 + 32)):
        assert row["share"]["reference"] == 0.25 and row["share"][UNSCALED] == pytest.approx(1 / 3)
        assert row["time_over_ours"]["torch"] == {"median": 1.5, "low": 1.5, "high": 1.5}
        assert row["copy_bytes_per_s"] == {"copy: cudaMemcpy": fewest / (0.5 * 6.0)}
    *_, line = kernels.table([forward]).splitlines()
    # what computes less is no rival
    assert line.endswith("| 25% | 17% | 33% | torch: 1.500 (1.500 .. 1.500) |")


def test_the_host_is_timed_without_launches():
    """Launched on a CPU, a kernel would fail."""
    code = "from bench.kernels import main; main(['--host=True', '--ops=rms_norm', '--rounds=6'])"
    done = run_python("-c", code, TRITON_INTERPRET="0")

    told = json.loads(done.stdout)
    assert told["ours, us"] > 0 and told["over torch"]["median"] > 0


def test_what_is_wrong_or_fails_is_not_timed(monkeypatch):
    plain = OPERATORS["rms_norm"].plain

    def without_gain(x, w):
        return plain(x, torch.ones_like(w)) + 0 * w

    def broken(x, w):
        raise RuntimeError("no kernel image\nand much more")

    def poisoned(x, w):
        return plain(x, w) * torch.nan

    arms = {"reference": OPERATORS["rms_norm"].ours("torch"), "torch": plain}
    arms |= {"Liger": without_gain, "quack": broken, "flash-attn": poisoned}
    monkeypatch.setattr(kernels, "arms_of", lambda *_: (dict(arms), []))
    config = KernelBenchConfig(rounds=6, dtype="float32")
    for row in kernels.measure(config, "rms_norm", 8, 16, CPU):
        assert set(row["share"]) == {"reference", "torch"}
        wrong, failed, nan = row["missing"]
        assert wrong.startswith("Liger: ") and "wrong, relative error" in wrong
        assert failed == "quack: RuntimeError: no kernel image"
        assert nan.startswith("flash-attn: ") and "relative error inf" in nan
    arms["reference"] = without_gain
    with pytest.raises(UserError, match="reference of rms_norm at C = 16 is wrong"):
        kernels.measure(config, "rms_norm", 8, 16, CPU)


def test_other_libraries_take_part_where_they_are_installed(monkeypatch):
    for module in ("liger_kernel", "quack", "flash_attn", "transformer_engine"):
        monkeypatch.setitem(sys.modules, module, None)  # what Python does for a missing module
    arms, missing = arms_of("rms_norm", CUDA)
    assert list(arms) == ["triton", "reference", "torch", "compiled"]
    assert [reason.split(":")[0] for reason in missing] == list(kernel_arms.PEERS)
    assert arms_of("taper_norm", CUDA)[1] == []  # they have no such operator


@pytest.mark.parametrize(
    ("only", "on_gpu", "on_cpu"),
    [
        ("triton", ["triton"], ["reference"]),
        ("torch", ["triton", "torch", UNSCALED], ["reference", "torch", UNSCALED]),
        ("compiled", ["triton", "compiled"], ["reference"]),
    ],
)
def test_arms_can_be_chosen(only, on_gpu, on_cpu):
    config = parse_args(KernelBenchConfig, [f"--arms={only}"])[0]
    assert list(arms_of("scaled_gelu", CUDA, config.arms)[0]) == on_gpu
    assert list(arms_of("scaled_gelu", CPU, config.arms)[0]) == on_cpu
    with pytest.raises(ConfigError, match="'tritn'"):
        parse_args(KernelBenchConfig, ["--arms=tritn"])


@pytest.mark.parametrize(("whole", "kept"), [(7, [7]), (5, None)])
def test_an_interrupted_bench_keeps_what_it_has_and_ends(whole, kept, monkeypatch, tmp_path):
    """A stage that is late is cut: no other case begins. Five rounds have no interval."""

    def interrupted(arm, **_):
        turns.append(arm)
        if len(turns) > 3 * whole:  # two arms and a copy
            raise KeyboardInterrupt
        return 1.0

    turns = []
    monkeypatch.setattr(timing, "seconds", interrupted)
    words = [*SMALL, "--rounds=50", "--ops=rms_norm,layer_norm", f"--out={tmp_path}"]
    if kept:
        kernels.main(words)
        assert [row["rounds"] for row in json_lines(tmp_path / "kernels.jsonl")] == kept
    else:
        with pytest.raises(KeyboardInterrupt):
            kernels.main(words)


@pytest.mark.parametrize(
    ("device", "threads", "clock"), [("cpu", 1, 1.0), ("cpu", 2, 2.0), ("mps", 1, 2.0)]
)
def test_the_process_s_time_is_taken_on_one_cpu_thread_alone(device, threads, clock, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    seconds = {time.process_time: 1.0, time.perf_counter: 2.0}
    monkeypatch.setattr(timing, "seconds", lambda call, clock: seconds[clock])
    assert timing.time_arms({"arm": int}, 3, torch.device(device)) == {"arm": [clock] * 3}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_rounds_and_keeps_those_that_are_whole(number):
    """SIGINT too where it was ignored, as in a shell's background job."""
    ran = []

    def arm():
        ran.append(number)
        if len(ran) == 8:
            os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        times = timing.time_arms({"a": arm, "b": arm}, 1000, CPU)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert set(map(len, times.values())) == {3}  # the fourth round is not whole


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: CUDA graphs, Triton kernels"
)
def test_a_run_on_a_gpu(tmp_path):
    kernels.main(["--rows=4096", "--channels=768", "--rounds=6", f"--out={tmp_path}"])
    records = json_lines(tmp_path / "kernels.jsonl")
    assert {row["ours"] for row in records} == {"triton"}
    assert all({"triton", "reference", "torch", "compiled"} <= set(row["share"]) for row in records)
