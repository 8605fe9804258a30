"""Steps that are captured in a CUDA graph: over several prompts, with each level of fusion and each
compilation.

    python -m pytest tests/decode/test_graph.py
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from decode_models import make, prompt
from torch.utils._python_dispatch import TorchDispatchMode

from decode import step
from decode.arms import check_arm
from decode.pack import LEVELS, pack
from decode.step import Decoder

# As bench_decode.py has them: what is made of our own kernels is not compiled.
WAYS = [
    (level, way)
    for level in LEVELS
    for way in ("graph", "compiled", "tuned")
    if way == "graph" or level in ("plain", "paper") or (level, way) == ("fused", "tuned")
]


class Recorder(TorchDispatchMode):
    """What a CUDA graph is, on a CPU: the operations of a capture, done again with the very same
    tensors.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, results))
        return results

    def replay(self):
        for operation, args, kwargs, results in self.calls:
            for old, new in zip(
                torch.utils._pytree.tree_leaves(results),
                torch.utils._pytree.tree_leaves(operation(*args, **kwargs)),
                strict=True,
            ):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def two_generations(model, decoder, batch, tokens=5):
    """A second prompt through the same captured step: logits against float64, tokens against the
    model's own.
    """
    device = model.wte.weight.device
    for idx in (prompt(batch).to(device), prompt(batch, 9).to(device)):
        check_arm(model, decoder, idx, tokens)


@pytest.mark.parametrize("level", ("plain", "fused"))
def test_a_captured_step_serves_a_second_prompt(level, monkeypatch):
    """The graph emulated: its logits stay where they were captured, whatever a prefill leaves
    behind.
    """

    @contextlib.contextmanager
    def capture(graph, **_):
        with graph:
            yield
        decoder.rewind(decoder.filled)  # a capture runs nothing

    cuda = {
        "Stream": lambda: SimpleNamespace(wait_stream=lambda _: None),
        "current_stream": lambda: None,
        "stream": contextlib.nullcontext,
        "synchronize": lambda: None,
        "CUDAGraph": Recorder,
        "graph": capture,
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    model = make("qwen3", "coupled", init_std=0.3).float()
    decoder = Decoder(pack(model, level), 3, 16, graph=True)
    two_generations(model, decoder, 3)
    captured = decoder.logits
    decoder.prefill(prompt(3))
    assert decoder.step() is captured


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("batch", (1, 3, 32))
@pytest.mark.parametrize(("level", "way"), WAYS)
def test_captured_steps_on_a_gpu(level, way, batch, dtype):
    if (level, way) == ("fused", "tuned") and not step.can_overlap(torch.device("cuda")):
        pytest.skip("launches that overlap want compute capability 9.0")
    torch.compiler.reset()
    shape = "gpt2-bias" if batch == 3 else "qwen3"
    model = make(shape, "rms" if level == "plain" else "coupled", init_std=0.3).to(dtype).cuda()
    compiled = way != "graph" and level != "fused"
    decoder = Decoder(
        pack(model, level), batch, 16, compiled=compiled, tuned=way == "tuned", graph=True
    )
    two_generations(model, decoder, batch)


@pytest.mark.skipif(
    not step.can_overlap(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    reason="launches that overlap need a GPU of compute capability 9.0",
)
@pytest.mark.parametrize(("batch", "length"), ((1, 300), (4, 300), (1, 2500)))
def test_overlapping_launches_decode_what_plain_ones_do(batch, length):
    """A kernel that did not wait would show in some of these tokens."""
    model = make("qwen3", "coupled", init_std=0.3, block_size=length).to(torch.bfloat16).cuda()
    packed = pack(model, "fused")
    plain, overlapping = (
        Decoder(packed, batch, length, tuned=tuned, graph=True).generate(prompt(batch).cuda(), 200)
        for tuned in (False, True)
    )
    assert torch.equal(plain, overlapping)
