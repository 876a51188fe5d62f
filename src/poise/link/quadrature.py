"""The exact vote in its readable form: Gauss–Legendre panels, cut where a row's integrand is not smooth.

    p_k = ∫ (f/F)(u + d_k) · exp( Σ_j log F(u + d_j) ) du,     d_j = max s − s_j

It costs every class at every node of its own row, O(k · nodes). Noises with a kink need it; for the analytic ones it is
the reference that the tables of ``smooth`` are tested against.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from poise.link.smooth import nodes_and_weights, split, widest_gap
from poise.noise import Noise

FAINTEST = -80.0
"""Log-probability (of two classes) down to which the panels reach; beyond, the two-class tail is followed."""

_PANEL_NODES = 12

_CUT_CLASSES = 20
"""Of a symmetric noise with a kink at 0 only the top classes' kinks count: at the j-th, G is at most 2^-j."""


def log_prob(gaps: Tensor, noise: Noise, at: Tensor) -> Tensor:
    """log C at the gaps `at` (n, m) of rows whose classes have the gaps `gaps` (n, k); float64, differentiable."""
    u, log_weight = _panels(gaps.detach(), noise)
    log_largest = noise.log_cdf(u[:, None, :] + gaps[..., None]).sum(1)
    near, far = split(at, gaps, noise, widest_gap(noise, FAINTEST))
    t = u[:, None, :] + near[..., None]
    log_hazard = noise.log_pdf(t) - noise.log_cdf(t)
    on_panels = torch.logsumexp(log_hazard + (log_largest + log_weight)[:, None, :], dim=-1)
    return on_panels + far


def numbers_per_row(noise: Noise, num_classes: int) -> int:
    """Working memory: a few numbers for each class at each node."""
    num_panels = len(_edges(noise)) + _CUT_CLASSES * len(noise.knots)
    return 6 * num_classes * num_panels * _PANEL_NODES


@functools.lru_cache(maxsize=32)
def _edges(noise: Noise) -> Tensor:
    """Panel edges for any row: two widths of the integrand apart."""
    return nodes_and_weights(noise, FAINTEST, step=2.0)[0]


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def gauss_legendre(num_nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [0, 1]."""
    x, w = np.polynomial.legendre.leggauss(num_nodes)
    return torch.from_numpy((x + 1) / 2), torch.from_numpy(w / 2)


def _panels(gaps: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Nodes and log-weights (n, panels · nodes): the shared edges, and each row's own kinks."""
    edges = _edges(noise).to(gaps).expand(gaps.shape[0], -1)
    top = gaps.topk(min(_CUT_CLASSES, gaps.shape[1]), dim=1, largest=False).values
    cuts = [(knot - top).clamp(edges[0, 0], edges[0, -1]) for knot in noise.knots]
    edges = torch.cat([edges, *cuts], dim=1).sort(dim=1).values
    x, w = (values.to(gaps) for values in gauss_legendre(_PANEL_NODES))
    width = edges.diff(dim=1)[..., None]
    u = edges[:, :-1, None] + width * x
    return u.flatten(1), torch.log(width * w).flatten(1)
