"""A proper score split into what recalibration could gain and what no recalibration can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from sklearn.isotonic import isotonic_regression
from torch import Tensor

from poise import _check
from poise._types import Array


@dataclass(frozen=True)
class Decomposition:
    """score = calibration + refinement."""

    score: float
    calibration: float
    """What the best monotone recalibration of the confidence would gain."""
    refinement: float
    """The score that is left after it."""


def decompose(probs: Array, labels: Array, score: str = "nll", *, floor: float = 1e-12) -> Decomposition:
    """The NLL or Brier score split into a calibration and a refinement part.

    refinement = min_g mean S(g(p), y) over all nondecreasing maps g of the top-label confidence, the other classes kept
    in proportion; calibration = S − refinement ≥ 0.

    The minimum is exact: a (weighted) isotonic regression. It is taken on the same data, so it fits some noise and the
    calibration part of a perfect model is above zero (about .002 nats for 95 % accuracy and 10,000 samples). Errors in
    the proportions of the other classes count as refinement. NLL has the floor of `nll`.

    >>> decompose([[0.75, 0.25]] * 4, [0, 0, 1, 1], "brier")
    Decomposition(score=0.625, calibration=0.125, refinement=0.5)

    Reference: Dimitriadis, Gneiting, Jordan, PNAS 2021 (CORP); Berta, Holzmüller, Jordan, Bach, 2025 (refinement as the
    minimum over a family of recalibrations).
    """
    totals, refined = resampled_parts(probs, labels, score, floor=floor)(None)
    total, left = float(totals[0]), float(refined[0])
    return Decomposition(total, total - left, left)


def calibration_part(probs: Array, labels: Array, score: str = "nll", *, floor: float = 1e-12) -> float:
    """The calibration part of `decompose`, as a metric.

    >>> calibration_part([[0.75, 0.25]] * 4, [0, 0, 1, 1], "brier")
    0.125
    """
    return decompose(probs, labels, score, floor=floor).calibration


def refinement_part(probs: Array, labels: Array, score: str = "nll", *, floor: float = 1e-12) -> float:
    """The refinement part of `decompose`, as a metric.

    >>> refinement_part([[0.75, 0.25]] * 4, [0, 0, 1, 1], "brier")
    0.5
    """
    return decompose(probs, labels, score, floor=floor).refinement


def resampled_parts(
    probs: Array, labels: Array, score: str = "nll", *, floor: float = 1e-12
) -> Callable[[Tensor | None], tuple[Tensor, Tensor]]:
    """(n, d) weights to the (d,) scores and the (d,) refinements of these rows; None is a weight of 1 for each."""
    _check.choice(score, ("nll", "brier"), "score")
    _check.nonnegative(floor, "floor")
    values, truth, _ = _check.scored(probs, labels)
    values = values.double().clamp(min=0)
    values = values / values.sum(dim=1, keepdim=True)
    confidence, predicted = values.max(dim=1)
    correct = predicted == truth
    others = values.scatter(1, predicted[:, None], 0.0)
    rest = others.sum(dim=1)
    # Where the confidence is 1 there are no proportions to keep: the rest is shared equally.
    proportion = torch.where(rest[:, None] > 0, others / rest[:, None], 1 / max(1, values.shape[1] - 1))
    proportion = proportion.scatter(1, predicted[:, None], 0.0)
    true, spread = proportion.gather(1, truth[:, None])[:, 0], proportion.square().sum(dim=1)

    def scores(certainty: Tensor) -> Tensor:
        if score == "nll":
            return -torch.log(torch.where(correct, certainty, (1 - certainty) * true) + floor)
        doubt = 1 - certainty
        squares = certainty.square() + doubt.square() * spread
        return squares + 1 - 2 * torch.where(correct, certainty, doubt * true)

    if score == "nll":
        target, curvature = correct.double(), torch.ones_like(confidence)
    else:
        # Each row's Brier score is a parabola in its certainty, of this curvature around this minimum.
        curvature = 1 + spread
        target = torch.where(correct, 1.0, (spread - true) / curvature)
    levels, place = torch.unique(confidence, return_inverse=True)
    plain = scores(confidence)

    def refined(weight: Tensor) -> Tensor:
        mass = torch.bincount(place, weight * curvature)
        there = mass > 0
        mean = torch.bincount(place, weight * curvature * target)[there] / mass[there]
        fitted = isotonic_regression(mean.cpu().numpy(), sample_weight=mass[there].cpu().numpy(), y_min=0, y_max=1)
        recalibrated = levels.new_zeros(len(levels)).masked_scatter_(there, torch.from_numpy(fitted).to(levels))
        drawn = weight > 0  # a row of infinite score that is not drawn costs nothing
        return torch.dot(scores(recalibrated[place])[drawn], weight[drawn])

    def parts(weights: Tensor | None) -> tuple[Tensor, Tensor]:
        columns = torch.ones_like(confidence)[:, None] if weights is None else weights.to(confidence)
        scored = [torch.dot(plain[column > 0], column[column > 0]) for column in columns.T]
        left = [refined(column) for column in columns.T]
        return torch.stack(scored) / columns.sum(0), torch.stack(left) / columns.sum(0)

    return parts
