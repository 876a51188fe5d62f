"""The series of ``series`` compiled for the CPU: a row at a time in the cache, its classes as many at once as fit.

Loops over classes, nodes and points are plain sums and products of float32, which the compiler turns into vectors.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from poise._types import Labels, Logits, Probs
from poise.link.compiled import Array, in_threads, summing
from poise.link.series import ENOUGH, series
from poise.noise import Noise

_BLOCK = 256
"""Classes whose polynomials stand in the cache at a time."""

_f = np.float32
_ZERO, _ONE, _TWO, _HALF = _f(0), _f(1), _f(2), _f(0.5)
_TINY = 1e-38
_JUST_BELOW = _f(1 - 2.4e-7)
"""What is below the top, however little, gets less."""

_LOG2_E = _f(math.log2(math.e))
_E1, _E2, _E3, _E4, _E5, _E6 = (_f(math.log(2) ** n / math.factorial(n)) for n in range(1, 7))
"""2^t = Σ (t log 2)^n / n!, to the last digit of float32 for |t| ≤ 1/2."""


class Tables(NamedTuple):
    """A noise's series as float32 arrays."""

    reach: np.float32
    bend: np.float32
    enough: np.float32
    to_log_largest: Array
    """(moments, nodes)"""
    at_ends: Array
    """(scales, nodes)"""
    at_points: Array
    """(scales, 1 + points, nodes): at d = 0 first."""
    to_curve: Array
    """(24, points)"""
    ends: Array
    """(scales,): gaps at which the curves end."""


@functools.lru_cache(maxsize=64)
def tables(noise: Noise) -> Tables:
    own = series(noise)
    hazard = own.hazard.transpose(1, 2)
    arrays = (own.to_log_largest, hazard[:, -1], hazard[:, :-1], own.to_curve.T, own.ends)
    return Tables(
        _f(own.reach),
        _f(own.bend),
        _f(math.exp(ENOUGH)),
        *(np.ascontiguousarray(a.numpy(), np.float32) for a in arrays),
    )


def prob(scores: Logits, noise: Noise, strength: float = 1.0, lapse: float = 0.0) -> Probs:
    """(1 − l) p + l/k at s = z/ε, (n, k), in float32."""
    z = np.ascontiguousarray(scores.detach().float().numpy())
    out = np.empty_like(z)
    table, unit = tables(noise), _f(1 / strength)
    in_threads(lambda start, stop: _prob(start, stop, z, out, unit, _f(lapse), *table), z.shape)
    return torch.from_numpy(out)


def prob_of(scores: Logits, noise: Noise, labels: Labels, strength: float = 1.0) -> tuple[Tensor, Tensor]:
    """p of the labeled classes and of the top ones, two times (n,) in float32."""
    z = np.ascontiguousarray(scores.detach().float().numpy())
    label = np.ascontiguousarray(labels.numpy())
    out = np.empty((2, len(z)), np.float32)
    table, unit = tables(noise), _f(1 / strength)
    in_threads(lambda start, stop: _prob_of(start, stop, z, label, out, unit, *table), z.shape)
    of_label, of_top = torch.from_numpy(out)
    return of_label, of_top


# ---- a row at a time, compiled -----------------------------------------------------------------------------------


@summing
def _prob(
    start: int,
    stop: int,
    scores: Array,
    out: Array,
    per_unit: np.float32,
    lapse: np.float32,
    reach: np.float32,
    bend: np.float32,
    enough: np.float32,
    to_log_largest: Array,
    at_ends: Array,
    at_points: Array,
    to_curve: Array,
    ends: Array,
) -> None:
    num_classes = scores.shape[1]
    gaps, power = np.empty(num_classes, np.float32), np.empty(num_classes, np.float32)
    low, high, moments, largest, curve = _room(to_log_largest, to_curve)
    for i in range(start, stop):
        _gaps(scores[i], gaps, per_unit)
        _add_moments(gaps, low, high, moments, reach, bend)
        scale = _curve(moments, largest, curve, enough, to_log_largest, at_ends, at_points, to_curve)[0]
        row = out[i]
        _log_shares(gaps, power, row, curve, reach, bend, ends[scale])
        _exp(row, power, power.view(np.int32))
        total = np.float64(0)
        for j in range(num_classes):
            share = row[j] * power[j]
            share = min(share, _JUST_BELOW) if gaps[j] > _ZERO else _ONE
            row[j] = share
            total += share
        unit, floor = _f((_ONE - lapse) / total), lapse / _f(num_classes)
        for j in range(num_classes):
            row[j] = row[j] * unit + floor


