"""The exact vote at a few softmaxes' cost: what a row's classes do together, and what each gets, as short series.

With the gaps d_j = max s − s_j and u measured from the top logit,

    log G(u) = Σ_j log F(u + d_j) ≈ Σ_r A_r(u) m_r,        m_r = Σ_j y_j^16 Q_r(x_j)          moments of the row
    log C(d) − log C(0)           ≈ (x + 1) Σ_r c_r Q_r(x),    C(d) = ∫ (f/F)(u + d) G(u) du    curve of the row
    p_k = C(d_k) / Σ_j C(d_j)

where y = c/(c + d) falls with the gap, x runs with it from −1 to 1, and Q_{8b+a} = T_{8b} T_a are products of
Chebyshev's polynomials. A class then costs one multiplication and addition per moment and one per coefficient; the
nodes u, the coefficients A and what makes a curve's series of its values depend on the noise alone, and only rows meet
them, not classes. In single precision p is good to 2e-6, and to one part in a thousand down to 1e-12.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from poise._types import Logits, Probs
from poise.link import smooth
from poise.noise import Noise

BLOCK = 8
"""Polynomials that share a T_{8b}."""

POWER = 16
"""Of y: without it, the large sums of far classes, which nearly cancel, would cost single precision its digits."""

_FAINTEST = -33.0
"""Log-probability of two classes at the farthest gap; 1e-12 is e^-27.6."""

_NODE_STEP = 0.25

ENOUGH = -29.0
"""log C(d)/C(0) at which a row's curve may end: beyond, it goes on in proportion to the gap."""

_SCALES = tuple(2.0 ** (-i / 4) for i in range(12))
"""How far a row's curve reaches, in units of the farthest gap: it ends sooner where many classes crowd."""

_BENDS = (0.25, 1.0, 3.0)
"""Values of c, in units of the farthest gap, of which each noise takes the best."""

_MOST_BLOCKS = 5
_CURVE_SPARE = 6
"""Gaps at which the curve is computed beyond the number of its coefficients; with both ends that makes 32."""

ROUNDING = 2.0**-20
"""Gaps are rounded to this part of 1 + d: what differs by less counts as equal, what differs by more keeps its order
through the last digits of a series."""


class Series(NamedTuple):
    """What a noise contributes; float64 on the CPU."""

    reach: float
    """The farthest gap of the moments."""
    bend: float
    """c of y = c/(c + d)."""
    to_log_largest: Tensor
    """A, (8 B, nodes)."""
    hazard: Tensor
    """(scales, nodes, 1 + points + 1): (f/F)(u + d) du at d = 0, at the points of the curve, and at its end."""
    to_curve: Tensor
    """(points, 8 B'): coefficients of a curve from its values."""
    ends: Tensor
    """(scales,): gaps at which the curves end."""
    error: float
    """Of log G and of some curves, at worst, in units of what is allowed."""

    @property
    def num_moments(self) -> int:
        return len(self.to_log_largest)

    @property
    def num_coefficients(self) -> int:
        return self.to_curve.shape[1]


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def series(noise: Noise) -> Series:
    """The shortest series that serve."""
    reach = smooth.widest_gap(noise, _FAINTEST)
    nodes, weights = smooth.nodes_and_weights(noise, _FAINTEST, _NODE_STEP)
    for num_blocks in range(3, _MOST_BLOCKS + 1):
        # Which bend is best, some of the nodes tell.
        errors = [_fit_log_cdf(noise, nodes[::9], reach, share * reach, num_blocks)[1] for share in _BENDS]
        if min(errors) <= 0.5:
            break
    bend = _BENDS[errors.index(min(errors))] * reach
    to_log_largest, error = _fit_log_cdf(noise, nodes, reach, bend, num_blocks)
    num_coefficients = 3 * BLOCK
    x = _chebyshev_points(num_coefficients + _CURVE_SPARE)
    points = torch.cat([x.new_zeros(1), _gap(x, reach, bend), x.new_tensor([reach])])
    scaled = torch.tensor(_SCALES, dtype=torch.float64)[:, None] * points
    t = scaled[:, None, :] + nodes[:, None]
    hazard = torch.exp(noise.log_pdf(t) - noise.log_cdf(t)) * weights[:, None]
    # Where a probability can be large, its logarithm must be good to as many digits.
    likely = torch.exp(smooth.two_class_tail(points[1:-1], noise)).clamp(1e-6 / 3e-4, 0.5)
    basis = polynomials(x, num_coefficients) * (x + 1)[:, None]
    to_curve = (torch.linalg.pinv(basis * likely[:, None]) * likely).T.contiguous()
    own = Series(reach, bend, to_log_largest, hazard, to_curve, scaled[:, -1], error)
    return own._replace(error=max(error, _curve_error(noise, own, nodes, weights)))


def has_series(noise: Noise) -> bool:
    """Whether they are short enough for this noise; those of steep ones are not."""
    return series(noise).error <= 1


