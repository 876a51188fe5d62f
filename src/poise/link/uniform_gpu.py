"""The exact vote for U(-1, 1) on a GPU: its kernel for rows with up to 64 classes within reach, the CPU for others."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from poise import link
from poise._types import Labels, Logits, Probs
from poise.kernels import uniform as kernels
from poise.link.quadrature import gauss_legendre
from poise.noise import Noise, Uniform

_FEW, _MOST = 16, 64
"""Classes within reach that the kernel has a form for."""

_OF_VOTES = {"SIZE": 128, "num_warps": 1}
_SCRATCH_BYTES = 4 * 2**20


def prob(scores: Logits, noise: Noise, strength: float = 1.0, lapse: float = 0.0) -> Probs:
    """(1 − l) p + l/k at s = z/ε, (n, k), in the type of the logits."""
    scores = scores.contiguous()
    out = torch.empty_like(scores)
    crowded = _run(scores, out, None, strength, lapse)
    if len(crowded):
        out[crowded] = ((1 - lapse) * _readable(scores[crowded], strength) + lapse / scores.shape[1]).to(out.dtype)
    return out


def prob_of(scores: Logits, noise: Noise, labels: Labels, strength: float = 1.0) -> tuple[Tensor, Tensor]:
    """p of the labeled classes and of the top ones, two times (n,) in float32."""
    scores = scores.contiguous()
    found = torch.empty(2, len(scores), device=scores.device)
    crowded = _run(scores, found, labels, strength, 0.0)
    if len(crowded):
        probs = _readable(scores[crowded], strength).float()
        found[0, crowded] = probs.gather(1, labels[crowded, None])[:, 0]
        found[1, crowded] = probs.amax(1)
    of_label, of_top = found
    return of_label, of_top


def _run(scores: Logits, out: Tensor, labels: Labels | None, strength: float, lapse: float) -> Tensor:
    """Starts the kernel; returns the rows that it left alone."""
    num_rows, num_classes = scores.shape
    rule = _rule(scores.device)
    most = max(1, _SCRATCH_BYTES // (4 * _MOST))
    near = torch.empty(min(num_rows, most), _MOST, dtype=torch.int32, device=scores.device)
    within = torch.empty(num_rows, dtype=torch.int32, device=scores.device)
    for start in range(0, num_rows, most):
        kernels.vote[(min(most, num_rows - start),)](
            scores[start:],
            out[start:] if labels is None else out[0, start:],
            out if labels is None else out[1, start:],
            near if labels is None else labels[start:],
            near,
            within[start:],
            rule,
            num_classes,
            1 / strength,
            lapse,
            IS_FULL=labels is None,
            FEW=_FEW,
            MOST=_MOST,
            **_OF_VOTES,
        )
    return (within > _MOST).nonzero()[:, 0]


def _readable(scores: Logits, strength: float) -> Probs:
    """On the CPU, whose form for crowded rows is compiled."""
    scaled = scores.cpu().double() / strength
    return torch.exp(link.Link(Uniform()).log_prob(scaled)).to(scores.device)


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _rule(device: torch.device) -> Tensor:
    """Nodes and weights on [0, 1]: first of the rule for few classes, then of that for many."""
    parts = [part for most in (_FEW, _MOST) for part in gauss_legendre(most // 2)]
    return torch.cat(parts).float().to(device)
