"""Affine maps of the logits before the softmax: vector, matrix and Dirichlet scaling, plain, tuned and structured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from poise import _check
from poise._types import Labels, Logits
from poise.calibrators.base import Calibrator
from poise.calibrators.temperature import TemperatureScaling

REGULARIZERS = ("none", "odir")

_TINY = 1e-6
"""A ridge on what a method leaves free: separable data then have an optimum too, and shifts of a column one gauge."""

_GRID = tuple(10.0**exponent for exponent in (2, 1, 0, -1, -2, -3, -4))
"""Strengths of ODIR in units of parameters per sample, from next to no freedom to nearly all."""

LossAndGrad = Callable[[Tensor], tuple[Tensor, Tensor]]


class VectorScaling(Calibrator):
    """softmax(w ⊙ z + b): a factor and an offset for every class, by likelihood.

    z are the logits less their mean over the classes, so that only differences matter. Convex: the optimum is one and
    does not depend on the start. Keeps neither order nor accuracy. Needs no features, but some tens of samples per
    class: with fewer it overfits (`StructuredVectorScaling` does not), and a class that the validation data lack is
    all but ruled out. A fit costs about a hundred softmaxes.

    Reference: Guo et al., On Calibration of Modern Neural Networks, 2017.
    """

    weights_: Tensor
    bias_: Tensor

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        temperature = _temperature(logits, labels, weight)
        scores = centered(logits.double()) / temperature
        found = _fit_map(scores, labels, weight, _Ridge(_TINY, _TINY), matrix=False)
        self.weights_, self.bias_ = found.weights / temperature, found.bias

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        return torch.log_softmax(_Map(self.weights_, self.bias_)(centered(logits)), dim=1)


class MatrixScaling(Calibrator):
    """softmax(W z + b): every logit may speak for every class, by likelihood.

    z are the logits less their mean over the classes. With reg="odir" the loss has λ Σ_{i≠j} W_ij² + μ Σ b_i² beside
    the mean −log p, as in `DirichletCalibration`. Convex; keeps neither order nor accuracy. k² + k parameters: without
    a penalty it overfits badly unless there are thousands of samples per class, and with a hundred classes or more it
    is ruin (the search then ends after 500 steps, short of the optimum, which makes it no worse).

    Reference: Guo et al., 2017; the penalty from Kull et al., Beyond Temperature Scaling, 2019.
    """

    weights_: Tensor
    bias_: Tensor
    strength_: float

    def __init__(self, reg: str = "none", strength: float | None = None, num_folds: int = 5, seed: int = 0) -> None:
        self.reg = reg
        self.strength = strength
        self.num_folds = num_folds
        self.seed = seed

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        temperature = _temperature(logits, labels, weight)
        scores = centered(logits.double()) / temperature
        found, self.strength_ = _fit_tuned(scores, labels, weight, self.reg, self.strength, self.num_folds, self.seed)
        self.weights_, self.bias_ = found.weights / temperature, found.bias

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        return torch.log_softmax(_Map(self.weights_, self.bias_)(centered(logits)), dim=1)


class DirichletCalibration(Calibrator):
    """softmax(W log p + b) with p = softmax(z): what a Dirichlet density of p for every class leads to.

    With reg="odir" (off-diagonal and intercept regularisation) the loss is mean −log q_y + λ Σ_{i≠j} W_ij² + μ Σ b_i²,
    in the units of log p / T, T the temperature. λ = s·k(k−1)/n and μ = s·k/n: as many effective parameters per sample
    whatever k. s is `strength`, or where that is None chosen by cross-validated likelihood out of seven powers of ten,
    strongest first, stopping when two in a row are worse. The authors choose λ and μ apart and average the folds' maps;
    here there is one s, and the map is fitted again on all samples.

    Convex; keeps neither order nor accuracy. Costs num_folds·7 fits of k² + k parameters: seconds at 10 classes, a
    minute or two at 1,000. The diagonal is free, so with few samples per class it overfits like vector scaling.

    Reference: Kull et al., Beyond Temperature Scaling: Obtaining Well-Calibrated Multiclass Probabilities, 2019.
    """

    weights_: Tensor
    bias_: Tensor
    strength_: float

    def __init__(self, reg: str = "odir", strength: float | None = None, num_folds: int = 5, seed: int = 0) -> None:
        self.reg = reg
        self.strength = strength
        self.num_folds = num_folds
        self.seed = seed

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        temperature = _temperature(logits, labels, weight)
        scores = torch.log_softmax(logits.double(), dim=1) / temperature
        found, self.strength_ = _fit_tuned(scores, labels, weight, self.reg, self.strength, self.num_folds, self.seed)
        self.weights_, self.bias_ = found.weights / temperature, found.bias

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        return torch.log_softmax(_Map(self.weights_, self.bias_)(torch.log_softmax(logits, dim=1)), dim=1)


class StructuredVectorScaling(Calibrator):
    """softmax((1 + v) ⊙ x + b) with x = log((1 − u) softmax(z/T) + u/k): vector scaling held to temperature scaling.

    T by likelihood, u = 1/(n + 1); then v and b minimize mean −log p_y + (k/n)(‖v‖² + ‖b‖²). The ridge is all: it lets
    a class be corrected as far as the samples speak for it, and many classes with few samples stay at temperature
    scaling. Convex; keeps neither order nor accuracy (which mostly rises a little). A fit costs some tens of softmaxes.
    Lower likelihood loss than temperature scaling nearly everywhere, but not a lower calibration error.

    Reference: Berta, Holzmüller, Jordan, Bach, Structured Matrix Scaling for Multi-Class Calibration, 2025.
    """

    temperature_: float
    uniform_: float
    weights_: Tensor
    bias_: Tensor

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        self.temperature_, self.uniform_, scores = _mixed(logits, labels, weight)
        ridge = scores.shape[1] / _total(labels, weight)
        self.weights_, self.bias_ = _fit_map(scores, labels, weight, _Ridge(ridge, ridge), matrix=False)

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        scores = _mix(logits, self.temperature_, self.uniform_)
        return torch.log_softmax(_Map(self.weights_, self.bias_)(scores), dim=1)


class StructuredMatrixScaling(Calibrator):
    """softmax((I + diag(v) + M) x + b) with x = log((1 − u) softmax(z/T) + u/k): matrix scaling that does not overfit.

    T by likelihood, u = 1/(n + 1), M zero on its diagonal; then v, b and M minimize
    mean −log p_y + (k/n)(‖v‖² + ‖b‖²) + (k(k−1)/n) ‖M‖². Convex; keeps neither order nor accuracy (which mostly rises
    a little). It can mend classes that are taken for each other, which no map of single scores can; with several hundred
    classes the ridge leaves M next to nothing, and `StructuredVectorScaling` gives the same for less. A fit costs some
    tens of products of an (n, k) by a (k, k) matrix: a second at 10 classes, half a minute at 1,000.

    Reference: Berta, Holzmüller, Jordan, Bach, Structured Matrix Scaling for Multi-Class Calibration, 2025.
    """

    temperature_: float
    uniform_: float
    weights_: Tensor
    bias_: Tensor

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        self.temperature_, self.uniform_, scores = _mixed(logits, labels, weight)
        ridge = scores.shape[1] / _total(labels, weight)
        penalty = _Ridge(ridge, ridge, ridge * (scores.shape[1] - 1))
        self.weights_, self.bias_ = _fit_map(scores, labels, weight, penalty, matrix=True)

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        scores = _mix(logits, self.temperature_, self.uniform_)
        return torch.log_softmax(_Map(self.weights_, self.bias_)(scores), dim=1)


class _Map(NamedTuple):
    """x → W x + b; (k,) weights are a diagonal."""

    weights: Tensor
    bias: Tensor

    def __call__(self, scores: Logits) -> Logits:
        weights, bias = self.weights.to(scores), self.bias.to(scores)
        return scores * weights + bias if weights.ndim == 1 else torch.addmm(bias, scores, weights.T)


class _Ridge(NamedTuple):
    """Factors of the squares of b, of W's diagonal less 1, and of the rest of W."""

    bias: float
    diagonal: float
    others: float = 0.0


