"""The exact vote for analytic noises: nodes and gaps shared by all rows, so that the integral is two matrix products.

With the gaps d_j = max s − s_j and u measured from the top logit,

    log G(u) = Σ_j log F(u + d_j),      p_k = C(d_k),      C(d) = ∫ (f/F)(u + d) · G(u) du.

Both functions of the gap, log F(u + ·) and log C(·), are smooth: they are tabulated at fixed gaps and interpolated by
cubics. A row's classes then act on the nodes only through the histogram of their gaps, and all of a row's probabilities
are read off one curve.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from torch import Tensor

from poise.noise import Noise


class Grade(NamedTuple):
    """How fine the tables are."""

    faintest: float
    """Log-probability (of two classes) down to which they reach; beyond, the two-class tail is followed."""
    node_step: float
    """Distance of the nodes in units of the integrand's local width."""
    gaps_per_unit: float
    """Tabulated gaps per unit near zero, before the noise's own sharpness; their distance grows with the gap."""


EXACT = Grade(faintest=-300.0, node_step=0.25, gaps_per_unit=96)
"""Errors below 1e-7: every probability that is given out."""

QUICK = Grade(faintest=-60.0, node_step=0.45, gaps_per_unit=24)
"""Relative errors below 1e-3 at a tenth of the cost: the many steps of a fit."""


@dataclass(frozen=True, eq=False)
class Tables:
    """What a noise contributes, computed once: everything else is two matrix products."""

    noise: Noise
    step: float
    """Distance of neighbouring tabulated gaps in x = asinh(d)."""
    log_cdf: Tensor
    """(gaps, nodes): log F(u + d)."""
    hazard: Tensor
    """(nodes, gaps): (f/F)(u + d), times the node's weight."""
    weights: Tensor
    """(nodes,): the trapezoid rule's."""

    @property
    def num_gaps(self) -> int:
        return len(self.log_cdf)

    @property
    def widest(self) -> float:
        """The largest gap on the curve; the last two tabulated ones only complete its cubic."""
        return math.sinh(self.step * (self.num_gaps - 3))


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def tables(noise: Noise, grade: Grade = EXACT) -> Tables:
    """Nodes spaced by the integrand's local width, gaps spaced by asinh; float64, on the CPU."""
    widest = widest_gap(noise, grade.faintest)
    nodes, weights = nodes_and_weights(noise, grade.faintest, grade.node_step)
    step = 1 / (grade.gaps_per_unit * max(1.0, sharpness(noise) / 2))
    # One gap below zero and two above the widest complete the first and the last cubic.
    x = step * torch.arange(-1, math.ceil(math.asinh(widest) / step) + 3, dtype=torch.float64)
    t = torch.sinh(x)[:, None] + nodes
    log_cdf = noise.log_cdf(t)
    hazard = torch.exp(noise.log_pdf(t) - log_cdf)
    return Tables(noise, step, log_cdf, (hazard * weights).T.contiguous(), weights)


def log_prob(gaps: Tensor, noise: Noise, at: Tensor) -> Tensor:
    """log C at the gaps `at` (n, m) of rows whose classes have the gaps `gaps` (n, k); float64, differentiable."""
    table = tables(noise)
    hazard = table.hazard.to(gaps.device)
    largest = _largest(gaps, table)
    near, far = split(at, gaps, noise, table.widest)
    place, weight = _cubic(near, table)
    if 4 * at.shape[1] < table.num_gaps // 8:
        # Few gaps are asked for: those columns of the product alone.
        curve = (hazard.T[place.flatten(1)] @ largest[..., None]).view_as(weight)
    else:
        curve = (largest @ hazard).gather(1, place.flatten(1)).view_as(weight)
    # The curve is never exactly zero: tiny keeps its logarithm finite where everything underflows.
    on_curve = (torch.log(curve + torch.finfo(gaps.dtype).tiny) * weight).sum(-1)
    return on_curve + far


