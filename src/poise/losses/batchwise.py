"""Losses that measure a calibration error of the whole batch beside its cross-entropy: MMCE and soft-binned ECE."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from poise import _check
from poise._types import Array
from poise.losses.base import Loss, of_the_batch, top_label

NORMALIZATIONS = ("kumar", "published")


def mmce_loss(logits: Array, labels: Array, weight: float = 2.0, width: float = 0.4, reduction: str = "mean") -> Tensor:
    """Cross-entropy and the maximum mean calibration error of the batch.

    mean −log p_y + weight · 1/n² Σ_ij (a_i − c_i)(a_j − c_j) exp(−|c_i − c_j| / width)

    c is the confidence, a whether it was right, which has no slope. weight = 0 is cross-entropy. The error is that of
    the batch, so it is small and noisy in batches of few rows; O(n²) memory. "sum" is n times the mean, as published;
    there is no "none".

    >>> mmce_loss(torch.zeros(1, 2), torch.tensor([0]), weight=1.0)  # log 2 + (1 − 1/2)²
    tensor(0.9431)

    Reference: Kumar, Sarawagi, Jain, Trainable Calibration Measures for Neural Networks, ICML 2018.
    """
    _check.nonnegative(weight, "weight")
    _check.positive(width, "width")
    scores, truth = _check.training_batch(logits, labels)
    confidence, correct = top_label(scores, truth)
    error = _kernel_form((correct.to(scores) - confidence) / len(scores), confidence, width)
    return of_the_batch(F.cross_entropy(scores, truth) + weight * error, len(scores), reduction)


def weighted_mmce_loss(
    logits: Array,
    labels: Array,
    weight: float = 2.0,
    width: float = 0.4,
    normalization: str = "kumar",
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy and the MMCE in which right and wrong rows count alike, however few the wrong ones are.

    mean −log p_y + weight · √(M² + 1e-10),   M² = Σ_ij r_i r_j exp(−|c_i − c_j| / width),
    r_i = (1 − c_i)/m for the m right rows, −c_i/n for the n wrong ones

    M asks for sureness where the network is right and for doubt where it is wrong: it is not 0 for a calibrated one. A
    batch without right or without wrong rows has only the cross-entropy. normalization="published" divides by m² and n²
    instead, as the code behind the published networks does (it divides means once more): right rows then count m times
    less, and wrong ones n times. "sum" is the mean times the rows; there is no "none". O(rows²) memory.

    >>> weighted_mmce_loss(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]), weight=1.0)
    tensor(1.2754)

    Reference: Kumar, Sarawagi, Jain, ICML 2018; the paper's MMCE, with weight = 2, as in Mukhoti et al., NeurIPS 2020.
    """
    _check.nonnegative(weight, "weight")
    _check.positive(width, "width")
    scores, truth = _check.training_batch(logits, labels)
    confidence, correct = top_label(scores, truth)
    power = 1 if _check.choice(normalization, NORMALIZATIONS, "normalization") == "kumar" else 2
    num_right = correct.sum()
    num_wrong = len(scores) - num_right
    count = torch.where(correct, num_right, num_wrong).to(scores)
    squared = _kernel_form((correct.to(scores) - confidence) / count**power, confidence, width)
    # A squared norm, but for rounding.
    error = torch.sqrt(squared.clamp(min=0) + 1e-10) * ((num_right > 0) & (num_wrong > 0))
    return of_the_batch(F.cross_entropy(scores, truth) + weight * error, len(scores), reduction)


def soft_ece_loss(
    logits: Array,
    labels: Array,
    weight: float = 1.0,
    num_bins: int = 15,
    temperature: float = 0.01,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy and the soft-binned calibration error of the batch.

    mean −log p_y + weight · (Σ_j S_j/n |C_j − A_j|² + 1e-12)^½,   S_j = Σ_i u_ij,
    u_ij = softmax_j(−(c_i − ξ_j)²/temperature),   ξ_j = (2j − 1)/(2 num_bins),
    C_j, A_j: means of confidence and of correctness, weighed by u_ij

    weight = 0 is cross-entropy. As temperature → 0 it is the ℓ² binned ECE, which has no slope across an edge; 0.01
    spreads a row over about three of 15 bins. `soft_temperature` names the temperature by the share that a bin's
    neighbor takes. The authors tune weight, bins and temperature for every data set. "sum" is the mean times the rows;
    there is no "none".

    >>> soft_ece_loss(torch.zeros(1, 2), torch.tensor([0]), weight=1.0)  # log 2 + |1/2 − 1|
    tensor(1.1931)

    Reference: Karandikar et al., Soft Calibration Objectives for Neural Networks, NeurIPS 2021.
    """
    _check.nonnegative(weight, "weight")
    _check.whole(num_bins, "num_bins")
    _check.positive(temperature, "temperature")
    scores, truth = _check.training_batch(logits, labels)
    confidence, correct = top_label(scores, truth)
    anchors = (torch.arange(num_bins, device=scores.device, dtype=scores.dtype) + 0.5) / num_bins
    shares = torch.softmax(-(confidence[:, None] - anchors).square() / temperature, dim=1)
    mass = shares.sum(dim=0)
    gap = (shares * (confidence - correct.to(scores))[:, None]).sum(dim=0) / mass.clamp(min=1e-5)
    # The root has an infinite slope at 0.
    error = torch.sqrt((mass / len(scores) * gap.square()).sum() + 1e-12)
    return of_the_batch(F.cross_entropy(scores, truth) + weight * error, len(scores), reduction)


def soft_temperature(num_bins: int, ratio: float) -> float:
    """The temperature at which a confidence in a bin's middle gives that bin `ratio` > 1 times what the next one gets.

    1 / (num_bins² log ratio)

    >>> round(soft_temperature(15, 1.5), 4)
    0.011
    """
    if _check.positive(ratio, "ratio") <= 1:
        raise ValueError(f"ratio must be above 1, for a bin takes more than its neighbor, but is {ratio!r}.")
    return 1 / (_check.whole(num_bins, "num_bins") ** 2 * math.log(ratio))


def _kernel_form(signed: Tensor, confidence: Tensor, width: float) -> Tensor:
    """Σ_ij s_i s_j exp(−|c_i − c_j| / width); without a matrix product, which autocast would do in halves."""
    kernel = torch.exp(-(confidence[:, None] - confidence).abs() / width)
    return (signed[:, None] * signed * kernel).sum()


class MMCELoss(Loss):
    """`mmce_loss` as a module."""

    def __init__(self, weight: float = 2.0, width: float = 0.4, reduction: str = "mean") -> None:
        super().__init__(mmce_loss, weight=weight, width=width, reduction=reduction)


class WeightedMMCELoss(Loss):
    """`weighted_mmce_loss` as a module."""

    def __init__(
        self, weight: float = 2.0, width: float = 0.4, normalization: str = "kumar", reduction: str = "mean"
    ) -> None:
        options = {"weight": weight, "width": width, "normalization": normalization, "reduction": reduction}
        super().__init__(weighted_mmce_loss, **options)


class SoftECELoss(Loss):
    """`soft_ece_loss` as a module."""

    def __init__(
        self, weight: float = 1.0, num_bins: int = 15, temperature: float = 0.01, reduction: str = "mean"
    ) -> None:
        options = {"weight": weight, "num_bins": num_bins, "temperature": temperature, "reduction": reduction}
        super().__init__(soft_ece_loss, **options)
