"""Functions of all logits that keep every order among the classes, yet bend more freely than a temperature."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from poise import _check
from poise._types import Labels, Logits
from poise.calibrators.affine import centered, temperature_of
from poise.calibrators.base import Calibrator
from poise.calibrators.fitting import differentiated, minimize, random_folds
from poise.metrics.bins import equal_mass_edges

VARIANTS = ("oi", "diag")

_DEEPEST = -1e6
"""Scores in units of the temperature below which a class is as good as impossible."""

_NUM_SLOPES = 12
_MAX_STEPS = 200
_STEP = 0.01
_SOFTPLUS_ONE = math.log(math.expm1(1 - 1e-6))


class IntraOrderPreserving(Calibrator):
    """softmax(f(z)) with f of the classes' own order: a larger logit always gets the larger probability.

    variant="oi" (order-invariant): f_(i) = Σ_{j≥i} (z_(j) − z_(j+1)) m_j over the sorted logits; the factors m > 0 of
    the gaps come from a small network that sees the `num_ranks` largest sorted logits, and the gaps below share the
    last one. variant="diag": f_k = g(z_k) with one increasing g for all classes, here a piecewise linear one of twelve
    slopes (the authors take the integral of a network). z are the logits in units of the temperature, less their mean.

    Training starts at temperature scaling, m = 1. The network learns by full batches of Adam for as many steps as two
    halves of the data find best for each other, at worst none; the slopes by likelihood under a prior worth one sample.
    Every order, top-k accuracy included, stays exactly; needs no features, deterministic for a seed. A fit costs some
    hundreds of softmaxes ("oi": a second at 5,000 × 10, ten at 2,500 × 1,000) or some tens ("diag"). It cannot see
    which class it deals with, and with a few hundred samples it stays close to a temperature.

    >>> logits = 6 * torch.arange(90.0).sin().view(30, 3)
    >>> labels = (logits + 6 * torch.arange(90.0).cos().view(30, 3)).argmax(1)
    >>> probs = IntraOrderPreserving("diag").fit(logits, labels).predict_proba(logits)
    >>> torch.equal(probs.argsort(1), logits.argsort(1))
    True

    Reference: Rahimi et al., Intra Order-Preserving Functions for Calibration of Multi-Class Neural Networks, 2020.
    """

    keeps_order = True

    temperature_: float
    mean_: Tensor
    spread_: Tensor
    layers_: tuple[Tensor, ...]
    num_steps_: int
    knots_: Tensor
    slopes_: Tensor

    def __init__(
        self, variant: str = "oi", hidden: tuple[int, ...] = (32, 32), num_ranks: int = 10, seed: int = 0
    ) -> None:
        self.variant = variant
        self.hidden = hidden
        self.num_ranks = num_ranks
        self.seed = seed

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.choice(self.variant, VARIANTS, "variant")
        _check.whole(self.num_ranks, "num_ranks")
        _check.whole(self.seed, "seed", least=0)
        for width in self.hidden:
            _check.whole(width, "hidden (a width for each layer)")
        if weight is not None:
            logits, labels, weight = logits[weight > 0], labels[weight > 0], weight[weight > 0]
        self.temperature_ = temperature_of(logits, labels, weight)
        scores, order = _sorted_scores(logits, self.temperature_)
        # From here on a class is its rank, which makes the fit blind to the order of the columns.
        weight = torch.ones_like(scores[:, 0]) if weight is None else weight
        data = _Ranked(scores, (order == labels[:, None]).long().argmax(dim=1), weight)
        if self.variant == "oi":
            self._fit_network(data)
        else:
            self._fit_slopes(data)

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        scores, order = _sorted_scores(logits, self.temperature_)
        if self.variant == "oi":
            bent = _stretched(scores, self._network_inputs(scores), [layer.to(scores) for layer in self.layers_])
        else:
            bent = _bent(scores, self.knots_.to(scores), self.slopes_.to(scores))
        log_prob = torch.log_softmax(bent, dim=1)
        return torch.empty_like(log_prob).scatter(1, order, log_prob).to(logits.dtype)

    def _network_inputs(self, scores: Logits) -> Tensor:
        """(n, r) the largest sorted scores, standardized; never far from what was trained on."""
        mean, spread = self.mean_.to(scores), self.spread_.to(scores)
        return ((scores[:, : len(mean)] - mean) / spread).clamp(-5, 5)

    def _fit_network(self, data: _Ranked) -> None:
        num_ranks = min(self.num_ranks + 1, data.scores.shape[1])
        top = data.scores[:, :num_ranks]
        self.mean_ = data.share @ top
        # A tenth of a temperature at least: what hardly varies must not be blown up.
        self.spread_ = (data.share @ (top - self.mean_).square()).sqrt().clamp(min=0.1)
        generator = torch.Generator().manual_seed(self.seed)
        widths = (num_ranks, *self.hidden, num_ranks - 1)
        start = []
        for fan_in, fan_out in itertools.pairwise(widths):
            uniform = 2 * torch.rand(fan_out, fan_in, generator=generator, dtype=torch.float64) - 1
            start += [(uniform / math.sqrt(fan_in)).to(top), torch.zeros(fan_out).to(top)]
        start[-2].zero_()
        half = random_folds(data.scores, data.ranks, 2, generator) == 0
        losses = torch.zeros(_MAX_STEPS + 1)
        for kept in (half, ~half):
            others, part = data.rows(~kept), float(data.share[~kept].sum())
            inputs = self._network_inputs(others.scores)
            with torch.no_grad():
                for step, layers in zip(range(_MAX_STEPS + 1), self._training(start, data.rows(kept)), strict=False):
                    losses[step] += part * float(others.loss(_stretched(others.scores, inputs, layers)))
        self.num_steps_ = int(losses.argmin())
        trained = next(itertools.islice(self._training(start, data), self.num_steps_, None))
        self.layers_ = tuple(layer.detach() for layer in trained)

    def _training(self, start: list[Tensor], data: _Ranked) -> Iterator[list[Tensor]]:
        """The layers before each step."""
        layers = [layer.clone().requires_grad_() for layer in start]
        descent = torch.optim.Adam(layers, lr=_STEP)
        inputs = self._network_inputs(data.scores)
        while True:
            yield layers
            with torch.enable_grad():
                loss = data.loss(_stretched(data.scores, inputs, layers))
            for layer, slope in zip(layers, torch.autograd.grad(loss, layers), strict=True):
                layer.grad = slope
            descent.step()

    def _fit_slopes(self, data: _Ranked) -> None:
        # Knots where decisions are made: among the two largest scores.
        spots, weight = centered(data.scores)[:, :2].reshape(1, -1), data.weight.repeat_interleave(2)
        self.knots_ = equal_mass_edges(spots, _NUM_SLOPES, weight, spots.dtype)[0, 1:-1].contiguous()
        log_slopes = minimize(
            differentiated(
                lambda bend: (
                    data.loss(_bent(data.scores, self.knots_, bend.exp())) + bend.square().sum() / (2 * data.total)
                )
            ),
            torch.zeros(_NUM_SLOPES).to(data.scores),
        )
        self.slopes_ = log_slopes.exp()


class _Ranked:
    """Sorted scores, the rank of each true class, and weights."""

    def __init__(self, scores: Logits, ranks: Labels, weight: Tensor) -> None:
        self.scores, self.ranks, self.weight = scores, ranks, weight
        self.total = float(weight.sum())
        self.share = weight / self.total

    def rows(self, kept: Tensor) -> _Ranked:
        return _Ranked(self.scores[kept], self.ranks[kept], self.weight[kept])

    def loss(self, bent: Logits) -> Tensor:
        """Mean −log p of the true classes."""
        return -torch.dot(self.share, torch.log_softmax(bent, dim=1).gather(1, self.ranks[:, None])[:, 0])


def _sorted_scores(logits: Logits, temperature: float) -> tuple[Logits, Tensor]:
    """(n, k) logits less their maximum, in units of the temperature, largest first; and whose they are."""
    ordered, order = logits.double().sort(dim=1, descending=True, stable=True)
    return ((ordered - ordered[:, :1]) / temperature).clamp(min=_DEEPEST), order


def _stretched(scores: Logits, inputs: Tensor, layers: Sequence[Tensor]) -> Logits:
    """Sorted scores with every gap multiplied by the network's factor for its rank, the last for all further down."""
    values = inputs
    for weights, bias in zip(layers[:-2:2], layers[1:-2:2], strict=True):
        values = torch.relu(torch.addmm(bias, values, weights.T))
    factors = torch.nn.functional.softplus(torch.addmm(layers[-1], values, layers[-2].T) + _SOFTPLUS_ONE) + 1e-6
    last = factors.shape[1] - 1
    tail = factors[:, last:] * (scores[:, last:] - scores[:, last : last + 1])
    gaps = scores[:, :last] - scores[:, 1 : last + 1]
    # Summed from below, every sum is at least the one before it, rounding or not.
    head = (gaps * factors[:, :last]).flip(1).cumsum(1).flip(1)
    return torch.cat([head, tail], dim=1)


def _bent(scores: Logits, knots: Tensor, slopes: Tensor) -> Logits:
    """g of the scores less their mean: linear with slopes[j] between knots j − 1 and j; what is sorted stays so."""
    values = centered(scores)
    piece = torch.searchsorted(knots, values.detach().contiguous())
    # Each piece starts at its lower knot; the first one, endless below, at its upper.
    anchors = torch.cat([knots[:1], knots])
    heights = torch.cat([torch.zeros_like(knots[:2]), (knots.diff() * slopes[1:-1]).cumsum(0)])
    return heights[piece] + slopes[piece] * (values - anchors[piece])
