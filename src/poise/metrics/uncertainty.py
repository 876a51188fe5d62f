"""How much of a metric is noise: intervals, the floor of a perfect model, and differences of two models."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from poise import _check
from poise._types import Array, Labels
from poise.metrics.calibration import ece
from poise.metrics.resampling import Metric, Statistic, resampled_weights, statistic

_ENTRIES_AT_A_TIME = 1 << 17
"""As many as the processor's own memory holds."""


@dataclass(frozen=True)
class Interval:
    """A metric as measured, and between what the same metric of infinitely many samples lies."""

    value: float
    """As measured. An error that cannot be negative is too large on average, and may lie above `high`."""
    low: float
    high: float
    corrected: float
    """The value with that bias taken out."""
    level: float


@dataclass(frozen=True)
class Difference:
    """A metric of model a less that of model b on the same samples."""

    value: float
    """As measured."""
    low: float
    high: float
    corrected: float
    """The difference with the bias of both taken out."""
    p_value: float
    """Of no difference, two-sided; never below 2/(resamples + 1)."""
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
    """A confidence interval for what the metric would be on infinitely many samples like these, by the bootstrap.

    Means (nll, brier, accuracies): the quantiles of the resampled values. Calibration errors are norms M(g) of gaps g,
    and noise makes M(ĝ) larger than M(g), and that of a resample larger again. So the interval holds the models that
    could have shown what was observed: low is M(t·h), h the gaps less their noise, where only (1 − level)/2 of the
    resamples M(t·h + g* − ĝ) reach the observed value; high is M(t·s), s gaps in proportion to their noise, the shape
    that hides most, where that share of what a calibrated model gives stay below it; corrected is M(t·h) at one half.
    Any other metric(probs, labels) is called on drawn rows, and its interval is reflected about the value.

    Bins stay those of this sample; the target has those of all samples. At level .95, with 2,000 and 10,000 samples of
    the paper's network and nine kinds of error, simulations covered it in .90 to 1.00 of the cases, `classwise_ece` in
    .87 to 1.00 (`adaptive_classwise_ece` and `ece_sweep` were not simulated). `mce` and `average_calibration_error`
    rest on nearly empty bins: .85 to 1.00, and so wide that they say little. Rows must be independent. Options are
    bound by functools.partial(ece, num_bins=10).

    >>> import torch
    >>> confidence = torch.linspace(0.5, 1, 2000)
    >>> labels = (torch.rand(2000, generator=torch.Generator().manual_seed(0)) < confidence - 0.1).long()
    >>> found = interval(ece, confidence, labels, resamples=200)
    >>> found.low < 0.1 < found.high
    True

    Reference: Efron, Tibshirani, 1993; the limit above as in Read, J. Phys. G 2002 (CLs), so it is never empty.
    """
    outside = (1 - _level(level)) / 2
    value = _measured(metric, probs, labels)
    runs = _Runs.of(metric, probs, labels, resamples, seed)
    if runs.statistic.mean:
        low, high = _quantiles(runs.values(), outside, 1 - outside)
        return Interval(value, low, high, value, level)
    if not runs.statistic.num_gaps:
        low, corrected, high = _quantiles(2 * value - runs.values(), outside, 0.5, 1 - outside)
        if runs.statistic.distance:
            # Near its least value the reflection is too sure: what noise alone would show may be noise alone.
            floor = noise_floor(probs, metric, draws=100, level=1 - outside, seed=seed)
            low = 0.0 if value <= floor.high else max(low, 0.0)
            corrected = max(low, corrected if value > floor.mean else 0.0)
            high = max(high, value, low)
        return Interval(value, low, high, corrected, level)
    shape, noise = runs.shapes()
    low = runs.truth(runs.scaled(shape, 1 - outside))
    high = runs.truth(runs.scaled(noise, outside * runs.below(0 * noise)))
    low = min(low, high)
    if runs.statistic.noiseless:  # it is debiased already
        return Interval(value, low, high, value, level)
    corrected = min(max(low, runs.truth(runs.scaled(shape, 0.5))), high)
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
    """Whether two models differ in a metric: metric(a) − metric(b), drawing the same samples for both.

    From low to high is the hull of two intervals: the quantiles of the resampled differences D*, and D − (D* − D°)
    where D* and D° are the resampled and the true difference of models that have the gaps of `interval`'s corrected
    value. The p-value is the larger one of the two. The first alone keeps the bias of both, the second alone finds a
    difference between equal errors far too often.

    Trust it as a test of no difference more than as an interval for the size. In simulations at level .95, with 2,000
    and 10,000 samples, two nearly equal errors (one model over-, one underconfident) were told apart in 0 to .12 of the
    cases, with the wrong sign in .03 at most. Where one error is near its noise floor the size is understated, most
    with many small bins: the interval missed the true difference on the side of zero in up to .8 of the cases
    (`adaptive_ece`, `classwise_ece`). For means (nll, brier, accuracies) none of this arises.

    >>> import torch
    >>> confidence = torch.linspace(0.5, 1, 2000)
    >>> labels = (torch.rand(2000, generator=torch.Generator().manual_seed(0)) < confidence).long()
    >>> found = paired_difference(ece, confidence, confidence * 0.5 + 0.5, labels, resamples=200)
    >>> found.high < 0 and found.p_value < 0.05
    True

    Reference: Efron, Tibshirani, 1993.
    """
    outside = (1 - _level(level)) / 2
    value = _measured(metric, probs_a, labels) - _measured(metric, probs_b, labels)
    a, b = (_Runs.of(metric, probs, labels, resamples, seed) for probs in (probs_a, probs_b))
    drawn = a.values() - b.values()
    if a.statistic.num_gaps:
        gaps_a, gaps_b = (runs.scaled(runs.shapes()[0], 0.5) for runs in (a, b))
        errors = a.values(gaps_a) - b.values(gaps_b) - (a.truth(gaps_a) - b.truth(gaps_b))
        moved = value - errors
    else:
        moved = drawn if a.statistic.mean else 2 * value - drawn
    lows, highs = zip(*(_quantiles(draws, outside, 1 - outside) for draws in (drawn, moved)), strict=True)
    rarer = max(min(int((draws >= 0).sum()), int((draws <= 0).sum())) for draws in (drawn, moved))
    return Difference(
        value, min(lows), max(highs), float(moved.median()), min(1.0, 2 * (rarer + 1) / (resamples + 1)), level
    )


