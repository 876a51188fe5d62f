"""The exact vote for U(-1, 1), compiled for the CPU: every class within reach exactly, however many.

    p_k = ½ ∫_{-1}^{1 - d_k} Π_{j≠k} F(u + d_j) du,     F(t) = (t + 1)/2 up to t = 1, and 1 beyond

Between two neighbouring gaps, 1 − d_{i+1} ≤ u ≤ 1 − d_i, the integrand is a polynomial in which the i top classes alone
take part; from the top down, every such segment adds to their integrals. All terms fall from class to class, and so
do their sums: rounding reverses nothing. Slopes are integrals of the same kind, as in ``uniform``.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from poise.link.compiled import Array, compiled, in_threads, summing
from poise.link.quadrature import gauss_legendre
from poise.noise import Noise

_MOST_NODES = 32
"""Exact for 64 factors."""

_LEFT = math.exp(-8)
"""What a panel of more factors must leave of the mass: a dozen nodes then err by 1e-15."""

_NEGLIGIBLE = 1e-40
"""Mass below which one node must do for a segment: its order is kept, and log p to three digits."""

_TINY = float(np.finfo(np.float64).tiny)


def log_prob(scores: Tensor, noise: Noise) -> Tensor:
    """log p, (n, k), of float32 or float64 scores; -inf for gaps of 2 and more; not differentiable."""
    z = np.ascontiguousarray(scores.detach().numpy())
    out = np.empty_like(z)
    in_threads(lambda start, stop: _log_prob(start, stop, z, out, *_rules()), z.shape)
    return torch.from_numpy(out)


def prob(scores: Tensor, noise: Noise, strength: float = 1.0, lapse: float = 0.0) -> Tensor:
    """(1 − l) p + l/k at s = z/ε, (n, k)."""
    scores = scores.detach()
    z = np.ascontiguousarray((scores if scores.dtype == torch.float64 else scores.float()).numpy())
    out = np.empty_like(z)
    in_threads(lambda start, stop: _prob(start, stop, z, out, 1 / strength, lapse, *_rules()), z.shape)
    return torch.from_numpy(out)


def log_prob_of(scores: Tensor, noise: Noise, labels: Tensor) -> Tensor:
    """log p of one class per row, (n,)."""
    return _one_class(scores, labels, with_slope=False)[0]


def log_prob_and_slope(scores: Tensor, noise: Noise, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The same and its gradient in the scores, (n,) and (n, k); zero where log p is -inf, or p underflows."""
    return _one_class(scores, labels, with_slope=True)


def _one_class(scores: Tensor, labels: Tensor, with_slope: bool) -> tuple[Tensor, Tensor]:
    z, label = np.ascontiguousarray(scores.detach().numpy()), np.ascontiguousarray(labels.numpy())
    out, slope = np.empty(len(z), z.dtype), np.zeros(z.shape if with_slope else (len(z), 0), z.dtype)
    in_threads(lambda start, stop: _log_prob_of(start, stop, z, label, out, slope, *_rules()), z.shape)
    return torch.from_numpy(out), torch.from_numpy(slope)


@functools.cache
def _rules() -> tuple[Array, Array]:
    """Gauss–Legendre on [0, 1]: nodes and weights of the rule of q nodes in row q."""
    nodes, weights = np.zeros((_MOST_NODES + 1, _MOST_NODES)), np.zeros((_MOST_NODES + 1, _MOST_NODES))
    for q in range(1, _MOST_NODES + 1):
        nodes[q, :q], weights[q, :q] = (values.numpy() for values in gauss_legendre(q))
    return nodes, weights


@compiled
def _prob(
    start: int, stop: int, scores: Array, out: Array, per_unit: float, lapse: float, nodes: Array, weights: Array
) -> None:
    num_classes = scores.shape[1]
    gaps, classes, curve = np.empty(num_classes), np.empty(num_classes, np.int64), np.empty(num_classes)
    no_slope, floor = np.empty(0), lapse / num_classes
    for i in range(start, stop):
        out[i] = floor
        within = _nearest(scores[i], per_unit, gaps, classes)
        _integrate(gaps[:within], curve[:within], 0, no_slope, nodes, weights)
        for rank in range(within):
            out[i, classes[rank]] = (1 - lapse) * min(curve[rank], 1.0) + floor


@compiled
def _log_prob(start: int, stop: int, scores: Array, out: Array, nodes: Array, weights: Array) -> None:
    num_classes = scores.shape[1]
    gaps, classes, curve = np.empty(num_classes), np.empty(num_classes, np.int64), np.empty(num_classes)
    no_slope = np.empty(0)
    for i in range(start, stop):
        out[i] = -math.inf
        within = _nearest(scores[i], 1.0, gaps, classes)
        _integrate(gaps[:within], curve[:within], 0, no_slope, nodes, weights)
        for rank in range(within):
            out[i, classes[rank]] = min(math.log(max(curve[rank], _TINY)), 0.0)


