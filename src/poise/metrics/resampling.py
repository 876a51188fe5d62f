"""Every metric as a function of many weightings of the same rows at once: what the bootstrap needs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from poise import _check
from poise._arrays import to_tensor
from poise._types import Array
from poise.metrics import calibration, debiased, decomposition, neighborhoods, scores, unbinned
from poise.metrics.bins import bin_index, equal_mass_edges, equal_width_edges, precision, top_label

_ENTRIES_AT_A_TIME = 1 << 21
_BLOCKS = 1024
_FINE = 4096
_KEPT = 1 << 26

Metric = Callable[[Array, Array], float]


@dataclass(frozen=True, eq=False)
class Statistic:
    """A metric as a function of sums that are linear in the weights; bins stay those of the full sample."""

    sums: Callable[[Tensor], Tensor]
    """(n, d) weights, each column of mean 1, to (s, d) sums."""
    value: Callable[[Tensor], Tensor]
    """(s, d) sums to the (d,) values of the metric."""
    num_gaps: int = 0
    """The leading sums that are gaps, which vanish for a calibrated model; 0 if the metric is no distance from it."""
    noiseless: Callable[[Tensor], Tensor] | None = None
    """(s, d) sums to what `value` estimates there; None: the value itself."""
    curve: bool = False
    """Whether the gaps are points of one curve, whose neighbours have the same sign."""
    mean: bool = False
    """Whether the metric is a mean over the rows."""
    additive: bool = False
    """Whether the value is a sum over the gaps, which can then be added up a few at a time."""
    distance: bool = False
    """Whether a metric without gaps vanishes for a calibrated model all the same, but for noise."""


def statistic(metric: Metric, probs: Array, labels: Array) -> Statistic:
    """The metric, possibly with options bound by functools.partial; one that is not ours is called on drawn rows."""
    options: dict[str, Any] = {}
    base: Callable[..., float] = metric
    if isinstance(metric, functools.partial) and not metric.args:
        base, options = metric.func, metric.keywords
    if "sample_weight" in options:
        raise ValueError(
            "sample_weight cannot be bound to a metric that is resampled: rows are drawn with equal weight."
        )
    build = _BUILDERS.get(base)
    return _called(metric, probs, labels) if build is None else build(probs, labels, **options)


def resampled_weights(num_samples: int, resamples: int, seed: int, device: torch.device) -> Iterator[Tensor]:
    """(n, d) counts of drawing n rows with replacement, a few columns at a time; the same for the same seed."""
    draw = _drawn_and_kept if num_samples * resamples <= _KEPT else _drawn
    for counts in draw(num_samples, resamples, seed):
        yield counts.to(device).double()


def _drawn(num_samples: int, resamples: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    step = max(1, _ENTRIES_AT_A_TIME // num_samples)
    for start in range(0, resamples, step):
        width = min(step, resamples - start)
        place = torch.randint(num_samples, (num_samples, width), generator=generator) * width + torch.arange(width)
        counts = torch.bincount(place.view(-1), minlength=num_samples * width).view(num_samples, width)
        yield counts.to(torch.uint8)  # a row is drawn more than 255 times in no one's lifetime


@functools.lru_cache(maxsize=1)
def _drawn_and_kept(num_samples: int, resamples: int, seed: int) -> tuple[Tensor, ...]:
    # A table of methods by metrics asks for the same draws in every cell, and drawing costs more than the metrics.
    return tuple(_drawn(num_samples, resamples, seed))


def _called(metric: Metric, probs: Array, labels: Array) -> Statistic:
    values, truth, _ = _check.scored(probs, labels)
    everyone = torch.arange(len(values), device=values.device)

    def sums(weight: Tensor) -> Tensor:
        drawn = (everyone.repeat_interleave(column.long()) for column in weight.T)
        return weight.new_tensor([[float(metric(values[rows], truth[rows])) for rows in drawn]])

    return Statistic(sums, lambda found: found[0])


def _mean(each: Callable[..., Tensor]) -> Callable[..., Statistic]:
    def build(probs: Array, labels: Array, **options: Any) -> Statistic:
        values, truth, _ = _check.scored(probs, labels)
        row = each(values, truth, **options)[None]
        return Statistic(lambda weight: row @ weight / len(values), lambda sums: sums[0], mean=True)

    return build


def _added(place: Tensor, amounts: list[Tensor | None], num_places: int) -> Callable[[Tensor], Tensor]:
    """Weights to Σ_i w_i · amount_i / n of each place, stacked over the amounts (None: 1)."""

    def sums(weight: Tensor) -> Tensor:
        zeros = weight.new_zeros(len(amounts), num_places, weight.shape[1])
        for out, amount in zip(zeros, amounts, strict=True):
            out.index_add_(0, place, weight if amount is None else weight * amount[:, None])
        return zeros.flatten(0, 1) / len(weight)

    return sums


def _top_label(value: Callable[..., Tensor], *, equal_mass: bool = False, parts: int = 1) -> Callable[..., Statistic]:
    """`value` of (b, d) gaps, and with more parts of (b, d) shares and hits."""

    def build(probs: Array, labels: Array, num_bins: int = 15, **options: Any) -> Statistic:
        confidence, correct, _, dtype = top_label(probs, labels)
        if equal_mass:
            edges = equal_mass_edges(confidence[None], num_bins, None, dtype)
        else:
            edges = equal_width_edges(num_bins, dtype).to(confidence)[None]
        place = bin_index(confidence[None], edges)[0]
        right = correct.double()
        sums = _added(place, [confidence.double() - right, None, right][:parts], num_bins)

        def of_parts(totals: Tensor) -> Tensor:
            return value(*totals.view(parts, num_bins, -1), **options)

        return Statistic(sums, of_parts, num_bins, additive=value is _error)

    return build


def _error(gap: Tensor) -> Tensor:
    return gap.abs().sum(0)


def _relative(gap: Tensor, mass: Tensor) -> Tensor:
    return torch.where(mass > 0, gap.abs() / mass, 0)


def _largest(gap: Tensor, mass: Tensor) -> Tensor:
    return _relative(gap, mass).amax(0)


def _average(gap: Tensor, mass: Tensor) -> Tensor:
    return _relative(gap, mass).sum(0) / (mass > 0).sum(0)


def _norm(gap: Tensor, mass: Tensor, *, p: int) -> Tensor:
    return (mass * _relative(gap, mass).pow(p)).sum(0).pow(1 / p)


def _debiased(probs: Array, labels: Array, num_bins: int = 15, *, p: int = 2) -> Statistic:
    num_samples = len(to_tensor(labels))

    def value(gap: Tensor, mass: Tensor, right: Tensor) -> Tensor:
        some = mass.clamp(min=0.5 / num_samples)
        return debiased.debiased(mass, some * num_samples, gap / some, right / some, p)

    def noiseless(gap: Tensor, mass: Tensor, right: Tensor) -> Tensor:
        return _norm(gap, mass, p=p)

    build, plain = (_top_label(norm, equal_mass=True, parts=3) for norm in (value, noiseless))
    return replace(build(probs, labels, num_bins), noiseless=plain(probs, labels, num_bins).value)


def _swept(probs: Array, labels: Array, *, p: int = 1) -> Statistic:
    confidence, correct, _, dtype = top_label(probs, labels)
    num_bins = debiased.swept(confidence, correct, dtype).count.shape[-1]
    return _top_label(functools.partial(_norm, p=p), equal_mass=True, parts=2)(probs, labels, num_bins)


def _cumulative(probs: Array, labels: Array) -> Statistic:
    confidence, correct, _, _ = top_label(probs, labels)
    residual = confidence.double() - correct.double()
    _, place = torch.unique(confidence, return_inverse=True)
    # Beyond a thousand levels of confidence the curve is followed at a thousand of them.
    num_levels = int(place.max()) + 1
    num_blocks = min(_BLOCKS, num_levels)
    added = _added(place * num_blocks // num_levels, [residual], num_blocks)
    return Statistic(lambda weight: added(weight).cumsum(0), lambda curve: curve.abs().amax(0), num_blocks, curve=True)


def _smooth(probs: Array, labels: Array) -> Statistic:
    """The curve smoothed by the width of the full sample, and from there one step to the width of each resample."""
    confidence, correct, _, _ = top_label(probs, labels)
    residual = confidence.double() - correct.double()
    width = max(unbinned.smooth_ece(probs, labels) or 1.0, 2e-3)
    # Waves beyond these are damped below 1e-19; nodes lie a quarter of the width apart.
    num_waves, num_nodes = math.ceil(3 / width), math.ceil(4 / width)
    steps = math.pi * torch.arange(num_waves, dtype=torch.float64, device=residual.device)
    twice = torch.where(steps > 0, 2.0, 1.0)
    onto_nodes = torch.cos(unbinned.nodes(num_nodes, residual.device)[:, None] * steps) * twice
    into_waves = torch.cos(steps[:, None] * unbinned.nodes(_FINE, residual.device))
    below, part = unbinned.place(confidence, _FINE)
    left = _added(below, [residual * (1 - part)], _FINE)
    right = _added(below + 1, [residual * part], _FINE)

    def damped(extra: float) -> Tensor:
        return onto_nodes * torch.exp(-0.5 * (steps * extra).square())

    curve, further = damped(width), (damped(width / 2)[:, :num_nodes] @ onto_nodes[:, :num_nodes].T) / num_nodes
    change = (math.hypot(1, 0.5) - 1) * width

    def sums(weight: Tensor) -> Tensor:
        return curve @ (into_waves @ (left(weight) + right(weight)))

    def value(curves: Tensor) -> Tensor:
        error = curves.abs().mean(0)
        slope = ((further @ curves).abs().mean(0) - error).clamp(max=0) / change
        return (width + (error - width) / (1 - slope)).maximum(curves.mean(0).abs())

    return Statistic(sums, value, num_nodes, curve=True)


def _grouped(probs: Array, labels: Array, group: Tensor, num_bins: int = 15) -> Statistic:
    confidence, correct, _, dtype = top_label(probs, labels)
    edges = equal_width_edges(num_bins, dtype).to(confidence)[None]
    place = group.to(confidence.device) * num_bins + bin_index(confidence[None], edges)[0]
    num_places = (int(group.max()) + 1) * num_bins
    sums = _added(place, [confidence.double() - correct.double()], num_places)
    return Statistic(sums, _error, num_places, additive=True)


def _split(part: Callable[[Tensor, Tensor], Tensor], *, distance: bool = False) -> Callable[..., Statistic]:
    """A part of the totals and refinements; the isotonic map is fitted anew to every resample."""

    def build(probs: Array, labels: Array, score: str = "nll", **options: Any) -> Statistic:
        parts = decomposition.resampled_parts(probs, labels, score, **options)
        return Statistic(lambda weight: part(*parts(weight))[None], lambda sums: sums[0], distance=distance)

    return build


def _classwise(probs: Array, labels: Array, num_bins: int = 15, *, equal_mass: bool = False) -> Statistic:
    values, truth, _ = _check.scored(probs, labels)
    dtype = precision(probs, values)
    columns = values.T.contiguous()
    num_classes, num_samples = columns.shape
    step = max(1, _ENTRIES_AT_A_TIME // num_samples)
    blocks = [slice(start, start + step) for start in range(0, num_classes, step)]

    def residual(block: slice) -> Tensor:
        members = torch.arange(num_classes, device=truth.device)[block, None]
        gaps = columns[block].double() - (truth == members).double()
        return gaps if equal_mass else torch.where(columns[block] > 0, gaps, 0)

    # Nearly everything lies in the lowest bin of a class, so the others are added and that one is what they leave.
    entries = []
    for block in blocks:
        if equal_mass:
            edges = equal_mass_edges(columns[block], num_bins, None, dtype)
        else:
            edges = equal_width_edges(num_bins, dtype).to(columns).expand(len(columns[block]), -1)
        index = bin_index(columns[block], edges)
        row, sample = index.nonzero(as_tuple=True)
        places = (row + block.start) * (num_bins - 1) + index[row, sample] - 1
        entries.append((places, sample, residual(block)[row, sample]))
    place, sample, amount = (torch.cat(parts) for parts in zip(*entries, strict=True))
    # Bins that hold nothing are left out: with many classes they are most of them.
    filled, place = torch.unique(place, return_inverse=True)
    owner = filled // (num_bins - 1)

    def sums(weight: Tensor) -> Tensor:
        upper = weight.new_zeros(len(filled), weight.shape[1])
        width = max(1, _ENTRIES_AT_A_TIME // weight.shape[1])
        for some in (slice(start, start + width) for start in range(0, len(place), width)):
            upper.index_add_(0, place[some], weight[sample[some]] * amount[some, None])
        lowest = torch.cat([residual(block) @ weight for block in blocks])
        lowest.index_add_(0, owner, upper, alpha=-1)
        return torch.cat([upper, lowest]) / num_samples

    def value(totals: Tensor) -> Tensor:
        return totals.abs().sum(0) / num_classes

    return Statistic(sums, value, len(filled) + num_classes, additive=True)


_BUILDERS: dict[Any, Callable[..., Statistic]] = {
    scores.nll: _mean(scores.log_losses),
    scores.brier: _mean(scores.squared_distances),
    scores.accuracy: _mean(scores.hits),
    scores.top_k_accuracy: _mean(scores.hits_within),
    calibration.ece: _top_label(_error),
    calibration.adaptive_ece: _top_label(_error, equal_mass=True),
    calibration.mce: _top_label(_largest, parts=2),
    calibration.average_calibration_error: _top_label(_average, parts=2),
    calibration.classwise_ece: _classwise,
    calibration.adaptive_classwise_ece: functools.partial(_classwise, equal_mass=True),
    debiased.debiased_ece: _debiased,
    debiased.ece_sweep: _swept,
    unbinned.ks_error: _cumulative,
    unbinned.smooth_ece: _smooth,
    neighborhoods.grouped_ece: _grouped,
    decomposition.calibration_part: _split(lambda total, refined: total - refined, distance=True),
    decomposition.refinement_part: _split(lambda total, refined: refined),
}
