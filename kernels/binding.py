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
from types import ModuleType

import torch
import triton
from torch import Tensor

from . import activation, reference, row_norm, rows
from .operands import Gradients, Inputs, Outputs, Saved, Settings, Upstream
from .reference import KINDS

# Was TRITON_INTERPRET=1 when Triton was imported? Then kernels run on a CPU, in its interpreter.
INTERPRETED = not isinstance(row_norm.forward_kernel, triton.JITFunction)

Backward = Callable[[Upstream, Saved, Settings, bool], Gradients]


def _launchers(settings: Settings) -> ModuleType:
    """Return the module whose `forward` and `backward` launch the kernels of an operator."""
    return activation if settings.kind in KINDS else row_norm


def _save(ctx, inputs: Inputs, settings: Settings, outputs: Outputs) -> None:
    """Save what backward needs: h, and not x and a, where they are added."""
    # The gradient of an output that nothing has used stays None, and the kernel skips it.
    ctx.set_materialize_grads(False)
    # No gradient goes through these statistics. One goes through RMSNorm's inv, where a later
    # position of coupled_grad=full shares it.
    constants = [outputs.mean, outputs.inv_out]
    if settings.kind in ("layer", "taper"):
        constants.append(outputs.inv)
    ctx.mark_non_differentiable(*[tensor for tensor in constants if tensor is not None])
    ctx.settings = settings
    ctx.x_dtype = inputs.x.dtype
    ctx.a_dtype = None if inputs.a is None else inputs.a.dtype
    is_sum = outputs.h is not None
    has_output_norm = settings.eps_out is not None
    is_given = outputs.inv is None
    saved = Saved(
        x=outputs.h if is_sum else inputs.x,
        a=inputs.a if has_output_norm else None,
        w=inputs.w,
        b=inputs.b,
        w_out=inputs.w_out,
        w_tilde=inputs.w_tilde,
        gate_c=inputs.gate_c,
        mean=outputs.mean,
        inv=inputs.given if is_given else outputs.inv,
        inv_out=outputs.inv_out,
    )
    ctx.save_for_backward(*saved)


def _gradients(ctx, of_outputs: Outputs, launch: Backward) -> Inputs:
    """Compute the gradients of Inputs, given those of Outputs; any that comes in may be None.

    `launch` starts the backward kernel.
    """
    saved = Saved(*ctx.saved_tensors)
    settings = ctx.settings
    upstream = Upstream(dy=of_outputs.y, dh=of_outputs.h, ds=of_outputs.inv)
    is_differentiated_again = torch.is_grad_enabled()
    statistic_alone = upstream.dy is None and upstream.ds is not None
    if is_differentiated_again or statistic_alone:
        # No kernel has a gradient of its own, and none is written for a statistic without y.
        found = _by_reference(upstream, saved, settings)
    else:
        wanted = Inputs(*ctx.needs_input_grad[: len(Inputs._fields)])
        gains = any((wanted.w, wanted.b, wanted.w_out, wanted.w_tilde))
        found = _by_kernels(upstream, saved, settings, gains, launch)
    da = found.a
    if saved.a is None:
        # x and a are added as they are, so the gradient of their sum is that of each.
        da = _cast(found.x, ctx.a_dtype)
    return Inputs(
        x=_cast(found.x, ctx.x_dtype),  # under autocast x is float32, and a bfloat16
        a=da,
        w=found.w,
        b=found.b,
        w_out=found.w_out,
        w_tilde=found.w_tilde,
    )


def _by_kernels(
    upstream: Upstream, saved: Saved, settings: Settings, gains: bool, launch: Backward
) -> Gradients:
    """Compute the gradients by one launch; the output norm's may take another, or it alone."""
    if upstream.dy is None:
        # Only the sum h was used. The kernel with zeros for dy would cost a pass more, and give NaN
        # in rows with an infinite number.
        found = Gradients(x=upstream.dh)
    else:
        found = launch(upstream, saved, settings, gains)
    has_output_norm = saved.a is not None
    if not has_output_norm or found.a is not None or found.x is None:
        return found
    # The output norm is left: N_out(a) is a summand of h, so its gradient is that of h.
    output_norm = Saved(x=saved.a, w=saved.w_out, inv=saved.inv_out)
    of_output = launch(Upstream(dy=found.x), output_norm, Settings("rms"), gains)
    return found._replace(a=of_output.x, w_out=of_output.w)


