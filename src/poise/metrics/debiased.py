"""Calibration errors that take the sampling noise, or the choice of the number of bins, out of the estimate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from poise._types import Array
from poise.metrics.bins import Bins, equal_mass_edges, tally, top_label


def debiased_ece(probs: Array, labels: Array, num_bins: int = 15, *, p: int = 2) -> float:
    """Calibration error in equal-mass bins less what sampling noise adds to it, as an l2 (p = 2) or l1 (p = 1) norm.

    p = 2: √max(0, Σ_b n_b/n · [gap_b² − acc_b (1 − acc_b)/(n_b − 1)]), bins of one sample left out.
    p = 1: max(0, 2 · ECE − E ECE*), where ECE* has acc_b* ~ N(acc_b, acc_b (1 − acc_b)/n_b).

    The square in p = 2 is unbiased up to its cut at zero; with p = 1 some upward bias stays. Values with p = 2 weigh
    large gaps more and cannot be compared with `ece`.

    >>> probs, labels = [[0.75, 0.25]] * 4, [0, 0, 0, 1]
    >>> debiased_ece(probs, labels), debiased_ece(probs, labels, p=1)
    (0.0, 0.0)

    Reference: Kumar, Liang, Ma, NeurIPS 2019. For p = 1 they average 1,000 random ECE*; this is the exact mean.
    """
    if p not in (1, 2):
        raise ValueError(f"p must be 1 or 2, the norm of the gaps, but is {p!r}.")
    confidence, correct, _, dtype = top_label(probs, labels)
    edges = equal_mass_edges(confidence[None], num_bins, None, dtype)
    bins = tally(confidence[None], correct[None], edges, None)[0]
    full = bins.count > 0
    return float(debiased(bins.mass[full], bins.count[full], bins.gap[full], bins.accuracy[full], p))


def debiased(mass: Tensor, count: Tensor, gap: Tensor, accuracy: Tensor, p: int) -> Tensor:
    """The estimate of `debiased_ece` from (b, ...) statistics of bins that are not empty."""
    variance = (accuracy * (1 - accuracy)).clamp(min=0)
    if p == 2:
        squares = gap.square() - variance / (count - 1).clamp(min=1)
        return (mass * torch.where(count > 1, squares, 0)).sum(0).clamp(min=0).sqrt()
    spread = (variance / count).sqrt()
    scaled = gap.abs() / spread.clamp(min=1e-150)
    # The mean of |N(gap, spread²)|.
    folded = gap.abs() * torch.erf(scaled / math.sqrt(2))
    folded = folded + spread * math.sqrt(2 / math.pi) * torch.exp(-0.5 * scaled.clamp(max=1e3).square())
    return (mass * (2 * gap.abs() - folded)).sum(0).clamp(min=0)


def ece_sweep(probs: Array, labels: Array, *, p: int = 1) -> float:
    """Calibration error in as many equal-mass bins as still have accuracies that rise with the confidence.

    (Σ_b n_b/n · |gap_b|^p)^(1/p), with the largest number of bins up to which every smaller one is monotone too.

    Fewer bins where the data are few, so less noise is taken for error. If already two bins are not monotone there is
    one bin, and the value is |mean confidence − accuracy|.

    >>> round(ece_sweep([[0.75, 0.25], [0.75, 0.25], [0.25, 0.75], [0.25, 0.75]], [0, 0, 1, 1]), 6)
    0.25

    Reference: Roelofs et al., AISTATS 2022.
    """
    if p not in (1, 2):
        raise ValueError(f"p must be 1 or 2, the norm of the gaps, but is {p!r}.")
    confidence, correct, _, dtype = top_label(probs, labels)
    bins = swept(confidence, correct, dtype)
    return float((bins.mass * bins.gap.abs().nan_to_num().pow(p)).sum().pow(1 / p))


def swept(confidence: Tensor, correct: Tensor, dtype: torch.dtype) -> Bins:
    """The finest equal-mass bins for which the accuracy rises with the confidence, as it does in all coarser ones."""
    order = confidence.argsort()
    ordered = confidence[order]
    right = torch.cat([torch.zeros(1, device=order.device), correct[order].double().cumsum(0)]).double()
    last, start, end = len(ordered) - 1, order.new_zeros(1), order.new_tensor([len(ordered)])

    def rising(num_bins: int) -> bool:
        # The edges of equal_mass_edges, without sorting again.
        rank = torch.arange(1, num_bins, device=order.device) * len(ordered) / num_bins
        below = rank.long()
        low, high = ordered[below].double(), ordered[(below + 1).clamp(max=last)].double()
        edges = (low + (rank - below) * (high - low)).to(dtype).to(ordered.dtype)
        ends = torch.cat([start, torch.searchsorted(ordered, edges, right=True), end])
        count = ends.diff()
        return bool(((right[ends].diff() / count)[count > 0].diff() >= 0).all())

    num_bins = len(ordered)
    if not rising(num_bins):  # bins of single levels of confidence rise only if every union of them does
        num_bins = next(b for b in range(1, len(ordered)) if not rising(b + 1))
    return tally(confidence[None], correct[None], equal_mass_edges(confidence[None], num_bins, None, dtype), None)[0]
