"""How affine maps are fitted: L-BFGS on exact gradients, ridges towards the identity, and their cross-validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from poise import _check
from poise._types import Labels, Logits

REGULARIZERS = ("none", "odir")

TINY = 1e-6
"""A ridge on what a method leaves free: separable data then have an optimum too, and shifts of a column one gauge."""

_GRID = tuple(10.0**exponent for exponent in (2, 1, 0, -1, -2, -3, -4))
"""Strengths of ODIR in units of parameters per sample, from next to no freedom to nearly all."""

_MANY = 40_000
"""Parameters above which a step costs so much that fits end early: 80 steps, on a fold 8 (else 500 and 40)."""

_WORTH_THREADS = 1_000_000
"""Scores of which one pass takes threads longer than it takes them to meet."""

LossAndGrad = Callable[[Tensor], tuple[Tensor, Tensor]]


@contextmanager
def unthreaded(scores: Logits) -> Iterator[None]:
    """Thousands of short passes over few scores on one thread.

    Torch's threads wait for each other busily after each pass: beside other work that takes tens of times as long.
    """
    before = torch.get_num_threads()
    if before == 1 or scores.numel() > _WORTH_THREADS or scores.device.type != "cpu":
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Map(NamedTuple):
    """x → W x + b; (k,) weights are a diagonal."""

    weights: Tensor
    bias: Tensor

    def __call__(self, scores: Logits) -> Logits:
        weights, bias = self.weights.to(scores), self.bias.to(scores)
        return scores * weights + bias if weights.ndim == 1 else torch.addmm(bias, scores, weights.T)


class Ridge(NamedTuple):
    """Factors of the squares of b, of W's diagonal less 1, and of the rest of W."""

    bias: float
    diagonal: float
    others: float = 0.0


def fit_map(
    scores: Logits,
    labels: Labels,
    weight: Tensor | None,
    ridge: Ridge,
    *,
    matrix: bool,
    start: Map | None = None,
    brief: bool = False,
) -> Map:
    """The map that minimizes the mean −log softmax(W x + b)_y and a ridge towards the identity.

    A `brief` fit on a fold begins where the stronger penalty ended, and only has to be ranked.
    """
    num_classes = scores.shape[1]
    one = torch.ones(num_classes).to(scores)
    identity = Map(torch.diag(one) if matrix else one, torch.zeros_like(one))
    center = torch.cat([part.flatten() for part in identity])
    diagonal = torch.full_like(one, ridge.diagonal)
    own = torch.full_like(identity.weights, ridge.others).fill_diagonal_(ridge.diagonal) if matrix else diagonal
    penalty = torch.cat([own.flatten(), torch.full_like(one, ridge.bias)])
    share = (torch.ones_like(labels) if weight is None else weight).to(scores) / total_weight(labels, weight)
    rows = torch.arange(len(labels), device=labels.device)

    def unpacked(theta: Tensor) -> Map:
        return Map(theta[:-num_classes].view(identity.weights.shape), theta[-num_classes:])

    def loss_and_grad(theta: Tensor) -> tuple[Tensor, Tensor]:
        log_prob = torch.log_softmax(unpacked(theta)(scores), dim=1)
        loss = -torch.dot(share, log_prob[rows, labels])
        residual = log_prob.exp_()
        residual[rows, labels] -= 1
        residual *= share[:, None]
        slope = (residual.T @ scores).flatten() if matrix else (residual * scores).sum(0)
        away = theta - center
        gradient = torch.cat([slope, residual.sum(0)]) + 2 * penalty * away
        return loss + torch.dot(penalty, away.square()), gradient

    # The curvature at the identity sets the units: a ridge of 1 and one of 1,000 in the same steps.
    prob = torch.softmax(scores, dim=1)
    spread = prob * (1 - prob) * share[:, None]
    curve = (spread.T @ scores.square()).flatten() if matrix else (spread * scores.square()).sum(0)
    curvature = torch.cat([curve, spread.sum(0)]) + 2 * penalty
    unit = (curvature + 1e-2 * curvature.mean() + TINY).rsqrt()
    first = center if start is None else torch.cat([part.flatten() for part in start])
    steps = (8 if brief else 80) if len(center) > _MANY else (40 if brief else 500)
    with unthreaded(scores):
        return unpacked(minimize(loss_and_grad, first, unit=unit, max_steps=steps))


