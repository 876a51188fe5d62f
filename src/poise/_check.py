"""The only place that judges user input; one sentence per error: what was expected, what came, what to do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poise._arrays import to_floating, to_tensor
from poise._types import Array, Labels, Logits, Probs


def logits(array: Array, *, num_classes: int | None = None) -> Logits:
    """Finite (n, k) scores; (n,) or (n, 1) is one log-odds per row and becomes the two columns (0, log-odds)."""
    scores = _matrix(array, "logits")
    columns = scores.shape[1]
    if columns == 1:
        scores = torch.cat([torch.zeros_like(scores), scores], dim=1)
    if num_classes is not None and scores.shape[1] != num_classes:
        raise ValueError(
            f"logits have {columns} column(s) but this calibrator was fitted with {num_classes}: X has {columns} "
            f"features, but it is expecting {num_classes} features as input; pass the same classes in the same order, "
            "and a single row as logits[None]. Reshape your data."
        )
    if _look_like_probs(scores):
        raise ValueError(
            "logits were expected, but every row is nonnegative and sums to one, so these look like probabilities; "
            "pass their logarithms, e.g. np.log(probs)."
        )
    return scores


def probs(array: Array) -> Probs:
    """Rows of (n, k) probabilities; (n,) or (n, 1) is the probability of the second of two classes."""
    values = _matrix(array, "probs")
    if values.shape[1] == 1:
        values = torch.cat([1 - values, values], dim=1)
    slack = 1e-3 if values.dtype == torch.float32 else 1e-5
    if values.shape[0] and values.min() >= 0 and bool(((values.sum(dim=1) - 100).abs() < 1).all()):
        raise ValueError(
            "each row of probs must sum to 1, but all sum to about 100, so these look like percentages; "
            "divide them by 100."
        )
    if values.shape[0] and (values.min() < -slack or values.max() > 1 + slack):
        raise ValueError(
            f"probs must lie between 0 and 1, but came with values from {values.min():.4g} to {values.max():.4g}; "
            "if these are logits, pass torch.softmax(logits, dim=1) or a calibrator's predict_proba."
        )
    sums = values.sum(dim=1)
    worst = (sums - 1).abs().max() if values.shape[0] else torch.zeros(())
    # Sixteen-bit probabilities of a thousand classes are off by a few thousandths in the sum.
    if worst > 2e-2:
        row = int((sums - 1).abs().argmax())
        raise ValueError(
            f"each row of probs must sum to 1, but row {row} sums to {float(sums[row]):.4g}; "
            "if these are logits, pass torch.softmax(logits, dim=1) or a calibrator's predict_proba."
        )
    return values


def labels(array: Array, *, num_samples: int, num_classes: int) -> Labels:
    """(n,) whole numbers from 0 to k-1, as int64."""
    values = to_tensor(array)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise ValueError(
            f"labels must be one whole number per row, shape ({num_samples},), but have shape {tuple(values.shape)}; "
            "for one-hot labels pass labels.argmax(1)."
        )
    if len(values) != num_samples:
        raise ValueError(
            f"there are {num_samples} rows of scores but {len(values)} labels; pass one label for every row."
        )
    if values.is_floating_point():
        if not bool(torch.isfinite(values).all()) or bool((values != values.round()).any()):
            raise ValueError(
                "labels must be whole numbers, but some are fractions, NaN or infinity, as of a continuous target; "
                "pass the column number of each row's true class."
            )
    elif values.is_complex():
        raise ValueError("labels must be whole numbers, but complex ones came; pass their real part.")
    whole = values.to(torch.int64)
    if num_samples and (whole.min() < 0 or whole.max() >= num_classes):
        wrong = int(whole.min()) if whole.min() < 0 else int(whole.max())
        raise ValueError(
            f"labels must lie between 0 and {num_classes - 1} for {num_classes} columns of scores, but a label "
            f"{wrong} came; labels count the columns from 0, or pass classes=[...] with the name of every column."
        )
    return whole


def named_labels(array: Array, classes: Sequence[Any] | np.ndarray | None, num_classes: int) -> tuple[Any, np.ndarray]:
    """Labels as column numbers, and the columns' names: from `classes`, or from labels that are words.

    Where the names are words, numbers count the columns; where the names are numbers, numbers are names.
    """
    if array is None:
        raise ValueError(
            "labels must be one whole number or name per row, but none came; pass fit(logits, labels). "
            "Expected array-like (array or non-string sequence), got None."
        )
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack__"):
        array = np.asarray(array)
        array = np.array(array.tolist()) if array.dtype.kind == "O" else array
    is_words = isinstance(array, np.ndarray) and array.dtype.kind in "OUS"
    if classes is None:
        if not is_words:
            return array, np.arange(num_classes)
        # scikit-learn's order: the columns of a decision function follow the sorted class names.
        classes = np.unique(array.astype(str))
        if len(classes) != num_classes:
            raise ValueError(
                f"labels hold {len(classes)} different names (Unknown label type for {num_classes} columns of scores); "
                "pass classes=[...] with the name of every column, in the order of the columns."
            )
    names = np.asarray(classes)
    if names.ndim != 1 or len(names) != num_classes:
        raise ValueError(
            f"classes must name each of the {num_classes} columns once, but {names.size} names came; "
            "pass one name for every column of the logits."
        )
    if len(np.unique(names)) != num_classes:
        raise ValueError("classes must differ from each other, but some name occurs twice; give each column its own.")
    if not is_words and names.dtype.kind not in "iuf":
        return array, names
    given, known = np.asarray(to_tensor(array).cpu() if not is_words else array.astype(str)), names
    if is_words:
        known = names.astype(str)
    order = np.argsort(known)
    columns = order[np.searchsorted(known, given, sorter=order).clip(max=num_classes - 1)]
    unknown = given[known[columns] != given]
    if len(unknown):
        raise ValueError(
            f"a label {unknown[0].item()!r} is not among the classes{_nearest(str(unknown[0]), map(str, known))}; "
            "pass classes=[...] with the name of every column."
        )
    return columns, names


def several_classes(values: Labels) -> None:
    """A fit needs rows, and rows of more than one class."""
    if len(values) == 0:
        raise ValueError("there is nothing to fit on: 0 samples came; pass the validation logits and labels.")
    if bool((values == values[0]).all()):
        raise ValueError(
            f"all {len(values)} labels are {int(values[0])}, only one class; pass a validation set that holds at "
            "least two classes, drawn like the data to be predicted."
        )


def sample_weight(array: Array | None, *, num_samples: int) -> Tensor | None:
    """None, or one nonnegative finite weight per row, as float64."""
    if array is None:
        return None
    weight = _floating(array, "sample_weight").double()
    if weight.ndim == 0:
        weight = weight.expand(num_samples)
    if weight.shape != (num_samples,):
        raise ValueError(
            f"sample_weight must be one number per row, shape ({num_samples},), but has shape {tuple(weight.shape)}; "
            "pass one for every row. Sample weights must be 1D array or scalar."
        )
    if not bool(torch.isfinite(weight).all()) or bool((weight < 0).any()):
        raise ValueError("sample_weight must be finite and nonnegative, but some weights are not; drop those rows.")
    if not bool(weight.sum() > 0):
        raise ValueError(
            "sample_weight must have a positive sum, but every weight is zero; leave it out for equal ones."
        )
    return weight


def tensor(array: Array, name: str, *, num_samples: int | None = None) -> Tensor:
    """Any finite floating array with one entry per sample along its first axis: images, activations, features."""
    values = _floating(array, name)
    if values.ndim == 0:
        raise ValueError(f"{name} must have one entry per sample along the first axis, but a single number came.")
    if num_samples is not None and len(values) != num_samples:
        raise ValueError(f"{name} have {len(values)} rows but {num_samples} were expected; pass one for every sample.")
    return _finite(values, name)


def positive(value: float, name: str) -> float:
    """A finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number above 0, but is {value!r}.")
    return float(value)


