"""Metrics of probabilities: they take probabilities and labels, never guess, and return fractions, not percent."""

from poise.metrics.bins import Bins
from poise.metrics.calibration import (
    adaptive_classwise_ece,
    adaptive_ece,
    average_calibration_error,
    classwise_ece,
    ece,
    mce,
)
from poise.metrics.scores import accuracy, brier, nll, top_k_accuracy

__all__ = [
    "Bins",
    "accuracy",
    "adaptive_classwise_ece",
    "adaptive_ece",
    "average_calibration_error",
    "brier",
    "classwise_ece",
    "ece",
    "mce",
    "nll",
    "top_k_accuracy",
]
