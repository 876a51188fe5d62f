"""The exact vote for U(-1, 1): between the points where a class drops out, the integrand is a polynomial.

    p_k = ½ ∫_{-1}^{1 - d_k} Π_{j≠k} F(u + d_j) du,     F(t) = (t + 1)/2 up to t = 1, and 1 beyond

so that class k's integral ends, with a jump, at u = 1 − d_k, and classes with d_k ≥ 2 never win. Up to 64 classes
within reach, every one of these points is cut at. Beyond, the cuts follow the decay of G = Π F, and each class's
probability is read off the curve C(d) by its values and slopes there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from poise.link.quadrature import gauss_legendre

_MOST_CLASSES = 64
_MOST_NODES = 16
"""Of a panel; it is exact for polynomials of degree 31, and each panel is a part of one only."""

_CROWDED_NODES = 8
"""Where the cuts already follow the decay of G."""

_NUM_CUTS = 64


def log_prob(gaps: Tensor, at: Tensor) -> Tensor:
    """log p at the gaps `at` (n, m), each of which is among the row's `gaps` (n, k); float64, differentiable."""
    within = (gaps < 2).sum(1)
    # The cost is that of the fullest row: rows of like fullness go together.
    fullness = (within - 1).clamp_min(1).log2().floor().long()
    groups = [(fullness == level).nonzero()[:, 0] for level in torch.unique(fullness)]
    parts = [_of_like_rows(gaps[rows], at[rows], int(within[rows].max())) for rows in groups]
    return torch.cat(parts)[torch.cat(groups).argsort()]


def numbers_per_row(num_classes: int) -> int:
    """Working memory: a few numbers for each class at each node of the usual row, which holds few classes in reach."""
    return 6 * min(num_classes, _MOST_CLASSES) ** 2 * 8


def _of_like_rows(gaps: Tensor, at: Tensor, within: int) -> Tensor:
    near = gaps.topk(within, dim=1, largest=False, sorted=True).values.clamp(max=2)
    at = at.clamp(max=2)
    if within <= _MOST_CLASSES:
        return _curve(at, near, cuts=near)[0]
    # The cuts stay where they are: the curve's slope carries the gradient in `at`, its values that in `near`.
    fixed = near.detach()
    widest = fixed[:, -1:]
    cuts = torch.cat([fixed[:, : _MOST_CLASSES // 2], _cuts(fixed), widest], dim=1).sort(dim=1).values
    ends = torch.minimum(cuts, widest)
    return _hermite(at, ends, *_curve(ends, near, cuts))


def _curve(at: Tensor, near: Tensor, cuts: Tensor) -> tuple[Tensor, Tensor]:
    """log C and its slope at gaps `at` that are among the `cuts`, so that no panel holds the end of an integral."""
    crowded = near.shape[1] > _MOST_CLASSES
    num_nodes = _CROWDED_NODES if crowded else min(_MOST_NODES, math.ceil(near.shape[1] / 2))
    x, w = (values.to(near) for values in gauss_legendre(num_nodes))
    # The top's gap is zero, but the lower end must move with it for the gradient to be right.
    start = -1 - near[:, :1]
    edges = torch.cat([torch.where(1 - cuts > start, 1 - cuts, start), start], dim=1).flip(1)
    width = edges.diff(dim=1)[..., None]
    u = (edges[:, :-1, None] + width * x).flatten(1)
    weight = (width * w).flatten(1)
    # Panels of no width are those of classes out of reach and of equal gaps; their nodes could be at F = 0.
    wide = (weight > 0) & (u > -1)
    u = torch.where(wide, u, 0)
    log_weight = torch.where(wide, weight, 1).log().masked_fill(~wide, -math.inf)
    log_mass = _log_largest(u, near) + log_weight
    t = u[:, None, :] + at[..., None]
    log_terms = (log_mass[:, None, :] - torch.log(t + 1)).masked_fill(t > 1, -math.inf)
    log_curve = _logsumexp(log_terms)
    log_steepness = _logsumexp(log_terms - torch.log(t + 1))
    end = _log_largest(1 - at, near) - math.log(2)
    return log_curve, -torch.exp(torch.logaddexp(end, log_steepness) - log_curve)


def _log_largest(u: Tensor, near: Tensor) -> Tensor:
    """log Π_j F(u + d_j), the distribution function of the largest perturbed logit."""
    # One logarithm for eight classes: a product of eight stays far from underflow.
    near = torch.nn.functional.pad(near, (0, -near.shape[1] % 8), value=2.0)
    cdf = ((u[:, None, :] + near[..., None] + 1) / 2).clamp(max=1)
    return torch.log(cdf.view(len(u), -1, 8, u.shape[1]).prod(2)).sum(1)


def _logsumexp(terms: Tensor) -> Tensor:
    """Over the last axis, with -inf and a zero gradient where every term is -inf."""
    empty = (terms == -math.inf).all(-1)
    return torch.logsumexp(terms.masked_fill(empty[..., None], 0.0), dim=-1).masked_fill(empty, -math.inf)


def _cuts(near: Tensor) -> Tensor:
    """Gaps at which −log G has grown by even steps of its square root, up to 80, and a few evenly spaced to the end."""
    rank = torch.arange(1, near.shape[1] + 1, dtype=near.dtype, device=near.device)
    # To first order −log G(1 − d) is Σ (d − d_j)/2 over the classes above d: a broken line, and easily inverted.
    lost = (rank * near - near.cumsum(1)) / 2
    level = torch.linspace(0, math.sqrt(80), _NUM_CUTS, dtype=near.dtype, device=near.device).square()
    level = level.expand(len(near), -1).contiguous()
    above = torch.searchsorted(lost, level, right=True).clamp(1, near.shape[1]) - 1
    cuts = near.gather(1, above) + 2 * (level - lost.gather(1, above)) / rank[above]
    evenly = torch.linspace(0, 1, _NUM_CUTS // 4, dtype=near.dtype, device=near.device) * near[:, -1:]
    return torch.cat([cuts.clamp(max=2), evenly], dim=1)


def _hermite(at: Tensor, x: Tensor, y: Tensor, slope: Tensor) -> Tensor:
    """The cubic through values and slopes (n, cuts) at rising `x`; -inf where the right value is."""
    right = torch.searchsorted(x, at.detach().contiguous()).clamp(1, x.shape[1] - 1)
    x0, x1 = x.gather(1, right - 1), x.gather(1, right)
    y0, y1 = y.gather(1, right - 1), y.gather(1, right)
    m0, m1 = slope.gather(1, right - 1), slope.gather(1, right)
    width = x1 - x0
    t = torch.where(width > 0, (at - x0) / torch.where(width > 0, width, 1), 0)
    finite = torch.isfinite(y1)
    y1, m1 = torch.where(finite, y1, y0), torch.where(finite, m1, 0)
    bend0, bend1 = width * m0 - (y1 - y0), (y1 - y0) - width * m1
    value = y0 + t * (y1 - y0) + t * (1 - t) * ((1 - t) * bend0 + t * bend1)
    # At a point that is there twice the curve has no width, but a slope.
    value = torch.where(width > 0, value, y0 + (at - x0) * torch.where(finite, m0, 0))
    # The curve falls; the cubic must not overshoot where it falls by many orders of magnitude between two cuts.
    # (Not by torch.minimum, which halves the gradient at the cuts themselves.)
    value = torch.where(value > y0, y0, torch.where(value < y1, y1, value))
    return torch.where(finite | (t == 0), value, -math.inf).masked_fill(at >= 2, -math.inf)
