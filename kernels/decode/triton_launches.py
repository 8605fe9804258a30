"""The launches of a decoding step on a GPU: the namespaces from which decode/step.py chooses.

FUSED         our Triton kernels, called directly: a CUDA graph removes the cost of launching
COMPILED      for a step that goes through torch.compile. Heads, attention, the adds to the residual
              stream and the choice of the next token are operators, which inductor calls without
              looking into them. It generates everything else, and the library multiplies. The
              choice is ours because inductor's is one program for a whole vocabulary
COMPILED_ROW  the same for one sequence where inductor writes the products itself: it adds to the
              stream inside of them, so it must see the sum
"""

from types import SimpleNamespace

import torch.nn.functional as F
from torch import Tensor

from .. import activation, rows
from . import attention, project, reference


def add_in_place(a: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """Return x + a weight^T, written into x.

    On CUDA, ATen's addmm into another tensor begins with a copy of x, which is one more launch. So
    the stream is only ever added to: after a pointwise add of inductor's, this would cost a launch
    too.
    """
    x.flatten(0, 1).addmm_(a.flatten(0, 1), weight.T)
    return x


def add_product(a: Tensor, weight: Tensor, x: Tensor) -> None:
    """Do the same as an operator, which may not return what it writes into."""
    add_in_place(a, weight, x)


add_product = rows.operator(add_product, ("x",))


def matmul_add(a: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    add_product(a, weight, x)
    return x


def matmul_add_visible(a: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """Return x + a weight^T as product and sum: inductor leaves addmm to the library, always.

    It must see the product: as an operator of its own, it leaves arm B with 8 launches instead of 7
    under gpt-fast's options.
    """
    return x + F.linear(a, weight)


# A norm, and the library's product, have no kernel of this package: they are PyTorch's, or what
# inductor makes of them. Of a compiled step so are the other functions of `reference`.
FUSED = SimpleNamespace(
    embed=attention.embed,
    norm=reference.norm,
    heads=attention.heads,
    attend=attention.attend,
    heads_attend=attention.heads_attend,
    combine=attention.combine,
    best=attention.best,
    take=attention.take,
    matmul=reference.matmul,
    matmul_add=add_in_place,
    activation=activation.activation,
    project=project.project,
)
COMPILED = SimpleNamespace(
    embed=reference.embed,
    norm=reference.norm,
    heads=rows.operator(attention.heads, ("k_cache", "v_cache")),
    attend=rows.operator(attention.attend),
    heads_attend=reference.heads_attend,
    combine=reference.combine,
    best=rows.operator(attention.best),
    take=rows.operator(attention.take, ("token", "pos", "out")),
    matmul=reference.matmul,
    matmul_add=matmul_add,
    activation=reference.activation,
    project=rows.operator(project.project),
)
COMPILED_ROW = SimpleNamespace(**vars(COMPILED) | {"matmul_add": matmul_add_visible})
