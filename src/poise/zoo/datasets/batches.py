"""The pickled batches of the official CIFAR archives, read by an unpickler that knows arrays and nothing else."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np


def read_batch(content: bytes) -> dict[str, Any]:
    """The dictionary in a batch; anything in it that is not a number, a string, a list or an array is an error.

    A pickle names functions to be called. This reader looks none of them up: the four names that a pickled array
    consists of stand for records here, and every other name is refused.
    """
    loaded = _Reader(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(loaded, dict):
        raise pickle.UnpicklingError("a batch is a dictionary")
    return {_text(key): value.array() if isinstance(value, _Array) else value for key, value in loaded.items()}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # numpy 2 writes numpy._core where numpy 1 wrote numpy.core.
        known = _KNOWN.get((module.replace("numpy._core", "numpy.core"), name))
        if known is None:
            raise pickle.UnpicklingError(f"a batch of images has no use for {module}.{name}")
        return known


class _Dtype:
    """numpy.dtype(name, align, copy)."""

    def __init__(self, name: bytes | str, *_: Any) -> None:
        self.name = _text(name)

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like, which bytes have none of."""


class _Array:
    """An array before it is one: numpy._reconstruct(ndarray, (0,), "b") and then its state."""

    def __init__(self, *_: Any) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        _, shape, dtype, is_fortran, content = self.state
        if not isinstance(dtype, _Dtype) or dtype.name != "u1":
            raise pickle.UnpicklingError("images are arrays of bytes")
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if is_fortran else "C")


class _Kind:
    """numpy.ndarray, where it is only named."""


def _bytes(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes for Python 2: _codecs.encode(text, "latin1")."""
    return text.encode("latin1")


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Kind,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _bytes,
}


def _text(value: bytes | str) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value
