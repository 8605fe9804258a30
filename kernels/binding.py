"""Make the Triton kernels PyTorch operators, nanonorm::<name>, with gradients.

An operator takes the arguments of the function of its name in kernels/reference.py, and writes into
none of them. Where there is no kernel (float64, or a CPU without Triton's interpreter) it computes
the reference instead, gradient included, so its binding can be checked anywhere. torch.compile
keeps an operator as one step of its graph, and fuses nothing into it.

Each operator has two functions here, which PyTorch calls as it calls those of a
torch.autograd.Function:

    _<name>_setup(ctx, inputs, output)    after forward: saves what backward needs
    _<name>_gradient(ctx, *gradients)     backward: one gradient for each input, None for constants

Backward computes what it can again, so what is saved is what is in memory anyway (the norm's input,
which is the residual stream; gains and biases) and the statistic, one number for each row. The
normalised tensor is not saved: it is the input times the statistic.

Backward is an operator as well, and has no gradient. So a second derivative raises an error here;
kernels=torch has one.
"""

from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor

from . import activation, reference, row_norm, sandwich, shared_rms, taper

DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # that have kernels
# Was TRITON_INTERPRET=1 when Triton was imported? Then kernels run on a CPU, in its interpreter.
INTERPRETED = not isinstance(row_norm.forward_kernel, triton.JITFunction)