def whole(value: int, name: str, *, least: int = 1) -> int:
    """A whole number not below `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be a whole number, {least} or more, but is {value!r}.")
    return int(value)


def choice(value: str, options: Iterable[str], name: str) -> str:
    """One of a few words."""
    known = list(options)
    if value not in known:
        hint = _nearest(str(value), known) or "."
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, but is {value!r}{hint}")
    return value


def one_or_more(value: Any, kind: type, name: str, example: str) -> tuple[Any, ...]:
    """One object of a kind, or several of them."""
    values = (value,) if isinstance(value, kind) or not isinstance(value, Sequence) else tuple(value)
    wrong = next((one for one in values if not isinstance(one, kind)), None)
    if wrong is not None or not values:
        raise TypeError(
            f"{name} must be one or several objects such as {example}, but {'none' if wrong is None else repr(wrong)} "
            f"came; pass {name}={example}."
        )
    return values


def head_output(logits: Tensor, *, num_samples: int) -> Logits:
    """(n, k) logits of several classes, as the rest of a network must give."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != num_samples or logits.shape[1] < 2:
        came = f"one of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ValueError(
            f"head must turn {num_samples} input(s) into a ({num_samples}, k) tensor of logits, but {came} came out; "
            "pass a function of (n, ...) inputs, such as the last layers of the network."
        )
    return logits


