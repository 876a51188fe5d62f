"""Parameterized temperature scaling: a small network reads each row's temperature off its sorted logits."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from poise import _check
from poise._types import Labels, Logits
from poise.calibrators.affine import centered, temperature_of
from poise.calibrators.base import Calibrator
from poise.calibrators.fitting import minimize

CRITERIA = ("nll", "mse")

_REACH = math.log(20.0)
"""How far, in log scale, a row's temperature may lie from the common one: no row can blow up or collapse."""


class ParameterizedTemperatureScaling(Calibrator):
    """softmax(z / T(z)), log T(z) = log T₀ + a·tanh(MLP(the top_k largest logits, sorted) / a), a = log 20.

    T₀ is the common temperature; the network (`num_layers` hidden layers of `num_nodes`) sees logits less their row's
    mean, in units of their spread, and starts at MLP = 0, that is, at temperature scaling. Trained by likelihood
    ("nll") or, as by its authors, by squared error ("mse"), with `weight_decay`·Σ w²/n on its matrices, by L-BFGS on
    all rows at once; `seed` draws the first weights. Unlike the authors' |MLP| with ReLU, the temperature cannot be 0
    and no unit can die, so every seed learns.

    Keeps the order of the classes, so accuracy never changes; a permutation of the classes changes nothing. It can mend
    an error whose size depends on the confidence. Not convex: seeds differ a little. With a few hundred samples or
    fewer it overfits; far from the validation data its temperature is a guess within a factor of 20. A fit takes
    seconds, whatever k.

    Reference: Tomani, Cremers, Buettner, Parameterized Temperature Scaling for Boosting the Expressive Power in
    Post-Hoc Uncertainty Calibration, 2022.
    """

    keeps_order = True

    temperature_: float
    center_: Tensor
    spread_: Tensor
    parameters_: Tensor

    def __init__(
        self,
        num_layers: int = 2,
        num_nodes: int = 5,
        top_k: int = 10,
        criterion: str = "nll",
        weight_decay: float = 15.0,
        num_steps: int = 300,
        seed: int = 0,
    ) -> None:
        self.num_layers = num_layers
        self.num_nodes = num_nodes
        self.top_k = top_k
        self.criterion = criterion
        self.weight_decay = weight_decay
        self.num_steps = num_steps
        self.seed = seed

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.whole(self.num_layers, "num_layers", least=0)
        for name in ("num_nodes", "top_k", "num_steps"):
            _check.whole(getattr(self, name), name)
        _check.whole(self.seed, "seed", least=0)
        _check.choice(self.criterion, CRITERIA, "criterion")
        _check.nonnegative(self.weight_decay, "weight_decay")
        scores = logits.double()
        share = (torch.ones_like(labels) if weight is None else weight).to(scores)
        total = float(share.sum())
        share = share / total
        self.temperature_ = temperature_of(logits, labels, weight)
        top = self._top(scores)
        self.center_ = share @ top
        spread = (share @ (top - self.center_).square()).sqrt()
        # A column that hardly varies (two classes have but one that does) is left small, not blown up.
        self.spread_ = spread.clamp(min=1e-3 * float(spread.max())) if bool(spread.max() > 0) else spread + 1
        inputs, tempered = (top - self.center_) / self.spread_, scores / self.temperature_
        sizes = self._sizes(top.shape[1])
        decay = (
            self.weight_decay
            / total
            * torch.cat([torch.cat([torch.ones(rows * columns), torch.zeros(rows)]) for rows, columns in sizes]).to(
                scores
            )
        )

        def loss_and_grad(parameters: Tensor) -> tuple[Tensor, Tensor]:
            parameters = parameters.requires_grad_()
            with torch.enable_grad():
                log_prob = torch.log_softmax(tempered * torch.exp(-_network(inputs, parameters, sizes)), dim=1)
                if self.criterion == "nll":
                    loss = -torch.dot(share, log_prob.gather(1, labels[:, None])[:, 0])
                else:
                    prob = log_prob.exp()
                    # Σ_k (p_k − y_k)² without a table of y.
                    errors = prob.square().sum(1) - 2 * prob.gather(1, labels[:, None])[:, 0] + 1
                    loss = torch.dot(share, errors)
                loss = loss + torch.dot(decay, parameters.square())
                (gradient,) = torch.autograd.grad(loss, parameters)
            return loss.detach(), gradient

        self.parameters_ = minimize(loss_and_grad, self._first(sizes).to(scores), max_steps=self.num_steps)

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        top = self._top(logits.double())
        inputs = (top - self.center_.to(top)) / self.spread_.to(top)
        log_ratio = _network(inputs, self.parameters_.to(top), self._sizes(top.shape[1]))
        return torch.log_softmax(logits / (self.temperature_ * log_ratio.exp()).to(logits), dim=1)

    def _top(self, scores: Logits) -> Tensor:
        return centered(scores).topk(min(self.top_k, scores.shape[1]), dim=1).values

    def _sizes(self, num_inputs: int) -> list[tuple[int, int]]:
        """(outputs, inputs) of every layer."""
        widths = [num_inputs, *[self.num_nodes] * self.num_layers, 1]
        return [(after, before) for before, after in pairwise(widths)]

    def _first(self, sizes: list[tuple[int, int]]) -> Tensor:
        """Glorot's uniform weights and zero offsets; the last layer all zeros, which is temperature scaling."""
        generator = torch.Generator().manual_seed(self.seed)
        parts = []
        for index, (rows, columns) in enumerate(sizes):
            limit = math.sqrt(6 / (rows + columns)) if index < len(sizes) - 1 else 0.0
            draws = torch.rand(rows * columns, generator=generator, dtype=torch.float64)
            parts += [limit * (2 * draws - 1), torch.zeros(rows, dtype=torch.float64)]
        return torch.cat(parts)


def _network(inputs: Tensor, parameters: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
    """(n, 1) logarithms of the rows' temperatures in units of the common one."""
    values, at = inputs, 0
    for index, (rows, columns) in enumerate(sizes):
        matrix = parameters[at : at + rows * columns].view(rows, columns)
        at += rows * columns
        values = torch.addmm(parameters[at : at + rows], values, matrix.T)
        at += rows
        if index < len(sizes) - 1:
            # Smooth where ReLU has a kink, which L-BFGS and a unit stuck at zero both mind.
            values = torch.nn.functional.silu(values)
    return _REACH * torch.tanh(values / _REACH)
