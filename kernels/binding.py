"""Bind the Triton kernels to PyTorch: all norms and activations have their gradients here.

kernels.apply calls one of two, which save and compute the same:

    Fused             eager mode: a torch.autograd.Function, which costs the fewest microseconds
    nanonorm::fused   torch.compile: an operator, one step of the graph, because torch.compile
                      cannot look into a Function that launches kernels

operands.py says what a statistic, `given`, gains, and dy, dh and ds are.

Backward keeps what is in memory anyway: the norm's input, which is the residual stream, and
the gains. Beside it the statistics, some numbers for each row. The normalised tensor is not saved:
it is the input times the statistic. Second derivatives are those of kernels/reference.py.
"""

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

import torch
import triton
from torch import Tensor

from . import activation, reference, row_norm, rows
from .operands import Gradients, Inputs, Outputs, Saved, Settings, Upstream
from .reference import ACTIVATIONS

# Was TRITON_INTERPRET=1 when Triton was imported? Then kernels run on a CPU, in its interpreter.
INTERPRETED = not isinstance(row_norm.forward_kernel, triton.JITFunction)

# (upstream, saved, settings, are the gradients of gains wanted?) -> the gradients, by one kernel
Backward = Callable[[Upstream, Saved, Settings, bool], Gradients]


def _launchers(settings: Settings) -> ModuleType:
    """Return the module whose `forward` and `backward` launch the kernels of an operator."""
    return activation if settings.kind in ACTIVATIONS else row_norm


def _save(ctx, inputs: Inputs, settings: Settings, outputs: Outputs) -> None:
    """Save what backward reads, and the types in which x and a get their gradients."""
    # If nothing has used an output, its gradient is then None and not zeros: the kernel skips it.
    ctx.set_materialize_grads(False)
    # No gradient goes through statistics. RMSNorm's inv is the exception: a later position may
    # share it, and sends a gradient back with coupled_grad=full.
    constants = [outputs.mean, outputs.inv_out]
    if settings.kind != "rms":
        constants.append(outputs.inv)
    ctx.mark_non_differentiable(*[tensor for tensor in constants if tensor is not None])
    ctx.settings = settings
    ctx.x_dtype = inputs.x.dtype
    ctx.a_dtype = None if inputs.a is None else inputs.a.dtype
    adds = outputs.h is not None
    has_output_norm = settings.eps_out is not None
    is_given = inputs.given is not None
    saved = Saved(
        # What is normalised. Of the sum h = x + a the summands are not needed: both have its
        # gradient. But an output norm, h = x + N_out(a), needs its input.
        x=outputs.h if adds else inputs.x,
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
    """Compute the gradients of Inputs from those of Outputs.

    Args:
        of_outputs: None for an output that nothing has used.
        launch: starts the backward kernel: _launch_backward, or under torch.compile
            _launch_backward_compiled.
    """
    saved = Saved(*ctx.saved_tensors)
    settings = ctx.settings
    upstream = Upstream(dy=of_outputs.y, dh=of_outputs.h, ds=of_outputs.inv)
    # In backward, gradients are recorded only if it was called with create_graph=True.
    is_differentiated_again = torch.is_grad_enabled()
    has_ds_alone = upstream.dy is None and upstream.ds is not None
    if is_differentiated_again or has_ds_alone:
        # The kernels have no gradients themselves, and take a ds only beside a dy.
        found = _by_reference(upstream, saved, settings)
    else:
        wanted = Inputs(*ctx.needs_input_grad[: len(Inputs._fields)])
        # A kernel computes the gradients of all gains or of none, so one answer is enough.
        wants_gains = wanted.w or wanted.b or wanted.w_out or wanted.w_tilde
        found = _by_kernels(upstream, saved, settings, wants_gains, launch)
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
    upstream: Upstream, saved: Saved, settings: Settings, wants_gains: bool, launch: Backward
) -> Gradients:
    """Compute the gradients by one launch, those of the output norm with it if there is one.

    The output norm takes a launch of its own in rows that are too long for one tile, and where y
    was not used.
    """
    if upstream.dy is None:
        # Only the sum h was used. The kernel with zeros for dy would cost a pass more, and give NaN
        # in rows with an infinite number.
        found = Gradients(x=upstream.dh)
    else:
        found = launch(upstream, saved, settings, wants_gains)
    has_output_norm = saved.a is not None
    if not has_output_norm:
        return found
    if found.a is not None:  # the launch has computed it
        return found
    if found.x is None:  # nothing was used, h neither
        return found
    # h = x + N_out(a). So the gradient of h is the dy of N_out, an RMSNorm with the input a.
    output_norm = Saved(x=saved.a, w=saved.w_out, inv=saved.inv_out)
    # Backward reads the statistic, and no eps.
    of_output = launch(Upstream(dy=found.x), output_norm, Settings("rms"), wants_gains)
    return found._replace(a=of_output.x, w_out=of_output.w)


