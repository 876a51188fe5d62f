"""The exact vote for analytic noises, compiled for the CPU: the tables of ``smooth``, one row at a time in the cache.

The integral, the nodes and the histogram of gaps are those of ``smooth``; what differs is how functions of a gap are
interpolated. Values and slopes are tabulated at the edges of cells and joined by Hermite's cubics, and a cell's width
doubles with every octave of unit + gap, so that a gap's cell and its place in it are the leading and the trailing bits
of one floating-point number. A class then costs some ten instructions each way, and only the edges of cells that hold
classes meet the nodes.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from poise.link import smooth
from poise.link.compiled import Array, compiled, in_threads, summing
from poise.noise import Noise

_SHARP = 4.0
"""A noise whose finest feature is so many times narrower than a Gaussian's takes more cells than ``smooth`` takes gaps:
a thousand classes that crowd just within reach of the top then change no probability by 1e-6."""

_ROUNDING = 1.5 * 2.0**12
"""Added and taken away again, this rounds a number below 2^12 to multiples of 2^-40: gaps that differ by less are
equal, and those that differ by more are too far apart for the last digits of a cubic to reverse them."""

_FAR_NUMBERS = 2**20
"""Gaps beyond the tables that are worked on together."""

_FAINT = -650.0
"""log p that is near its smallest, log of the smallest normal number."""

_MANTISSA, _EXPONENT_OF_ONE = 52, 1023
_TINY = float(np.finfo(np.float64).tiny)


class Tables(NamedTuple):
    """What a noise contributes at the edges of the cells (rows) and at the nodes (columns); float64."""

    unit: float
    bits: int
    """Cells of an octave, as a power of two."""
    edges: Array
    first: Array
    """The first node that matters to gaps up to an edge."""
    weights: Array
    log_cdf: Array
    """log F(u + d); its slope in d is the hazard f/F."""
    hazard: Array
    hazard_slope: Array

    @property
    def widest(self) -> float:
        """The largest gap in a cell."""
        return float(self.edges[-1]) * (1 - 1e-9)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def tables(noise: Noise, grade: smooth.Grade = smooth.EXACT) -> Tables:
    widest = smooth.widest_gap(noise, grade.faintest)
    nodes, weights = smooth.nodes_and_weights(noise, grade.faintest, grade.node_step)
    width = 1 / (grade.gaps_per_unit * max(1.0, smooth.sharpness(noise) / _SHARP))
    bits = round(-math.log2(width))
    unit = width * 2.0**bits
    cell = np.arange(math.ceil(math.log2(1 + widest / unit) * 2**bits) + 2)
    edges = unit * (2.0 ** (cell >> bits) * (1 + (cell & (2**bits - 1)) / 2**bits) - 1)
    t = (torch.from_numpy(edges)[:, None] + nodes).requires_grad_()
    with torch.enable_grad():
        log_pdf = noise.log_pdf(t)
        (slope,) = torch.autograd.grad(log_pdf.sum(), t)
    t, log_pdf = t.detach(), log_pdf.detach()
    log_cdf = noise.log_cdf(t)
    hazard = torch.exp(log_pdf - log_cdf)
    # Nodes that hold less than e^-40 of what the most likely of two classes that far apart holds.
    log_mass = log_pdf - log_cdf + noise.log_cdf(nodes) + torch.log(weights)
    first = (log_mass > log_mass.amax(1, keepdim=True) - 40).int().argmax(1).cummin(0).values
    parts = (edges, first.numpy(), weights, log_cdf, hazard, hazard * (slope - hazard))
    return Tables(unit, bits, *(np.ascontiguousarray(part) for part in parts))


def log_prob(scores: Tensor, noise: Noise) -> Tensor:
    """log p, (n, k), of float32 or float64 scores; not differentiable."""
    table = tables(noise)
    z = np.ascontiguousarray(scores.detach().numpy())
    out = np.empty_like(z)
    is_far = np.zeros(len(z), np.bool_)
    in_threads(lambda start, stop: _log_prob(start, stop, z, out, is_far, *table), z.shape)
    log_prob = torch.from_numpy(out)
    if is_far.any():
        # Some rows at a time: memory must not grow with their number.
        for rows in torch.split(torch.from_numpy(is_far).nonzero()[:, 0], max(1, _FAR_NUMBERS // z.shape[1])):
            gaps = _gaps(scores.detach()[rows])
            log_prob[rows] += torch.from_numpy(_tail(gaps.numpy(), noise, table.widest)).to(log_prob.dtype)
    if log_prob.dtype == torch.float64:
        log_prob -= torch.logsumexp(log_prob, dim=1, keepdim=True)
    return log_prob


def _tail(gaps: Array, noise: Noise, widest: float) -> Array:
    """`smooth.tail_beyond`, by straight lines: its formulas are a hundred times as dear as all else."""
    at, value = _tail_table(noise, widest)
    tail: Array = np.interp(gaps, at, value) * np.maximum(gaps / at[-1], 1)
    return tail


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _tail_table(noise: Noise, widest: float) -> tuple[Array, Array]:
    at = np.geomspace(widest, smooth.widest_gap(noise, -1e6), 4096)
    return at, smooth.tail_beyond(torch.from_numpy(at), noise, widest).numpy()


def log_prob_of(scores: Tensor, noise: Noise, labels: Tensor) -> Tensor:
    """log p of one class per row, (n,)."""
    return _of_label(scores, labels, noise, tables(noise), with_slope=False)[0]


def log_prob_and_slope(scores: Tensor, noise: Noise, labels: Tensor) -> tuple[Tensor, Tensor]:
    """log p of one class per row (n,) and its derivative in every score (n, k), quickly: fits take many steps by it."""
    table = tables(noise, smooth.QUICK)
    log_prob, pull = _of_label(scores, labels, noise, table, with_slope=True)
    gaps = _gaps(scores.detach().gather(1, labels[:, None]), scores.detach().amax(1, keepdim=True))
    return log_prob, smooth.slopes(pull, gaps, scores.argmax(1), labels, noise, table.widest)


def _of_label(
    scores: Tensor, labels: Tensor, noise: Noise, table: Tables, *, with_slope: bool
) -> tuple[Tensor, Tensor]:
    z, label = np.ascontiguousarray(scores.detach().numpy()), np.ascontiguousarray(labels.numpy())
    out = np.empty(len(z))
    pull = np.empty(z.shape if with_slope else (0, 0))
    in_threads(lambda start, stop: _label_and_pull(start, stop, z, label, out, pull, *table), z.shape)
    log_prob = torch.from_numpy(out)
    gaps = _gaps(scores.detach().gather(1, labels[:, None]), scores.detach().amax(1, keepdim=True))[:, 0]
    far = gaps > table.widest
    if far.any():
        log_prob[far] += torch.from_numpy(_tail(gaps[far].numpy(), noise, table.widest))
    return log_prob.to(scores.dtype), torch.from_numpy(pull)


def _gaps(scores: Tensor, top: Tensor | None = None) -> Tensor:
    scores = scores.double()
    return (scores.amax(1, keepdim=True) if top is None else top.double()) - scores


# ---- a row at a time, compiled -----------------------------------------------------------------------------------


@compiled
def _log_prob(
    start: int,
    stop: int,
    scores: Array,
    out: Array,
    is_far: Array,
    unit: float,
    bits: int,
    edges: Array,
    first: Array,
    weights: Array,
    log_cdf: Array,
    hazard: Array,
    hazard_slope: Array,
) -> None:
    num_edges, num_nodes = log_cdf.shape
    scaled, moments, largest = np.empty(scores.shape[1]), np.zeros((num_edges, 4)), np.empty(num_nodes)
    places, curve, cubic = scaled.view(np.int64), np.empty((num_edges, 2)), np.empty((num_edges, 4))
    for i in range(start, stop):
        is_far[i] = _scale(scores[i], scaled, unit, edges[-1])
        last = _add_moments(places, bits, moments)
        begin = _add_largest(moments, last, edges, first, log_cdf, hazard, largest)
        mass = largest[begin:] * weights[begin:]
        known = -1
        for cell in range(last + 1):
            if moments[cell, 0] > 0:
                moments[cell] = 0
                for edge in range(max(cell, known + 1), cell + 2):
                    p, slope = _dots(hazard[edge, begin:], hazard_slope[edge, begin:], mass)
                    # Never exactly zero: tiny keeps the logarithm finite where everything underflows.
                    curve[edge, 0] = math.log(p + _TINY)
                    curve[edge, 1] = slope / (p + _TINY)
                known = cell + 1
                _flatten(curve, cell, edges)
                _hermite(curve, cell, edges, cubic)
        for j in range(len(places)):
            # Nothing is surer than sure, not even by the last digit of a table.
            out[i, j] = min(_at(cubic, places[j], bits), 0.0)


@compiled
def _label_and_pull(
    start: int,
    stop: int,
    scores: Array,
    labels: Array,
    out: Array,
    pull: Array,
    unit: float,
    bits: int,
    edges: Array,
    first: Array,
    weights: Array,
    log_cdf: Array,
    hazard: Array,
    hazard_slope: Array,
) -> None:
    """log p of the labels and, if `pull` has room, ∫ (f/F)(u + d_j) r(u) du, r the density of the winning label's u."""
    num_edges, num_nodes = log_cdf.shape
    scaled, moments, largest = np.empty(scores.shape[1]), np.zeros((num_edges, 4)), np.empty(num_nodes)
    places, curve, cubic = scaled.view(np.int64), np.empty((num_edges, 2)), np.empty((num_edges, 4))
    for i in range(start, stop):
        _scale(scores[i], scaled, unit, edges[-1])
        last = _add_moments(places, bits, moments)
        begin = _add_largest(moments, last, edges, first, log_cdf, hazard, largest)
        mass = largest[begin:] * weights[begin:]
        own = places[labels[i]]
        cell, t = _cell(own, bits), _within(own, bits)
        for edge in range(cell, cell + 2):
            p, slope = _dots(hazard[edge, begin:], hazard_slope[edge, begin:], mass)
            curve[edge, 0] = math.log(p + _TINY)
            curve[edge, 1] = slope / (p + _TINY)
        _hermite(curve, cell, edges, cubic)
        out[i] = min(_at(cubic, own, bits), 0.0)
        if len(pull) == 0:
            moments[: last + 1] = 0
            continue
        # How log p changes with the mass at each node: through the values at both edges, and through the slopes.
        width = edges[cell + 1] - edges[cell]
        left, right = width * t * (1 - t) * (1 - t), -width * t * t * (1 - t)
        low = (1 - t) * (1 - t) * (1 + 2 * t) - left * curve[cell, 1]
        high = t * t * (3 - 2 * t) - right * curve[cell + 1, 1]
        at_low, at_high = math.exp(-curve[cell, 0]), math.exp(-curve[cell + 1, 0])
        for u in range(len(mass)):
            of_low = low * hazard[cell, begin + u] + left * hazard_slope[cell, begin + u]
            of_high = high * hazard[cell + 1, begin + u] + right * hazard_slope[cell + 1, begin + u]
            mass[u] *= at_low * of_low + at_high * of_high
        known = -1
        for cell in range(last + 1):
            if moments[cell, 0] > 0:
                moments[cell] = 0
                for edge in range(max(cell, known + 1), cell + 2):
                    curve[edge, 0], curve[edge, 1] = _dots(hazard[edge, begin:], hazard_slope[edge, begin:], mass)
                known = cell + 1
                _hermite(curve, cell, edges, cubic)
        for j in range(len(places)):
            pull[i, j] = _at(cubic, places[j], bits)