def _cast(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return a gradient in `dtype`; None without a gradient, or where nothing asks for it."""
    return None if gradient is None or dtype is None else gradient.to(dtype)


def _launch_backward(
    upstream: Upstream, saved: Saved, settings: Settings, gains: bool
) -> Gradients:
    """Launch the backward kernel; gradients of gains and biases only if `gains`."""
    return _launchers(settings).backward(upstream, saved, settings, gains)


def _by_reference(upstream: Upstream, saved: Saved, settings: Settings) -> Gradients:
    """Compute the gradients by autograd of the reference.

    They have gradients themselves where backward is differentiated.
    """
    if not torch.is_grad_enabled():
        saved = Saved(*[_as_leaf(tensor) for tensor in saved])
    inputs = Inputs(
        x=saved.x,
        given=saved.inv,
        w=saved.w,
        b=saved.b,
        w_tilde=saved.w_tilde,
        gate_c=saved.gate_c,
    )
    with torch.enable_grad():
        outputs = reference.normalize(saved.x, inputs, settings)
        leaves = Gradients(x=saved.x, w=saved.w, b=saved.b, w_tilde=saved.w_tilde)
        found = _autograd((outputs.y, outputs.inv), (upstream.dy, upstream.ds), leaves)
        if upstream.dh is not None:
            dx = upstream.dh if found.x is None else found.x + upstream.dh
            found = found._replace(x=dx)
        if saved.a is None:
            return found
        a = saved.a.to(reference.statistics_dtype(saved.a))
        normed, _ = reference.rms_norm(a, saved.w_out, None, settings.eps_out)
        leaves = Gradients(a=saved.a, w_out=saved.w_out)
        of_output = _autograd((normed,), (found.x,), leaves)
    return found._replace(a=of_output.a, w_out=of_output.w_out)


def _as_leaf(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().requires_grad_()


def _autograd(
    outputs: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...], leaves: Gradients
) -> Gradients:
    """Return the gradients of the leaves that have one, each in the place of its leaf."""
    pairs = [(root, given) for root, given in zip(outputs, gradients) if given is not None]
    wanted = [tensor for tensor in leaves if tensor is not None and tensor.requires_grad]
    if not pairs or not wanted:
        return Gradients()
    roots = [root for root, _ in pairs]
    given = [gradient.to(root.dtype) for root, gradient in pairs]
    found = torch.autograd.grad(roots, wanted, given, create_graph=True, allow_unused=True)
    by_leaf = dict(zip(map(id, wanted), found))
    return Gradients(*[by_leaf.get(id(tensor)) for tensor in leaves])


class Fused(torch.autograd.Function):
    """A norm or an activation by its kernel: Fused.apply(*Inputs, Settings) -> Outputs."""

    @staticmethod
    def forward(ctx, *operands) -> Outputs:
        *tensors, settings = operands
        inputs = Inputs(*tensors)
        outputs = _launchers(settings).forward(inputs, settings)
        _save(ctx, inputs, settings, outputs)
        return outputs

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, Outputs(*gradients), _launch_backward), None


# ------------------------------------------------------------------ operators for torch.compile
# An operator has a flat signature: the fields of the records, one by one. And it cannot return
# None: in its place it returns an empty tensor.


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
    kind: str,
    eps: float,
    eps_out: float | None,
    groups: int,
    counted: int | None,
) -> list[Tensor]:
    inputs = Inputs(x=x, a=a, given=given, w=w, b=b, w_out=w_out, w_tilde=w_tilde, gate_c=gate_c)
    settings = Settings(kind=kind, eps=eps, eps_out=eps_out, groups=groups, counted=counted)
    return _filled(_launchers(settings).forward(inputs, settings), x)


def _save_compiled(ctx, inputs: tuple, output: Sequence[Tensor]) -> None:
    n_tensors = len(Inputs._fields)
    settings = Settings(*inputs[n_tensors:])
    _save(ctx, Inputs(*inputs[:n_tensors]), settings, Outputs(*_unfilled(output)))


def _gradients_compiled(ctx, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    found = _gradients(ctx, Outputs(*_unfilled(gradients)), _launch_backward_compiled)
    return *found, *[None for _ in Settings._fields]


fused.register_autograd(_gradients_compiled, setup_context=_save_compiled)


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
    kind: str,
    eps: float,
    eps_out: float | None,
    groups: int,
    counted: int | None,
    gains: bool,
) -> list[Tensor]:
    saved = Saved(
        x=x,
        a=a,
        w=w,
        b=b,
        w_out=w_out,
        w_tilde=w_tilde,
        gate_c=gate_c,
        mean=mean,
        inv=inv,
        inv_out=inv_out,
    )
    settings = Settings(kind=kind, eps=eps, eps_out=eps_out, groups=groups, counted=counted)
    return _filled(_launch_backward(Upstream(dy, dh, ds), saved, settings, gains), x)


def _launch_backward_compiled(
    upstream: Upstream, saved: Saved, settings: Settings, gains: bool
) -> Gradients:
    return Gradients(*_unfilled(fused_backward(*upstream, *saved, *settings, gains)))


def compiled(inputs: Inputs, settings: Settings) -> Outputs:
    """Call the operator that torch.compile sees."""
    return Outputs(*_unfilled(fused(*inputs, *settings)))
