"""The Triton kernels as PyTorch operators nanonorm::<name>: functional, with a fake implementation
and a gradient.

An operator takes the arguments of the function of its name in kernels/reference.py. Where there is
no kernel (float64, or a CPU without Triton's interpreter) it computes the reference instead,
gradient included: so its binding can be checked anywhere. torch.compile takes an operator as it is
and fuses nothing into it.
"""

from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor

from . import activation, reference, row_norm, shared_rms, taper

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# TRITON_INTERPRET=1 when it was imported
INTERPRETED = not isinstance(row_norm.forward_kernel, triton.JITFunction)


def _contiguous(outputs: Tensor | Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """Outputs in the layout that the kernels write."""
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
    """Registers nanonorm::<name of compute>. What `compute` (the reference) returns for fake
    tensors describes the outputs; `setup(ctx, inputs, outputs)` and `gradient(ctx, *grads)` are as
    in torch.autograd.Function.
    """

    def plain(*inputs):
        return _contiguous(compute(*inputs))

    def run(*inputs):
        has_kernel = inputs[0].dtype in DTYPES and (inputs[0].is_cuda or INTERPRETED)
        return (kernel if has_kernel else plain)(*inputs)

    schema = torch.library.infer_schema(compute, mutates_args=())
    op = torch.library.custom_op(
        f"nanonorm::{compute.__name__}", run, mutates_args=(), schema=schema
    )
    op.register_fake(plain)
    if gradient is not None:
        op.register_autograd(gradient, setup_context=setup)
    return op


def _save(ctx, *tensors: Tensor | None) -> None:
    """For operators of several outputs: the gradient of one that nobody used is None, and the
    kernel skips it.
    """
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _gains(ctx, *places: int) -> bool:
    """Does one of the inputs at these places, gains and biases, want a gradient?

    They are not summed if frozen.
    """
    return any(ctx.needs_input_grad[place] for place in places)


def _wanted(gradient: Tensor) -> Tensor | None:
    """Operators return a tensor without elements where autograd wants None."""
    return gradient if gradient.numel() else None


def _of_the_summands(ctx, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of h = x + a, for x and for a, each in its own type."""
    return tuple(None if dh is None else dh.to(dtype) for dtype in ctx.dtypes)


rms_norm_backward = operator(reference.rms_norm_backward, row_norm.rms_norm_backward)
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
    x, w, b, _, _, ctx.counted = inputs
    _save(ctx, x, w, b, output[1])


def _rms_gradients(ctx, dy, dh, ds, gains):
    """(dx, dw, db) for the gradients of y, of the stream x itself and of inv_rms; None for one that
    nobody used.
    """
    x, w, b, inv_rms = ctx.saved_tensors
    if dy is not None:
        dx, dw, db = rms_norm_backward(dy, dh, ds, x, w, b, inv_rms, ctx.counted, gains)
        return dx, _wanted(dw), _wanted(db)
    if ds is not None:  # zeros for dy would be a pass more, and NaN in rows with an inf
        through = reference.inverse_rms_backward(ds, x, inv_rms, ctx.counted)
        dh = through if dh is None else dh + through
    return dh, None, None


def _rms_gradient(ctx, dy, ds):
    return *_rms_gradients(ctx, dy, None, ds, _gains(ctx, 1, 2)), None, None, None


def _add_rms_setup(ctx, inputs, output):
    x, a, w, b, _, _, ctx.counted = inputs
    ctx.dtypes = x.dtype, a.dtype
    _save(ctx, output[1], w, b, output[2])


def _add_rms_gradient(ctx, dy, dh, ds):
    dh, dw, db = _rms_gradients(ctx, dy, dh, ds, _gains(ctx, 2, 3))
    return *_of_the_summands(ctx, dh), dw, db, None, None, None


rms_norm = operator(reference.rms_norm, row_norm.rms_norm, _rms_setup, _rms_gradient)
add_rms_norm = operator(
    reference.add_rms_norm, row_norm.add_rms_norm, _add_rms_setup, _add_rms_gradient
)


# ---------------------------------------------------------------------------------------- LayerNorm


def _layer_setup(ctx, inputs, output):
    x, w, b, _ = inputs
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(x, w, b, output[1], output[2])


def _layer_gradient(ctx, dy, _mean, _inv_std):
    x, w, b, mean, inv_std = ctx.saved_tensors
    dx, dw, db = layer_norm_backward(dy, x, w, b, mean, inv_std, _gains(ctx, 1, 2))
    return dx, _wanted(dw), _wanted(db), None


layer_norm = operator(reference.layer_norm, row_norm.layer_norm, _layer_setup, _layer_gradient)


# ---------------------------------------------------------------------- CoupledNorm, the activation


def _shared_setup(ctx, inputs, output):
    h, inv_rms, w = inputs
    ctx.save_for_backward(h, inv_rms, w)


def _shared_gradient(ctx, dy):
    h, inv_rms, w = ctx.saved_tensors
    dh, dw = shared_rms_scale_backward(dy, None, h, inv_rms, w, _gains(ctx, 2))
    return dh, None, _wanted(dw)


def _add_shared_setup(ctx, inputs, output):
    x, a, inv_rms, w = inputs
    ctx.dtypes = x.dtype, a.dtype
    _save(ctx, output[1], inv_rms, w)


def _add_shared_gradient(ctx, dy, dh):
    h, inv_rms, w = ctx.saved_tensors
    if dy is None:
        return *_of_the_summands(ctx, dh), None, None
    dh, dw = shared_rms_scale_backward(dy, dh, h, inv_rms, w, _gains(ctx, 3))
    return *_of_the_summands(ctx, dh), None, _wanted(dw)


def _activation_setup(ctx, inputs, output):
    z, inv_rms, b, ctx.kind = inputs
    ctx.save_for_backward(z, inv_rms, b)


def _activation_gradient(ctx, dy):
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
    h, w, w_tilde, gate_c, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(h, w, w_tilde, gate_c, output[1])


def _taper_gradient(ctx, dy, _inv_rms):
    h, w, w_tilde, gate_c, inv_rms = ctx.saved_tensors
    dh, dw, dw_tilde = taper_norm_backward(dy, h, w, w_tilde, gate_c, inv_rms, _gains(ctx, 1, 2))
    return dh, _wanted(dw), _wanted(dw_tilde), None, None


taper_norm = operator(reference.taper_norm, taper.taper_norm, _taper_setup, _taper_gradient)
