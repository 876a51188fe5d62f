"""Calibration by bins: a probability is replaced by how often its bin came true."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from poise import _check
from poise._types import Labels, Logits
from poise.calibrators.base import Calibrator
from poise.calibrators.reduction import MODES, asked, binary_problems, recombined, steps
from poise.metrics.bins import equal_mass_edges, equal_width_edges, tally

STRATEGIES = ("equal_width", "equal_mass")

_PRIOR_SAMPLES = 2.0
"""N' of BBQ: what the prior of a whole binning weighs, in samples."""

_WIDEST = 10
"""C of BBQ: binnings of n^⅓/C to C·n^⅓ bins are averaged."""


class _Steps:
    """A step function of the probability of each class, or of the top one: ``edges_`` and ``rates_``, a row each."""

    mode: str
    edges_: Tensor
    rates_: Tensor

    def _keeps_order(self) -> bool:
        return self.mode == "top_label"

    @torch.no_grad()
    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        edges, rates = self.edges_.to(logits.device), self.rates_.to(logits.device)
        return recombined(logits, steps(asked(logits, self.mode), edges, rates), self.mode)


class HistogramBinning(_Steps, Calibrator):
    """p → the share of validation samples in the bin of p that came true; bins (lo, hi].

    With mode="one_vs_rest" every class has bins of its own and the rows are divided by their sums; neither order nor
    accuracy is kept. With mode="top_label" only the top class's probability is binned and the others share the rest as
    before: order and accuracy are kept, a confidence below the runner-up's being raised to it. An empty bin answers
    with its centre; a trace (1e-9) of the softmax parts ties and rows of zeros.

    Needs no features and costs a softmax and a count. Bins are coarse: differences within one are lost, a bin with few
    samples answers with noise, and one with no hit all but rules the class out, which the likelihood resents. With
    hundreds of classes one-vs-rest has only a few hits per class. Bins of equal mass and one-vs-rest go together only
    where a class has more samples than a bin, else the bin mixes it with its rivals: the accuracy falls by some points
    at 10 classes and to nothing at 1,000.

    >>> logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    >>> calibrator = HistogramBinning(num_bins=2, mode="top_label").fit(logits, [0, 0, 1, 0])
    >>> calibrator.predict_proba(torch.tensor([[1.0, 0.0]]))
    tensor([[0.7500, 0.2500]])

    Reference: Zadrozny and Elkan, Obtaining Calibrated Probability Estimates, 2001; Guo et al., 2017.
    """

    def __init__(self, num_bins: int = 15, strategy: str = "equal_width", mode: str = "one_vs_rest") -> None:
        self.num_bins = num_bins
        self.strategy = strategy
        self.mode = mode

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.whole(self.num_bins, "num_bins")
        _check.choice(self.strategy, STRATEGIES, "strategy")
        _check.choice(self.mode, MODES, "mode")
        values, hits = binary_problems(logits, labels, self.mode)
        if self.strategy == "equal_width":
            edges = equal_width_edges(self.num_bins, values.dtype).to(values).repeat(len(values), 1)
        else:
            edges = equal_mass_edges(values, self.num_bins, weight, values.dtype)
        bins = tally(values, hits, edges, weight)
        centers = (edges[:, 1:] + edges[:, :-1]) / 2
        self.edges_ = edges[:, 1:-1].contiguous()
        self.rates_ = torch.where(bins.count > 0, bins.accuracy, centers)