@compiled
def _log_prob_of(
    start: int, stop: int, scores: Array, labels: Array, out: Array, slope: Array, nodes: Array, weights: Array
) -> None:
    """With the slope too, in zeros, unless it has no columns."""
    num_classes = scores.shape[1]
    gaps, classes, curve = np.empty(num_classes), np.empty(num_classes, np.int64), np.empty(1)
    steepness = np.empty(slope.shape[1])
    for i in range(start, stop):
        out[i] = -math.inf
        within = _nearest(scores[i], 1.0, gaps, classes)
        for rank in range(within):
            if classes[rank] != labels[i]:
                continue
            mine = steepness[:within]
            mine[:] = 0
            _integrate(gaps[:within], curve, rank, mine, nodes, weights)
            out[i] = min(math.log(max(curve[0], _TINY)), 0.0)
            if curve[0] > _TINY:
                for j in range(len(mine)):
                    if j != rank:
                        slope[i, classes[j]] -= mine[j] / curve[0]
                        slope[i, labels[i]] += mine[j] / curve[0]


@compiled
def _nearest(scores: Array, per_unit: float, gaps: Array, classes: Array) -> int:
    """Gaps below 2 in rising order and whose they are; returns how many."""
    top = scores[0]
    for j in range(1, len(scores)):
        top = max(top, scores[j])
    within = 0
    for j in range(len(scores)):
        gap = (np.float64(top) - scores[j]) * per_unit
        if gap < 2:
            gaps[within] = gap
            classes[within] = j
            within += 1
    if within > 32:
        order = np.argsort(gaps[:within])
        gaps[:within] = gaps[:within][order]
        classes[:within] = classes[:within][order]
        return within
    for j in range(1, within):
        gap, whose, at = gaps[j], classes[j], j
        while at > 0 and gaps[at - 1] > gap:
            gaps[at], classes[at] = gaps[at - 1], classes[at - 1]
            at -= 1
        gaps[at], classes[at] = gap, whose
    return within


@compiled
def _integrate(gaps: Array, curve: Array, rank: int, slope: Array, nodes: Array, weights: Array) -> None:
    """C at the gaps from a rank on, as many as `curve` holds, and if wanted the first one's slopes in all the gaps.

    u is measured from its end, u + 1; to the slopes, which must be zero, ∫ G/((u + d) (u + d_j)) du is added.
    """
    curve[:] = 0
    largest = _product(gaps[: rank + 1], 2 - gaps[rank])
    for active in range(rank + 1, len(gaps) + 1):
        is_last = active == len(gaps)
        high, low = 2 - gaps[active - 1], 0.0 if is_last else 2 - gaps[active]
        near, mine = gaps[:active], gaps[rank : min(active, rank + len(curve))]
        # Halving what is left of a segment never ends it, but what is left soon does not count.
        end = low + 1e-10 * (high - low)
        while high > end:
            width, at_low = high - low, _product(near, low)
            # More factors than nodes can serve: several panels, each down to where little is left of the last.
            while active > 2 * _MOST_NODES and at_low < _LEFT * largest and width > 1e-3 * high:
                width /= 2
                at_low = _product(near, high - width)
            num_nodes = _num_nodes(active, at_low / largest, largest)
            for q in range(num_nodes):
                u = high - width * (1 - nodes[num_nodes, q])
                mass = _product(near, u) * width * weights[num_nodes, q]
                _add_quotients(curve, mass, mine, u)
                if len(slope):
                    _add_quotients(slope, mass / (gaps[rank] + u), near, u)
            high, largest = high - width, at_low
            if is_last and largest * 1e17 < curve[len(mine) - 1]:
                return
        if largest < _TINY:
            return


@compiled
def _num_nodes(active: int, left: float, largest: float) -> int:
    """As many as a polynomial of that degree needs, or fewer where little of it is bent."""
    if left > 0.5 and largest < _NEGLIGIBLE:
        return 1
    needed = 2 if left > 0.995 else 3 if left > 0.95 else _MOST_NODES
    if _LEFT < left <= 0.95:
        needed = 4 + math.ceil(-math.log(left))
    return min((active + 1) // 2, needed)


@summing
def _product(gaps: Array, u: float) -> float:
    """Π_j F(u + d_j)."""
    product = 1.0
    for j in range(len(gaps)):
        product *= 0.5 * (gaps[j] + u)
    return product


@summing
def _add_quotients(curve: Array, mass: float, gaps: Array, u: float) -> None:
    for j in range(len(gaps)):
        curve[j] += mass / (gaps[j] + u)
