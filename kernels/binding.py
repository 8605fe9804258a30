"""Bind the Triton kernels to PyTorch: one operator with a gradient for all norms and activations.

In eager mode it is a torch.autograd.Function, `Fused`. torch.compile cannot look into one that
starts kernels, so there it is an operator, nanonorm::fused, which stays one step of the graph.
Both save and compute the same. Under function transforms (torch.func) plain PyTorch runs instead,
so `Fused` has no setup_context: with one, PyTorch inspects a signature at every call, which takes
longer than all the rest of forward.

Backward computes what it can again, so what is saved is what is in memory anyway (the norm's input,
which is the residual stream; gains and biases) and the statistics, some numbers for each row. The
normalised tensor is not saved: it is the input times the statistic. Second derivatives are those of
kernels/reference.py.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import activation, reference, row_norm, rows
from .reference import KINDS, Inputs, Outputs

# Was TRITON_INTERPRET=1 when Triton was imported? Then kernels run on a CPU, in its interpreter.
INTERPRETED = not isinstance(row_norm.forward_kernel, triton.JITFunction)


class Gradients(NamedTuple):
    """Gradients of inputs; None for what there is not, or where none is wanted."""

    x: Tensor | None
    a: Tensor | None = None
    w: Tensor | None = None
    b: Tensor | None = None
    w_out: Tensor | None = None
    w_tilde: Tensor | None = None


def _save(ctx, inputs: tuple, outputs: Sequence[Tensor | None]) -> None:
    """Save what backward needs: h, and not x and a, where they are added.

    The gradient of an output that nothing has used stays None, and the kernel skips it.
    """
    given = Inputs(*inputs)
    _, h, mean, inv, inv_out = outputs
    ctx.set_materialize_grads(False)
    # No position shares these. LayerNorm's and TaperNorm's inv are not shared either.
    own = inv if given.kind in ("layer", "taper") else None
    ctx.mark_non_differentiable(*[tensor for tensor in (mean, own, inv_out) if tensor is not None])
    ctx.constants = inputs[8:]  # from eps on: what is no tensor
    ctx.dtypes = given.x.dtype, None if given.a is None else given.a.dtype
    ctx.save_for_backward(
        given.x if h is None else h,
        None if given.eps_out is None else given.a,
        given.given if inv is None else inv,
        *(given.w, given.b, given.w_out, given.w_tilde, given.gate_c, mean, inv_out),
    )


def _gradients(
    ctx, dy, dh, _mean, ds, _inv_out, launch: Callable | None = None
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of Inputs; any gradient that comes in may be None.

    `launch` starts a backward kernel: None for _launch_backward.
    """
    launch = launch or _launch_backward
    x, a, inv, w, b, w_out, w_tilde, gate_c, mean, inv_out = ctx.saved_tensors
    *_, counted, kind = ctx.constants
    gains = any(ctx.needs_input_grad[3:7])
    found = Gradients(dh)
    # Where y was not used no kernel is launched: with zeros for dy it would cost a pass more, and
    # give NaN in rows with an infinite number.
    by_reference = torch.is_grad_enabled() or (dy is None and ds is not None)
    if by_reference:
        inputs = Inputs(x, a, inv, w, b, w_out, w_tilde, gate_c, *ctx.constants)
        found = _by_reference(inputs, dy, dh, ds)
    elif dy is not None:
        found = Gradients(
            *launch(
                *(dy, dh, ds, x, a, w, b, w_out, w_tilde, gate_c),
                *(mean, inv, inv_out, counted, kind, gains),
            )
        )
    dx = found.x
    if a is not None and found.a is None and dx is not None and not by_reference:
        # The output norm by itself: dx is the gradient of a row's N_out(a).
        nothing = (None,) * 5
        da, _, dw_out, *_ = launch(
            *(dx, None, None, a, None, w_out, *nothing, inv_out, None, None, "rms", gains)
        )
        found = found._replace(a=da, w_out=dw_out)
    # x and a have the gradient of their sum, in the type of each: under autocast x is float32 and a
    # bfloat16.
    of_x, of_a = (None if dtype is None or dx is None else dx.to(dtype) for dtype in ctx.dtypes)
    da = of_a if a is None else found.a
    return of_x, da, None, found.w, found.b, found.w_out, found.w_tilde, *[None] * 6


def launch_forward(*inputs) -> Outputs:
    """Launch the forward kernel of a norm or an activation for these Inputs."""
    return (activation if inputs[-1] in KINDS else row_norm).forward(*inputs)


