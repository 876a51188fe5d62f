"""What a strength is chosen by: a proper score, or a calibration error, on validation data."""

from __future__ import annotations

import torch
from torch import Tensor

from poise import metrics
from poise._types import Labels, Probs

CRITERIA = ("nll", "brier", "ece", "adaptive_ece")
PROPER = ("nll", "brier")
"""Smooth in the strength where the probabilities are."""

NLL_FLOOR = 1e-12


def criterion_value(criterion: str, probs: Probs, labels: Labels, weight: Tensor | None) -> float:
    """The criterion of full probabilities; smaller is better."""
    if criterion == "nll":
        return metrics.nll(probs, labels, floor=NLL_FLOOR, sample_weight=weight)
    return float(getattr(metrics, criterion)(probs, labels, sample_weight=weight))


def weighted_mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """Σ w v / Σ w, or the plain mean."""
    return values.mean() if weight is None else torch.dot(values, weight.to(values)) / weight.sum().to(values)
