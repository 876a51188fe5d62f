"""Arrays of any library in, the same kind out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor

from poise._types import Array

_COMPUTED_IN_FLOAT32 = (torch.float16, torch.bfloat16)


def to_tensor(array: Array) -> Tensor:
    """The array as a tensor on its own device, without a copy where that is possible."""
    if isinstance(array, Tensor):
        return array
    if isinstance(array, np.ndarray):
        if array.dtype.char in "Og":  # numbers as objects, long doubles
            array = array.astype(np.float64)
        # A tensor cannot be read-only, reversed or big-endian; numpy arrays can.
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        usable = native.flags.writeable and all(stride >= 0 for stride in native.strides)
        return torch.from_numpy(native if usable else native.copy())
    if hasattr(array, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(array)
    return to_tensor(np.array(array))


def to_floating(array: Array) -> Tensor:
    """The array as a floating tensor, its gradient kept: halves become float32, whole numbers float64."""
    tensor = to_tensor(array)
    if tensor.dtype in _COMPUTED_IN_FLOAT32:
        return tensor.float()
    return tensor if tensor.is_floating_point() else tensor.double()


def like(tensor: Tensor, example: Array, *, dtype: torch.dtype | None = None) -> Any:
    """The tensor as the kind of array that `example` is; floating results take its floating dtype."""
    if tensor.is_floating_point():
        example_dtype = dtype if dtype is not None else to_tensor(example).dtype
        if example_dtype.is_floating_point:
            tensor = tensor.to(example_dtype)
    if isinstance(example, Tensor):
        return tensor
    if not isinstance(example, np.ndarray) and hasattr(example, "__dlpack__"):
        module = _namespace(example)
        if module is not None:
            return module.from_dlpack(tensor.detach())
    return tensor.detach().cpu().numpy()


def _namespace(array: Array) -> Any:
    """The library an array comes from, if it can take a tensor through DLPack (array-API libraries can)."""
    get = getattr(array, "__array_namespace__", None)
    module = get() if get is not None else None
    return module if hasattr(module, "from_dlpack") else None
