"""Parameterized temperature scaling: a small network reads each row's temperature off its sorted logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from poise import _check
from poise._types import Labels, Logits
from poise.calibrators.affine import centered, temperature_of
from poise.calibrators.base import Calibrator
from poise.calibrators.fitting import minimize, random_folds

CRITERIA = ("nll", "mse")

_DECAYS = (50.0, 15.0, 5.0, 1.5)
"""Weight decays that are compared where none is given, from one that leaves next to nothing of the network."""

_FOLDS = 5

_BRIEF = 100
"""Steps of a fit on a fold, which only has to be ranked."""

_REACH = math.log(20.0)
"""How far, in log scale, a row's temperature may lie from the common one: no row can blow up or collapse."""


@dataclass(frozen=True, eq=False)
class _Rows:
    """What the network sees, what its temperatures divide (the largest is zero), and how much each row counts."""

    inputs: Tensor
    tempered: Logits
    labels: Labels
    mass: Tensor

    def __getitem__(self, rows: Tensor) -> _Rows:
        return _Rows(self.inputs[rows], self.tempered[rows], self.labels[rows], self.mass[rows])


class ParameterizedTemperatureScaling(Calibrator):
    """softmax(z / T(z)), log T(z) = log T₀ + a·tanh(MLP(the top_k largest logits, sorted) / a), a = log 20.

    T₀ is the common temperature; the network (`num_layers` hidden layers of `num_nodes`) sees logits less their row's
    mean, in units of their spread, and starts at MLP = 0, that is, at temperature scaling. Trained by likelihood
    ("nll") or, as by its authors, by squared error ("mse"), with `weight_decay`·Σ w²/n on its matrices, by L-BFGS on
    all rows at once; `seed` draws the first weights. The authors stop early instead of decaying; here 5-fold
    cross-validation chooses the decay (``weight_decay_``) unless one is given. Unlike the authors' |MLP| with ReLU, the
    temperature cannot be 0 and no unit can die, so every seed learns. (A network without either safeguard may collapse:
    all units dead, it is temperature scaling; below zero, it turns every prediction around.)

    Keeps the order of the classes, so accuracy never changes; a permutation of the classes changes nothing. It can mend
    an error whose size depends on the confidence. Not convex: seeds differ a little. With a few hundred samples or
    fewer it learns little or overfits; far from the validation data its temperature is a guess within a factor of 20. A
    fit costs some thousand softmaxes: seconds, and about a minute with a thousand classes.

    Reference: Tomani, Cremers, Buettner, Parameterized Temperature Scaling for Boosting the Expressive Power in
    Post-Hoc Uncertainty Calibration, 2022.
    """

    keeps_order = True

    temperature_: float
    weight_decay_: float
    center_: Tensor
    spread_: Tensor
    parameters_: Tensor

    def __init__(
        self,
        num_layers: int = 2,
        num_nodes: int = 5,
        top_k: int = 10,
        criterion: str = "nll",
        weight_decay: float | None = None,
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
        if self.weight_decay is not None:
            _check.nonnegative(self.weight_decay, "weight_decay")
        scores = logits.double()
        mass = (torch.ones_like(labels) if weight is None else weight).to(scores)
        self.temperature_ = temperature_of(logits, labels, weight)
        top = self._top(scores)
        self.center_ = mass @ top / mass.sum()
        spread = (mass @ (top - self.center_).square() / mass.sum()).sqrt()
        # A column that hardly varies (two classes have but one that does) is left small, not blown up.
        self.spread_ = spread.clamp(min=1e-3 * float(spread.max())) if bool(spread.max() > 0) else spread + 1
        tempered = (scores - scores.amax(1, keepdim=True)) / self.temperature_
        rows = _Rows((top - self.center_) / self.spread_, tempered, labels, mass)
        chosen = self._cross_validated(rows[mass > 0]) if self.weight_decay is None else self.weight_decay
        self.weight_decay_ = float(chosen)
        self.parameters_ = self._trained(rows, self.weight_decay_, self.num_steps)

    def _cross_validated(self, rows: _Rows) -> float:
        """The weight decay whose fits on four fifths have the lowest loss on the others, from the strongest down."""
        generator = torch.Generator().manual_seed(self.seed)
        fold_of = random_folds(rows.tempered, rows.labels, _FOLDS, generator)
        folds = [fold_of == fold for fold in range(_FOLDS) if 0 < int((fold_of == fold).sum()) < len(rows.labels)]
        best, best_loss, worse = _DECAYS[0], math.inf, 0
        for decay in _DECAYS:
            loss = 0.0
            for out in folds:
                trained = self._trained(rows[~out], decay, min(self.num_steps, _BRIEF))
                held_out = rows[out]
                log_ratio = _network(held_out.inputs, trained, self._sizes(held_out.inputs.shape[1]))
                loss += float(torch.dot(held_out.mass, self._losses(held_out, log_ratio)[0]))
            worse = 0 if loss < best_loss else worse + 1
            if loss < best_loss:
                best, best_loss = decay, loss
            if worse == 2:
                break
        return best

    def _trained(self, rows: _Rows, weight_decay: float, num_steps: int) -> Tensor:
        """The network's numbers, from the seed's first ones."""
        sizes = self._sizes(rows.inputs.shape[1])
        share = rows.mass / rows.mass.sum()
        on_matrices = torch.cat([torch.cat([torch.ones(m * n), torch.zeros(m)]) for m, n in sizes])
        decay = (weight_decay / rows.mass.sum()) * on_matrices.to(share)

        def loss_and_grad(parameters: Tensor) -> tuple[Tensor, Tensor]:
            parameters = parameters.requires_grad_()
            with torch.enable_grad():
                log_ratio = _network(rows.inputs, parameters, sizes)
                losses, slopes = self._losses(rows, log_ratio.detach())
                (gradient,) = torch.autograd.grad(log_ratio, parameters, (share * slopes)[:, None])
            parameters = parameters.detach()
            loss = torch.dot(share, losses) + torch.dot(decay, parameters.square())
            return loss, gradient + 2 * decay * parameters

        return minimize(loss_and_grad, self._first(sizes).to(share), max_steps=num_steps)

    def _losses(self, rows: _Rows, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Every row's loss and its derivative in the logarithm of the row's temperature: all that needs the classes."""
        # Nothing is above zero here, so no exponential needs a look at the largest first.
        scaled = rows.tempered * torch.exp(-log_ratio)
        own = scaled.gather(1, rows.labels[:, None])[:, 0]
        share = torch.exp(scaled)
        total = share.sum(1)
        mean = torch.linalg.vecdot(share, scaled) / total
        log_true = own - torch.log(total)
        if self.criterion == "nll":
            return -log_true, own - mean
        # Σ_k (p_k − y_k)² without a table of y; d p_k = p_k (Σ_j p_j s_j − s_k).
        true, square = log_true.exp(), share.square()
        losses = square.sum(1) / total.square() - 2 * true + 1
        of_squares = 2 * (square.sum(1) * mean - torch.linalg.vecdot(square, scaled)) / total.square()
        return losses, of_squares - 2 * true * (mean - own)

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