def _contiguous(outputs: Tensor | Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """Give the reference's outputs the layout that the kernels write.

    torch.compile takes strides from the fake implementation, and the kernel must keep to them.
    """
    return (
        outputs.contiguous()
        if isinstance(outputs, Tensor)
        else tuple(output.contiguous() for output in outputs)
    )


def operator(
    compute: Callable,
    kernel: Callable,
    setup: Callable | None = None,
    gradient: Callable | None = None,
):
    """Register the operator nanonorm::<name of compute>.

    Args:
        compute: the reference. What it returns for fake tensors, which have no data, describes the
            outputs.
        kernel: what runs on a GPU; it has the signature of `compute`.
        setup: (ctx, inputs, output), saves what `gradient` needs.
        gradient: (ctx, *gradients of the outputs) -> gradients of the inputs; None: no gradient.
    """

    def plain(*inputs):
        return _contiguous(compute(*inputs))

    def run(*inputs):
        has_kernel = inputs[0].dtype in DTYPES and (inputs[0].is_cuda or INTERPRETED)
        return (kernel if has_kernel else plain)(*inputs)

    # From the reference, whose parameters have type annotations; `run` has none.
    schema = torch.library.infer_schema(compute, mutates_args=())
    op = torch.library.custom_op(
        f"nanonorm::{compute.__name__}", run, mutates_args=(), schema=schema
    )
    op.register_fake(plain)
    if gradient is not None:
        op.register_autograd(gradient, setup_context=setup)
    return op


def _save(ctx, *tensors: Tensor | None) -> None:
    """Save tensors for the backward pass of an operator with several outputs.

    The gradient of an output that nothing has used is then None, where PyTorch would make a tensor
    of zeros. The kernel skips it.
    """
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _gains(ctx, *places: int) -> bool:
    """Return whether an input at these places, which are gains and biases, needs a gradient.

    If all of them are frozen, backward does not compute their sums over rows.
    """
    return any(ctx.needs_input_grad[place] for place in places)


def _wanted(gradient: Tensor) -> Tensor | None:
    """Return a gradient for autograd: None for a tensor without elements.

    An operator cannot return None, so it stands for a gradient that was not computed.
    """
    return gradient if gradient.numel() else None


def _of_the_summands(ctx, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of x and of a, given that of h = x + a.

    They are the same tensor, in the type of each: under autocast x is float32 and a bfloat16.
    """
    return tuple(None if dh is None else dh.to(dtype) for dtype in ctx.dtypes)


# Backward operators; without a gradient of their own.
rms_norm_backward = operator(reference.rms_norm_backward, row_norm.rms_norm_backward)
norm_add_norm_backward = operator(reference.norm_add_norm_backward, sandwich.norm_add_norm_backward)
layer_norm_backward = operator(reference.layer_norm_backward, row_norm.layer_norm_backward)
shared_rms_scale_backward = operator(
    reference.shared_rms_scale_backward, shared_rms.shared_rms_scale_backward
)
scaled_activation_backward = operator(
    reference.scaled_activation_backward, activation.scaled_activation_backward
)
taper_norm_backward = operator(reference.taper_norm_backward, taper.taper_norm_backward)


# ------------------------------------------------------------------------------------------ RMSNorm


def _rms_setup(ctx, inputs, output):
    """Save x, w, b and inv_rms.

    b is not needed for its values: its gradient has its type.
    """
    x, w, b, _, _, ctx.counted = inputs
    _save(ctx, x, w, b, output[1])


def _rms_gradients(ctx, dy, dh, ds, gains):
    """Compute the gradients of RMSNorm's inputs; any gradient that comes in may be None.

    Args:
        dy: gradient of y (..., C).
        dh: gradient of the residual stream itself (..., C), which add_rms_norm returns too.
        ds: gradient of inv_rms (..., G), from positions that share it (coupled_grad=full).
        gains: compute dw and db.

    Returns:
        (dx, dw, db)
    """
    x, w, b, inv_rms = ctx.saved_tensors
    if dy is not None:
        dx, dw, db = rms_norm_backward(dy, dh, ds, x, w, b, inv_rms, ctx.counted, gains)
        return dx, _wanted(dw), _wanted(db)
    # y was not used: the kernel is not launched. With zeros for dy it would cost a pass more, and
    # give NaN in rows with an infinite number.
    if ds is not None:
        through = reference.inverse_rms_backward(ds, x, inv_rms, ctx.counted)
        dh = through if dh is None else dh + through
    return dh, None, None


def _rms_gradient(ctx, dy, ds):
    """Compute the gradients of (x, w, b, eps, groups, counted)."""
    return *_rms_gradients(ctx, dy, None, ds, _gains(ctx, 1, 2)), None, None, None


def _add_rms_setup(ctx, inputs, output):
    """Save h, not x and a: the norm reads h, and h is kept anyway, as the residual stream."""
    x, a, w, b, _, _, ctx.counted = inputs
    ctx.dtypes = x.dtype, a.dtype
    _save(ctx, output[1], w, b, output[2])


def _add_rms_gradient(ctx, dy, dh, ds):
    """Compute the gradients of (x, a, w, b, eps, groups, counted).

    The kernel adds dh, so the two gradients of the stream take one pass.
    """
    dh, dw, db = _rms_gradients(ctx, dy, dh, ds, _gains(ctx, 2, 3))
    return *_of_the_summands(ctx, dh), dw, db, None, None, None


rms_norm = operator(reference.rms_norm, row_norm.rms_norm, _rms_setup, _rms_gradient)
add_rms_norm = operator(
    reference.add_rms_norm, row_norm.add_rms_norm, _add_rms_setup, _add_rms_gradient
)


# ---------------------------------------------------------------------- output norm + add + norm


def _normed_gradients(ctx, dh, a, w_out, inv_out):
    """Compute the gradients of (x, a, w_out) in h = x + N_out(a), given that of h, or None."""
    if dh is None:
        return None, None, None
    # RMSNorm's own kernel: dh is the gradient of x as it is.
    counted = a.shape[-1]
    da, dw_out, _ = rms_norm_backward(
        dh, None, None, a, w_out, None, inv_out, counted, _gains(ctx, 2)
    )
    return dh, da, _wanted(dw_out)


def _add_normed_setup(ctx, inputs, output):
    """Save a, w_out and inv_out; neither x nor h is needed."""
    _, a, w_out, _ = inputs
    ctx.mark_non_differentiable(output[1])
    _save(ctx, a, w_out, output[1])


def _add_normed_gradient(ctx, dh, _inv_out):
    """Compute the gradients of (x, a, w_out, eps)."""
    return *_normed_gradients(ctx, dh, *ctx.saved_tensors), None


def _norm_add_norm_setup(ctx, inputs, output):
    """Save h, a, both gains and both statistics; h is kept anyway, as the residual stream."""
    _, a, w_out, w_in, _, _ = inputs
    _, h, inv_rms, inv_out = output
    ctx.mark_non_differentiable(inv_out)
    _save(ctx, h, a, w_out, w_in, inv_rms, inv_out)


def _norm_add_norm_gradient(ctx, dy, dh, ds, _inv_out):
    """Compute the gradients of (x, a, w_out, w_in, eps_out, eps); the kernel adds dh."""
    h, a, w_out, w_in, inv_rms, inv_out = ctx.saved_tensors
    if dy is not None:
        dx, da, dw_out, dw_in = norm_add_norm_backward(
            dy, dh, ds, h, a, w_out, w_in, inv_rms, inv_out, _gains(ctx, 2, 3)
        )
        return dx, da, _wanted(dw_out), _wanted(dw_in), None, None
    # y was not used: only the output norm is left.
    if ds is not None:
        through = reference.inverse_rms_backward(ds, h, inv_rms, h.shape[-1])
        dh = through if dh is None else dh + through
    return *_normed_gradients(ctx, dh, a, w_out, inv_out), None, None, None


add_normed = operator(
    reference.add_normed, sandwich.add_normed, _add_normed_setup, _add_normed_gradient
)
norm_add_norm = operator(
    reference.norm_add_norm, sandwich.norm_add_norm, _norm_add_norm_setup, _norm_add_norm_gradient
)


# ---------------------------------------------------------------------------------------- LayerNorm


def _layer_setup(ctx, inputs, output):
    """Save x, w, b, mean and inv_std. The statistics are not shared, so they have no gradient."""
    x, w, b, _ = inputs
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(x, w, b, output[1], output[2])


def _layer_gradient(ctx, dy, _mean, _inv_std):
    """Compute the gradients of (x, w, b, eps)."""
    x, w, b, mean, inv_std = ctx.saved_tensors
    dx, dw, db = layer_norm_backward(dy, x, w, b, mean, inv_std, _gains(ctx, 1, 2))
    return dx, _wanted(dw), _wanted(db), None


layer_norm = operator(reference.layer_norm, row_norm.layer_norm, _layer_setup, _layer_gradient)


# ---------------------------------------------------------------------- CoupledNorm, the activation


def _shared_setup(ctx, inputs, output):
    """Save h, inv_rms and w. h is needed for dw alone."""
    h, inv_rms, w = inputs
    ctx.save_for_backward(h, inv_rms, w)


def _shared_gradient(ctx, dy):
    """Compute the gradients of (h, inv_rms, w); inv_rms is a constant."""
    h, inv_rms, w = ctx.saved_tensors
    dh, dw = shared_rms_scale_backward(dy, None, h, inv_rms, w, _gains(ctx, 2))
    return dh, None, _wanted(dw)


def _add_shared_setup(ctx, inputs, output):
    """Save h, not x and a, as in _add_rms_setup; inv_rms and w."""
    x, a, inv_rms, w = inputs
    ctx.dtypes = x.dtype, a.dtype
    _save(ctx, output[1], inv_rms, w)


def _add_shared_gradient(ctx, dy, dh):
    """Compute the gradients of (x, a, inv_rms, w); the kernel adds dh."""
    h, inv_rms, w = ctx.saved_tensors
    # y was not used: the gradient of the stream passes through.
    if dy is None:
        return *_of_the_summands(ctx, dh), None, None
    dh, dw = shared_rms_scale_backward(dy, dh, h, inv_rms, w, _gains(ctx, 3))
    return *_of_the_summands(ctx, dh), None, _wanted(dw)


def _activation_setup(ctx, inputs, output):
    """Save z, inv_rms and b. Backward computes z * inv_rms + b again, in float32."""
    z, inv_rms, b, ctx.kind = inputs
    ctx.save_for_backward(z, inv_rms, b)


def _activation_gradient(ctx, dy):
    """Compute the gradients of (z, inv_rms, b, kind); inv_rms is a constant."""
    z, inv_rms, b = ctx.saved_tensors
    dz, db = scaled_activation_backward(dy, z, inv_rms, b, ctx.kind, _gains(ctx, 2))
    return dz, None, _wanted(db), None


shared_rms_scale = operator(
    reference.shared_rms_scale, shared_rms.shared_rms_scale, _shared_setup, _shared_gradient
)
add_shared_rms_scale = operator(
    reference.add_shared_rms_scale,
    shared_rms.add_shared_rms_scale,
    _add_shared_setup,
    _add_shared_gradient,
)
scaled_activation = operator(
    reference.scaled_activation,
    activation.scaled_activation,
    _activation_setup,
    _activation_gradient,
)


# ---------------------------------------------------------------------------------------- TaperNorm


def _taper_setup(ctx, inputs, output):
    """Save h, both gains, (g, c) and inv_rms, which has no gradient."""
    h, w, w_tilde, gate_c, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(h, w, w_tilde, gate_c, output[1])


def _taper_gradient(ctx, dy, _inv_rms):
    """Compute the gradients of (h, w, w_tilde, gate_c, eps); g and c are constants."""
    h, w, w_tilde, gate_c, inv_rms = ctx.saved_tensors
    dh, dw, dw_tilde = taper_norm_backward(dy, h, w, w_tilde, gate_c, inv_rms, _gains(ctx, 1, 2))
    return dh, _wanted(dw), _wanted(dw_tilde), None, None


taper_norm = operator(reference.taper_norm, taper.taper_norm, _taper_setup, _taper_gradient)
