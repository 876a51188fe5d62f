"""Feature clipping: what is farther out than a bound on the features no longer makes a prediction surer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from poise import _check, metrics, search
from poise._arrays import to_floating
from poise._types import Array, Labels, Logits
from poise.calibrators.affine import centered
from poise.calibrators.base import Calibrator
from poise.calibrators.criteria import CRITERIA, criterion_value

_ACCURACY_KEPT = 0.99


class FeatureClipping(Calibrator):
    """softmax(W clamp(f, −C, C) + b): the penultimate features f are clipped before the head (W, b) reads them.

    C is chosen by `criterion` among those that keep more than 99 % of the validation accuracy. As b is in the logits,
    the product is z + W (clamp(f, −C, C) − f), and the last layer's `head_weight` W, (k, d), is all it takes. Where it
    is None, W is found from features and logits by least squares: exactly, given more rows than features.

    Needs features, at the fit and after, and logits that are linear in them, which is checked. Order and accuracy are
    not kept, the latter nearly. It can only lower certainty, and only where features are extreme. A fit costs some
    eighty passes through the head. Features that are the logits themselves make it logit clipping; temperature scaling
    of its log-probabilities combines the two.

    >>> features = torch.tensor([[4.0, 0.0], [1.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> calibrator = FeatureClipping(head_weight=torch.eye(2)).fit(features, [1, 0, 1, 0, 1, 0], features=features)
    >>> bool(calibrator.predict_proba(features, features=features)[0, 0] < torch.softmax(features, 1)[0, 0])
    True

    Reference: Tao et al., Feature Clipping for Uncertainty Calibration, 2025.
    """

    needs_features = True

    head_: Tensor
    bound_: float

    def __init__(self, head_weight: Array | None = None, criterion: str = "nll") -> None:
        self.head_weight = head_weight
        self.criterion = criterion

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.choice(self.criterion, CRITERIA, "criterion")
        values = _rows(features, logits)
        counted = slice(None) if weight is None else weight > 0
        self.head_ = self._head(values[counted], logits[counted])
        scores = logits.double()

        def value(bound: float, least: float = 0.0) -> float:
            probs = torch.softmax(self._clipped(scores, values, bound), dim=1)
            if metrics.accuracy(probs, labels, sample_weight=weight) < least:
                return math.inf
            return criterion_value(self.criterion, probs, labels, weight)

        least = _ACCURACY_KEPT * metrics.accuracy(torch.softmax(scores, dim=1), labels, sample_weight=weight)

        def objective(bounds: Sequence[float]) -> list[float]:
            return [value(bound, least) for bound in bounds]

        found = search.minimize(objective, float(values.abs().amax(dim=1).median()) or 1.0, smooth=False)
        self.bound_ = found.argument if found.value < value(math.inf) else math.inf

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        values = _rows(features, logits)
        if values.shape[1] != self.head_.shape[1]:
            raise ValueError(
                f"features have {values.shape[1]} columns but this calibrator was fitted with {self.head_.shape[1]}; "
                "pass those of the same layer."
            )
        return torch.log_softmax(self._clipped(logits.double(), values, self.bound_), dim=1).to(logits.dtype)

    def _clipped(self, logits: Logits, features: Tensor, bound: float) -> Logits:
        beyond = features.clamp(-bound, bound) - features
        # Most features are never out of bounds, and cost nothing.
        touched = beyond.any(dim=0)
        return logits + beyond[:, touched] @ self.head_.to(features)[:, touched].T

    def _head(self, features: Tensor, logits: Logits) -> Tensor:
        """(k, d) float64: the last layer's weight as given or as found; an error where it does not give the logits."""
        around, scores = features - features.mean(dim=0), centered(logits.double())
        scores = scores - scores.mean(dim=0)
        if self.head_weight is None:
            if len(features) <= features.shape[1] + 1:
                raise ValueError(
                    f"FeatureClipping finds the last layer's weight from more rows than features, but {len(features)} "
                    f"rows of {features.shape[1]} features came; pass head_weight=..., shape (k, d)."
                )
            square = around.T @ around
            # Features that never vary, or vary together, have no weight of their own.
            firm = square + (1e-10 * square.diagonal().mean()).clamp(min=1e-100) * torch.eye(len(square)).to(square)
            head: Tensor = torch.linalg.solve(firm, around.T @ scores).T.contiguous()
        else:
            head = to_floating(self.head_weight).detach().to(features)
            if head.shape != (logits.shape[1], features.shape[1]):
                raise ValueError(
                    f"head_weight must have a row per class and a column per feature, shape ({logits.shape[1]}, "
                    f"{features.shape[1]}), but has shape {tuple(head.shape)}; pass the last layer's weight."
                )
        rest = scores - centered(around @ head.T)
        off = float(rest.square().mean().sqrt() / scores.square().mean().sqrt().clamp(min=1e-30))
        if len(logits) > 2 and off > 0.1:
            whose = "features" if self.head_weight is None else "features and head_weight"
            raise ValueError(
                f"the {whose} do not give these logits (they are off by {off:.0%} of their spread); pass the inputs of "
                "the last linear layer, after its activation, and where there are few rows that layer's weight."
            )
        return head


def _rows(features: Tensor | None, logits: Logits) -> Tensor:
    assert features is not None  # needs_features saw to it
    return features.detach().to(logits.device).flatten(1).double()
