"""The byte ledger: how it counts, and what it says of this repository's norms.

    python -m pytest tests/bench/test_bytes.py

Inductor is told of a GPU that is not there, and remembers some of it: what generates code runs in a
child process.
"""

import collections
import dataclasses
import gc
import re
from collections.abc import Mapping, Sequence
from unittest import mock

import pytest
import torch
from helpers import FORKS, ROOT, json_lines

import norm_plan
from bench import bytes
from common.environment import environment
from common.errors import UserError
from kernels.cross_entropy import cross_entropy
from model import FOLD_PAYS, GPT, GPTConfig
from study import cuda_codegen, traffic
from study.traffic import launches, total

TOKENS = 65536
# one worker computes the figures, none waits for them
pytestmark = pytest.mark.xdist_group("byte_ledger")
needs_codegen = pytest.mark.skipif(
    bool(cuda_codegen.supported()), reason=cuda_codegen.supported() or "can run"
)


@pytest.fixture(scope="module")
def in_child():
    """in_child(function): its result there."""
    with FORKS.Pool(1) as pool:
        yield pool.apply


# ------------------------------------------------------------------------------------ how it counts

# What inductor writes, cut to what counts: x * gain in place over (4, 8, 16), a reduction that uses
# a work space.
SOURCE = """
triton_poi = async_compile.triton('triton_poi', '''
@triton_heuristics.pointwise(size_hints={'x': 512}, triton_meta={'signature':
    {'in_out_ptr0': '*bf16', 'in_ptr0': '*fp32', 'xnumel': 'i32', 'XBLOCK': 'constexpr'}})
@triton.jit
def triton_poi(in_out_ptr0, in_ptr0, xnumel, XBLOCK : tl.constexpr):
    tmp0 = tl.load(in_out_ptr0 + (x0), xmask).to(tl.float32)
    tmp1 = tl.load(in_ptr0 + (x1), xmask)
    tmp2 = tl.load(in_ptr0 + (x1), xmask, eviction_policy='evict_last')
    tl.store(in_out_ptr0 + (x0), tmp0 * tmp1, xmask)
''', device_str='cuda')
triton_per = async_compile.triton('triton_per', '''
@triton_heuristics.persistent_reduction(triton_meta={'signature':
    {'in_ptr0': '*bf16', 'out_ptr0': '*fp32', 'ws_ptr': '*fp32', 'xnumel': 'i32'}})
@triton.jit
def triton_per(in_ptr0, out_ptr0, ws_ptr, xnumel):
    tmp0 = tl.load(in_ptr0 + (x0), xmask).to(tl.float32)
    tl.store(out_ptr0 + (x1), tmp0, xmask)
    tl.store(ws_ptr + (x2), tmp0, xmask)
''', device_str='cuda')

class Runner:
    def call(self, args):
        primals_1, primals_2, primals_3, primals_4 = args
        args.clear()
        assert_size_stride(primals_1, (4, 8, 16), (128, 16, 1))
        assert_size_stride(primals_2, (16, ), (1, ))
        assert_size_stride(primals_3, (16, 16), (16, 1))
        assert_size_stride(primals_4, (32, 64), (64, 1))
        with torch.cuda._DeviceGuard(0):
            buf0 = reinterpret_tensor(primals_1, (32, 16), (16, 1), 0); del primals_1  # reuse
            triton_poi.run(buf0, primals_2, 512, stream=stream0)
            buf1 = empty_strided_cuda((32, 16), (16, 1), torch.bfloat16)
            extern_kernels.addmm(
                buf0, buf0, reinterpret_tensor(primals_3, (16, 16), (1, 16), 0), out=buf1)
            extern_kernels.addmm(primals_2, buf0, primals_3, out=buf1)
            buf2 = empty_strided_cuda((4, 8, 1), (8, 1, 32), torch.float32)
            workspace_0 = empty_strided_cuda((48, ), (1, ), torch.float32)
            triton_per.run(buf1, buf2, workspace_0, 32, stream=stream0)
            buf3 = buf1; del buf1  # reuse
            triton_poi.run(buf3, primals_2, 512, stream=stream0)
            triton_poi.run(primals_4, primals_2, 2048, stream=stream0)
            triton_poi.run(primals_3, primals_2, 256, stream=stream0)
            triton_poi.run(primals_3, primals_3, 256, stream=stream0)
"""


