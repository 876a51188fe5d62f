"""How much of a metric is noise: intervals, the floor of a perfect model, and differences of two models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from poise import _check
from poise._types import Array, Labels
from poise.metrics.calibration import ece
from poise.metrics.resampling import Metric, Statistic, resampled_weights, statistic


@dataclass(frozen=True)
class Interval:
    """A metric as measured, and what the same metric of infinitely many such samples lies between."""

    value: float
    """As measured; of an error that cannot be negative it is too high on average, and may lie above `high`."""
    low: float
    high: float
    corrected: float
    """The value with that upward bias taken out, between `low` and `high`."""
    level: float


@dataclass(frozen=True)
class Difference:
    """A metric of one model less that of another on the same samples."""

    value: float
    """As measured."""
    low: float
    high: float
    corrected: float
    """The difference with the bias of both taken out."""
    p_value: float
    """Of no difference, two-sided."""
    level: float


@dataclass(frozen=True)
class NoiseFloor:
    """What a metric shows for a model that is perfectly calibrated."""

    mean: float
    high: float
    """The quantile at `level`: a larger value is not noise alone."""
    level: float


def interval(
    metric: Metric, probs: Array, labels: Array, *, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> Interval:
    """A confidence interval for what the metric would be on infinitely many samples of the same kind."""
    outside = (1 - _level(level)) / 2
    value = float(metric(probs, labels))
    runs = _Runs.of(metric, probs, labels, resamples, seed)
    if runs.statistic is None:
        drawn = 2 * value - runs.values()
        low, corrected, high = _quantiles(drawn, outside, 0.5, 1 - outside)
    elif not runs.statistic.num_gaps:
        corrected = value
        low, high = _quantiles(runs.values(), outside, 1 - outside)
    else:
        shape, noise = runs.shapes()
        low = runs.truth(runs.scaled(shape, 1 - outside))
        corrected = runs.truth(runs.scaled(shape, 0.5))
        high = runs.truth(runs.scaled(noise, outside * runs.below(0 * noise)))
    return Interval(value, low, high, corrected, level)


def paired_difference(
    metric: Metric,
    probs_a: Array,
    probs_b: Array,
    labels: Array,
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Difference:
    """Whether model a and model b differ in a metric, by drawing the same samples for both."""
    outside = (1 - _level(level)) / 2
    value = float(metric(probs_a, labels)) - float(metric(probs_b, labels))
    a, b = (_Runs.of(metric, probs, labels, resamples, seed) for probs in (probs_a, probs_b))
    if a.statistic is None or b.statistic is None:
        errors = a.values() - b.values() - value
    elif not a.statistic.num_gaps:
        errors = value - (a.values() - b.values())
    else:
        gaps_a, gaps_b = (runs.scaled(runs.shapes()[0], 0.5) for runs in (a, b))
        errors = a.values(gaps_a) - b.values(gaps_b) - (a.truth(gaps_a) - b.truth(gaps_b))
    low, corrected, high = (value - q for q in _quantiles(errors, 1 - outside, 0.5, outside))
    rarer = min(int((errors >= value).sum()), int((errors <= value).sum()))
    return Difference(value, low, high, corrected, min(1.0, 2 * (rarer + 1) / (resamples + 1)), level)


def noise_floor(
    probs: Array,
    metric: Metric = ece,
    *,
    num_samples: int | None = None,
    draws: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> NoiseFloor:
    """What a metric would show if these probabilities were perfectly calibrated, on as many samples."""
    values = _check.probs(probs).detach()
    generator = torch.Generator().manual_seed(seed)
    size = len(values) if num_samples is None else _check.whole(num_samples, "num_samples")
    cumulated = values.double().clamp(min=0).cumsum(dim=1)
    found = []
    for _ in range(_check.whole(draws, "draws")):
        rows = None if num_samples is None else torch.randint(len(values), (size,), generator=generator)
        some, steps = (values, cumulated) if rows is None else (values[rows], cumulated[rows])
        found.append(metric(some, _drawn_labels(steps, generator)))
    drawn = torch.tensor(found, dtype=torch.float64)
    return NoiseFloor(float(drawn.mean()), float(drawn.quantile(_level(level))), level)


@dataclass(frozen=True, eq=False)
class _Runs:
    """A metric in all resamples: as sums that are still to be evaluated, or as values if it is not one of ours."""

    statistic: Statistic | None
    drawn: Tensor
    observed: Tensor

    @classmethod
    def of(cls, metric: Metric, probs: Array, labels: Array, resamples: int, seed: int) -> _Runs:
        values, truth, _ = _check.scored(probs, labels)
        _check.whole(resamples, "resamples", least=2)
        counts = resampled_weights(len(values), resamples, seed, values.device)
        known = statistic(metric, probs, labels)
        if known is not None:
            observed = known.sums(values.new_ones(len(values), 1, dtype=torch.float64))
            drawn = torch.cat([known.sums(weight) for weight in counts], dim=1)
            return cls(known, drawn, observed)
        everyone = torch.arange(len(values), device=values.device)
        chosen = (everyone.repeat_interleave(column.long()) for weight in counts for column in weight.T)
        found = [float(metric(values[rows], truth[rows])) for rows in chosen]
        return cls(None, torch.tensor(found, dtype=torch.float64), values.new_zeros(0))

    def shapes(self) -> tuple[Tensor, Tensor]:
        """Gaps a model may have: the observed ones less their noise, and ones in proportion to the noise."""
        assert self.statistic is not None
        gaps = self.observed[: self.statistic.num_gaps]
        spread = self.drawn[: len(gaps)].std(dim=1, keepdim=True)
        sign = gaps.sum().sign() if self.statistic.curve else gaps.sign()
        shrunk = gaps * (1 - (spread / gaps).square()).nan_to_num(nan=0.0).clamp(min=0)
        return shrunk if shrunk.any() else gaps, spread * sign

    def values(self, gaps: Tensor | None = None) -> Tensor:
        """The metric in each resample; with gaps, in resamples of a model that has these gaps."""
        if self.statistic is None:
            return self.drawn
        if gaps is None:
            return self.statistic.value(self.drawn)
        moved = self.drawn[: len(gaps)] - self.observed[: len(gaps)] + gaps
        return self.statistic.value(torch.cat([moved, self.drawn[len(gaps) :]]))

    def truth(self, gaps: Tensor) -> float:
        """The metric of infinitely many samples of a model that has these gaps."""
        assert self.statistic is not None
        value = self.statistic.noiseless or self.statistic.value
        return float(value(torch.cat([gaps, self.observed[len(gaps) :]]))[0])

    def below(self, gaps: Tensor) -> float:
        """Share of resamples in which a model of these gaps shows no more than was observed."""
        assert self.statistic is not None
        return float((self.values(gaps) <= self.statistic.value(self.observed) * (1 + 1e-12)).double().mean())

    def scaled(self, gaps: Tensor, target: float) -> Tensor:
        """The gaps, scaled so that `below` falls to the target; zero if it is there already without gaps."""
        if self.below(0 * gaps) <= target or not gaps.any():
            return 0 * gaps
        low, high = 0.0, 1.0
        while self.below(high * gaps) > target:
            low, high = high, 2 * high
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.below(middle * gaps) > target else (low, middle)
        return high * gaps


def _drawn_labels(cumulated: Tensor, generator: torch.Generator) -> Labels:
    drawn = torch.rand(len(cumulated), 1, generator=generator, dtype=torch.float64).to(cumulated.device)
    found = torch.searchsorted(cumulated, drawn * cumulated[:, -1:], right=True)
    return found[:, 0].clamp(max=cumulated.shape[1] - 1)


def _quantiles(values: Tensor, *levels: float) -> tuple[float, ...]:
    return tuple(float(value) for value in values.quantile(values.new_tensor(levels)))


def _level(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, like 0.95, but is {level!r}.")
    return level