def _cast(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return a gradient in `dtype`; None without a gradient, or where nothing asks for it."""
    return None if gradient is None or dtype is None else gradient.to(dtype)


def _launch_backward(
    upstream: Upstream, saved: Saved, settings: Settings, wants_gains: bool
) -> Gradients:
    """Launch the backward kernel in eager mode."""
    return _launchers(settings).backward(upstream, saved, settings, wants_gains)


def _by_reference(upstream: Upstream, saved: Saved, settings: Settings) -> Gradients:
    """Compute the norm once more in plain PyTorch, and its gradients by autograd.

    These have gradients themselves where backward is differentiated.
    """
    if not torch.is_grad_enabled():
        # Then they begin a graph of their own. Else they stay in the one that is differentiated
        # again.
        saved = Saved(*[_as_leaf(tensor) for tensor in saved])
    h = saved.x
    inputs = Inputs(
        x=h,
        given=saved.inv,  # a shared norm reads it; the others compute their own once more
        w=saved.w,
        b=saved.b,
        w_tilde=saved.w_tilde,
        gate_c=saved.gate_c,
    )
    with torch.enable_grad():
        # From y and the statistic to the norm's input h
        outputs = reference.normalize(h, inputs, settings)
        leaves = Gradients(x=h, w=saved.w, b=saved.b, w_tilde=saved.w_tilde)
        found = _autograd((outputs.y, outputs.inv), (upstream.dy, upstream.ds), leaves)
        # h goes on as the residual stream as well.
        if upstream.dh is not None:
            dh = upstream.dh if found.x is None else found.x + upstream.dh
            found = found._replace(x=dh)
        if saved.a is None:
            return found
        # From h = x + N_out(a) to a
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
    """Return the gradients of `leaves`, from those of `outputs`, of which some are None.

    None for a leaf that has no gradient, or does not require one.
    """
    roots = []
    of_roots = []
    for output, gradient in zip(outputs, gradients):
        if gradient is not None:
            roots.append(output)
            of_roots.append(gradient.to(output.dtype))
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    if not roots or not wanted:
        return Gradients()
    found = torch.autograd.grad(roots, wanted, of_roots, create_graph=True, allow_unused=True)
    by_leaf = dict(zip(map(id, wanted), found))
    return Gradients(*[by_leaf.get(id(leaf)) for leaf in leaves])


class Fused(torch.autograd.Function):
    """A norm or an activation by its kernel: Fused.apply(*Inputs, Settings) -> Outputs.

    It has no setup_context. torch.func would need one, but there plain PyTorch runs instead
    (takes_kernel); and with one PyTorch inspects a signature at every call, which takes longer than
    all the rest of forward.
    """

    @staticmethod
    def forward(ctx, *operands) -> Outputs:
        *tensors, settings = operands
        inputs = Inputs(*tensors)
        outputs = _launchers(settings).forward(inputs, settings)
        _save(ctx, inputs, settings, outputs)
        return outputs

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_inputs = _gradients(ctx, Outputs(*gradients), _launch_backward)
        return *of_inputs, None  # Settings have no gradient


# ------------------------------------------------------------------ operators for torch.compile
# An operator takes no records, so it takes their fields one by one. Nor can it return None, so it
# returns an empty tensor instead.


def _filled(tensors: Iterable[Tensor | None], x: Tensor) -> list[Tensor]:
    """Put an empty tensor (0,), on the device of x, in the place of each None."""
    return [x.new_empty(0) if tensor is None else tensor for tensor in tensors]


def _unfilled(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Undo _filled: put None in the place of each empty tensor; what is None already stays so.

    The gradient of an empty output may come in as None or as an empty tensor.
    """
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
    """Launch the forward kernel. Takes the fields of Inputs and Settings, returns Outputs."""
    inputs = Inputs(x=x, a=a, given=given, w=w, b=b, w_out=w_out, w_tilde=w_tilde, gate_c=gate_c)
    settings = Settings(kind=kind, eps=eps, eps_out=eps_out, groups=groups, counted=counted)
    return _filled(_launchers(settings).forward(inputs, settings), x)


def _save_compiled(ctx, inputs: tuple, output: Sequence[Tensor]) -> None:
    n_tensors = len(Inputs._fields)
    tensors = Inputs(*inputs[:n_tensors])
    settings = Settings(*inputs[n_tensors:])
    _save(ctx, tensors, settings, Outputs(*_unfilled(output)))


def _gradients_compiled(ctx, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    of_inputs = _gradients(ctx, Outputs(*_unfilled(gradients)), _launch_backward_compiled)
    of_settings = [None for _ in Settings._fields]
    return *of_inputs, *of_settings


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
    wants_gains: bool,
) -> list[Tensor]:
    """Launch the backward kernel. Takes the fields of Upstream, Saved and Settings.

    Returns Gradients. There is a dy, because without one _by_kernels launches nothing.
    """
    upstream = Upstream(dy=dy, dh=dh, ds=ds)
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
    return _filled(_launch_backward(upstream, saved, settings, wants_gains), x)


def _launch_backward_compiled(
    upstream: Upstream, saved: Saved, settings: Settings, wants_gains: bool
) -> Gradients:
    """Launch the backward kernel under torch.compile."""
    return Gradients(*_unfilled(fused_backward(*upstream, *saved, *settings, wants_gains)))


def compiled(inputs: Inputs, settings: Settings) -> Outputs:
    """Compute an operator under torch.compile."""
    return Outputs(*_unfilled(fused(*inputs, *settings)))