@torch.no_grad()
def log_prob_and_slope(gaps: Tensor, noise: Noise, label: Tensor, grade: Grade) -> tuple[Tensor, Tensor]:
    """log p of one class per row (n,), and its derivative in every class's logit (n, k), from one pass.

    ∂ log p_y / ∂ s_j = −∫ (f/F)(u + d_j) r_y(u) du for j ≠ y, where r_y is the density of the winning y's u; and since
    only differences matter, the derivative in s_y is minus their sum.
    """
    table = tables(noise, grade)
    hazard, node_weight = table.hazard.to(gaps.device), table.weights.to(gaps.device)
    largest = _largest(gaps, table)
    of_label = gaps.gather(1, label[:, None])
    place, weight = _cubic(of_label, table)
    tiny = torch.finfo(gaps.dtype).tiny
    # (n, 4, nodes): the label's hazard at the four tabulated gaps around its own.
    columns = hazard.T[place[:, 0]] * largest[:, None, :]
    curve = columns.sum(-1) + tiny
    log_prob = (torch.log(curve) * weight[:, 0]).sum(-1) + tail_beyond(of_label, noise, table.widest)[:, 0]
    density = ((weight[:, 0] / curve)[..., None] * columns).sum(1)
    pull = (density / node_weight) @ hazard
    place, weight = _cubic(gaps, table)
    pulls = (pull.gather(1, place.flatten(1)).view_as(weight) * weight).sum(-1)
    return log_prob, slopes(pulls, of_label, gaps.argmin(1), label, noise, table.widest)


def slopes(pull: Tensor, of_label: Tensor, top: Tensor, label: Tensor, noise: Noise, widest: float) -> Tensor:
    """The derivative of log p_y in every class's logit, from how the others pull it down (n, k).

    Only differences matter; beyond the widest gap, that moves with the top, and the tail with the top and the label.
    """
    top, own = top[:, None], label[:, None]
    slope = pull.neg().scatter_(1, own, 0)
    slope.scatter_add_(1, torch.where(of_label > widest, top, own), -slope.sum(1, keepdim=True))
    if (of_label > widest).any():
        with torch.enable_grad():
            gap = of_label.detach().requires_grad_()
            (steepness,) = torch.autograd.grad(tail_beyond(gap, noise, widest).sum(), gap)
        slope.scatter_add_(1, top, steepness).scatter_add_(1, own, -steepness)
    return slope


def _largest(gaps: Tensor, table: Tables) -> Tensor:
    """G at the nodes, (n, nodes): the distribution function of the largest perturbed logit."""
    place, weight = _cubic(gaps, table)
    histogram = gaps.new_zeros(gaps.shape[0], table.num_gaps)
    histogram = histogram.scatter_add(1, place.flatten(1), weight.flatten(1))
    log_largest = histogram @ table.log_cdf.to(gaps.device)
    # Denormal numbers would be slow, and are below anything asked for.
    return torch.exp(log_largest.masked_fill(log_largest < -700, -math.inf))


def split(at: Tensor, gaps: Tensor, noise: Noise, widest: float) -> tuple[Tensor, Tensor]:
    """The gaps up to the widest one, and what the two-class tail adds to log C beyond it."""
    # The top's gap is zero, but the widest gap must move with it for the gradient to be right.
    top = gaps.amin(1, keepdim=True)
    return torch.where(at > widest, top + widest, at), tail_beyond(at - top, noise, widest)


def tail_beyond(gap: Tensor, noise: Noise, widest: float) -> Tensor:
    """How much the two-class tail falls from the widest gap to this one; nothing up to there.

    Beyond e^-1e6 it falls in proportion to the gap: finite, in order, and with a derivative that has digits.
    """
    farthest = widest_gap(noise, -1e6)
    tail = two_class_tail(gap.clamp(widest, farthest), noise) - two_class_tail(gap.new_tensor(widest), noise)
    return tail * (gap / farthest).clamp_min(1)


def numbers_per_row(noise: Noise, num_classes: int) -> int:
    """Working memory: four weights and places of each class, and the row's own histogram and curve."""
    table = tables(noise)
    return 20 * num_classes + 8 * (table.num_gaps + len(table.hazard))


