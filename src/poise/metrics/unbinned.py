"""Calibration errors without bins: smoothed by a kernel, or accumulated along the confidence."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.fft import dct, idct
from scipy.optimize import brentq
from torch import Tensor

from poise._types import Array
from poise.metrics.bins import top_label

_NODES = 1 << 14


def smooth_ece(probs: Array, labels: Array, *, sample_weight: Array | None = None) -> float:
    """Smooth calibration error: residuals smoothed by a Gaussian whose width is the error itself.

    E(σ) = ∫₀¹ |Σ_i K_σ(t, c_i) (c_i − a_i)| / n dt, reported where E(σ) = σ; K_σ is the Gaussian reflected at 0 and 1.

    E decreases, so there is one such σ. Continuous in the probabilities, without bins to choose. Noise counts here too:
    a perfect model with 95 % accuracy shows about .006 on 10,000 samples.

    >>> round(smooth_ece([[0.75, 0.25], [0.75, 0.25], [0.25, 0.75], [0.25, 0.75]], [0, 0, 1, 1]), 6)
    0.25

    Reference: Błasiok, Nakkiran, ICLR 2024. Their relplot stops at steps of 1/1024 in σ and halves the mass of
    confidences at 1, so it differs by up to some .01 for very sure models.
    """
    confidence, correct, weight, _ = top_label(probs, labels, sample_weight)
    residual = shares(weight, confidence) * (confidence.double() - correct.double())
    return fixed_point(cosine_waves(confidence, residual))


def ks_error(probs: Array, labels: Array, *, sample_weight: Array | None = None) -> float:
    """Kolmogorov–Smirnov calibration error: the largest cumulative residual along the sorted confidences.

    max_t |(1/n) Σ_{i: c_i ≤ t} (c_i − a_i)|

    Equal confidences are added together, so the order of the rows does not matter. At most the `ece` of any bins that
    are fine enough; gaps of opposite sign at different confidences cancel in part.

    >>> round(ks_error([[0.75, 0.25], [0.75, 0.25], [0.25, 0.75], [0.25, 0.75]], [0, 0, 1, 1]), 6)
    0.25

    Reference: Gupta et al., ICLR 2021.
    """
    confidence, correct, weight, _ = top_label(probs, labels, sample_weight)
    residual = shares(weight, confidence) * (confidence.double() - correct.double())
    _, level = torch.unique(confidence, return_inverse=True)
    return float(torch.bincount(level, residual).cumsum(0).abs().max())


def shares(weight: Tensor | None, values: Tensor) -> Tensor:
    """The weights as shares of one; equal where there are none."""
    if weight is None:
        return torch.full(values.shape, 1 / len(values), dtype=torch.float64, device=values.device)
    return weight / weight.sum()


def nodes(number: int, device: torch.device) -> Tensor:
    """(j + ½)/number, j = 0, 1, …"""
    return (torch.arange(number, dtype=torch.float64, device=device) + 0.5) / number


def place(confidence: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The node at or below each confidence, and the part that belongs to the next one to keep the mean place."""
    along = (confidence.double() * number - 0.5).clamp(0, number - 1)
    below = along.floor().clamp(max=number - 2)
    return below.long(), along - below


def cosine_waves(confidence: Tensor, residual: Tensor) -> np.ndarray:
    """Σ_i r_i cos(π k c_i), k = 0, 1, …, of residuals on nodes."""
    below, part = place(confidence, _NODES)
    left = torch.bincount(below, residual * (1 - part), minlength=_NODES)
    right = torch.bincount(below + 1, residual * part, minlength=_NODES)
    return np.asarray(dct((left + right).cpu().numpy(), type=2)) / 2


def fixed_point(waves: np.ndarray) -> float:
    """The σ with E(σ) = σ, for the cosine waves of the residuals."""
    signed = abs(float(waves[0]))
    if _smoothed_error(waves, signed) <= signed + 1e-12:  # smoothed, the residuals are of one sign
        return signed
    rough = _smoothed_error(waves, 0.0)
    return float(brentq(lambda width: _smoothed_error(waves, width) - width, signed, rough, xtol=1e-10))


def _smoothed_error(waves: np.ndarray, width: float) -> float:
    # The Gaussian reflected at both ends is the heat kernel of [0, 1]: in cosine waves it only damps.
    damped = waves * np.exp(-0.5 * (math.pi * width * np.arange(len(waves))) ** 2)
    return float(np.abs(idct(damped, type=2)).mean() * 2 * len(waves))