def _fit_map(
    scores: Logits,
    labels: Labels,
    weight: Tensor | None,
    ridge: _Ridge,
    *,
    matrix: bool,
    start: _Map | None = None,
    max_steps: int = 500,
) -> _Map:
    """The map that minimizes the mean −log softmax(W x + b)_y and a ridge towards the identity."""
    num_classes = scores.shape[1]
    one = torch.ones(num_classes).to(scores)
    identity = _Map(torch.diag(one) if matrix else one, torch.zeros_like(one))
    center = torch.cat([part.flatten() for part in identity])
    diagonal = torch.full_like(one, ridge.diagonal)
    own = torch.full_like(identity.weights, ridge.others).fill_diagonal_(ridge.diagonal) if matrix else diagonal
    penalty = torch.cat([own.flatten(), torch.full_like(one, ridge.bias)])
    share = (torch.ones_like(labels) if weight is None else weight).to(scores) / _total(labels, weight)
    rows = torch.arange(len(labels), device=labels.device)

    def unpacked(theta: Tensor) -> _Map:
        return _Map(theta[:-num_classes].view(identity.weights.shape), theta[-num_classes:])

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
    unit = (curvature + 1e-2 * curvature.mean() + _TINY).rsqrt()
    first = center if start is None else torch.cat([part.flatten() for part in start])
    return unpacked(_minimize(loss_and_grad, first, unit=unit, max_steps=max_steps))


