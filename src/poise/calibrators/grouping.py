"""Group calibration: the samples are split into groups that err alike, and each group gets its own temperature."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.interpolate import CubicHermiteSpline
from torch import Tensor

from poise import _check
from poise._types import Labels, Logits
from poise.calibrators.affine import centered, temperature_of
from poise.calibrators.base import Calibrator
from poise.calibrators.fitting import differentiated, minimize, random_folds
from poise.calibrators.reduction import in_order

BASES = ("temperature", "ets")

_NODES = 97
_REACH = 64.0
"""Of the table of log-likelihoods: temperatures up to this factor from the global one."""


class GroupCalibration(Calibrator):
    """1/U Σ_u p(z; group of f under partition u): the mean of calibrators of groups found in the features f.

    Partition u is argmax_g W_u f. W_u minimizes, from a random start, mean −log Σ_g softmax(W_u f)_g σ_y(z/τ_g) plus
    `penalty` times the mean square of W_u; these gates and τ_g serve for that only. Then every hard group gets a base
    calibrator by likelihood: its temperature, or with base="ets" w₁ softmax(z/T) + w₂ softmax(z) + w₃/k.

    With `split`, each partition learns its gates from a random half of the samples and its calibrators from the other:
    as in the original protocol, which has two sets. Without, as in the public code that came after, groups fit noise:
    with a thousand classes or features that is far worse than one temperature. Each group is fitted as if it held one
    sample more, the mean of all: a group without samples has the global calibrator, one without errors a finite one.

    Keeps the order of the classes, so accuracy never changes. Made for the penultimate features; without features it
    takes the logits (less their mean, in units of the temperature), where the partitions are nearly the same. A fit
    costs 97 softmaxes and up to 100 passes over the features per partition (a second at 5,000 × 10, a minute at
    2,500 × 1,000 with 1,280 features), a prediction a softmax per partition.

    >>> logits, features = 4 * torch.arange(1200.0).sin().view(400, 3), torch.tensor([[1.0], [-1.0]]).repeat(200, 1)
    >>> labels = torch.where(features[:, 0] > 0, logits.argmax(1), torch.arange(400) % 3)
    >>> calibrator = GroupCalibration(num_partitions=1).fit(logits, labels, features=features)
    >>> calibrator.predict_proba(logits[2:4], features=features[2:4]).amax(1) > 0.5
    tensor([ True, False])

    Reference: Yang, Zhan, Gan, Beyond Probability Partitions: Calibrating Neural Networks with Semantic Aware Grouping,
    2023 (their ETS is fitted by squared error, which is worse).
    """

    keeps_order = True

    uses_features_: bool
    temperature_: float
    gates_: Tensor
    temperatures_: Tensor
    shares_: Tensor

    def __init__(
        self,
        num_partitions: int = 20,
        num_groups: int = 2,
        base: str = "temperature",
        penalty: float = 0.1,
        split: bool = True,
        seed: int = 0,
    ) -> None:
        self.num_partitions = num_partitions
        self.num_groups = num_groups
        self.base = base
        self.penalty = penalty
        self.split = split
        self.seed = seed

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.whole(self.num_partitions, "num_partitions")
        _check.whole(self.num_groups, "num_groups")
        _check.choice(self.base, BASES, "base")
        _check.nonnegative(self.penalty, "penalty")
        _check.whole(self.seed, "seed", least=0)
        if weight is not None:
            kept = weight > 0
            logits, labels, weight = logits[kept], labels[kept], weight[kept]
            features = None if features is None else features[kept]
        self.temperature_, self.uses_features_ = temperature_of(logits, labels, weight), features is not None
        positions = self._positions(logits, features)
        share = torch.ones(len(labels)).to(positions) if weight is None else weight
        share, total = share / share.sum(), float(share.sum())
        table = _Table(logits.double(), labels, self.temperature_)
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.num_partitions, self.num_groups, positions.shape[1])
        starts = (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) / math.sqrt(shape[2])
        gates, temperatures, shares = [], [], []
        for start in starts:
            half = random_folds(logits.double() / self.temperature_, labels, 2, generator).to(share)
            seen, fresh = (half, 1 - half) if self.split else (torch.ones_like(half),) * 2
            gates.append(_partition(positions, table, seen * share, start.to(positions), self.penalty))
            group = (positions @ gates[-1].T).argmax(dim=1)
            for g in range(self.num_groups):
                heavy = share * (fresh * (group == g) * total + 1)
                temperatures.append(table.best(heavy))
                shares.append(table.shares(temperatures[-1], heavy) if self.base == "ets" else (1.0, 0.0, 0.0))
        self.gates_ = torch.stack(gates)
        self.temperatures_ = torch.tensor(temperatures, dtype=torch.float64).view(shape[:2])
        self.shares_ = torch.tensor(shares, dtype=torch.float64).view(*shape[:2], 3)

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        scores = logits.double()
        positions = self._positions(logits, features)
        if positions.shape[1] != self.gates_.shape[2]:
            raise ValueError(
                f"features have {positions.shape[1]} columns but this calibrator was fitted with "
                f"{self.gates_.shape[2]}; pass those of the same layer."
            )
        total = torch.full_like(scores, -torch.inf)
        parts = zip(*(one.to(logits.device) for one in (self.gates_, self.temperatures_, self.shares_)), strict=True)
        for gate, temperatures, shares in parts:
            group = (positions @ gate.T).argmax(dim=1)
            share = shares[group, :, None].log()
            log_prob = torch.log_softmax(scores / temperatures[group, None], dim=1)
            total = torch.logaddexp(total, log_prob + share[:, 0])
            if self.base == "ets":
                rest = torch.logaddexp(
                    torch.log_softmax(scores, dim=1) + share[:, 1], share[:, 2] - math.log(scores.shape[1])
                )
                total = torch.logaddexp(total, rest)
        return in_order(total - math.log(len(self.gates_)), logits)

    def _positions(self, logits: Logits, features: Tensor | None) -> Tensor:
        """(n, d) what the partitions look at."""
        if self.uses_features_ == (features is None):
            raise ValueError(
                "this calibrator was fitted with features; pass features=..., one row for every sample."
                if features is None
                else "this calibrator was fitted without features; leave them out, or fit it again with them."
            )
        if features is not None:
            return features.detach().to(logits.device).flatten(1).double()
        return centered(logits.detach().double()) / self.temperature_


class _Table:
    """log σ_y(z/T) of every sample and its slope at a row of log-temperatures, cubic between them.

    Twenty partitions ask for it thousands of times, at a handful of temperatures for all samples: no softmax is needed.
    """

    def __init__(self, scores: Logits, labels: Labels, temperature: float) -> None:
        reach, middle = math.log(_REACH), math.log(temperature)
        self.nodes = np.linspace(middle - reach, middle + reach, _NODES)
        self.middle, self.step = middle, float(self.nodes[1] - self.nodes[0])
        values, slopes = [], []
        for node in self.nodes:
            scaled = scores / math.exp(node)
            log_prob = torch.log_softmax(scaled, dim=1)
            values.append(log_prob.gather(1, labels[:, None])[:, 0])
            # The mean of differences from the true class's score: of no more than they matter, whatever their size.
            away = scaled - scaled.gather(1, labels[:, None])
            slopes.append((log_prob.exp() * away).sum(dim=1))
        self.values, self.slopes = torch.stack(values), torch.stack(slopes)
        self.own = torch.log_softmax(scores, dim=1).gather(1, labels[:, None])[:, 0]
        self.uniform = torch.full_like(self.own, -math.log(scores.shape[1]))

    def __call__(self, log_temperature: Tensor) -> Tensor:
        """(g, n) log-likelihoods at (g,) log-temperatures."""
        place: Tensor = ((log_temperature - self.nodes[0]) / self.step).clamp(0, _NODES - 1)
        low = place.detach().floor().long().clamp(max=_NODES - 2)
        t = (place - low)[:, None]
        rise, left = t * t * (3 - 2 * t), 1 - t
        bend = t * left * (left * self.slopes[low] - t * self.slopes[low + 1])
        start, end = self.values[low], self.values[low + 1]
        return start + rise * (end - start) + self.step * bend

    def best(self, weight: Tensor) -> float:
        """The temperature of the highest weighted likelihood."""
        curve = CubicHermiteSpline(self.nodes, (self.values @ weight).cpu(), (self.slopes @ weight).cpu())
        # Ends first and the middle: of equal likelihoods the first is taken.
        candidates = np.concatenate([[self.middle], curve.derivative().roots(extrapolate=False), self.nodes[[0, -1]]])
        candidates = candidates[np.isfinite(candidates)]
        return float(np.exp(candidates[np.argmax(curve(candidates))]))

    def shares(self, temperature: float, weight: Tensor) -> tuple[float, ...]:
        """w of w₁ softmax(z/T) + w₂ softmax(z) + w₃/k, by EM on the weighted likelihood."""
        tempered = self(torch.tensor([math.log(temperature)]).to(weight))[0]
        parts = torch.stack([tempered, self.own, self.uniform])
        weight = weight / weight.sum()
        shares = torch.tensor([0.9, 0.05, 0.05]).to(parts)
        for _ in range(500):
            updated = torch.softmax(shares.log()[:, None] + parts, dim=0) @ weight
            change = (updated - shares).abs().max()
            shares = updated
            if change < 1e-9:
                break
        return tuple(shares.tolist())


def _partition(positions: Tensor, table: _Table, share: Tensor, start: Tensor, penalty: float) -> Tensor:
    """(g, d) gates that part the samples so that a temperature for each part raises the likelihood most."""
    share = share / share.sum().clamp(min=1e-300)
    columns = positions.T.contiguous()

    def loss(theta: Tensor) -> Tensor:
        gates = theta[: start.numel()].view_as(start)
        scores = gates @ columns
        likelihood = torch.logsumexp(scores - scores.logsumexp(dim=0) + table(theta[start.numel() :]), dim=0)
        return penalty * gates.square().mean() - torch.dot(share, likelihood)

    first = torch.cat([start.flatten(), torch.full_like(start[:, 0], table.middle)])
    return minimize(differentiated(loss), first, max_steps=100)[: start.numel()].view_as(start)
