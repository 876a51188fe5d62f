"""Confidences sorted into bins, once, for every binned metric and every diagram."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from poise import _check
from poise._arrays import to_tensor
from poise._types import Array

_ENTRIES_AT_A_TIME = 1 << 21


@dataclass(frozen=True, eq=False)
class Bins:
    """How much weight, mean confidence and accuracy each bin of confidences holds.

    A bin is (lo, hi]; the last one holds confidence 1. Ties are decided at the precision the confidences came in: a
    float32 0.8 lies in the bin that ends at 0.8. Every field may have leading axes, e.g. one row of bins per class.

    >>> bins = Bins.equal_width([0.55, 0.6, 0.9, 1.0], [True, False, True, True], num_bins=5)
    >>> bins.count.tolist()
    [0.0, 0.0, 2.0, 0.0, 2.0]
    >>> round(float(bins.error), 6)
    0.0625
    """

    edges: Tensor
    """(..., b + 1) increasing bounds, at the precision of the confidences."""
    count: Tensor
    """(..., b) weight of the samples in each bin; their number when they have no weights."""
    confidence: Tensor
    """(..., b) mean confidence; NaN where a bin is empty."""
    accuracy: Tensor
    """(..., b) share of right predictions; NaN where a bin is empty."""
    total: float
    """Weight of all samples, those in no bin included."""

    @classmethod
    def equal_width(
        cls, confidence: Array, correct: Array, num_bins: int = 15, *, sample_weight: Array | None = None
    ) -> Bins:
        """Bins with edges 0, 1/b, …, 1; a confidence of exactly 0 counts in the first."""
        values, hits, weight = _check.confidences(confidence, correct, sample_weight)
        edges = equal_width_edges(num_bins, precision(confidence, values)).to(values)
        return tally(values[None], hits[None], edges[None], weight)[0]

    @classmethod
    def equal_mass(
        cls, confidence: Array, correct: Array, num_bins: int = 15, *, sample_weight: Array | None = None
    ) -> Bins:
        """Bins with about equally many samples: edges interpolated between the sorted confidences.

        Equal confidences are never parted, so discrete confidences give unequal and even empty bins. The smallest
        confidence counts in the first bin (the published code leaves it out). Weights count as repetitions.
        """
        values, hits, weight = _check.confidences(confidence, correct, sample_weight)
        edges = equal_mass_edges(values[None], num_bins, weight, precision(confidence, values))
        return tally(values[None], hits[None], edges, weight)[0]

    @classmethod
    def classwise(
        cls,
        probs: Array,
        labels: Array,
        num_bins: int = 15,
        *,
        equal_mass: bool = False,
        sample_weight: Array | None = None,
    ) -> Bins:
        """One row of bins per class, of p_k against 1[y = k]; a p_k of exactly 0 falls in no equal-width bin."""
        values, truth, weight = _check.scored(probs, labels, sample_weight)
        dtype = precision(probs, values)
        num_classes = values.shape[1]
        step = max(1, _ENTRIES_AT_A_TIME // len(values))
        parts = []
        for start in range(0, num_classes, step):
            columns = values[:, start : start + step].T.contiguous()
            hits = truth == torch.arange(start, start + len(columns), device=truth.device)[:, None]
            if equal_mass:
                parts.append(tally(columns, hits, equal_mass_edges(columns, num_bins, weight, dtype), weight))
            else:
                edges = equal_width_edges(num_bins, dtype).to(columns).expand(len(columns), -1)
                parts.append(tally(columns, hits, edges, weight, zero_counts=False))
        return cls(
            edges=torch.cat([part.edges for part in parts]),
            count=torch.cat([part.count for part in parts]),
            confidence=torch.cat([part.confidence for part in parts]),
            accuracy=torch.cat([part.accuracy for part in parts]),
            total=parts[0].total,
        )

    @property
    def mass(self) -> Tensor:
        """(..., b) share of the total weight in each bin."""
        return self.count / self.total

    @property
    def gap(self) -> Tensor:
        """(..., b) confidence − accuracy, positive where the model is overconfident; NaN where a bin is empty."""
        return self.confidence - self.accuracy

    @property
    def error(self) -> Tensor:
        """(...) Σ_b mass_b · |gap_b|: the expected calibration error of these bins."""
        return (self.mass * self.gap.abs()).nansum(dim=-1)

    def __getitem__(self, row: int) -> Bins:
        """The bins of one row, e.g. of one class."""
        return Bins(self.edges[row], self.count[row], self.confidence[row], self.accuracy[row], self.total)


def top_label(
    probs: Array, labels: Array, sample_weight: Array | None = None
) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype]:
    """(confidence, correct, weight, precision) of the most probable class; the first of equal ones."""
    values, truth, weight = _check.scored(probs, labels, sample_weight)
    confidence, predicted = values.max(dim=1)
    return confidence, predicted == truth, weight, precision(probs, values)


def precision(array: Array, values: Tensor) -> torch.dtype:
    """The floating type that `array` came in, before halves were widened to `values`."""
    dtype = to_tensor(array).dtype
    return dtype if dtype.is_floating_point else values.dtype


def equal_width_edges(num_bins: int, dtype: torch.dtype) -> Tensor:
    """0, 1/b, …, 1, each the number of this precision nearest to j/b (a linspace is off by an ulp in places)."""
    steps = torch.arange(_check.whole(num_bins, "num_bins") + 1, dtype=torch.float64)
    return (steps / num_bins).to(dtype)


def equal_mass_edges(values: Tensor, num_bins: int, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(k, b + 1) edges interpolated at the ranks j·n/b, j = 0 … b, in each row of (k, n) values.

    A sample of weight w stands for w equal samples; one of weight below 1 takes its part of a rank.
    """
    _check.whole(num_bins, "num_bins")
    if weight is not None:
        values, weight = values[:, weight > 0], weight[weight > 0]
    ordered, order = values.sort(dim=1)
    heavy = torch.ones_like(ordered, dtype=torch.float64) if weight is None else weight[order]
    reached = heavy.cumsum(dim=1)
    ranks = reached[:, -1:] * torch.arange(num_bins + 1, device=values.device) / num_bins
    below = torch.searchsorted(reached, ranks, right=True).clamp(max=ordered.shape[1] - 1)
    above = (below + 1).clamp(max=ordered.shape[1] - 1)
    unit = heavy.gather(1, below).clamp(max=1.0)
    part = ((ranks - reached.gather(1, below)) / unit + 1).clamp(0, 1)
    low, high = (ordered.gather(1, rank).double() for rank in (below, above))
    return (low + part * (high - low)).to(dtype).to(values.dtype)


