"""Calibrators as safetensors and JSON: parameters and learned values, never code and never a pickle."""

from __future__ import annotations

import dataclasses
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

import poise.calibrators  # noqa: F401  (registers every calibrator)
from poise import _check, neighbors, noise
from poise.calibrators.base import CALIBRATORS
from poise.io.files import FilePath, atomic, existing, listed, reading

FORMAT = 1
"""Raised whenever an older poise could not read what this one writes."""

_RECORDS: dict[str, type] = {
    name: record
    for module in (noise, neighbors)
    for name, record in vars(module).items()
    if isinstance(record, type) and dataclasses.is_dataclass(record) and not name.startswith("_")
}
"""The dataclasses that may stand in a file; one that holds a function is refused for its field."""


def save(calibrator: Any, path: FilePath) -> None:
    """Writes a fitted calibrator as one ``.safetensors`` file, whole or not at all.

    The file holds the class name, the parameters and the learned values; `load` gives back a calibrator whose
    predictions are the same bit for bit. What is code (a `head`, a transform, a noise of your own) is refused:
    take it out with ``set_params`` before saving and put it back after loading.

    >>> import tempfile, torch, poise
    >>> logits, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 1, 1])
    >>> calibrator = poise.TemperatureScaling().fit(logits, labels)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     poise.save(calibrator, f"{folder}/calibrator.safetensors")
    ...     loaded = poise.load(f"{folder}/calibrator.safetensors")
    >>> torch.equal(loaded.predict_proba(logits), calibrator.predict_proba(logits))
    True
    """
    file = Path(path)
    if file.suffix.lower() != ".safetensors":
        raise ValueError(f"a calibrator is kept as .safetensors, but {file} came; call it {file.stem}.safetensors.")
    name = type(calibrator).__name__
    if CALIBRATORS.get(name) is not type(calibrator):
        raise TypeError(f"save takes a calibrator of poise, but a {name} came; pass the fitted calibrator itself.")
    check_is_fitted(calibrator, msg="%(name)s has learned nothing that could be saved; call fit(logits, labels) first.")
    writer = _Writer(calibrator)
    content = {"format": FORMAT, "version": _version(), "calibrator": writer.calibrator(calibrator, "")}
    # One key, for safetensors writes several in an order that changes from run to run.
    header = {"poise": json.dumps(content, allow_nan=False)}
    with atomic(file) as temporary:
        save_file(writer.tensors, temporary, metadata=header)


def _version() -> str:
    """Of poise, which may also be used from a folder, without having been installed."""
    try:
        return metadata.version("poise")
    except metadata.PackageNotFoundError:
        return "not installed"


def load(path: FilePath) -> Any:
    """The calibrator that `save` wrote, on the CPU; nothing in the file is ever run."""
    file = existing(path)
    with file.open("rb") as start:
        # A pickle tells its protocol so; a safetensors file has an opening brace in the ninth place.
        beginning = start.read(9)
    is_safetensors = beginning[8:] == b"{"
    if not is_safetensors and beginning[:1] == b"\x80" and beginning[1:2] in b"\2\3\4\5":
        raise ValueError(
            f"{file} is a pickle, and opening one can run anything, so poise never does; write it with poise.save."
        )
    if not is_safetensors and beginning[:2] == b"PK":
        raise ValueError(
            f"{file} was written by torch.save or np.savez and not by poise.save; pass one that poise fit wrote."
        )
    remedy = "write it again with poise.save"
    with reading(file, "a safetensors file", remedy), safe_open(file, framework="pt") as content:
        header = (content.metadata() or {}).get("poise")
        names = list(content.keys())
        # A copy, for what safetensors gives goes on reading the file, at any alignment.
        tensors = {} if header is None else {name: content.get_tensor(name).clone() for name in names}
    if header is None:
        raise ValueError(
            f"{file} is a safetensors file but holds no calibrator of poise, only {listed(names)}; scores are opened "
            "with poise.io.read_scores and networks with safetensors.torch.load_file."
        )
    with reading(file, "a calibrator", remedy):
        told = json.loads(header)
        version, written_in = str(told["version"]), int(told["format"])
    if written_in > FORMAT:
        raise ValueError(
            f"{file} was written by poise {version} in format {written_in}, but poise {_version()} "
            f"reads formats up to {FORMAT}; pip install --upgrade poise."
        )
    try:
        return _Reader(tensors).value(told["calibrator"])
    except _Unknown as error:
        raise ValueError(
            f"{file} holds {error.what}, which poise {_version()} does not know (the file was written "
            f"by {version}); upgrade poise, or import the module that defines it{error.hint or '.'}"
        ) from None
    except Exception as error:
        raise ValueError(
            f"{file} holds a calibrator that cannot be rebuilt ({error}); it is damaged or of another version of poise "
            f"({version}, this is {_version()}): write it again with poise.save."
        ) from error


