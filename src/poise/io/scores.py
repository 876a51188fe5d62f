"""What a network said about a data set, and the truth: logits or probabilities, labels, features and class names."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from poise import _check
from poise._arrays import to_floating
from poise._types import Array, Labels, Logits, Probs
from poise.io import tables
from poise.io.files import FilePath, atomic, existing, listed, reading

_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_CONTROL = re.compile("[\x00-\x1f\x7f\ufeff]")


@dataclass(frozen=True, eq=False)
class Scores:
    """Logits or probs of n samples and k classes, with labels, features and class names where they are known.

    Any kind of array may be given; the fields are tensors, checked and of one length, in the floating dtype they came
    with. One log-odds per row becomes two columns, labels that are names become column numbers.

    >>> scores = Scores(logits=[[2.0, 1.0], [0.0, 3.0]], labels=["cat", "dog"], classes=["cat", "dog"])
    >>> scores.labels, scores.num_samples, scores.num_classes
    (tensor([0, 1]), 2, 2)
    """

    logits: Logits | None = None
    probs: Probs | None = None
    labels: Labels | None = None
    features: Tensor | None = None
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if (self.logits is None) == (self.probs is None):
            came = "neither" if self.logits is None else "both"
            raise ValueError(f"either logits or probs were expected, but {came} came; give the one you have.")
        if self.logits is not None:
            self._set("logits", _as_came(_check.logits(self.logits), self.logits))
        else:
            self._set("probs", _as_came(_check.probs(self.probs), self.probs))
        labels, names = _check.named_labels([] if self.labels is None else self.labels, self.classes, self.num_classes)
        if self.labels is not None:
            self._set("labels", _check.labels(labels, num_samples=self.num_samples, num_classes=self.num_classes))
            if self.classes is None and names.dtype.kind == "U":
                self._set("classes", names)
        if self.classes is not None:
            self._set("classes", _class_names(self.classes))
        if self.features is not None:
            features = _check.tensor(self.features, "features", num_samples=self.num_samples)
            self._set("features", _as_came(features, self.features))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def _values(self) -> Tensor:
        values = self.probs if self.logits is None else self.logits
        assert values is not None  # one of the two, by construction
        return values

    @property
    def num_samples(self) -> int:
        return len(self._values)

    @property
    def num_classes(self) -> int:
        return self._values.shape[1]

    def as_logits(self) -> Logits:
        """The logits, or the logarithms of the probs.

        A probability of exactly zero has no finite logarithm; it is raised to the smallest normal number of its dtype,
        1e-38 in float32 (in which halves are computed) and 2e-308 in float64. What the zero hid is lost.

        >>> Scores(probs=[[1.0, 0.0]]).as_logits()
        tensor([[   0.0000, -708.3964]], dtype=torch.float64)
        """
        if self.logits is not None:
            return self.logits
        probs = to_floating(self._values)
        return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def read_scores(path: FilePath, *, need_labels: bool = True) -> Scores:
    """The scores in a file, on the CPU; everything is checked before it is returned.

    ``.npz``, ``.safetensors`` and ``.pt`` (a dictionary) hold `logits` or `probs` (n, k), `labels` (n) and, where
    known, `features` (n, ...) and `classes` (k names; in the JSON metadata of ``.safetensors``). ``.npy`` files go
    together by name: beside ``val.logits.npy`` or ``val_probs.npy`` lie ``val.labels.npy`` or ``val_labels.npy``.
    ``.csv`` and ``.parquet`` have a column `label` and one column per class, named after it; their values are probs
    when every row is a distribution and logits otherwise, and a label is the name of a column, or its number counted
    from 0 where no class has a number for a name. A table without class names calls its columns 0, 1, 2, ...

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_scores(f"{folder}/val.csv", logits=[[2.0, -1.0]], labels=[0], classes=["cat", "dog"])
    ...     scores = read_scores(f"{folder}/val.csv")
    >>> scores.logits, scores.labels, scores.classes
    (tensor([[ 2., -1.]], dtype=torch.float64), tensor([0]), ('cat', 'dog'))
    """
    file = existing(path)
    read, _ = _format(file)
    parts = read(file)
    if "logits" not in parts and "probs" not in parts:
        raise ValueError(f"{file} must hold `logits` or `probs`, but holds {listed(parts)}; rename what is there.")
    try:
        scores = Scores(**{name: parts[name] for name in Scores.__dataclass_fields__ if name in parts})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    if need_labels and scores.labels is None:
        place = {".csv": "a column `label`", ".parquet": "a column `label`"}.get(file.suffix.lower(), "`labels`")
        if file.suffix.lower() == ".npy":
            place = f"the file {_beside(file, 'labels').name} beside it"
        raise ValueError(f"{file} holds no labels, but they are needed here; add {place}, one label for every row.")
    return scores


def write_scores(
    path: FilePath,
    *,
    logits: Array | None = None,
    probs: Array | None = None,
    labels: Array | None = None,
    features: Array | None = None,
    classes: Array | None = None,
) -> None:
    """Writes what `read_scores` reads, whole or not at all; of logits and probs give one.

    Tables have no room for features. ``.npz``, ``.npy`` and tables hold bfloat16 as float32, and ``.csv`` is read as
    float64, both without loss. Several ``.npy`` files cannot be replaced at one instant; the other formats are.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_scores(f"{folder}/test.npz", probs=[[0.9, 0.1]])
    ...     read_scores(f"{folder}/test.npz", need_labels=False).probs
    tensor([[0.9000, 0.1000]], dtype=torch.float64)
    """
    file = Path(path)
    _, write = _format(file)
    write(file, Scores(logits, probs, labels, features, classes))


def _as_came(judged: Tensor, given: Array) -> Tensor:
    """Halves again where halves came: the checks compute in float32."""
    half = _HALVES.get(str(getattr(given, "dtype", "")).removeprefix("torch."))
    return (judged if half is None else judged.to(half)).detach()


def _class_names(classes: Array) -> tuple[str, ...]:
    names = tuple(str(name) for name in np.asarray(classes).tolist())
    wrong = next((name for name in names if not name.strip() or _CONTROL.search(name)), None)
    if wrong is not None:
        raise ValueError(f"classes must have names without line breaks, but one is {wrong!r}; give it another name.")
    return names


def _tensors(scores: Scores) -> dict[str, Tensor]:
    return {name: value for name, value in vars(scores).items() if isinstance(value, Tensor)}


def _arrays(scores: Scores) -> dict[str, Any]:
    arrays = {name: _numpy(value) for name, value in _tensors(scores).items()}
    if scores.classes is not None:
        arrays["classes"] = np.array(scores.classes)
    return arrays


def _numpy(tensor: Tensor) -> np.ndarray:
    # numpy has no bfloat16.
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


def _read_npz(file: Path) -> dict[str, Any]:
    remedy = "write it again, e.g. np.savez(path, logits=logits, labels=labels)"
    # Opened here, for np.load leaves a truncated file open.
    with (
        reading(file, "an .npz archive of arrays", remedy),
        file.open("rb") as content,
        np.load(content, allow_pickle=False) as arrays,
    ):
        return {name: arrays[name] if name in Scores.__dataclass_fields__ else None for name in arrays}


def _write_npz(file: Path, scores: Scores) -> None:
    # Given a path, numpy would add its own suffix to one like .NPZ.
    with atomic(file) as temporary, temporary.open("wb") as content:
        np.savez(content, **_arrays(scores))


def _beside(file: Path, part: str) -> Path:
    """val.logits.npy -> val.labels.npy: the name with its last `logits` or `probs` replaced."""
    found = re.fullmatch(r"(.*)(?:logits|probs)(.*)", file.name)
    if found is None:
        raise ValueError(
            f"an .npy file of scores is named like val.logits.npy or val_probs.npy, with val.labels.npy or "
            f"val_labels.npy beside it, but {file.name} came; rename it, or put all in one .npz."
        )
    return file.with_name(part.join(found.groups()))


def _read_npy(file: Path) -> dict[str, Any]:
    kind = "logits" if _beside(file, "logits") == file else "probs"
    parts: dict[str, Any] = {}
    for part in (kind, "labels", "features", "classes"):
        if (other := _beside(file, part)).exists():
            with reading(other, "an .npy array", "write it again with np.save"):
                parts[part] = np.load(other, allow_pickle=False)
    return parts


def _write_npy(file: Path, scores: Scores) -> None:
    kind = "probs" if scores.logits is None else "logits"
    if _beside(file, kind) != file:
        raise ValueError(f"{file.name} is to hold {kind}; call it {_beside(file, kind).name}.")
    arrays = _arrays(scores)
    for part in {"labels", "features", "classes"} - set(arrays):
        if (stale := _beside(file, part)).exists():
            raise ValueError(f"{stale} would belong to {file.name}, which comes without {part}; delete or rename it.")
    with ExitStack() as files:
        for part, array in arrays.items():
            temporary = files.enter_context(atomic(_beside(file, part)))
            with temporary.open("wb") as content:
                np.save(content, array, allow_pickle=False)


def _read_pt(file: Path) -> dict[str, Any]:
    remedy = "it must hold tensors and words only; write it again with torch.save({'logits': ..., 'labels': ...}, path)"
    with reading(file, "a dictionary of tensors", remedy), warnings.catch_warnings():
        # torch warns of a foreign pickle before it refuses it.
        warnings.simplefilter("ignore")
        content = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a dictionary of tensors, but holds a {type(content).__name__}; {remedy}.")
    return {str(name): value for name, value in content.items()}


def _write_pt(file: Path, scores: Scores) -> None:
    # A view would drag the whole of what it looks at into the file.
    content: dict[str, Any] = {name: value.cpu().clone() for name, value in _tensors(scores).items()}
    if scores.classes is not None:
        content["classes"] = list(scores.classes)
    with atomic(file) as temporary:
        torch.save(content, temporary)


def _read_safetensors(file: Path) -> dict[str, Any]:
    with (
        reading(file, "a safetensors file", "write it again, e.g. with poise.io.write_scores"),
        safe_open(file, framework="pt") as content,
    ):
        metadata = content.metadata() or {}
        wanted = set(content.keys()) & set(Scores.__dataclass_fields__)
        # A copy, for what safetensors gives goes on reading the file, at any alignment.
        parts = {name: content.get_tensor(name).clone() if name in wanted else None for name in content.keys()}  # noqa: SIM118
        if "classes" in metadata:
            parts["classes"] = json.loads(metadata["classes"])
    if "poise" in metadata:
        raise ValueError(f"{file} holds a calibrator, but scores were expected; open it with poise.load.")
    return parts


def _write_safetensors(file: Path, scores: Scores) -> None:
    tensors = {name: value.cpu().contiguous() for name, value in _tensors(scores).items()}
    metadata = {} if scores.classes is None else {"classes": json.dumps(scores.classes)}
    with atomic(file) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def _write_table(write: Callable[[Path, tables.Table], None]) -> Callable[[Path, Scores], None]:
    def write_scores_to(file: Path, scores: Scores) -> None:
        if scores.features is not None:
            raise ValueError(f"a table such as {file.name} has no room for features; leave them out, or write an .npz.")
        labels = None if scores.labels is None else scores.labels.tolist()
        kind = "probs" if scores.logits is None else "logits"
        write(file, tables.Table(_numpy(scores._values), kind, labels, scores.classes))

    return write_scores_to


def _format(file: Path) -> tuple[Callable[[Path], dict[str, Any]], Callable[[Path, Scores], None]]:
    suffix = file.suffix.lower()
    if suffix not in _FORMATS:
        hint = _check._nearest(suffix, _FORMATS) or "; use one of these."
        raise ValueError(f"scores are kept as {', '.join(_FORMATS)}, but the path is {file}{hint}")
    return _FORMATS[suffix]


_FORMATS: dict[str, tuple[Callable[[Path], dict[str, Any]], Callable[[Path, Scores], None]]] = {
    ".npz": (_read_npz, _write_npz),
    ".npy": (_read_npy, _write_npy),
    ".pt": (_read_pt, _write_pt),
    ".safetensors": (_read_safetensors, _write_safetensors),
    ".csv": (tables.read_csv, _write_table(tables.write_csv)),
    ".parquet": (tables.read_parquet, _write_table(tables.write_parquet)),
}