def _fit_log_cdf(noise: Noise, nodes: Tensor, reach: float, bend: float, num_blocks: int) -> tuple[Tensor, float]:
    """A by weighted least squares, and its largest error in units of what is allowed."""
    x = _chebyshev_points(240)
    gap = _gap(x, reach, bend)
    target = noise.log_cdf(nodes[:, None] + gap)
    # G ≤ F(u), so that no probability notices an error where F(u) is small; and a thousand far classes add theirs up.
    allowed = 1e-6 * target.abs().clamp_min(1e-3) * torch.exp(-noise.log_cdf(nodes)).clamp_max(1e3)[:, None]
    basis = polynomials(x, BLOCK * num_blocks) * (bend / (bend + gap))[:, None] ** POWER
    scaled = basis / allowed[..., None]
    coefficients = torch.linalg.lstsq(scaled, (target / allowed)[..., None], driver="gels").solution[..., 0]
    error = ((coefficients @ basis.T - target) / allowed).abs().max()
    return coefficients.T.contiguous(), float(error)


def _curve_error(noise: Noise, own: Series, nodes: Tensor, weights: Tensor) -> float:
    """The largest error of curves in units of what is allowed: of one class alone, and of one far above 999 others."""
    gap = torch.linspace(0, own.reach, 400, dtype=torch.float64)
    t = gap[:, None] + nodes
    others = torch.tensor([0.25, 0.5, 0.75, 1.0], dtype=torch.float64)[:, None] * own.reach
    log_largest = noise.log_cdf(nodes) + 999 * torch.cat([torch.zeros_like(nodes)[None], noise.log_cdf(nodes + others)])
    largest = torch.exp(log_largest)
    exact = torch.log(largest @ (torch.exp(noise.log_pdf(t) - noise.log_cdf(t)) * weights).T)
    short = _log_shares(gap.expand(len(largest), -1), largest, own)
    allowed = (1e-6 / torch.exp(exact)).clamp_max(1e-3)
    error = (short - (exact - exact[:, :1])).abs() / allowed
    return float(error[exact > math.log(1e-12)].max())


def polynomials(x: Tensor, number: int) -> Tensor:
    """Q_r(x) = T_{8b}(x) T_a(x), r = 8b + a, along a new last axis."""
    low = [torch.ones_like(x), x]
    while len(low) <= BLOCK:
        low.append(2 * x * low[-1] - low[-2])
    high = [low[0], low[BLOCK]]
    while len(high) < number // BLOCK:
        high.append(2 * low[BLOCK] * high[-1] - high[-2])
    return torch.stack([high[r // BLOCK] * low[r % BLOCK] for r in range(number)], dim=-1)


def position(gap: Tensor, reach: float, bend: float) -> tuple[Tensor, Tensor]:
    """x, from −1 at no gap to 1 at the farthest; and y."""
    y = bend / (bend + gap)
    return 2 * (1 - y) * ((bend + reach) / reach) - 1, y


def _gap(x: Tensor, reach: float, bend: float) -> Tensor:
    """The gap at a position."""
    y = 1 - (x + 1) / 2 * (reach / (bend + reach))
    return bend / y - bend


def _chebyshev_points(number: int) -> Tensor:
    at = (torch.arange(number, dtype=torch.float64) + 0.5) / number
    return -torch.cos(math.pi * at)


def prob(scores: Logits, noise: Noise) -> Probs:
    """p, (n, k), readably and in float64: what the compiled forms are tested against."""
    own = series(noise)
    scores = scores.double().cpu()
    gap = rounded(scores.amax(1, keepdim=True) - scores)
    x, y = position(gap.clamp_max(own.reach), own.reach, own.bend)
    # Beyond the reach a class is too far to matter to the others.
    share = torch.where(gap <= own.reach, y**POWER, 0)
    moments = (polynomials(x, own.num_moments) * share[..., None]).sum(1)
    largest = torch.exp((moments @ own.to_log_largest).clamp_max(0))
    return torch.softmax(_log_shares(gap, largest, own), dim=1)


def _log_shares(gap: Tensor, largest: Tensor, own: Series) -> Tensor:
    """log C(d) − log C(0) of rows with G at the nodes."""
    curves = torch.einsum("nu,sup->nsp", largest, own.hazard)
    # The shortest curve at whose end next to nothing is left.
    ends = curves[..., -1] <= math.exp(ENOUGH) * curves[..., 0]
    scale = (ends * torch.arange(len(_SCALES), device=gap.device)).amax(1)
    curve = torch.log(curves[torch.arange(len(gap)), scale] + torch.finfo(torch.float32).tiny)
    coefficients = (curve[:, 1:-1] - curve[:, :1]) @ own.to_curve
    part = gap / own.ends[scale, None]
    x, _ = position((part * own.reach).clamp_max(own.reach), own.reach, own.bend)
    log_share = (x + 1) * (polynomials(x, own.num_coefficients) * coefficients[:, None, :]).sum(-1)
    return log_share * part.clamp_min(1)


def rounded(gap: Tensor) -> Tensor:
    """1 + d to 19 binary places after its first, less 1: equal gaps or clearly different ones."""
    mantissa, exponent = torch.frexp(1 + gap)
    return torch.ldexp(torch.round(mantissa / ROUNDING) * ROUNDING, exponent) - 1