def test_what_is_read_from_generated_source():
    found = launches(SOURCE, batch=4, tokens=8)
    scaled, residual, reduced, again, *_ = found
    # loaded and stored; the gain once, though loaded twice
    assert scaled.bytes_moved == 2 * 512 * 2 + 16 * 4
    assert (scaled.name, scaled.widths, scaled.others) == ("triton_poi", (16,), (16,))
    assert (residual.name, residual.bytes_moved, residual.widths) == ("addmm", 512 * 2, (16,))
    # the work space is written here and read by a sum
    assert reduced.bytes_moved == 512 * 2 + 32 * 4 + 2 * 48 * 4
    assert reduced.widths == (16, 1) and reduced.others == (48,)
    assert again == scaled
    # The fifth touches 64 numbers a token: the MLP's. The last two have no tokens: what counts is
    # whether a gain is touched.
    of_norms = [True, True, True, True, False, True, False]
    assert [launch.is_of_norms(16) for launch in found] == of_norms
    # one number a token: the loss
    assert not dataclasses.replace(reduced, widths=(1, 1)).is_of_norms(16)


@pytest.mark.parametrize(
    ("seen", "unseen", "message"),
    [
        (
            "tmp1 = tl.load(in_ptr0 + (x1), xmask)\n    tmp2 = tl.load(in_ptr0",
            "tl.atomic_add(in_ptr0",
            "in_ptr0 plainly",
        ),
        ("tl.store(ws_ptr", "tl.atomic_add(ws_ptr", "ws_ptr plainly"),
        (
            "buf3 = buf1",
            "buf3 = torch.ops.nanonorm.rms_norm.default(buf1)",
            "rms_norm.default is opaque",
        ),
        (
            "extern_kernels.addmm(primals_2",
            "extern_kernels.convolution(primals_2",
            "convolution is opaque",
        ),
    ],
)
def test_what_cannot_be_counted_is_an_error_not_a_zero(seen, unseen, message):
    assert seen in SOURCE
    with pytest.raises(UserError, match=message):
        launches(SOURCE.replace(seen, unseen), 4, 8)


def code_of_a_loss_in_chunks() -> str:
    """In two chunks of 16,384 rows and 32,768 logits, as many bytes as a chunk may have."""
    return cuda_codegen.cuda_code(
        lambda targets, x, head: cross_entropy(x, head, targets, 32700),
        [
            torch.zeros(32768, dtype=torch.int64),
            *(torch.empty(32768, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)),
        ],
    )[0]


@needs_codegen
def test_a_chunk_of_the_loss_writes_logits_and_their_gradient_alone(in_child):
    """Both in bfloat16; in float32 neither is ever written."""
    code = in_child(code_of_a_loss_in_chunks)
    assert "((16384, 32768), (32768, 1), torch.bfloat16)" in code
    assert not re.search(r"\(\(16384, 32\d\d\d\), \(\d+, 1\), torch\.float32\)", code)