class BayesianBinning(_Steps, Calibrator):
    """BBQ: the average over many binnings into quantiles, each weighted by how probable it makes the labels.

    p → Σ_B P(B | labels) (m_b + α_b)/(n_b + N'/B), where b is the bin of p in the binning with B quantile bins, m_b of
    n_b samples came true, and the rate's prior is Beta(α_b, β_b) with the bin's midpoint as mean and α_b + β_b = N'/B,
    N' = 2. B runs from n^⅓/10 to 10·n^⅓, at most n/5; all in logarithms of Γ.

    The modes, what they keep and what they cost in accuracy are those of `HistogramBinning`, and so is what a thousand
    classes do to one-vs-rest; the average is smoother and never exactly zero. Needs no features. A fit costs a sort per
    class and some thousand bin counts: a second or two at 2,500 × 1,000. The learned steps are up to two per sample and
    class.

    >>> logits = torch.tensor([[2.0, 0.0]] * 12 + [[0.0, 1.0]] * 8)
    >>> calibrator = BayesianBinning("top_label").fit(logits, [0] * 9 + [1] * 3 + [1] * 6 + [0] * 2)
    >>> calibrator.predict_proba(logits[[0, -1]]).amax(1)
    tensor([...])

    Reference: Naeini, Cooper, Hauskrecht, Obtaining Well Calibrated Probabilities Using Bayesian Binning, 2015.
    """

    def __init__(self, mode: str = "one_vs_rest") -> None:
        self.mode = mode

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.choice(self.mode, MODES, "mode")
        if weight is not None:
            logits, labels, weight = logits[weight > 0], labels[weight > 0], weight[weight > 0]
        values, hits = binary_problems(logits, labels, self.mode)
        ordered, order = values.sort(dim=1)
        mass = torch.ones_like(ordered) if weight is None else weight[order]
        ranking = _Ranking(ordered, mass.cumsum(1), (hits.gather(1, order) * mass).cumsum(1))
        total = float(ranking.reached[0, -1])
        root = total ** (1 / 3)
        most = max(1, min(math.ceil(_WIDEST * root), int(total / 5)))
        binnings = [_Binning(ranking, size) for size in range(min(max(1, int(root / _WIDEST)), most), most + 1)]
        shares = torch.softmax(torch.stack([binning.log_score for binning in binnings]), dim=0)
        # The average is one step function again: every edge adds its binning's jump where it lies.
        base, jumps = torch.zeros_like(ordered[:, 0]), torch.zeros_like(ranking.places)
        for binning, share in zip(binnings, shares, strict=True):
            base += share * binning.rates[:, 0]
            jumps.scatter_add_(1, binning.edges, share[:, None] * binning.rates.diff(dim=1))
        kept = (jumps != 0).any(dim=0)
        self.edges_ = ranking.places[:, kept].contiguous()
        self.rates_ = torch.cat([base[:, None], base[:, None] + jumps[:, kept].cumsum(1)], dim=1).clamp(0, 1)


class _Ranking:
    """Rows of sorted values, with the weight and the hits reached at each; and where an edge between them can lie."""

    def __init__(self, ordered: Tensor, reached: Tensor, hits: Tensor) -> None:
        self.reached = reached
        after = torch.cat([ordered[:, 1:], ordered.new_ones(len(ordered), 1)], dim=1)
        # At a value and half way to the next one; of equal values only the last is a place.
        self.places = torch.stack([ordered, (ordered + after) / 2], dim=2).flatten(1)
        self.last_equal = torch.searchsorted(ordered, ordered, right=True) - 1
        zero = torch.zeros_like(reached[:, :1])
        self.count_until, self.hits_until = torch.cat([zero, reached], 1), torch.cat([zero, hits], 1)


class _Binning:
    """Each row cut into `size` bins of about equal weight: the edges' places, posterior mean rates and evidence."""

    def __init__(self, ranking: _Ranking, size: int) -> None:
        total = ranking.reached[:, -1:]
        ranks = total * torch.arange(1, size, device=total.device) / size
        at = ranking.last_equal.gather(1, torch.searchsorted(ranking.reached, ranks - 1e-9 * total))
        # A rank reached exactly lies between two samples; else it lies within one, or among equals.
        between = ranking.reached.gather(1, at) <= ranks + 1e-9 * total
        self.edges = 2 * at + between
        zero = torch.zeros_like(ranking.last_equal[:, :1])
        bounds = torch.cat([zero, at + 1, zero + ranking.reached.shape[1]], dim=1)
        count = ranking.count_until.gather(1, bounds).diff(dim=1)
        hits = ranking.hits_until.gather(1, bounds).diff(dim=1)
        cuts = ranking.places.gather(1, self.edges)
        ends = torch.cat([torch.zeros_like(total), cuts, torch.ones_like(total)], dim=1)
        prior = _PRIOR_SAMPLES / size
        mean = ((ends[:, 1:] + ends[:, :-1]) / 2).clamp(1e-12, 1 - 1e-12)
        self.rates = (hits + prior * mean) / (count + prior)
        self.log_score = (
            math.lgamma(prior)
            - torch.lgamma(count + prior)
            + _log_rising(prior * mean, hits)
            + _log_rising(prior * (1 - mean), count - hits)
        ).sum(dim=1)


def _log_rising(start: Tensor, length: Tensor) -> Tensor:
    """log Γ(start + length)/Γ(start)."""
    return torch.lgamma(start + length) - torch.lgamma(start)