def training_batch(logits_array: Array, labels_array: Array) -> tuple[Logits, Labels]:
    """(n, k) logits of two classes or more, halves as float32, and (n,) whole labels, on one device.

    The labels' range is looked at on the CPU only: on a GPU that would make every training step wait for the last one.
    """
    scores = _floating(logits_array, "logits")
    if scores.ndim != 2 or scores.shape[0] == 0 or scores.shape[1] < 2:
        raise ValueError(
            f"a loss takes logits of shape (n, k) with at least one row and two classes, but they have shape "
            f"{tuple(scores.shape)}; pass the network's output for a batch, one column per class."
        )
    truth = to_tensor(labels_array)
    if truth.shape != scores.shape[:1] or truth.is_floating_point() or truth.is_complex():
        raise ValueError(
            f"a loss takes one whole number per row as labels, shape ({len(scores)},), but they have shape "
            f"{tuple(truth.shape)} and dtype {truth.dtype}; for one-hot labels pass labels.argmax(1)."
        )
    if truth.device.type == "cpu":
        truth = labels(truth, num_samples=len(scores), num_classes=scores.shape[1])
    return scores, truth.to(scores.device, torch.int64)


def below_one(value: float, name: str) -> float:
    """A number from 0 up to, but not including, 1."""
    if nonnegative(value, name) >= 1:
        raise ValueError(f"{name} must be 0 or above and below 1, but is {value!r}.")
    return float(value)


def _nearest(word: str, options: Iterable[str]) -> str:
    known = {option.lower(): option for option in options}
    close = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f"; did you mean {known[close[0]]!r}?" if close else ""


def _matrix(array: Array, name: str) -> Tensor:
    values = _floating(array, name)
    if values.ndim == 1:
        values = values[:, None]
    if values.ndim != 2:
        raise ValueError(
            f"{name} must be a table of samples by classes, shape (n, k), but have {values.ndim} dimensions, shape "
            f"{tuple(values.shape)}; flatten the other axes into rows. Expected 2D array."
        )
    if values.shape[1] == 0:
        raise ValueError(
            f"{name} must have a column per class, but came with 0 feature(s) (shape={tuple(values.shape)}) while a "
            "minimum of 1 is required; pass one score for every class."
        )
    return _finite(values, name)


def _floating(array: Array, name: str) -> Tensor:
    if hasattr(array, "toarray"):
        raise TypeError(f"{name} must be a dense array, but a sparse one came; pass {name}.toarray().")
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack__"):
        array = np.asarray(array)
        if array.dtype.kind == "O":
            try:
                array = array.astype(float)
            except (TypeError, ValueError) as error:
                raise type(error)(
                    f"{name} must be numbers, but {error} (argument must be numbers); pass integers or floats."
                ) from error
    if isinstance(array, np.ndarray) and array.dtype.kind not in "fiub":
        kind = "complex ones came (Complex data not supported)" if array.dtype.kind == "c" else f"{array.dtype} came"
        raise ValueError(f"{name} must be real numbers, but {kind}; pass integers or floats.")
    if isinstance(array, Tensor) and array.is_complex():
        raise ValueError(f"{name} must be real numbers, but complex ones came; pass integers or floats.")
    return to_floating(array)


