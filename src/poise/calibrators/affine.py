"""Affine maps of the logits before the softmax: vector, matrix and Dirichlet scaling, plain, tuned and structured."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from poise._types import Labels, Logits
from poise.calibrators.base import Calibrator
from poise.calibrators.fitting import TINY, Map, Ridge, fit_map, fit_tuned, total_weight
from poise.calibrators.temperature import TemperatureScaling


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
        temperature = temperature_of(logits, labels, weight)
        scores = centered(logits.double()) / temperature
        found = fit_map(scores, labels, weight, Ridge(TINY, TINY), matrix=False)
        self.weights_, self.bias_ = found.weights / temperature, found.bias

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        return torch.log_softmax(Map(self.weights_, self.bias_)(centered(logits)), dim=1)


class MatrixScaling(Calibrator):
    """softmax(W z + b): every logit may speak for every class, by likelihood.

    z are the logits less their mean over the classes. With reg="odir" the loss has λ Σ_{i≠j} W_ij² + μ Σ b_i² beside
    the mean −log p, as in `DirichletCalibration`. Convex; keeps neither order nor accuracy. k² + k parameters: without
    a penalty it overfits badly unless there are thousands of samples per class, and with a hundred classes or more it
    is ruin (the search then ends short of the optimum, after 500 steps, or 80 above 200 classes, which is no loss).

    Reference: Guo et al., 2017; the penalty from Kull et al., Beyond Temperature Scaling, 2019.
    """

    weights_: Tensor
    bias_: Tensor
    strength_: float

    def __init__(self, reg: str = "none", strength: float | None = None, num_folds: int = 3, seed: int = 0) -> None:
        self.reg = reg
        self.strength = strength
        self.num_folds = num_folds
        self.seed = seed

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        temperature = temperature_of(logits, labels, weight)
        scores = centered(logits.double()) / temperature
        found, self.strength_ = fit_tuned(scores, labels, weight, self.reg, self.strength, self.num_folds, self.seed)
        self.weights_, self.bias_ = found.weights / temperature, found.bias

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        return torch.log_softmax(Map(self.weights_, self.bias_)(centered(logits)), dim=1)


class DirichletCalibration(Calibrator):
    """softmax(W log p + b) with p = softmax(z): what a Dirichlet density of p for every class leads to.

    With reg="odir" (off-diagonal and intercept regularisation) the loss is mean −log q_y + λ Σ_{i≠j} W_ij² + μ Σ b_i²,
    in the units of log p / T, T the temperature. λ = s·k(k−1)/n and μ = s·k/n: as many effective parameters per sample
    whatever k. s is `strength`, or where that is None chosen by cross-validated likelihood out of seven powers of ten,
    strongest first, stopping when two in a row are worse. The authors choose λ and μ apart and average the folds' maps;
    here there is one s, and the map is fitted again on all samples.

    Convex; keeps neither order nor accuracy. Costs up to num_folds·7 fits of k² + k parameters, each but 40 steps from
    the one before (8 above 200 classes): a second at 10 classes, a minute at 1,000. The diagonal is free, so with few
    samples per class it overfits like vector scaling.

    Reference: Kull et al., Beyond Temperature Scaling: Obtaining Well-Calibrated Multiclass Probabilities, 2019.
    """

    weights_: Tensor
    bias_: Tensor
    strength_: float

    def __init__(self, reg: str = "odir", strength: float | None = None, num_folds: int = 3, seed: int = 0) -> None:
        self.reg = reg
        self.strength = strength
        self.num_folds = num_folds
        self.seed = seed

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        temperature = temperature_of(logits, labels, weight)
        scores = torch.log_softmax(logits.double(), dim=1) / temperature
        found, self.strength_ = fit_tuned(scores, labels, weight, self.reg, self.strength, self.num_folds, self.seed)
        self.weights_, self.bias_ = found.weights / temperature, found.bias

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        return torch.log_softmax(Map(self.weights_, self.bias_)(torch.log_softmax(logits, dim=1)), dim=1)


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
        ridge = scores.shape[1] / total_weight(labels, weight)
        self.weights_, self.bias_ = fit_map(scores, labels, weight, Ridge(ridge, ridge), matrix=False)

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        scores = _mix(logits, self.temperature_, self.uniform_)
        return torch.log_softmax(Map(self.weights_, self.bias_)(scores), dim=1)


class StructuredMatrixScaling(Calibrator):
    """softmax((I + diag(v) + M) x + b) with x = log((1 − u) softmax(z/T) + u/k): matrix scaling that does not overfit.

    T by likelihood, u = 1/(n + 1), M zero on its diagonal; then v, b and M minimize
    mean −log p_y + (k/n)(‖v‖² + ‖b‖²) + (k(k−1)/n) ‖M‖². Convex; keeps neither order nor accuracy (which mostly rises
    a little). It can mend classes that are taken for each other, which no map of single scores can; with some hundred
    classes the ridge leaves M next to nothing, and `StructuredVectorScaling` gives the same for less. A fit costs some
    tens of products of an (n, k) by a (k, k) matrix: a second at 10 classes, some ten seconds at 1,000.

    Reference: Berta, Holzmüller, Jordan, Bach, Structured Matrix Scaling for Multi-Class Calibration, 2025.
    """

    temperature_: float
    uniform_: float
    weights_: Tensor
    bias_: Tensor

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        self.temperature_, self.uniform_, scores = _mixed(logits, labels, weight)
        ridge = scores.shape[1] / total_weight(labels, weight)
        penalty = Ridge(ridge, ridge, ridge * (scores.shape[1] - 1))
        self.weights_, self.bias_ = fit_map(scores, labels, weight, penalty, matrix=True)

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        scores = _mix(logits, self.temperature_, self.uniform_)
        return torch.log_softmax(Map(self.weights_, self.bias_)(scores), dim=1)


def centered(logits: Logits) -> Logits:
    """Logits less their mean over the classes: what is left when only differences matter."""
    return logits - logits.mean(dim=1, keepdim=True)


def temperature_of(logits: Logits, labels: Labels, weight: Tensor | None) -> float:
    scaling = TemperatureScaling()
    scaling._fit(logits, labels, weight, None)
    return scaling.temperature_


def _mixed(logits: Logits, labels: Labels, weight: Tensor | None) -> tuple[float, float, Logits]:
    temperature, uniform = temperature_of(logits, labels, weight), 1 / (total_weight(labels, weight) + 1)
    return temperature, uniform, _mix(logits.double(), temperature, uniform)


def _mix(logits: Logits, temperature: float, uniform: float) -> Logits:
    """log((1 − u) softmax(z/T) + u/k)."""
    log_prob = torch.log_softmax(logits / temperature, dim=1) + math.log1p(-uniform)
    return torch.logaddexp(log_prob, log_prob.new_tensor(math.log(uniform / logits.shape[1])))