def noise_floor(
    probs: Array,
    metric: Metric = ece,
    *,
    num_samples: int | None = None,
    draws: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> NoiseFloor:
    """What a metric would show if these probabilities were perfectly calibrated, on as many samples.

    mean and quantile of metric(p, y*), y* ~ p for every row, over a number of draws.

    With num_samples the rows are drawn too, with replacement: how large a test set must be for an error to be seen.
    Nothing below `high` can be told from perfect by that metric.

    >>> import torch
    >>> noise_floor(torch.full((1000, 2), 0.5)).mean < 0.03 < noise_floor(torch.full((100, 2), 0.5)).mean
    True

    Reference: Bröcker, Smith, Weather and Forecasting 2007 (consistency resampling).
    """
    values = _check.probs(probs).detach()
    size = len(values) if num_samples is None else _check.whole(num_samples, "num_samples")
    if not len(values):
        raise ValueError("there is nothing to draw labels from: 0 rows of probs came; pass those of a test set.")
    generator = torch.Generator().manual_seed(seed)
    cumulated = values.double().clamp(min=0).cumsum(dim=1)
    found = []
    for _ in range(_check.whole(draws, "draws")):
        if num_samples is None:
            found.append(metric(values, _drawn_labels(cumulated, generator)))
        else:
            rows = torch.randint(len(values), (size,), generator=generator).to(values.device)
            found.append(metric(values[rows], _drawn_labels(cumulated[rows], generator)))
    drawn = torch.tensor(found, dtype=torch.float64)
    return NoiseFloor(float(drawn.mean()), float(drawn.quantile(_level(level))), level)


@dataclass(frozen=True, eq=False)
class _Runs:
    """A metric in all resamples, as sums that are still to be evaluated."""

    statistic: Statistic
    drawn: Tensor
    observed: Tensor

    @classmethod
    def of(cls, metric: Metric, probs: Array, labels: Array, resamples: int, seed: int) -> _Runs:
        values, _, _ = _check.scored(probs, labels)
        _check.whole(resamples, "resamples", least=2)
        found = statistic(metric, probs, labels)
        weights = resampled_weights(len(values), resamples, seed, values.device)
        drawn = torch.cat([found.sums(weight) for weight in weights], dim=1)
        return cls(found, drawn, found.sums(values.new_ones(len(values), 1, dtype=torch.float64)))

    def shapes(self) -> tuple[Tensor, Tensor]:
        """Gaps a model may have: the observed ones less their noise, and ones in proportion to the noise."""
        gaps = self.observed[: self.statistic.num_gaps]
        spread = self.drawn[: len(gaps)].std(dim=1, keepdim=True)
        sign = gaps.sum().sign() if self.statistic.curve else gaps.sign()
        shrunk = gaps * (1 - (spread / gaps).square()).nan_to_num(nan=0.0).clamp(min=0)
        return shrunk if shrunk.any() else gaps, spread * sign

    def values(self, gaps: Tensor | None = None) -> Tensor:
        """The metric in each resample; with gaps, in resamples of a model that has these gaps."""
        if gaps is None:
            return self.statistic.value(self.drawn)
        moves = gaps - self.observed[: len(gaps)]
        if self.statistic.additive:
            step = max(1, _ENTRIES_AT_A_TIME // self.drawn.shape[1])
            parts = [slice(start, start + step) for start in range(0, len(gaps), step)]
            return torch.stack([self.statistic.value(self.drawn[part] + moves[part]) for part in parts]).sum(0)
        moved = self.drawn[: len(gaps)] + moves
        return self.statistic.value(torch.cat([moved, self.drawn[len(gaps) :]]))

    def truth(self, gaps: Tensor) -> float:
        """The metric of infinitely many samples of a model that has these gaps."""
        value = self.statistic.noiseless or self.statistic.value
        return min(1.0, float(value(torch.cat([gaps, self.observed[len(gaps) :]]))[0]))

    def below(self, gaps: Tensor) -> float:
        """Share of resamples in which a model of these gaps shows no more than was observed."""
        return float((self.values(gaps) <= self.statistic.value(self.observed) * (1 + 1e-12)).double().mean())

    def scaled(self, gaps: Tensor, target: float) -> Tensor:
        """The gaps, scaled so that `below` falls to the target; zero if it is there already without gaps."""
        if self.below(0 * gaps) <= target or not gaps.any():
            return 0 * gaps
        low, high = 0.0, 1.0
        # A gap in a bin that many resamples leave empty may never get there.
        while self.below(high * gaps) > target and self.truth(high * gaps) < 1:
            low, high = high, 2 * high
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.below(middle * gaps) > target else (low, middle)
        return high * gaps


def _measured(metric: Metric, probs: Array, labels: Array) -> float:
    value = float(metric(probs, labels))
    if not math.isfinite(value):
        raise ValueError(f"the metric is {value} on these samples, so it has no interval; give nll a floor above 0.")
    return value


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