def _finite(values: Tensor, name: str) -> Tensor:
    # One reduction decides; only an error pays for the search of its place.
    if not bool(torch.isfinite(values.detach().sum())) and not bool(torch.isfinite(values).all()):
        row = int((~torch.isfinite(values)).reshape(len(values), -1).any(1).nonzero()[0])
        kind = "NaN" if bool(torch.isnan(values).any()) else "infinity"
        raise ValueError(
            f"{name} must be finite, but row {row} holds {kind}; find out where it comes from, or drop the row."
        )
    return values


def _look_like_probs(values: Tensor) -> bool:
    # A few rows tell of nearly all logits that they are none.
    return len(values) > 1 and all(_are_probs(some) for some in (values[:8], values))


def _are_probs(values: Tensor) -> bool:
    if bool((values < 0).any()) or bool((values > 1).any()):
        return False
    return bool(((values.sum(dim=1) - 1).abs() < 1e-3).all())


def scored(
    probs_array: Array, labels_array: Array, weight_array: Array | None = None
) -> tuple[Probs, Labels, Tensor | None]:
    """What every metric takes: at least one row of probabilities, its label and its weight, on one device, detached."""
    values = probs(probs_array).detach()
    if len(values) == 0:
        raise ValueError("there is nothing to score: 0 rows came; pass the probabilities and labels of a test set.")
    truth = labels(labels_array, num_samples=len(values), num_classes=values.shape[1])
    weight = sample_weight(weight_array, num_samples=len(values))
    return values, truth.to(values.device), None if weight is None else weight.detach().to(values.device)


def confidences(
    confidence_array: Array, correct_array: Array, weight_array: Array | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(n,) confidences between 0 and 1, whether each was right (0 or 1), and the weights."""
    confidence = _finite(_floating(confidence_array, "confidence"), "confidence").detach()
    if confidence.ndim != 1 or len(confidence) == 0:
        raise ValueError(
            f"confidence must be one number per row and at least one row, but has shape {tuple(confidence.shape)}; "
            "for a table of probabilities pass probs.max(1)."
        )
    if confidence.min() < -1e-3 or confidence.max() > 1 + 1e-3:
        raise ValueError(
            f"confidence must lie between 0 and 1, but came with values from {float(confidence.min()):.4g} to "
            f"{float(confidence.max()):.4g}; divide percentages by 100."
        )
    correct = to_tensor(correct_array).detach().to(confidence.device)
    if correct.shape != confidence.shape:
        raise ValueError(
            f"correct must have one entry per confidence, shape {tuple(confidence.shape)}, but has shape "
            f"{tuple(correct.shape)}."
        )
    if bool(((correct != 0) & (correct != 1)).any()):
        raise ValueError("correct must be true or false (1 or 0) in each row; pass predicted == labels.")
    weight = sample_weight(weight_array, num_samples=len(confidence))
    return confidence, correct != 0, None if weight is None else weight.detach().to(confidence.device)


def nonnegative(value: float, name: str) -> float:
    """A finite number, zero or above."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number, 0 or above, but is {value!r}.")
    return float(value)


def images(tensor: Tensor, *, in_color: bool = False) -> Tensor:
    """(n, channels, height, width); to change colours, with three channels of values from 0 to 1."""
    if tensor.ndim != 4:
        raise ValueError(
            f"augmentations take images of shape (n, channels, height, width), but {tuple(tensor.shape)} came; pass a "
            "batch of images, a single one as images[None], or Additive(Gaussian()) for other inputs."
        )
    if in_color and tensor.shape[1] != 3:
        raise ValueError(
            f"colours are jittered and blurred on images of 3 channels, but {tensor.shape[1]} came; use weak()."
        )
    if in_color and len(tensor) and (tensor.min() < 0 or tensor.max() > 1):
        raise ValueError(
            f"colours are jittered on images with values from 0 to 1, but values from {float(tensor.min()):.3g} to "
            f"{float(tensor.max()):.3g} came; pass images before normalization and make it the network's first layer."
        )
    return tensor


def layer(name: str, known: Iterable[str]) -> str:
    """The name of a module inside a network."""
    names = [one for one in known if one]
    if name not in names:
        close = difflib.get_close_matches(str(name), names, n=3) or names[:3]
        raise ValueError(
            f"the network has no layer {name!r}; the nearest are {', '.join(map(repr, close))}, and "
            "dict(model.named_modules()) has them all."
        )
    return name
