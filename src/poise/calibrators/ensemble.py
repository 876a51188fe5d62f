"""Ensemble temperature scaling: a mixture of the tempered, the raw and the uniform probabilities."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from poise import _check, search
from poise._types import Labels, Logits
from poise.calibrators.base import Calibrator

CRITERIA = ("nll", "mse")


class EnsembleTemperatureScaling(Calibrator):
    """w₁ softmax(z/T) + w₂ softmax(z) + w₃/k, with w ≥ 0 and Σ w = 1.

    T and w together minimize the mean −log p ("nll") or the squared error of the probabilities ("mse", the authors'
    choice): for every T the best w is found exactly, for that problem is convex. Keeps the order of the classes, so
    accuracy never changes; never worse than temperature scaling on the validation data. w₂ or w₃ are often 0, and it is
    temperature scaling then. By squared error T comes out larger where the network is overconfident, which costs
    likelihood and calibration error. One curve for all confidences, less free than it looks. A fit costs some thirty
    softmaxes. After it: ``temperature_`` and ``weights_``.

    Reference: Zhang, Kailkhura, Han, Mix-n-Match: Ensemble and Compositional Methods for Uncertainty Calibration, 2020.
    """

    keeps_order = True

    temperature_: float
    weights_: Tensor

    def __init__(self, criterion: str = "nll") -> None:
        self.criterion = criterion

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.choice(self.criterion, CRITERIA, "criterion")
        scores = logits.double()
        share = (torch.ones_like(labels) if weight is None else weight).to(scores)
        share = share / share.sum()
        solve = _best_by_likelihood if self.criterion == "nll" else _best_by_square
        raw = torch.log_softmax(scores, dim=1)

        def objective(temperatures: Sequence[float]) -> list[float]:
            return [solve(torch.log_softmax(scores / t, dim=1), raw, labels, share)[0] for t in temperatures]

        self.temperature_ = search.minimize(objective, search.margin_scale(scores) / 4, smooth=True).argument
        self.weights_ = solve(torch.log_softmax(scores / self.temperature_, dim=1), raw, labels, share)[1]

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        tempered, raw, uniform = self.weights_.tolist()
        log_prob = torch.log_softmax(logits / self.temperature_, dim=1) + _log(tempered)
        if raw > 0:
            log_prob = torch.logaddexp(log_prob, torch.log_softmax(logits, dim=1) + math.log(raw))
        if uniform > 0:
            log_prob = torch.logaddexp(log_prob, log_prob.new_tensor(math.log(uniform / logits.shape[1])))
        return log_prob


def _best_by_likelihood(tempered: Logits, raw: Logits, labels: Labels, share: Tensor) -> tuple[float, Tensor]:
    """The smallest mean −log of the mixture at the true classes, and its weights."""
    rows = torch.arange(len(labels), device=labels.device)
    uniform = torch.full_like(share, -math.log(raw.shape[1]))
    true = torch.stack([tempered[rows, labels], raw[rows, labels], uniform], dim=1)
    # Ratios to the best component of a row: a product of p that underflow would be 0/0.
    top = true.max(dim=1, keepdim=True).values
    ratio = torch.exp(true - top)

    mixture = torch.full_like(ratio[0], 1 / 3)
    loss = _cone_loss(ratio, mixture, share)
    for _ in range(100):
        updated = _newton_step(ratio, mixture, share, loss)
        gain = loss - _cone_loss(ratio, updated, share)
        if gain > 0:
            mixture, loss = updated, loss - gain
        if not gain > 1e-13:
            break
    mixture = mixture / mixture.sum()
    return _cone_loss(ratio, mixture, share) - 1 - float(share @ top[:, 0]), mixture


def _cone_loss(ratio: Tensor, mixture: Tensor, share: Tensor) -> float:
    """Mean −log of the mixture + Σ w: its minimum over all w ≥ 0 has Σ w = 1, so that only signs are to be minded."""
    return float(mixture.sum() - share @ torch.log(ratio @ mixture))


def _newton_step(ratio: Tensor, mixture: Tensor, share: Tensor, loss: float) -> Tensor:
    """A Newton step among the weights not held at 0, cut to w ≥ 0; where it gains nothing, a step of EM, which does."""
    mixed = ratio @ mixture
    pull = share @ (ratio / mixed[:, None])
    free = ((mixture > 0) | (pull > 1)).nonzero()[:, 0]
    scaled = ratio[:, free] * (share.sqrt() / mixed)[:, None]
    curvature = scaled.T @ scaled
    # Two components may be the same, at T = 1 for one.
    curvature += 1e-10 * curvature.diagonal().mean() * torch.eye(len(free)).to(curvature)
    direction = torch.zeros_like(mixture).index_copy_(0, free, torch.linalg.solve(curvature, (pull - 1)[free]))
    for length in (1.0, 0.5, 0.25, 0.1, 0.02):
        updated = (mixture + length * direction).clamp(min=0)
        if _cone_loss(ratio, updated, share) < loss:
            return updated
    return mixture * pull


def _best_by_square(tempered: Logits, raw: Logits, labels: Labels, share: Tensor) -> tuple[float, Tensor]:
    """The smallest mean Σ_k (p_k − y_k)² and its weights, exact: a quadratic on a triangle."""
    parts = []
    for log_prob in (tempered, raw, torch.full_like(raw, -math.log(raw.shape[1]))):
        error = log_prob.exp()
        error[torch.arange(len(labels), device=labels.device), labels] -= 1
        parts.append((error * share.sqrt()[:, None]).flatten())
    # As Σ w = 1, the error of the mixture is the mixture of the errors.
    gram = torch.stack([torch.stack([torch.dot(one, other) for other in parts]) for one in parts])
    # Two components may be the same, at T = 1 for one. (No lstsq: its last digits change from run to run.)
    firm = gram + 1e-12 * gram.diagonal().mean() * torch.eye(3).to(gram)
    best, best_loss = torch.eye(3).to(gram)[0], float(gram[0, 0])
    for size in (1, 2, 3):
        for face in map(list, itertools.combinations(range(3), size)):
            solution = torch.linalg.solve(firm[face][:, face], torch.ones(size).to(gram))
            mixture = torch.zeros_like(best).index_copy_(0, torch.tensor(face, device=gram.device), solution)
            mixture = mixture / mixture.sum()
            loss = float(mixture @ gram @ mixture)
            if bool((mixture >= 0).all()) and loss < best_loss - 1e-12:
                best, best_loss = mixture, loss
    return best_loss, best


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