def fit_tuned(
    scores: Logits,
    labels: Labels,
    weight: Tensor | None,
    reg: str,
    strength: float | None,
    num_folds: int,
    seed: int,
) -> tuple[Map, float]:
    """The matrix map under no penalty, or under ODIR of a given or a cross-validated strength; and the strength."""
    _check.choice(reg, REGULARIZERS, "reg")
    _check.whole(num_folds, "num_folds", least=2)
    _check.whole(seed, "seed", least=0)
    if strength is not None:
        _check.positive(strength, "strength")
    if reg == "none":
        return fit_map(scores, labels, weight, Ridge(TINY, TINY, TINY), matrix=True), 0.0
    if strength is None:
        strength = _cross_validated(scores, labels, weight, num_folds, seed)
    ridge = _odir(strength, scores.shape[1], total_weight(labels, weight))
    return fit_map(scores, labels, weight, ridge, matrix=True), float(strength)


def _cross_validated(scores: Logits, labels: Labels, weight: Tensor | None, num_folds: int, seed: int) -> float:
    """The strength of ODIR with the lowest mean −log p of samples held out."""
    mass = torch.ones_like(scores[:, 0]) if weight is None else weight.to(scores)
    scores, labels, mass = scores[mass > 0], labels[mass > 0], mass[mass > 0]
    fold_of = random_folds(scores, labels, num_folds, torch.Generator().manual_seed(seed))
    folds = [fold_of == fold for fold in range(num_folds) if 0 < int((fold_of == fold).sum()) < len(labels)]
    starts: list[Map | None] = [None] * len(folds)
    best, best_loss, worse = _GRID[0], math.inf, 0
    for strength in _GRID:
        loss = 0.0
        for index, fold in enumerate(folds):
            kept = ~fold
            ridge = _odir(strength, scores.shape[1], float(mass[kept].sum()))
            fitted = fit_map(
                scores[kept], labels[kept], mass[kept], ridge, matrix=True, start=starts[index], brief=True
            )
            log_prob = torch.log_softmax(fitted(scores[fold]), dim=1)
            loss -= float(torch.dot(mass[fold], log_prob.gather(1, labels[fold, None])[:, 0]))
            starts[index] = fitted
        worse = 0 if loss < best_loss else worse + 1
        if loss < best_loss:
            best, best_loss = strength, loss
        if worse == 2:
            break
    return best


def _odir(strength: float, num_classes: int, total: float) -> Ridge:
    bias = strength * num_classes / total
    return Ridge(bias, TINY, bias * (num_classes - 1))


def minimize(loss_and_grad: LossAndGrad, start: Tensor, *, unit: Tensor | float = 1.0, max_steps: int = 500) -> Tensor:
    """L-BFGS with strong Wolfe steps on exact gradients, in float64 and in coordinates of the given unit.

    Torch's and not scipy's, whose threaded dot products wait on each other for seconds on a busy machine.
    """
    theta = (start / unit).clone()
    best, best_loss = start, math.inf
    optimizer = torch.optim.LBFGS(
        [theta],
        max_iter=max_steps,
        max_eval=2 * max_steps,
        history_size=20,
        tolerance_grad=1e-7,
        tolerance_change=1e-13,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        nonlocal best, best_loss
        here = theta * unit
        loss, gradient = loss_and_grad(here)
        theta.grad = gradient * unit
        if float(loss) <= best_loss:
            best, best_loss = here.detach(), float(loss)
        return float(loss)

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    # The best point seen: where a line search fails, the last one need not be it.
    return best


def differentiated(loss: Callable[[Tensor], Tensor]) -> LossAndGrad:
    """A differentiable loss with its gradient, as `minimize` asks for it."""

    def loss_and_grad(theta: Tensor) -> tuple[Tensor, Tensor]:
        theta = theta.detach().requires_grad_()
        with torch.enable_grad():
            value = loss(theta)
            (gradient,) = torch.autograd.grad(value, theta)
        return value.detach(), gradient

    return loss_and_grad


def random_folds(scores: Logits, labels: Labels, num_folds: int, generator: torch.Generator) -> Tensor:
    """(n,) a random fold of every row; equal rows share one, so that a weight of two is a row given twice."""
    # The key knows no order of the classes.
    key = scores.gather(1, labels[:, None])[:, 0] - scores.mean(dim=1)
    rows, row = torch.unique(torch.round(key * 1e6), return_inverse=True)
    order = torch.randperm(len(rows), generator=generator).to(labels.device)
    return (order % num_folds)[row]


def total_weight(labels: Labels, weight: Tensor | None) -> float:
    """How many samples there are, a weight of two being two."""
    return float(len(labels) if weight is None else weight.sum())