class _Writer:
    """Values to JSON; scalars and lists are themselves, everything else is an object with its kind as first key."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.tensors: dict[str, Tensor] = {}

    def calibrator(self, calibrator: Any, where: str) -> dict[str, Any]:
        dot = f"{where}." if where else ""
        learned = {
            name: value for name, value in vars(calibrator).items() if name.endswith("_") and not name.startswith("__")
        }
        params = calibrator.get_params(deep=False)
        return {
            "calibrator": type(calibrator).__name__,
            "params": {name: self.value(value, dot + name) for name, value in params.items()},
            "learned": {name: self.value(value, dot + name) for name, value in learned.items()},
        }

    def value(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            # JSON has no infinity and no NaN.
            return value if np.isfinite(value) else {"float": repr(value)}
        if kind is list:
            return self._items(value, where)
        if kind is tuple:
            return {"tuple": self._items(value, where)}
        if kind is dict:
            return {"dict": [[self.value(k, where), self.value(v, f"{where}[{k!r}]")] for k, v in value.items()]}
        if isinstance(value, np.generic) and _is_plain(value.dtype):
            return {"scalar": kind.__name__, "value": self.value(value.item(), where)}
        if kind is np.ndarray:
            return self._array(value, where)
        if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_complex():
            return {"tensor": self._tensor(value.detach().cpu(), where)}
        if _RECORDS.get(kind.__name__) is kind:
            fields = [field.name for field in dataclasses.fields(value) if field.init]
            return {
                "record": kind.__name__,
                "fields": {name: self.value(getattr(value, name), f"{where}.{name}") for name in fields},
            }
        if CALIBRATORS.get(kind.__name__) is kind:
            return self.calibrator(value, where)
        raise self._refusal(value, where)

    def _items(self, values: Any, where: str) -> list[Any]:
        return [self.value(value, f"{where}[{index}]") for index, value in enumerate(values)]

    def _array(self, array: np.ndarray, where: str) -> dict[str, Any]:
        if array.dtype.kind in "OU":
            items = self._items(array.ravel().tolist(), where)
            return {"words": items, "dtype": array.dtype.str, "shape": list(array.shape)}
        if not _is_plain(array.dtype):
            raise self._refusal(array, where)
        # A tensor cannot be read-only, reversed or big-endian; numpy arrays can.
        native = array.astype(array.dtype.newbyteorder("="), order="K")
        return {"array": self._tensor(torch.from_numpy(native), where)}

    def _tensor(self, tensor: Tensor, where: str) -> dict[str, Any]:
        # A transposed matrix comes back transposed: BLAS may round the same numbers differently in another order.
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        if tensor.is_contiguous():
            order = list(range(tensor.ndim))
        name = where if where not in self.tensors else f"{where}#{len(self.tensors)}"
        self.tensors[name] = tensor.permute(order).clone(memory_format=torch.contiguous_format)
        return {"name": name, "order": order}

    def _refusal(self, value: Any, where: str) -> TypeError:
        root = where.split(".")[0].split("[")[0]
        what, remedy = "parameter", f"call set_params({root}=None) before saving and set it again after loading"
        if root.endswith("_"):
            what, remedy = "learned value", "replace it by one of these"
        elif hasattr(self.owner, f"{root}_"):
            # Then the learned values hold it too.
            remedy = "fit it again where it is needed"
        owner, kind = type(self.owner).__name__, type(value).__qualname__
        details = ", ".join(str(getattr(value, name)) for name in ("dtype", "layout") if hasattr(value, name))
        return TypeError(
            f"{owner} cannot be saved, for its {what} `{where}` is of type {kind}{details and f' ({details})'}, and a "
            f"file holds numbers, words, arrays and tensors, never code; {remedy}."
        )


class _Unknown(Exception):
    """A name in a file that stands for nothing here."""

    def __init__(self, name: str, known: dict[str, type]) -> None:
        self.what, self.hint = f"a {name}", _check._nearest(name, known)


class _Reader:
    """What `_Writer` wrote, back to values."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def value(self, item: Any) -> Any:
        match item:
            case list():
                return [self.value(part) for part in item]
            case {"float": word}:
                return float(word)
            case {"tuple": items}:
                return tuple(self.value(items))
            case {"dict": pairs}:
                return {self.value(key): self.value(value) for key, value in pairs}
            case {"scalar": name, "value": value}:
                kind = getattr(np, name)
                if not (isinstance(kind, type) and issubclass(kind, np.generic)):
                    raise TypeError(f"{name} is no number")
                return kind(self.value(value))
            case {"words": items, "dtype": dtype, "shape": shape}:
                words = np.empty(len(items), dtype=dtype)
                for index, word in enumerate(items):
                    words[index] = self.value(word)
                return words.reshape(shape)
            case {"array": stored}:
                return self._tensor(stored).numpy()
            case {"tensor": stored}:
                return self._tensor(stored)
            case {"record": name, "fields": fields}:
                return _known(name, _RECORDS)(**{field: self.value(value) for field, value in fields.items()})
            case {"calibrator": name, "params": params, "learned": learned}:
                calibrator = _known(name, CALIBRATORS)(**{param: self.value(value) for param, value in params.items()})
                for attribute, value in learned.items():
                    if not attribute.endswith("_"):
                        raise TypeError(f"{attribute} is no learned value")
                    setattr(calibrator, attribute, self.value(value))
                return calibrator
            case dict():
                raise TypeError(f"nothing is written as {listed(item)}")
        return item

    def _tensor(self, stored: dict[str, Any]) -> Tensor:
        back = sorted(range(len(stored["order"])), key=stored["order"].__getitem__)
        return self.tensors[stored["name"]].permute(back)


def _known(name: str, classes: dict[str, type]) -> type:
    if name not in classes:
        raise _Unknown(name, classes)
    return classes[name]


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether torch and JSON both have it: no complex, no long double, no dates."""
    return dtype.kind == "U" or (dtype.kind in "biuf" and dtype.itemsize <= 8)