def bin_index(values: Tensor, edges: Tensor) -> Tensor:
    """Which bin (lo, hi] of its row each of the (k, n) values lies in; beyond the ends is in the end bins."""
    return torch.searchsorted(edges[:, 1:-1].contiguous(), values.contiguous())


def tally(values: Tensor, hits: Tensor, edges: Tensor, weight: Tensor | None, *, zero_counts: bool = True) -> Bins:
    """Bins of (k, n) values and hits with (k, b + 1) edges and (n,) weights, summed in float64."""
    num_rows, num_bins = len(values), edges.shape[-1] - 1
    index = bin_index(values, edges)
    if not zero_counts:
        index = torch.where(values > 0, index, num_bins)
    index += torch.arange(num_rows, device=index.device)[:, None] * (num_bins + 1)
    heavy = None if weight is None else weight.expand_as(values)

    def total(summand: Tensor | None) -> Tensor:
        flat = None if summand is None else summand.reshape(-1)
        sums = torch.bincount(index.view(-1), flat, minlength=num_rows * (num_bins + 1))
        return sums.double().view(num_rows, num_bins + 1)[:, :num_bins]

    count = total(heavy)
    confident = total(values.double() if heavy is None else values * heavy)
    right = total(hits.double() if heavy is None else hits * heavy)
    mass = float(values.shape[1] if weight is None else weight.sum())
    return Bins(edges, count, confident / count, right / count, total=mass)