@compiled
def _scale(scores: Array, scaled: Array, unit: float, widest: float) -> bool:
    """1 + gap/unit, up to the widest, and whether any gap is beyond that."""
    top = scores[0]
    for j in range(1, len(scores)):
        top = max(top, scores[j])
    per_unit, most = 1 / unit, (1 + widest / unit) * (1 - 1e-9)
    farthest = 0.0
    for j in range(len(scores)):
        x = (np.float64(top) - scores[j]) * per_unit + 1
        farthest = max(farthest, x)
        scaled[j] = (min(x, most) + _ROUNDING) - _ROUNDING
    return farthest > most


@compiled
def _cell(place: int, bits: int) -> int:
    """From the exponent and the leading bits."""
    return (place >> (_MANTISSA - bits)) - (_EXPONENT_OF_ONE << bits)


@compiled
def _within(place: int, bits: int) -> float:
    """From the trailing bits, in [0, 1)."""
    return (place & ((1 << (_MANTISSA - bits)) - 1)) * (1.0 / (1 << (_MANTISSA - bits)))


@compiled
def _add_moments(places: Array, bits: int, moments: Array) -> int:
    """Add up 1, t, t², t³ of the classes in each cell; returns the last cell that holds one."""
    last = 0
    for place in places:
        cell, t = _cell(place, bits), _within(place, bits)
        moments[cell, 0] += 1
        moments[cell, 1] += t
        moments[cell, 2] += t * t
        moments[cell, 3] += t * t * t
        last = max(last, cell)
    return last