def _fit_tuned(
    scores: Logits,
    labels: Labels,
    weight: Tensor | None,
    reg: str,
    strength: float | None,
    num_folds: int,
    seed: int,
) -> tuple[_Map, float]:
    """The matrix map under no penalty, or under ODIR of a given or a cross-validated strength; and the strength."""
    _check.choice(reg, REGULARIZERS, "reg")
    _check.whole(num_folds, "num_folds", least=2)
    _check.whole(seed, "seed", least=0)
    if strength is not None:
        _check.positive(strength, "strength")
    if reg == "none":
        return _fit_map(scores, labels, weight, _Ridge(_TINY, _TINY, _TINY), matrix=True), 0.0
    if strength is None:
        strength = _cross_validated(scores, labels, weight, num_folds, seed)
    ridge = _odir(strength, scores.shape[1], _total(labels, weight))
    return _fit_map(scores, labels, weight, ridge, matrix=True), float(strength)


def _cross_validated(scores: Logits, labels: Labels, weight: Tensor | None, num_folds: int, seed: int) -> float:
    ...


def _odir(strength: float, num_classes: int, total: float) -> _Ridge:
    bias = strength * num_classes / total
    return _Ridge(bias, _TINY, bias * (num_classes - 1))


def _minimize(
    loss_and_grad: LossAndGrad,
    start: Tensor,
    *,
    unit: Tensor | None = None,
    bounds: tuple[float, float] | None = None,
    max_steps: int = 500,
) -> Tensor:
    """L-BFGS with exact gradients in float64, in coordinates of the given unit, optionally within bounds of all."""
    unit = torch.ones_like(start) if unit is None else unit

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        loss, gradient = loss_and_grad(torch.from_numpy(theta).to(start.device) * unit)
        return float(loss), (gradient * unit).cpu().numpy()

    found = minimize(
        objective,
        (start / unit).cpu().numpy(),
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": max_steps, "maxfun": 2 * max_steps, "maxcor": 20, "ftol": 1e-13, "gtol": 1e-8},
    )
    return torch.from_numpy(found.x).to(start) * unit


def centered(logits: Logits) -> Logits:
    """Logits less their mean over the classes: what is left when only differences matter."""
    return logits - logits.mean(dim=1, keepdim=True)


def _total(labels: Labels, weight: Tensor | None) -> float:
    return float(len(labels) if weight is None else weight.sum())


def _temperature(logits: Logits, labels: Labels, weight: Tensor | None) -> float:
    scaling = TemperatureScaling()
    scaling._fit(logits, labels, weight, None)
    return scaling.temperature_


def _mixed(logits: Logits, labels: Labels, weight: Tensor | None) -> tuple[float, float, Logits]:
    temperature, uniform = _temperature(logits, labels, weight), 1 / (_total(labels, weight) + 1)
    return temperature, uniform, _mix(logits.double(), temperature, uniform)


def _mix(logits: Logits, temperature: float, uniform: float) -> Logits:
    """log((1 − u) softmax(z/T) + u/k)."""
    log_prob = torch.log_softmax(logits / temperature, dim=1) + math.log1p(-uniform)
    return torch.logaddexp(log_prob, log_prob.new_tensor(math.log(uniform / logits.shape[1])))
