"""The exact vote for U(-1, 1): between the points where a class drops out, the integrand is a polynomial.

    p_k = ∫_0^{2 - d_k} G(v) / (v + d_k) dv,     G(v) = Π_j F_j(v),     F_j(v) = (v + d_j)/2 up to 1, and 1 beyond

with v = u + 1, so that class k's integral ends, with a jump, at v = 2 − d_k, and classes with d_k ≥ 2 never win. Panels
end where a class does. The slopes are means over the same nodes, v being distributed as it is when class k wins:

    ∂ log p_k / ∂ d_j = E[1/(v + d_j); v < 2 − d_j],  j ≠ k,    and that in d_k makes their sum zero
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from poise.link.quadrature import gauss_legendre

_MOST_NODES = 8
"""Of a panel: exact for 16 factors, and to 1e-10 where the product falls by no more than e^-6."""

_STEEPEST = 6.0

_CROWD = 64
"""As many classes times as many nodes are worked on together; with more classes fewer nodes, at least one panel's."""


def log_prob(gaps: Tensor, at: Tensor) -> Tensor:
    """log p at the gaps `at` (n, m), each of which is among the row's `gaps` (n, k); float64, differentiable once."""
    within = (gaps < 2).sum(1)
    # The cost is that of the fullest row: rows of like fullness go together.
    fullness = (within - 1).clamp_min(1).log2().floor().long()
    groups = [(fullness == level).nonzero()[:, 0] for level in torch.unique(fullness)]
    parts = []
    for rows in groups:
        most = int(within[rows].max())
        near = gaps[rows].topk(most, dim=1, largest=False, sorted=True).values
        asked = at[rows].topk(min(most, at.shape[1]), dim=1, largest=False)
        curve = _Curve.apply(near.clamp(max=2), asked.values.clamp(max=2))  # type: ignore[no-untyped-call]
        parts.append(torch.full_like(at[rows], -math.inf).scatter(1, asked.indices, curve))
    return torch.cat(parts)[torch.cat(groups).argsort()]


def numbers_per_row(num_classes: int) -> int:
    """Working memory: a few numbers for each class at the nodes that are worked on together."""
    return 6 * min(num_classes, _CROWD) * _CROWD


class _Curve(torch.autograd.Function):
    """log ∫_0^{2 - d} G(v)/(v + d) dv at the gaps `at`, which are among `near`, rising from 0 to 2 at most."""

    @staticmethod
    def forward(near: Tensor, at: Tensor) -> Tensor:
        log_curve = torch.full_like(at, -math.inf)
        for v, log_weight in _nodes(near, at):
            log_curve = torch.logaddexp(log_curve, torch.logsumexp(_log_terms(v, log_weight, near, at), dim=-1))
        return log_curve

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        near, at, log_curve = ctx.saved_tensors
        empty = log_curve == -math.inf
        grad, log_curve = grad.masked_fill(empty, 0), log_curve.masked_fill(empty, 0)
        grad_near, grad_at = torch.zeros_like(near), torch.zeros_like(at)
        for v, log_weight in _nodes(near, at):
            share = torch.exp(_log_terms(v, log_weight, near, at) - log_curve[..., None])
            slope = torch.where(v[:, None, :] < 2 - near[..., None], 1 / (v[:, None, :] + near[..., None]), 0)
            grad_near += torch.einsum("nr,nrq,njq->nj", grad, share, slope)
            grad_at -= grad * torch.einsum("nrq,njq->nr", share, slope)
        return grad_near, grad_at


def _nodes(near: Tensor, at: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Nodes v and the logarithms of their weights (n, nodes), some panels at a time; -inf for panels of no width."""
    num_classes = near.shape[1]
    x, w = (values.to(near) for values in gauss_legendre(min(_MOST_NODES, math.ceil(num_classes / 2))))
    edges = _edges(near)
    panels_at_once = max(1, _CROWD * _CROWD // (_MOST_NODES * max(num_classes, at.shape[1])))
    width = -edges.diff(dim=1)[..., None]
    # A panel of no width has no weight either, but 1/(v + d) must be a number.
    v = torch.where(width > 0, edges[:, :-1, None] - width * x, 1.0)
    weight = width * w
    for some in zip(torch.split(v, panels_at_once, 1), torch.split(weight, panels_at_once, 1), strict=True):
        yield some[0].flatten(1), torch.log(some[1]).flatten(1)


def _edges(near: Tensor) -> Tensor:
    """Edges of the panels, falling from 2 to 0 (n, panels + 1): the ends of the classes, and more where G is steep.

    G falls ever faster from the end of a class to the next one's: halves of halves, towards where it is large.
    """
    ends = torch.cat([2 - near, torch.zeros_like(near[:, :1])], dim=1)
    high, width = ends[:, :-1], -ends.diff(dim=1)
    # (log G)' = Σ 1/(v + d_j) at the upper end is below the chord of 1/(v + d) times the number of classes.
    rank = torch.arange(1, near.shape[1] + 1, dtype=near.dtype, device=near.device)
    evenness = torch.where(near > 0, near.cumsum(1) / rank / near, 0)
    fall = torch.where(width > 0, width * rank * ((1 - evenness) / high + evenness / 2), 0)
    depth = math.ceil(math.log2(max(1.0, float(fall.max()) / _STEEPEST)))
    halvings = 0.5 ** torch.arange(1, depth + 1, dtype=near.dtype, device=near.device)
    is_cut = 2 * fall[..., None] * halvings > _STEEPEST
    cuts = torch.where(is_cut, high[..., None] - width[..., None] * halvings, 0).flatten(1)
    cuts = cuts.topk(int(is_cut.flatten(1).sum(1).max()), dim=1).values
    return torch.cat([ends, cuts], dim=1).sort(dim=1, descending=True).values


def _log_terms(v: Tensor, log_weight: Tensor, near: Tensor, at: Tensor) -> Tensor:
    """log of weight · G/(v + d) (n, gaps, nodes), for the nodes up to a gap's end."""
    inside = v[:, None, :] < 2 - at[..., None]
    log_mass = (_log_largest(v, near) + log_weight)[:, None, :]
    return (log_mass - torch.log(v[:, None, :] + at[..., None])).masked_fill(~inside, -math.inf)


def _log_largest(v: Tensor, near: Tensor) -> Tensor:
    """log G, G being the distribution function of the largest perturbed logit."""
    # One logarithm for eight classes: a product of eight stays far from underflow.
    near = torch.nn.functional.pad(near, (0, -near.shape[1] % 8), value=2.0)
    cdf = ((v[:, None, :] + near[..., None]) / 2).clamp(max=1)
    return torch.log(cdf.view(len(v), -1, 8, v.shape[1]).prod(2)).sum(1)
