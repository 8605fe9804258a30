"""What the operators of kernels/ take, keep and return, by name. What there is not is None.

    forward     Inputs, Settings -> Outputs
    kept        Saved, Settings
    backward    Upstream, Saved, Settings -> Gradients

    statistic    `inv`, what the norm's input is multiplied by: 1 / RMS or 1 / standard deviation of
                 a row. A shared position and an activation do not compute one. They take one that
                 was computed before: it is `given`.
    gains        w, b, w_out and w_tilde: gains and biases. Their gradients are sums over rows.
    dy, dh, ds   gradients of the loss in the outputs y, h and inv

Tensors stand apart from settings. A torch.autograd.Function takes the record of settings as it is;
an operator that torch.compile sees takes its fields one by one.
"""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The tensors that an operator takes."""

    x: Tensor  # residual stream (..., C), or what an activation is applied to
    a: Tensor | None = None  # what is added to it (..., C)
    given: Tensor | None = None  # the statistic (..., 1) of a shared position or an activation
    w: Tensor | None = None  # gain (C,)
    b: Tensor | None = None  # bias (C,)
    w_out: Tensor | None = None  # gain of the output norm (C,)
    w_tilde: Tensor | None = None  # gain of TaperNorm's fixed map (C,)
    gate_c: Tensor | None = None  # TaperNorm's gate and scale (2,)


class Settings(NamedTuple):
    """Which operator it is, and its numbers."""

    kind: str = ""  # rms, layer, shared, taper, an activation, or "" for the sum h alone
    eps: float = 0.0
    eps_out: float | None = None  # of the output norm, an RMSNorm of a before it is added
    groups: int = 1
    counted: int | None = None  # channels of each group that the mean square is over; None: all


class Outputs(NamedTuple):
    """What an operator returns."""

    y: Tensor | None = None  # (..., C)
    h: Tensor | None = None  # the sum x + a (..., C)
    mean: Tensor | None = None  # (..., 1)
    inv: Tensor | None = None  # the statistic (..., G), where it is not given
    inv_out: Tensor | None = None  # the statistic of a (..., 1)


class Saved(NamedTuple):
    """What backward reads of the forward pass."""

    x: Tensor  # the norm's input (..., C): h where the operator adds
    a: Tensor | None = None  # the output norm's input (..., C), where there is one
    w: Tensor | None = None
    b: Tensor | None = None
    w_out: Tensor | None = None
    w_tilde: Tensor | None = None
    gate_c: Tensor | None = None
    mean: Tensor | None = None
    inv: Tensor | None = None  # the statistic, taken or given
    inv_out: Tensor | None = None


class Upstream(NamedTuple):
    """Gradients of the outputs that have one."""

    dy: Tensor | None = None  # (..., C)
    dh: Tensor | None = None  # of the residual stream (..., C)
    ds: Tensor | None = None  # of the statistic (..., G)


class Gradients(NamedTuple):
    """Gradients of inputs; None also where none is wanted."""

    x: Tensor | None = None  # of the norm's input: of h where the operator adds
    a: Tensor | None = None  # of the output norm's input
    w: Tensor | None = None
    b: Tensor | None = None
    w_out: Tensor | None = None
    w_tilde: Tensor | None = None
