"""A structured affine map of the logits under any link, shrunk towards temperature scaling.

    s = (1 + v) ⊙ x + M x + b,     loss = mean −log p_y(s/ε) + λ_b‖b‖² + λ_v‖v‖² + λ_M‖M‖²

with λ_b = λ_v = k/n and λ_M = k(k−1)/n: the penalty has the size of what so many parameters would win by chance. The
zero map is temperature scaling, or its like under another link.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from poise._types import Labels, Logits
from poise.link import Link

MAPS = ("none", "vector", "matrix")

_FOLDS = 5

_MOST_CLASSES_OF_A_MATRIX = 200
"""With more, the penalty leaves nothing of the matrix on any validation set of usual size."""

Array = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, eq=False)
class AffineMap:
    """x ↦ (1 + v) ⊙ x + M x + b; `off_diagonal` M is None for a vector map."""

    diagonal: Tensor
    bias: Tensor
    off_diagonal: Tensor | None = None

    def __call__(self, x: Logits) -> Logits:
        mapped = (1 + self.diagonal.to(x)) * x + self.bias.to(x)
        return mapped if self.off_diagonal is None else mapped + x @ self.off_diagonal.to(x).T


def is_worth_fitting(kind: str, num_classes: int) -> bool:
    """Whether the penalty leaves anything of a map of this kind."""
    return kind != "matrix" or num_classes <= _MOST_CLASSES_OF_A_MATRIX


@dataclass(frozen=True, eq=False)
class Rows:
    """What a map is fitted on."""

    x: Logits
    labels: Labels
    weight: Tensor | None
    fit_lapse: Callable[[Tensor, int, Tensor | None], float] | None

    def __getitem__(self, rows: Tensor) -> Rows:
        return Rows(self.x[rows], self.labels[rows], None if self.weight is None else self.weight[rows], self.fit_lapse)

    @property
    def total(self) -> float:
        return float(len(self.x) if self.weight is None else self.weight.sum())

    @property
    def share(self) -> Tensor:
        """Each row's part of the mean."""
        return (torch.ones_like(self.x[:, 0]) if self.weight is None else self.weight.to(self.x)) / self.total

    def lapse(self, true: Tensor) -> float:
        """The lapse that belongs to the true classes' probabilities."""
        return 0.0 if self.fit_lapse is None else self.fit_lapse(true, self.x.shape[1], self.weight)


@dataclass(frozen=True, eq=False)
class Fitted:
    """A map under a link, and its penalized loss."""

    kind: str
    link: Link
    strength: float
    map: AffineMap
    loss: float


def fit_map(kind: str, link: Link, strength: float, rows: Rows, start: AffineMap | None = None) -> Fitted:
    """The map of least penalized −log p under a link of fixed strength; the lapse is fitted along the way."""
    x, share = rows.x, rows.share
    k = x.shape[1]
    penalty = torch.cat([x.new_full((2 * k,), k / rows.total), x.new_full((k * k,), k * (k - 1) / rows.total)])
    if kind == "vector":
        penalty = penalty[: 2 * k]

    def value_and_gradient(parameters: Array) -> tuple[float, Array]:
        theta = torch.from_numpy(parameters).to(x)
        log_prob, slope = link.log_prob_and_slope(_unpack(theta, k)(x) / strength, rows.labels)
        true = torch.exp(log_prob)
        lapse = rows.lapse(true)
        # d log((1−l) p + l/k) is the link's share in it times d log p; the lapse is the best and adds no derivative.
        mixed = (1 - lapse) * true + lapse / k + 1e-300
        pull = -slope * (share * (1 - lapse) * true / mixed)[:, None] / strength
        gradient = [(pull * x).sum(0), pull.sum(0)]
        if kind == "matrix":
            gradient.append((pull.T @ x).fill_diagonal_(0).flatten())
        value = torch.dot(penalty, theta.square()) - torch.dot(share, torch.log(mixed))
        if lapse:
            value = value - math.log(lapse) / rows.total
        return float(value), (torch.cat(gradient) + 2 * penalty * theta).cpu().numpy().astype(np.float64)

    begin = np.zeros(len(penalty)) if start is None else _pack(start)
    options = {"maxiter": 200, "ftol": 1e-8, "gtol": 1e-6, "maxcor": 20}
    found = minimize(value_and_gradient, begin, jac=True, method="L-BFGS-B", options=options)
    return Fitted(kind, link, strength, _unpack(torch.from_numpy(found.x).to(x), k), float(found.fun))


def cross_validated(fitted: Fitted, rows: Rows) -> float:
    """Mean −log p of rows held out, in turn, from a fit of the same kind that starts at the one on all rows."""
    order = torch.randperm(len(rows.x), generator=torch.Generator().manual_seed(0)).to(rows.x.device)
    total = 0.0
    for fold in range(_FOLDS):
        held_out = order[fold::_FOLDS]
        kept = torch.ones_like(order, dtype=torch.bool).index_fill_(0, held_out, False).nonzero()[:, 0]
        train, test = rows[kept], rows[held_out]
        refitted = fit_map(fitted.kind, fitted.link, fitted.strength, train, start=fitted.map)
        lapse = train.lapse(_true(refitted, train))
        mixed = (1 - lapse) * _true(refitted, test) + lapse / rows.x.shape[1] + 1e-12
        total -= float(torch.dot(test.share, torch.log(mixed))) * test.total
    return total / rows.total


def _true(fitted: Fitted, rows: Rows) -> Tensor:
    return torch.exp(fitted.link.log_prob_and_slope(fitted.map(rows.x) / fitted.strength, rows.labels)[0])


def _unpack(theta: Tensor, k: int) -> AffineMap:
    off_diagonal = theta[2 * k :].view(k, k) if len(theta) > 2 * k else None
    return AffineMap(theta[:k], theta[k : 2 * k], off_diagonal)


def _pack(affine: AffineMap) -> Array:
    parts = [affine.diagonal, affine.bias]
    if affine.off_diagonal is not None:
        parts.append(affine.off_diagonal.flatten())
    return torch.cat(parts).cpu().numpy().astype(np.float64)
