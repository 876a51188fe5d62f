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
from poise.metrics.debiased import debiased_ece, ece_sweep
from poise.metrics.decomposition import Decomposition, calibration_part, decompose, refinement_part
from poise.metrics.neighborhoods import piece, proximity
from poise.metrics.scores import accuracy, brier, nll, top_k_accuracy
from poise.metrics.unbinned import ks_error, smooth_ece
from poise.metrics.uncertainty import (
    Difference,
    Interval,
    NoiseFloor,
    interval,
    noise_floor,
    paired_difference,
)

__all__ = [
    "Bins",
    "Decomposition",
    "Difference",
    "Interval",
    "NoiseFloor",
    "accuracy",
    "adaptive_classwise_ece",
    "adaptive_ece",
    "average_calibration_error",
    "brier",
    "calibration_part",
    "classwise_ece",
    "debiased_ece",
    "decompose",
    "ece",
    "ece_sweep",
    "interval",
    "ks_error",
    "mce",
    "nll",
    "noise_floor",
    "paired_difference",
    "piece",
    "proximity",
    "refinement_part",
    "smooth_ece",
    "top_k_accuracy",
]
