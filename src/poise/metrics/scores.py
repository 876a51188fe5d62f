"""Proper scores and accuracies: how good the probabilities and the predictions are."""

from __future__ import annotations

import torch
from torch import Tensor

from poise import _check
from poise._types import Array, Labels, Probs


def nll(probs: Array, labels: Array, *, floor: float = 1e-12, sample_weight: Array | None = None) -> float:
    """Negative log-likelihood of the true classes, in nats.

    mean −log(p_y + floor)

    The floor is the published convention: a true class with probability 0 costs 27.6 nats, not infinity, so the value
    of a method that gives zeros depends on it. Pass floor=0 for the plain logarithm.

    >>> round(nll([[0.5, 0.5], [0.25, 0.75]], [0, 1]), 6)
    0.490415

    Reference: Good, JRSS B 1952; the floor as in Mukhoti et al., NeurIPS 2020.
    """
    values, truth, weight = _check.scored(probs, labels, sample_weight)
    return _mean(log_losses(values, truth, floor=floor), weight)


def brier(probs: Array, labels: Array, *, sample_weight: Array | None = None) -> float:
    """Brier score: the squared distance of the probabilities from the truth, between 0 and 2.

    mean Σ_k (p_k − 1[y = k])²

    Summed over the classes; some libraries halve it, or average over the classes.

    >>> brier([[0.5, 0.5], [0.25, 0.75]], [0, 1])
    0.3125

    Reference: Brier, Monthly Weather Review 1950.
    """
    values, truth, weight = _check.scored(probs, labels, sample_weight)
    return _mean(squared_distances(values, truth), weight)


def accuracy(probs: Array, labels: Array, *, sample_weight: Array | None = None) -> float:
    """Share of rows whose most probable class, the first of equal ones, is the true one.

    mean 1[argmax_k p_k = y]

    >>> accuracy([[0.5, 0.5], [0.25, 0.75]], [1, 1])
    0.5
    """
    values, truth, weight = _check.scored(probs, labels, sample_weight)
    return _mean(hits(values, truth), weight)


def top_k_accuracy(probs: Array, labels: Array, k: int = 5, *, sample_weight: Array | None = None) -> float:
    """Share of rows whose true class is among the k most probable ones.

    mean 1[rank of y ≤ k]; of equal probabilities the first column ranks first, so k = 1 is `accuracy`.

    With k or fewer classes it is 1.

    >>> top_k_accuracy([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]], [1, 2], k=2)
    0.5
    """
    values, truth, weight = _check.scored(probs, labels, sample_weight)
    return _mean(hits_within(values, truth, k=k), weight)


def log_losses(probs: Probs, labels: Labels, *, floor: float = 1e-12) -> Tensor:
    """The NLL of each row."""
    true = probs.gather(1, labels[:, None])[:, 0].double()
    return -torch.log(true.clamp(min=0) + _check.nonnegative(floor, "floor"))


def squared_distances(probs: Probs, labels: Labels) -> Tensor:
    """The Brier score of each row."""
    true = probs.gather(1, labels[:, None])[:, 0].double()
    return probs.square().sum(dim=1, dtype=torch.float64) - 2 * true + 1


def hits(probs: Probs, labels: Labels) -> Tensor:
    """1 for each row that is predicted right, else 0."""
    return (probs.argmax(dim=1) == labels).double()


def hits_within(probs: Probs, labels: Labels, *, k: int = 5) -> Tensor:
    """1 for each row whose true class has one of the k highest ranks, else 0."""
    true = probs.gather(1, labels[:, None])
    earlier = torch.arange(probs.shape[1], device=labels.device) < labels[:, None]
    rank = ((probs > true) | ((probs == true) & earlier)).sum(dim=1)
    return (rank < _check.whole(k, "k")).double()


def _mean(scores: Tensor, weight: Tensor | None) -> float:
    return float(scores.mean() if weight is None else (scores @ weight) / weight.sum())