@compiled
def _add_largest(
    moments: Array, last: int, edges: Array, first: Array, log_cdf: Array, hazard: Array, largest: Array
) -> int:
    """G = exp Σ_j log F(u + d_j), by Hermite's weights of a cell's classes at its two edges; returns its first node."""
    begin: int = first[last + 1]
    log_largest = largest[begin:]
    log_largest[:] = 0
    value = slope = 0.0
    for cell in range(last + 2):
        width = edges[cell + 1] - edges[cell] if cell <= last else 0.0
        m0, m1, m2, m3 = moments[cell, 0], moments[cell, 1], moments[cell, 2], moments[cell, 3]
        # What the cell to the left adds to this edge, and this cell's own.
        value += m0 - 3 * m2 + 2 * m3
        slope += width * (m1 - 2 * m2 + m3)
        if value != 0 or slope != 0:
            _add(log_largest, value, log_cdf[cell, begin:], slope, hazard[cell, begin:])
        value, slope = 3 * m2 - 2 * m3, width * (m3 - m2)
    for u in range(begin, len(largest)):
        largest[u] = math.exp(largest[u]) if largest[u] > -700 else 0.0
    while begin < len(largest) - 1 and largest[begin] == 0:
        begin += 1
    return begin


@compiled
def _hermite(curve: Array, cell: int, edges: Array, cubic: Array) -> None:
    """The cubic through the values and slopes at both edges of a cell, in powers of the place within it."""
    width = edges[cell + 1] - edges[cell]
    rise = curve[cell + 1, 0] - curve[cell, 0]
    left, right = width * curve[cell, 1], width * curve[cell + 1, 1]
    cubic[cell, 0] = curve[cell, 0]
    cubic[cell, 1] = left
    cubic[cell, 2] = 3 * rise - 2 * left - right
    cubic[cell, 3] = left + right - 2 * rise


@compiled
def _flatten(curve: Array, cell: int, edges: Array) -> None:
    """Slopes with which the cubic falls as the curve does: where p underflows it bends too sharply for its own."""
    if curve[cell + 1, 0] > _FAINT:
        return
    steepest = 3 * min(curve[cell + 1, 0] - curve[cell, 0], 0.0) / (edges[cell + 1] - edges[cell])
    for edge in range(cell, cell + 2):
        curve[edge, 1] = max(curve[edge, 1], steepest)


@compiled
def _at(cubic: Array, place: int, bits: int) -> float:
    cell, t = _cell(place, bits), _within(place, bits)
    value: float = cubic[cell, 0] + t * (cubic[cell, 1] + t * (cubic[cell, 2] + t * cubic[cell, 3]))
    return value


@summing
def _add(out: Array, a: float, x: Array, b: float, y: Array) -> None:
    for u in range(len(out)):
        out[u] += a * x[u] + b * y[u]


@summing
def _dots(x: Array, y: Array, weight: Array) -> tuple[float, float]:
    of_x = of_y = 0.0
    for u in range(len(weight)):
        of_x += x[u] * weight[u]
        of_y += y[u] * weight[u]
    return of_x, of_y