def code_of_a_running_sum() -> str:
    """Of what writes into a part of a tensor, as a statistic that runs over steps does."""

    def add(sums: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        sums[:-1] += x.detach().sum(0)
        return 2 * x

    return cuda_codegen.cuda_code(add, [torch.zeros(17), torch.ones(8, 16, requires_grad=True)])[0]


@needs_codegen
def test_a_write_into_a_part_of_a_tensor_is_counted(in_child):
    moved = launches(in_child(code_of_a_running_sum), 1, 8)
    assert sum(launch.bytes_moved for launch in moved) >= 4 * (8 * 16 + 8 * 16 + 16)


# ------------------------------------------------------------------------ what it says of the norms


# What is counted anew, as all others would take half an hour: arm -> streams beside the block alone
TODAY = {
    "rms": (),
    "layer": (),
    "coupled": ("float32",),
    "coupled, fold": ("autocast",),
}
# it adds the gradients of two paths within a norm's backward kernel
OLDER = torch.__version__.startswith("2.11.")


def recorded(folder) -> dict[str, dict[str, float]]:
    """Bytes per token of each arm, as the program has written them."""
    return {row["norms"]: row["bytes_per_token"] for row in json_lines(folder / "ledger.jsonl")}


LEDGER = recorded(ROOT / "results/cpu/bytes")


def figures() -> tuple[dict[str, dict[str, float]], list[tuple[str, str]]]:
    """Count what TODAY says; return that, and the source of each step in the order of counting."""
    gc.disable()  # it takes 15 % of the time; this process soon ends
    config, sources = bytes.LedgerConfig(), []
    cuda_code = cuda_codegen.cuda_code

    def code_of(*given):
        sources.append(cuda_code(*given))
        return sources[-1]

    with mock.patch.object(traffic, "cuda_code", code_of):
        found = {arm: bytes.count(config, arm, streams) for arm, streams in TODAY.items()}
    return found, sources


@pytest.fixture(scope="module")
def today(in_child):
    return in_child(figures)


@needs_codegen
def test_the_table_in_results_is_todays(today):
    found, _ = today
    changed = {
        (arm, name)
        for arm, row in found.items()
        for name in row
        if row[name] != pytest.approx(LEDGER[arm][name], rel=1e-3)
    }
    assert {name for row in found.values() for name in row} == LEDGER["rms"].keys()
    assert changed == ({("layer", "one block")} if OLDER else set())


def test_what_norms_move_in_the_step_of_training():
    """With bfloat16 streams RMSNorm's gain gradient rides along with its row reduction, and
    coupled's needs a pass of its own.
    """
    rms, coupled, fold = (LEDGER[arm] for arm in ("rms", "coupled", "coupled, fold"))
    assert rms["bfloat16 stream"] < coupled["bfloat16 stream"] <= 26_500  # so says the README
    assert fold["float32 stream"] < coupled["float32 stream"] < rms["float32 stream"]
    # Fold has no norm2: three addmm take the adds, two crossings each.
    assert fold["copied"] == pytest.approx(fold["bfloat16 stream"] + 3 * 2 * 2 * 768)
    # Passes over the 4 C^2 weights: float32 -> bfloat16 and back, 24 C^2 bytes each, counted here
    # alone, though every norm's weights are cast; and for the gain's gradient a read of both, which
    # only fold has.
    extra, casts = 24 * 768**2 / TOKENS, 48 * 768**2 / TOKENS
    saved = coupled["bfloat16 stream"] - (fold["copied"] - casts - extra)
    assert pytest.approx(extra * TOKENS / 768 / saved, rel=0.02) == FOLD_PAYS
    # What fold saves is not spent in the MLP, whose activation keeps its bfloat16 input.
    for stream, whole in (("copied", "copied, whole"), ("float32 stream", "float32, whole")):
        assert fold[whole] - fold[stream] <= rms[whole] - rms[stream] + 2 * casts


def bytes_of_what_ran(sources: Sequence[str], ran: Mapping[str, int]) -> int:
    """Check that kernels ran as often as they are read in the sources; return the norms' bytes."""
    found = [launch for code in sources for launch in launches(code, TOKENS // 1024, 1024)]
    generated = {name: times for name, times in ran.items() if name.startswith("triton_")}
    assert generated == collections.Counter(
        launch.name for launch in found if launch.name != "addmm"
    )
    return total(found, 768)


@needs_codegen
def test_a_step_has_the_kernels_and_bytes_that_are_counted(today):
    """The next test without its GPU: what runs is what the sources call."""
    of_three, of_two = today[1][-2:]  # of "coupled, fold", which is counted last
    moved = []
    for sources in (of_three, of_two):
        ran = collections.Counter(re.findall(r"(triton_\w+)\.run\(", "".join(sources)))
        assert len(ran) > 5
        moved.append(bytes_of_what_ran(sources, ran))
    expected = LEDGER["coupled, fold"]["bfloat16 stream"]
    assert (moved[0] - moved[1]) / TOKENS == pytest.approx(expected, rel=0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a trace of a compiled step")
@pytest.mark.parametrize("arm", ["rms", "coupled, fold"])
def test_a_real_step_has_the_kernels_and_bytes_that_are_counted(arm):
    """On a GPU: its generated kernels run as often as they are read in the code, and one more block
    moves the bytes of results/. Prints the copies of whole streams, which tell whether an addmm
    copies its operand.
    """
    from torch._inductor.utils import run_and_get_code
    from torch.profiler import ProfilerActivity, profile

    keys, moved = bytes.ARMS[arm] | {"norm_type": arm.split(",")[0], "residual": "autocast"}, {}
    idx = torch.zeros(TOKENS // 1024, 1024, dtype=torch.int64, device="cuda")
    for blocks in (2, 3):
        torch._dynamo.reset()
        model = GPT(GPTConfig(n_layer=blocks, vocab_size=64, **keys)).cuda()
        model.wte.requires_grad_(False)  # as in bytes_of_one_more_block
        model.wpe.requires_grad_(False)
        compiled = torch.compile(model, dynamic=False)

        def step(compiled: torch.nn.Module = compiled) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss, _ = compiled(idx, idx)
            loss.backward()

        _, sources = run_and_get_code(step)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            step()
            torch.cuda.synchronize()
        ran = collections.Counter(event.name for event in trace.events())
        moved[blocks] = bytes_of_what_ran(sources, ran)
        print(arm, blocks, {name: times for name, times in ran.items() if "copy" in name.lower()})
    expected = LEDGER[arm]["bfloat16 stream"]
    assert (moved[3] - moved[2]) / TOKENS == pytest.approx(expected, rel=0.02)


def test_the_program_writes_its_table(tmp_path, monkeypatch):
    """Into a folder that does not exist yet; then one arm again, which leaves the others."""
    out = f"--out={tmp_path / 'new'}"
    monkeypatch.setattr(bytes, "count", lambda config, arm: LEDGER["none"])
    bytes.main([out])
    monkeypatch.setattr(bytes, "count", lambda config, arm: LEDGER[arm])
    bytes.main([out, f"--arms={'; '.join(LEDGER)}"])
    first = environment(torch.device("cpu"))["git"]
    head = (tmp_path / "new/README.md").read_text().split("\n|")[0]
    assert f"commit {first}. Made" in " ".join(head.split())
    place = {"git": "of another day", "versions": {"torch": "3.0"}}
    monkeypatch.setattr(bytes, "environment", lambda device: place)
    bytes.main([out, "--arms=rms"])
    head = " ".join((tmp_path / "new/README.md").read_text().split("\n|")[0].split())
    assert "of another day (rms)" in head and f"commit {first} (layer, coupled," in head
    assert recorded(tmp_path / "new") == LEDGER
    pages = [folder / "README.md" for folder in (ROOT / "results/cpu/bytes", tmp_path / "new")]
    old, new = (re.findall(r"^\|.*", page.read_text(), re.M) for page in pages)
    assert sorted(new) == sorted(old) and len(old) == 2 + len(LEDGER)


def test_every_arm_is_a_config():
    assert bytes.ARMS.keys() == LEDGER.keys()
    for arm, keys in bytes.ARMS.items():
        GPTConfig(norm_type=arm.split(",")[0], **keys)
    counted = {arm.split(",")[0] for arm in bytes.ARMS}
    assert counted | set(bytes.MIXTURES) == norm_plan.NORM_TYPES.keys()
