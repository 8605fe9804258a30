"""Triton's interpreter, nearer to a GPU and faster: imported before any kernel.

Triton decides when it is imported: without a GPU its kernels run in the interpreter, on CPU
tensors. Here is done once what Triton does for each operation.
"""

import functools
import inspect
import math
import os
from importlib.metadata import version

import numpy as np
import torch

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))

from triton.language import bfloat16, core, float32
from triton.runtime import interpreter


def cast_as_a_gpu(builder, source, target, cast=interpreter.InterpreterBuilder.cast_impl):
    """Triton's interpreter truncates float32 to bfloat16; a GPU rounds to the nearest, ties to
    even, as PyTorch.
    """
    if (source.dtype.scalar, target.scalar) != (float32, bfloat16):
        return cast(builder, source, target)
    rounded = torch.from_numpy(np.array(source.data)).bfloat16().view(torch.uint16).numpy()
    return interpreter.TensorHandle(rounded, bfloat16)


def patch_builtins(package, builder, scope, found={}):  # noqa: B006
    """As Triton does before each kernel, but it looks for what to patch only once."""
    if package not in found:
        found[package] = [pair for pair in inspect.getmembers(package) if core.is_builtin(pair[1])]
    for name, member in found[package]:
        if getattr(package, name) is member:  # else a kernel that is running has patched it
            interpreter._patch_attr(package, name, member, builder, scope)


@functools.cache
def languages(function) -> list:
    return [value for value in function.__globals__.values() if value in (core, interpreter.tl)]


def patch_languages(function, patch=interpreter._patch_lang):
    """As Triton does, but not once more for each helper that a kernel calls."""
    if all(one.range.__module__ == interpreter.__name__ for one in languages(function)):
        return interpreter._LangPatchScope()
    return patch(function)


def numpy_type(type, find=interpreter._get_np_dtype, found={}):  # noqa: B006
    name = type.scalar.name
    if name not in found:
        found[name] = find(type)
    return found[name]


def make_block(self, element_ty, shape, make=core.block_type.__init__, found={}):  # noqa: B006
    key = (element_ty.name, *shape)
    if key not in found:
        make(self, element_ty, shape)
        found[key] = vars(self).copy()
    vars(self).update(found[key])


@functools.cache
def sizes(shape: tuple) -> tuple:
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))


def make_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = sizes((*type.shape,) if type.is_block() else ())


def reduce_by_halves(self, inputs: tuple) -> list:
    """Triton combines one element after the other in Python; this does a half of the axis at once,
    as a GPU does. Axes of tiles are powers of two.
    """
    parts = [tensor.handle.data for tensor in inputs]
    types = [tensor.dtype for tensor in inputs]
    while parts[0].shape[self.axis] > 1:
        halves = zip(*(np.split(part, 2, self.axis) for part in parts))
        first, second = (map(self.to_tensor, half, types) for half in halves)
        parts = [tensor.handle.data for tensor in self.combine_fn.fn(*first, *second)]
    return [self.to_tensor(part.squeeze(self.axis), type) for part, type in zip(parts, types)]


if os.environ["TRITON_INTERPRET"] == "1":
    interpreter.ReduceOps.generic_reduce = reduce_by_halves
    interpreter.InterpreterBuilder.cast_impl = cast_as_a_gpu
    interpreter._patch_builtin = patch_builtins
    interpreter._patch_lang = patch_languages
    interpreter._get_np_dtype = numpy_type
    core.block_type.__init__ = make_block
    core.tensor.__init__ = make_tensor
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )

if version("triton").startswith("3.6"):  # its interpreter does not count with numpy 2.4

    def patch_tensor(tensor, scope, patch=interpreter._patch_lang_tensor):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_tensor