@summing
def _prob_of(
    start: int,
    stop: int,
    scores: Array,
    labels: Array,
    out: Array,
    per_unit: np.float32,
    reach: np.float32,
    bend: np.float32,
    enough: np.float32,
    to_log_largest: Array,
    at_ends: Array,
    at_points: Array,
    to_curve: Array,
    ends: Array,
) -> None:
    gaps, (room, own) = np.empty(scores.shape[1], np.float32), np.empty((2, 1), np.float32)
    low, high, moments, largest, curve = _room(to_log_largest, to_curve)
    for i in range(start, stop):
        _gaps(scores[i], gaps, per_unit)
        _add_moments(gaps, low, high, moments, reach, bend)
        scale, first = _curve(moments, largest, curve, enough, to_log_largest, at_ends, at_points, to_curve)
        label = labels[i]
        _log_shares(gaps[label : label + 1], room, own, curve, reach, bend, ends[scale])
        out[0, i] = min(first * math.exp(own[0]), 1.0)
        out[1, i] = min(first, 1.0)


@summing
def _room(to_log_largest: Array, to_curve: Array) -> tuple[Array, Array, Array, Array, Array]:
    num_moments, num_nodes = to_log_largest.shape
    low, high = np.empty((9, _BLOCK), np.float32), np.empty((num_moments // 8, _BLOCK), np.float32)
    nodes = np.empty((3, num_nodes), np.float32)
    return low, high, np.empty(num_moments, np.float32), nodes, np.empty(len(to_curve), np.float32)


@summing
def _gaps(scores: Array, gaps: Array, per_unit: np.float32) -> None:
    top = scores[0]
    for j in range(len(scores)):
        top = max(top, scores[j])
    for j in range(len(scores)):
        gaps[j] = (top - scores[j]) * per_unit


@summing
def _add_moments(gaps: Array, low: Array, high: Array, moments: Array, reach: np.float32, bend: np.float32) -> None:
    """m_r = Σ_j y_j^16 Q_r(x_j)."""
    moments[:] = 0
    stretch = _TWO * (bend + reach) / reach
    for start in range(0, len(gaps), _BLOCK):
        some = gaps[start : start + _BLOCK]
        for j in range(len(some)):
            y = bend / (bend + min(some[j], reach))
            x = stretch * (_ONE - y) - _ONE
            y *= y
            y *= y
            y *= y
            t2 = _TWO * x * x - _ONE
            t3 = _TWO * x * t2 - x
            t4 = _TWO * x * t3 - t2
            t5 = _TWO * x * t4 - t3
            t6 = _TWO * x * t5 - t4
            t7 = _TWO * x * t6 - t5
            low[1, j], low[2, j], low[3, j], low[4, j] = x, t2, t3, t4
            low[5, j], low[6, j], low[7, j], low[8, j] = t5, t6, t7, _TWO * x * t7 - t6
            # Beyond the reach a class is too far to matter to the others.
            high[0, j] = y * y if some[j] <= reach else _ZERO
        for b in range(1, len(high)):
            for j in range(len(some)):
                above = high[b - 2, j] if b > 1 else _ZERO
                factor = _TWO if b > 1 else _ONE
                high[b, j] = factor * low[8, j] * high[b - 1, j] - above
        for b in range(len(high)):
            m0 = m1 = m2 = m3 = m4 = m5 = m6 = m7 = _ZERO
            for j in range(len(some)):
                h = high[b, j]
                m0 += h
                m1 += h * low[1, j]
                m2 += h * low[2, j]
                m3 += h * low[3, j]
                m4 += h * low[4, j]
                m5 += h * low[5, j]
                m6 += h * low[6, j]
                m7 += h * low[7, j]
            moments[8 * b] += m0
            moments[8 * b + 1] += m1
            moments[8 * b + 2] += m2
            moments[8 * b + 3] += m3
            moments[8 * b + 4] += m4
            moments[8 * b + 5] += m5
            moments[8 * b + 6] += m6
            moments[8 * b + 7] += m7


@summing
def _curve(
    moments: Array,
    nodes: Array,
    curve: Array,
    enough: np.float32,
    to_log_largest: Array,
    at_ends: Array,
    at_points: Array,
    to_curve: Array,
) -> tuple[int, np.float32]:
    """The curve's coefficients; returns its scale, and C(0)."""
    largest, power, shares = nodes[0], nodes[1], nodes[2, : to_curve.shape[1]]
    for u in range(len(largest)):
        largest[u] = _ZERO
    for r in range(len(moments)):
        _add(largest, moments[r], to_log_largest[r])
    for u in range(len(largest)):
        largest[u] = min(largest[u], _ZERO)
    _exp(largest, power, power.view(np.int32))
    for u in range(len(largest)):
        largest[u] *= power[u]
    first = _dot(at_points[0, 0], largest)
    scale = 0
    # The shortest curve at whose end next to nothing is left.
    while scale + 1 < len(at_ends) and _dot(at_ends[scale + 1], largest) <= enough * first:
        scale += 1
    for point in range(len(shares)):
        shares[point] = _dot(at_points[scale, point + 1], largest) + _TINY
    for point in range(len(shares)):
        shares[point] = math.log(shares[point] / first)
    for r in range(len(curve)):
        curve[r] = _dot(to_curve[r], shares)
    return scale, first


@summing
def _add(out: Array, factor: np.float32, x: Array) -> None:
    for u in range(len(out)):
        out[u] += factor * x[u]


@summing
def _dot(x: Array, y: Array) -> np.float32:
    total = _ZERO
    for u in range(len(x)):
        total += x[u] * y[u]
    return total


@summing
def _log_shares(
    gaps: Array, rounded: Array, out: Array, curve: Array, reach: np.float32, bend: np.float32, end: np.float32
) -> None:
    """log C(d)/C(0): the row's series, and beyond its end in proportion to the gap."""
    stretch, per_end, c = _TWO * (bend + reach) / reach, _ONE / end, curve
    bits = rounded.view(np.int32)
    for j in range(len(gaps)):
        rounded[j] = gaps[j] + _ONE
    for j in range(len(gaps)):
        bits[j] = (bits[j] + np.int32(8)) & np.int32(-16)
    for j in range(len(gaps)):
        part = (rounded[j] - _ONE) * per_end
        y = bend / (bend + min(part, _ONE) * reach)
        x = stretch * (_ONE - y) - _ONE
        t2 = _TWO * x * x - _ONE
        t3 = _TWO * x * t2 - x
        t4 = _TWO * x * t3 - t2
        t5 = _TWO * x * t4 - t3
        t6 = _TWO * x * t5 - t4
        t7 = _TWO * x * t6 - t5
        t8 = _TWO * x * t7 - t6
        total = c[0] + c[1] * x + c[2] * t2 + c[3] * t3 + c[4] * t4 + c[5] * t5 + c[6] * t6 + c[7] * t7
        middle = c[8] + c[9] * x + c[10] * t2 + c[11] * t3 + c[12] * t4 + c[13] * t5 + c[14] * t6 + c[15] * t7
        outer = c[16] + c[17] * x + c[18] * t2 + c[19] * t3 + c[20] * t4 + c[21] * t5 + c[22] * t6 + c[23] * t7
        total += t8 * middle + (_TWO * t8 * t8 - _ONE) * outer
        out[j] = (x + _ONE) * total * max(part, _ONE)


@summing
def _exp(values: Array, power: Array, bits: Array) -> None:
    """e^x = 2^k · 2^t: the second factor into `values`, the first into `power`, whose bits are `bits`."""
    for j in range(len(values)):
        t = max(values[j] * _LOG2_E, _f(-125.0))
        k = np.floor(t + _HALF)
        t -= k
        bits[j] = (np.int32(k) + np.int32(127)) << np.int32(23)
        values[j] = _ONE + t * (_E1 + t * (_E2 + t * (_E3 + t * (_E4 + t * (_E5 + t * _E6)))))
