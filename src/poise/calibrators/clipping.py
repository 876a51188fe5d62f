"""Clipping: what is farther out than a bound on features or logits no longer makes a prediction surer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from poise import _check, metrics, search
from poise._arrays import to_floating
from poise._types import Array, Labels, Logits
from poise.calibrators.base import Calibrator
from poise.calibrators.criteria import CRITERIA, criterion_value


class FeatureClipping(Calibrator):
    """softmax(W clamp(f, −C, C) + b): the penultimate features f are clipped before the head (W, b) reads them.

    C is chosen by `criterion` among those that keep more than 99 % of the validation accuracy. As b is in the logits,
    the product is z + W (clamp(f, −C, C) − f), and `head_weight` (k, d), the last layer's weight, is all it takes; that
    these features and this head do give these logits is checked.

    Needs features, at the fit and after. Order and accuracy are not kept, the latter nearly. It can only lower
    certainty, and only where features are extreme: a fit costs some eighty passes through the head. Temperature scaling
    of its log-probabilities combines the two.

    >>> features = torch.tensor([[4.0, 0.0], [1.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> calibrator = FeatureClipping(head_weight=torch.eye(2)).fit(features, [1, 0, 1, 0, 1, 0], features=features)
    >>> bool(calibrator.predict_proba(features, features=features)[0, 0] < torch.softmax(features, 1)[0, 0])
    True

    Reference: Tao et al., Feature Clipping for Uncertainty Calibration, 2025.
    """

    needs_features = True

    bound_: float

    def __init__(self, head_weight: Array | None = None, criterion: str = "nll") -> None:
        self.head_weight = head_weight
        self.criterion = criterion

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.choice(self.criterion, CRITERIA, "criterion")
        assert features is not None  # needs_features saw to it
        values = features.detach().to(logits.device).flatten(1)
        _check_head(self._head(logits, values), values, logits)
        self.bound_ = _best_bound(
            lambda bound: self._clipped(logits.double(), values, bound),
            float(values.abs().amax(dim=1).median()),
            0.99,
            self.criterion,
            labels,
            weight,
        )

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        assert features is not None  # needs_features saw to it
        values = features.to(logits.device).flatten(1)
        return torch.log_softmax(self._clipped(logits.double(), values, self.bound_), dim=1).to(logits.dtype)

    def _clipped(self, logits: Logits, features: Tensor, bound: float) -> Logits:
        beyond = features.clamp(-bound, bound) - features
        return logits + (beyond @ self._head(logits, features).T).to(logits)

    def _head(self, logits: Logits, features: Tensor) -> Tensor:
        """(k, d) in the precision of the features: a product in theirs is what the network did."""
        if self.head_weight is None:
            raise ValueError("FeatureClipping needs the last layer's weight; pass head_weight=..., shape (k, d).")
        weight = to_floating(self.head_weight).detach()
        if weight.shape != (logits.shape[1], features.shape[1]):
            raise ValueError(
                f"head_weight must have a row per class and a column per feature, shape ({logits.shape[1]}, "
                f"{features.shape[1]}), but has shape {tuple(weight.shape)}; pass the last layer's weight."
            )
        return weight.to(features)


class LogitClipping(Calibrator):
    """softmax(min(z, C)): no logit counts beyond the bound C; the logits are taken less their mean.

    C is chosen by `criterion` among those that keep more than 95 % of the validation accuracy. Logits beyond the bound
    become equal, so the most certain rows lose their prediction unless only one is beyond; below it no order changes.
    The step before feature clipping, good as a comparison: needs no features, a fit costs some eighty softmaxes.

    Reference: Tao et al., Feature Clipping for Uncertainty Calibration, 2025 (their public code).
    """

    bound_: float

    def __init__(self, criterion: str = "nll") -> None:
        self.criterion = criterion

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.choice(self.criterion, CRITERIA, "criterion")
        scores = _less_mean(logits.double())
        scale = float(scores.amax(dim=1).median())
        self.bound_ = _best_bound(lambda bound: scores.clamp(max=bound), scale, 0.95, self.criterion, labels, weight)

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        return torch.log_softmax(_less_mean(logits.double()).clamp(max=self.bound_), dim=1).to(logits.dtype)


def _best_bound(
    clipped: Callable[[float], Logits],
    scale: float,
    accuracy_kept: float,
    criterion: str,
    labels: Labels,
    weight: Tensor | None,
) -> float:
    """The bound with the best criterion among those that keep enough of the accuracy; infinite if none is better."""

    def value(bound: float, least: float) -> float:
        probs = torch.softmax(clipped(bound), dim=1)
        if metrics.accuracy(probs, labels, sample_weight=weight) < least:
            return math.inf
        return criterion_value(criterion, probs, labels, weight)

    unclipped = torch.softmax(clipped(math.inf), dim=1)
    least = accuracy_kept * metrics.accuracy(unclipped, labels, sample_weight=weight)

    def objective(bounds: Sequence[float]) -> list[float]:
        return [value(bound, least) for bound in bounds]

    found = search.minimize(objective, scale or 1.0, smooth=False)
    return found.argument if found.value < criterion_value(criterion, unclipped, labels, weight) else math.inf


def _less_mean(logits: Logits) -> Logits:
    return logits - logits.mean(dim=1, keepdim=True)


def _check_head(head_weight: Tensor, features: Tensor, logits: Logits) -> None:
    """Raises unless logits = features @ head_weight.T + bias, to the precision that features are kept in."""
    rest = _less_mean(logits.double() - (features @ head_weight.T).double())
    off = float((rest - rest.mean(dim=0)).std() / _less_mean(logits.double()).std().clamp(min=1e-30))
    if len(logits) > 2 and off > 0.05:
        raise ValueError(
            f"the features and head_weight do not give these logits (they are off by {off:.0%} of their spread); pass "
            "the inputs of the last linear layer, after its activation, and that layer's weight."
        )
