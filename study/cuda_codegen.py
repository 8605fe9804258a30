"""Generate inductor's CUDA code of a training graph on a machine without a GPU.

    forward, backward = cuda_code(function, inputs)

torch.compile traces the function on CPU tensors without content, with inductor's own passes and
partitioner. The two graphs are then re-labelled as CUDA graphs and lowered to Triton source for an
H200, whose properties are given to inductor by hand. Nothing is compiled further and nothing runs.
All of this is inductor's private interface, so it works with the torch versions named here, and
other versions are refused.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from common.errors import UserError

TORCH = ("2.11", "2.13")

# An H200, as torch.cuda.get_device_properties would describe it.
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=143771 << 20,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=60 << 20,
    gcnArchName="",
    clock_rate=1980000,
    memory_clock_rate=3201000,
    memory_bus_width=6144,
)


def supported() -> str:
    """Return why this installation cannot generate the code; empty if it can."""
    if not torch.__version__.startswith(tuple(f"{version}." for version in TORCH)):
        return (
            f"reads private interfaces of torch {' and '.join(TORCH)}, this is {torch.__version__}"
        )
    return "" if find_spec("triton") else "needs triton: pip install triton"


def cuda_code(
    function: Callable[..., Tensor | tuple],
    inputs: Sequence[Tensor],
) -> tuple[str, str]:
    """Return the modules that inductor would run on a GPU for `function(*inputs)`.

    Every output that has a gradient gets one of its own shape. Inductor's options are those that
    are set (torch._inductor.config).

    Args:
        function: a module or function with one graph.
        inputs: on the CPU, as are the parameters; contents unused.

    Returns:
        Source of (forward, backward). Backward is "" if no output has a gradient
        (torch.no_grad).

    Raises:
        UserError: This torch or triton is not supported.
    """
    if reason := supported():
        raise UserError(f"inductor's CUDA code cannot be generated here: it {reason}")
    from torch._inductor.compile_fx import compile_fx

    sources: dict[bool, str] = {}

    def inner_compile(
        graph: fx.GraphModule, example_inputs: Sequence[Tensor], is_backward=False, **_
    ):
        outputs = graph.graph.output_node().args[0]
        results = [node.meta["val"] if isinstance(node, fx.Node) else node for node in outputs]
        sources[is_backward] = _lower(graph, example_inputs, is_backward)
        return _unfilled(results)

    torch._dynamo.reset()  # a function seen before would not be traced again
    with (
        torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        compiled = torch.compile(
            function,
            backend=functools.partial(compile_fx, inner_compile=inner_compile),
            fullgraph=True,
            dynamic=False,
        )
        results = torch.utils._pytree.tree_leaves(compiled(*inputs))
        differentiable = [
            value for value in results if isinstance(value, Tensor) and value.requires_grad
        ]
        if differentiable:
            torch.autograd.backward(
                differentiable, [torch.empty_like(value) for value in differentiable]
            )
    return sources[False], sources.get(True, "")


def _unfilled(like: list) -> Callable[[list], list]:
    """Return a function that stands for a compiled graph with results like these.

    It takes the graph's inputs as a list, and returns tensors of the right shapes.
    """

    def run(inputs: list) -> list:
        inputs.clear()  # a compiled graph frees its inputs like this
        return [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            if isinstance(value, Tensor)
            else value
            for value in like
        ]

    boxed: Any = run
    boxed._boxed_call = True
    return boxed


def _lower(graph: fx.GraphModule, example_inputs: Sequence[Tensor], is_backward: bool) -> str:
    """Return Triton source for a graph that was traced on the CPU."""
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import (
        _recursive_post_grad_passes,
        record_original_output_strides,
        view_to_reshape,
    )
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes import reinplace
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    fake = detect_fake_mode([node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")])
    with _pretend_h200(), torch.no_grad(), V.set_fake_mode(fake):
        record_original_output_strides(graph)
        with fake:
            inputs = [_as_cuda(value) for value in example_inputs]
            # nodes of a CPU graph into those of a CUDA graph, in place
            for node in graph.graph.nodes:
                node.meta.pop("tensor_meta", None)
                if "val" in node.meta:
                    node.meta["val"] = torch.utils._pytree.tree_map(_as_cuda, node.meta["val"])
                if node.kwargs.get("device") == torch.device("cpu"):
                    node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        view_to_reshape(graph)
        with mock.patch.object(reinplace, "_inplace_generalized_scatter", _written_to):
            _recursive_post_grad_passes(graph, is_inference=False)
        lowering = GraphLowering(
            graph,
            example_inputs=inputs,
            shape_env=fake.shape_env,
            is_backward=is_backward,
            graph_id=0,
        )
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            return lowering.codegen()[0].value


def _written_to(x: Tensor, source: Tensor, views: list) -> Tensor:
    """Stand for a write into a view of x, of which the passes ask for the result's shape alone.

    Without CUDA, torch refuses to copy even fake tensors of a GPU.
    """
    return x


def _as_cuda(value: object) -> object:
    """Return a fake CPU tensor as a fake CUDA tensor, and everything else unchanged."""
    if isinstance(value, Tensor) and value.device.type == "cpu":
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    return value


@contextlib.contextmanager
def _pretend_h200() -> Iterator[None]:
    """Answer for an H200 what inductor asks torch and Triton about the GPU."""
    import triton
    from torch._dynamo import device_interface
    from triton.backends.compiler import GPUTarget

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    answers: dict[str, dict[str, Any]] = {
        "torch.cuda": {
            "is_available": True,
            "device_count": 1,
            "current_device": 0,
            "get_device_properties": H200,
            "get_device_capability": (9, 0),
            "synchronize": None,
            "_lazy_init": None,
            "is_bf16_supported": True,
        },
        "torch._dynamo.device_interface.CudaInterface": {
            "is_available": True,
            "get_compute_capability": 90,
            "get_device_properties": H200,
            "is_triton_capable": True,
            "raise_if_triton_unavailable": None,
            "current_device": 0,
        },
        "torch._dynamo.device_interface.CudaInterface.Worker": {
            "get_device_properties": H200,
            "current_device": 0,
        },
        # it would allocate, in a CUDA build
        "torch._subclasses.fake_tensor": {"init_gpu_context": None},
        "torch.utils._triton": {"has_triton": True},
        "torch._inductor.scheduler": {"has_triton": True},
    }
    with contextlib.ExitStack() as stack:
        active = property(lambda _: driver)
        stack.enter_context(mock.patch.object(type(triton.runtime.driver), "active", active))
        stack.enter_context(mock.patch("torch.version.cuda", "13.0"))
        for target, values in answers.items():
            for name, value in values.items():
                stack.enter_context(mock.patch(f"{target}.{name}", return_value=value))
        if not device_interface._device_initialized:
            device_interface.init_device_reg()
        yield
