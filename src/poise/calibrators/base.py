"""The contract of every calibrator: scikit-learn's conventions, any array in and the same kind out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from poise import _arrays, _check
from poise._types import Array, Inputs, Labels, Logits, Probs

CALIBRATORS: dict[str, type[Calibrator]] = {}
"""Every calibrator by its class's name: what files are read with, and what tests walk."""


class Calibrator(ClassifierMixin, BaseEstimator, ABC):
    """Learns on validation logits and labels; turns logits into probabilities.

    A method implements ``_fit``, which sets attributes whose names end in ``_``, and ``_log_prob``; everything else,
    the judging of input above all, is done here and the same for all.
    """

    keeps_order: ClassVar[bool] = False
    """Whether no two classes of a row ever change places: then predictions and accuracy are the network's own."""

    needs_features: ClassVar[bool] = False

    classes_: np.ndarray[Any, Any]
    n_features_in_: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        CALIBRATORS[cls.__name__] = cls

    def fit(
        self,
        logits: Array,
        labels: Array,
        *,
        features: Array | None = None,
        sample_weight: Array | None = None,
        classes: Any = None,
    ) -> Self:
        """Learn from validation data: (n, k) logits, or (n,) log-odds of two classes, and (n,) labels.

        Labels are column numbers or names; `classes` names the columns (else names are taken in sorted order).
        A sample's weight counts like repetitions of it.
        """
        inputs, num_classes = self._check_inputs(logits)
        columns, names = _check.named_labels(labels, classes, num_classes)
        truth = _check.labels(columns, num_samples=len(inputs), num_classes=num_classes).to(inputs.device)
        weight = _check.sample_weight(sample_weight, num_samples=len(inputs))
        _check.several_classes(truth if weight is None else truth[weight.to(truth.device) > 0])
        features = self._check_features(features, len(inputs))
        self._fit(inputs.detach(), truth, weight if weight is None else weight.to(inputs.device), features)
        self.classes_ = names
        shape = _arrays.to_tensor(logits).shape
        self.n_features_in_ = shape[1] if len(shape) > 1 else 1
        return self

    def predict_proba(self, logits: Array, *, features: Array | None = None) -> Any:
        """(n, k) probabilities, of the kind, dtype and device the logits came in."""
        return _arrays.like(self._on_checked(self._prob, logits, features), logits)

    def predict_log_proba(self, logits: Array, *, features: Array | None = None) -> Any:
        """(n, k) log-probabilities, exact where a probability would round to zero."""
        return _arrays.like(self._on_checked(self._log_prob, logits, features), logits)

    def predict(self, logits: Array, *, features: Array | None = None) -> Any:
        """The class with the highest probability: column numbers as the logits' kind of array, or class names."""
        columns = self._on_checked(self._log_prob, logits, features).argmax(1)
        if self._keeps_order():
            # Probabilities that round to the same number must not decide what the logits tell apart.
            columns = self._check_inputs(logits, len(self.classes_))[0].argmax(1)
        if self.classes_.dtype.kind in "iu" and bool((self.classes_ == np.arange(len(self.classes_))).all()):
            return _arrays.like(columns, logits)
        return self.classes_[columns.cpu().numpy()]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # As accurate as the logits are, not more.
        tags.classifier_tags.poor_score = True
        return tags

    @abstractmethod
    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None: ...

    @abstractmethod
    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits: ...

    def _prob(self, logits: Logits, features: Tensor | None) -> Probs:
        return torch.exp(self._log_prob(logits, features))

    def _keeps_order(self) -> bool:
        """What `keeps_order` says of the method, of this one as it was fitted."""
        return self.keeps_order

    def _check_inputs(self, logits: Array, num_classes: int | None = None) -> tuple[Inputs, int]:
        scores = _check.logits(logits, num_classes=num_classes)
        return scores, scores.shape[1]

    def _check_features(self, features: Array | None, num_samples: int) -> Tensor | None:
        if features is not None:
            return _check.tensor(features, "features", num_samples=num_samples)
        if self.needs_features:
            raise ValueError(
                f"{type(self).__name__} needs the network's features; pass features=..., one row for every sample."
            )
        return None

    def _on_checked(
        self, method: Callable[[Inputs, Tensor | None], Tensor], logits: Array, features: Array | None
    ) -> Tensor:
        check_is_fitted(self)
        inputs, _ = self._check_inputs(logits, len(self.classes_))
        features = self._check_features(features, len(inputs))
        if len(inputs) == 0:
            return inputs.new_zeros(0, len(self.classes_))
        return method(inputs, features)
