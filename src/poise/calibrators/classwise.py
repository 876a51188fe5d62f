"""Class-wise temperature scaling: every logit is divided by its own class's temperature."""

from __future__ import annotations

import torch
from torch import Tensor

from poise import _check
from poise._types import Labels, Logits
from poise.calibrators.affine import centered, temperature_of
from poise.calibrators.base import Calibrator
from poise.calibrators.fitting import minimize
from poise.calibrators.temperature import TemperatureScaling

METHODS = ("nll", "ece")

_STEPS = (-0.08, -0.04, 0.04, 0.08)
"""The authors' ±0.1 and ±0.2 at the temperature they had, 2.5, as shares of it."""

_SWEEPS = 50
_TINY = 1e-6


class ClasswiseTemperatureScaling(Calibrator):
    """softmax(z ⊘ T), with a temperature T_k > 0 for every class and z less its mean over the classes.

    method="nll" minimizes the mean −log p: convex in 1/T, so the optimum is one. method="ece" is the authors' search:
    from the temperature of the lowest ECE on, every class in turn takes the one of five nearby temperatures (T itself,
    ± 4 %, ± 8 % of the common one) with the lowest ECE of all validation data, until a sweep changes nothing.

    Without the mean taken off, as published, the result would depend on a constant added to the logits, which means
    nothing. Keeps neither order nor accuracy. Needs some tens of samples per class for "nll"; "ece" fits the noise of
    a few bins: validation ECE falls to nearly 0, test ECE does not. A fit costs about a hundred softmaxes ("nll"), or a
    few numbers per row, class and sweep ("ece": seconds at a thousand classes). After it: ``temperatures_``.

    Reference: Frenkel, Goldberger, Network Calibration by Class-based Temperature Scaling, 2021.
    """

    temperatures_: Tensor

    def __init__(self, method: str = "nll") -> None:
        self.method = method

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.choice(self.method, METHODS, "method")
        scores = centered(logits.double())
        share = (torch.ones_like(labels) if weight is None else weight).to(scores)
        share = share / share.sum()
        if self.method == "nll":
            common = temperature_of(scores, labels, weight)
            self.temperatures_ = common * _by_likelihood(scores / common, labels, share)
        else:
            scaling = TemperatureScaling("ece")
            scaling._fit(scores, labels, weight, None)
            search = _Search(scores / scaling.temperature_, labels, share)
            self.temperatures_ = scaling.temperature_ * search.run()

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        return torch.log_softmax(centered(logits) / self.temperatures_.to(logits), dim=1)


def _by_likelihood(scores: Logits, labels: Labels, share: Tensor) -> Tensor:
    """The temperatures of least mean −log p, in log scale, where they cannot turn negative."""
    rows = torch.arange(len(labels), device=labels.device)

    def loss_and_grad(log_factors: Tensor) -> tuple[Tensor, Tensor]:
        scaled = scores * log_factors.exp()
        log_prob = torch.log_softmax(scaled, dim=1)
        loss = -torch.dot(share, log_prob[rows, labels])
        residual = log_prob.exp_()
        residual[rows, labels] -= 1
        # A class that the validation data lack would drift on for ever without the tiny ridge.
        gradient = share @ (residual * scaled) + 2 * _TINY * log_factors
        return loss + _TINY * log_factors.square().sum(), gradient

    prob = torch.softmax(scores, dim=1)
    curvature = share @ (prob * (1 - prob) * scores.square()) + 2 * _TINY
    unit = (curvature + 1e-2 * curvature.mean()).rsqrt()
    return torch.exp(-minimize(loss_and_grad, torch.zeros_like(scores[0]), unit=unit))


class _Search:
    """The greedy search by ECE; a move changes one column, so every sum over the classes is kept and mended."""

    def __init__(self, scores: Logits, labels: Labels, share: Tensor) -> None:
        self.scores, self.labels, self.share = scores, labels, share
        self.factors = torch.ones_like(scores[0])

    def run(self) -> Tensor:
        for _ in range(_SWEEPS):
            self._recount()
            moved = [self._improve(column) for column in range(len(self.factors))]
            if not any(moved):
                break
        return self.factors

    def _recount(self) -> None:
        """All sums afresh, once per sweep, lest rounding add up."""
        self.scaled = self.scores / self.factors
        self.first, self.second = self._leaders(slice(None))
        self.total = torch.logsumexp(self.scaled, dim=1)
        self.best = float(self._ece(self.first[0][None], self.total[None], self.first[1][None])[0])

    def _leaders(self, rows: Tensor | slice) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The greatest of every row and the runner-up, each with its column."""
        top = self.scaled[rows].topk(2, dim=1)
        return (top.values[:, 0], top.indices[:, 0]), (top.values[:, 1], top.indices[:, 1])

    def _improve(self, column: int) -> bool:
        """Take the best of the nearby temperatures of one class, if it lowers the ECE."""
        steps = self.factors[column] + torch.tensor(_STEPS).to(self.factors)
        steps = steps[steps > 0.01]
        if not len(steps):
            return False
        own = self.scores[:, column] / steps[:, None]
        leads = self.first[1] == column
        other = torch.where(leads, self.second[0], self.first[0])
        rival = torch.where(leads, self.second[1], self.first[1])
        # log Σ of the others, by subtraction; it cannot be less than their greatest term, whatever cancels.
        share = torch.exp(self.scaled[:, column] - self.total).clamp(max=1)
        rest = torch.maximum(self.total + torch.log1p(-share), other)
        totals = torch.logaddexp(rest, own)
        errors = self._ece(torch.maximum(own, other), totals, torch.where(own > other, column, rival))
        chosen = int(errors.argmin())
        if not float(errors[chosen]) < self.best - 1e-12:
            return False
        self.best = float(errors[chosen])
        self.factors[column] = steps[chosen]
        self.scaled[:, column] = own[chosen]
        self.total = totals[chosen]
        touched = (leads | (self.second[1] == column) | (own[chosen] >= self.second[0])).nonzero()[:, 0]
        for kept, fresh in zip((*self.first, *self.second), sum(self._leaders(touched), ()), strict=True):
            kept[touched] = fresh
        return True

    def _ece(self, top: Tensor, totals: Tensor, columns: Tensor) -> Tensor:
        """(c,) the ECE, 15 bins (lo, hi], of c candidates for the confidence and the predicted class of every row."""
        confidence = torch.exp(top - totals)
        index = (torch.ceil(confidence * 15) - 1).clamp(0, 14).long()
        index += 15 * torch.arange(len(top), device=top.device)[:, None]
        gap = ((columns == self.labels).to(totals) - confidence) * self.share
        sums = torch.bincount(index.flatten(), gap.flatten(), minlength=15 * len(top))
        return sums.view(len(top), 15).abs().sum(1)