def two_class_tail(gap: Tensor, noise: Noise) -> Tensor:
    """The leading term of log P(a class that far below wins): one large draw, or two that share the gap."""
    half = gap / 2
    return torch.maximum(noise.log_pdf(gap), noise.log_pdf(half) + noise.log_cdf(-half))


def _cubic(gaps: Tensor, table: Tables) -> tuple[Tensor, Tensor]:
    """The four tabulated gaps around each gap and Lagrange's weights, (n, m, 4)."""
    x = torch.asinh(gaps.clamp(max=table.widest)) / table.step
    first = x.detach().floor().clamp(0, table.num_gaps - 4)
    t = x - first
    before, after, far = t + 1, t - 1, t - 2
    weight = torch.stack(
        [-t * after * far / 6, before * after * far / 2, -before * t * far / 2, before * t * after / 6], dim=-1
    )
    return first.long()[..., None] + torch.arange(4, device=gaps.device), weight


@functools.lru_cache(maxsize=128)
def widest_gap(noise: Noise, faintest: float) -> float:
    """The gap at which the two-class tail falls to `faintest`."""
    low, high = 0.0, 1.0
    while two_class_tail(torch.tensor(high, dtype=torch.float64), noise) > faintest:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        faint = two_class_tail(torch.tensor(middle, dtype=torch.float64), noise) < faintest
        low, high = (low, middle) if faint else (middle, high)
    return high


def _curvatures(noise: Noise, u: Tensor) -> tuple[Tensor, Tensor]:
    """−(log f)'' and −(log F)'', nonnegative for the log-concave noises here; beside a knot, not on it."""
    for knot in noise.knots:
        u = torch.where((u - knot).abs() < 0.25, knot + 0.25, u)
    step = 1e-4
    # By differences: nodes need not be placed to the last digit, and second derivatives load all of torch's compiler.
    curvature = (_slope(noise, u + step) - _slope(noise, u - step)) / (2 * step)
    hazard = torch.exp(noise.log_pdf(u) - noise.log_cdf(u))
    return -curvature, hazard * (hazard - _slope(noise, u))


@torch.enable_grad()
def _slope(noise: Noise, u: Tensor) -> Tensor:
    """(log f)'."""
    u = u.detach().requires_grad_()
    (slope,) = torch.autograd.grad(noise.log_pdf(u).sum(), u)
    return slope


def sharpness(noise: Noise, left: float = -6.0) -> float:
    """How many times narrower than a Gaussian's the density's finest feature is, where it is not small."""
    u = torch.linspace(left, 6, 4001, dtype=torch.float64)
    likely = noise.log_pdf(u) > -3
    return max(1.0, float(_curvatures(noise, u[likely])[0].max().sqrt()))


@torch.inference_mode(False)
def nodes_and_weights(noise: Noise, faintest: float, step: float) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the trapezoid rule in v, where dv/du is one over the integrand's local width."""
    widest = widest_gap(noise, faintest)
    grid = torch.arange(-widest - 12, 60, 1 / 512, dtype=torch.float64)
    # Out of sight is what lies below e^-40 of the probability asked for, of the top class as of the widest gap's.
    top = noise.log_pdf(grid) > -40 - math.log(1000)
    far = noise.log_pdf(grid + widest) + noise.log_cdf(grid) > faintest - 40
    seen = (top | far).nonzero()
    grid = grid[int(seen[0]) : int(seen[-1]) + 1]
    of_pdf, of_cdf = _curvatures(noise, grid)
    # The gaps of other classes carry the features right of the middle to any node.
    density = torch.sqrt(sharpness(noise, left=0.0) ** 2 + 2 * of_cdf + of_pdf).numpy()
    u = grid.numpy()
    v = CubicSpline(u, density).antiderivative()(u)
    at = np.linspace(v[0], v[-1], math.ceil((v[-1] - v[0]) / step) + 1)
    nodes = CubicSpline(v, u)(at)
    weights = (at[1] - at[0]) / CubicSpline(u, density)(nodes)
    return torch.from_numpy(nodes), torch.from_numpy(weights)