def _launch_backward(*arguments) -> tuple[Tensor | None, ...]:
    """Launch the backward kernel of a norm or an activation."""
    dy, _, _, x, _, _, b, *_, inv, _, _, kind, gains = arguments
    if kind not in KINDS:
        return row_norm.backward(*arguments)
    dz, db = activation.backward(dy, x, inv, b, kind, gains)
    return dz, None, None, db, None, None


def _by_reference(
    inputs: Inputs, dy: Tensor | None, dh: Tensor | None, ds: Tensor | None
) -> Gradients:
    """Compute the gradients by autograd of the reference.

    They have gradients themselves where backward is differentiated. inputs.x is the norm's input.
    """
    if not torch.is_grad_enabled():
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs[:7]
        ]
        inputs = Inputs(*leaves, *inputs[7:])  # type: ignore[call-arg]  # seven leaves
    with torch.enable_grad():
        y, _, _, inv, _ = reference.normalize(inputs.x, inputs)
        dx, dw, db, dw_tilde = _autograd(
            (y, inv), (dy, ds), (inputs.x, inputs.w, inputs.b, inputs.w_tilde)
        )
        if dh is not None:
            dx = dh if dx is None else dx + dh
        if inputs.a is None:
            return Gradients(dx, None, dw, db, None, dw_tilde)
        a = inputs.a.to(reference.statistics_dtype(inputs.a))
        normed, _ = reference.rms_norm(a, inputs.w_out, None, inputs.eps_out)
        da, dw_out = _autograd((normed,), (dx,), (inputs.a, inputs.w_out))
    return Gradients(dx, da, dw, db, dw_out, dw_tilde)


def _autograd(
    outputs: tuple[Tensor | None, ...],
    gradients: tuple[Tensor | None, ...],
    inputs: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """Return the gradients of the inputs that have one."""
    pairs = [(root, given) for root, given in zip(outputs, gradients) if given is not None]
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    roots = [root for root, _ in pairs]
    given = [gradient.to(root.dtype) for root, gradient in pairs]
    found = torch.autograd.grad(roots, wanted, given, create_graph=True, allow_unused=True)
    by_input = dict(zip(map(id, wanted), found))
    return [by_input.get(id(tensor)) for tensor in inputs]


class Fused(torch.autograd.Function):
    """A norm or an activation by its kernel: Fused.apply(*Inputs) -> Outputs."""

    @staticmethod
    def forward(ctx, *inputs) -> Outputs:
        outputs = launch_forward(*inputs)
        _save(ctx, inputs, outputs)
        return outputs

    backward = staticmethod(_gradients)


# ------------------------------------------------------------------ operators for torch.compile
# An operator cannot return None: in its place it returns an empty tensor.


def _filled(tensors: Iterable[Tensor | None], x: Tensor) -> list[Tensor]:
    """Put an empty tensor in the place of each None."""
    return [x.new_empty(0) if tensor is None else tensor for tensor in tensors]


def _unfilled(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Put None in the place of each tensor of `_filled`, and of a gradient of one."""
    return [None if tensor is None or tensor.shape == (0,) else tensor for tensor in tensors]


@rows.operator
def fused(
    x: Tensor,
    a: Tensor | None,
    given: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    w_out: Tensor | None,
    w_tilde: Tensor | None,
    gate_c: Tensor | None,
    eps: float,
    eps_out: float | None,
    groups: int,
    counted: int | None,
    kind: str,
) -> list[Tensor]:
    inputs = (x, a, given, w, b, w_out, w_tilde, gate_c, eps, eps_out, groups, counted, kind)
    return _filled(launch_forward(*inputs), x)


fused.register_autograd(
    lambda ctx, gradients: _gradients(  # type: ignore[misc]
        ctx, *_unfilled(gradients), launch=_compiled_backward
    ),
    setup_context=lambda ctx, inputs, output: _save(ctx, inputs, _unfilled(output)),
)


@rows.operator
def fused_backward(
    dy: Tensor,
    dh: Tensor | None,
    ds: Tensor | None,
    x: Tensor,
    a: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    w_out: Tensor | None,
    w_tilde: Tensor | None,
    gate_c: Tensor | None,
    mean: Tensor | None,
    inv: Tensor,
    inv_out: Tensor | None,
    counted: int | None,
    kind: str,
    gains: bool,
) -> list[Tensor]:
    found = _launch_backward(
        *(dy, dh, ds, x, a, w, b, w_out, w_tilde, gate_c, mean, inv, inv_out, counted, kind, gains)
    )
    return _filled(found, x)


def _compiled_backward(*arguments) -> list[Tensor | None]:
    return _unfilled(fused_backward(*arguments))


def compiled(*inputs) -> Outputs:
    """Call the operator as Fused.apply is called."""
    return Outputs(*_unfilled(fused(*inputs)))
