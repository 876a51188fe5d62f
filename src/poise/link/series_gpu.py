"""The series of ``series`` on a GPU: three kernels, and what goes between them.

Rows go through in portions, so that what stands between the kernels is less than a hundredth of input and output at a
thousand classes. Logits are computed with as float32, whatever their type.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from poise._types import Labels, Logits, Probs
from poise.kernels import series as kernels
from poise.link.series import ENOUGH, series
from poise.noise import Noise

_OF_MOMENTS = {"SIZE": 64, "num_warps": 1}
"""Classes that a warp takes at a time: two a thread, whose sums fit its registers."""

_OF_PROBS = {"SIZE": 128, "num_warps": 1}

_OF_CURVES = {"ROWS": 16, "TILE": 16, "PRECISION": "ieee", "num_warps": 4}
"""A tile of rows and nodes, and how its matrix products are made."""

_NODES = 32
"""The number of nodes is padded to a multiple of this, the largest tile."""

_SCRATCH_BYTES = 3 * 2**20

_SPARE = 8
"""Columns beyond a row's moments: its top logit needs one."""


class Tables(NamedTuple):
    """A noise's series on a device, with zeros where matrix products want more."""

    reach: float
    bend: float
    num_moments: int
    to_log_largest: Tensor
    """(moments, nodes)"""
    ends: Tensor
    """(nodes, 16): at d = 0, then at the end of each scale."""
    points: Tensor
    """(scales, nodes, 32): at d = 0, then at the points of the curve."""
    to_curve: Tensor
    """(32, 32)"""
    scales: Tensor
    """(16,): gaps at which the curves end."""


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def tables(noise: Noise, device: torch.device) -> Tables:
    own = series(noise)
    num_scales, num_nodes, num_points = own.hazard.shape
    nodes = -(-num_nodes // _NODES) * _NODES
    shapes = ((-(-own.num_moments // 16) * 16, nodes), (nodes, 16), (num_scales, nodes, 32), (32, 32), (16,))
    to_log_largest, ends, points, to_curve, scales = (torch.zeros(shape) for shape in shapes)
    to_log_largest[: own.num_moments, :num_nodes] = own.to_log_largest
    ends[:num_nodes, 0] = own.hazard[0, :, 0]
    ends[:num_nodes, 1 : 1 + num_scales] = own.hazard[:, :, -1].T
    points[:, :num_nodes, : num_points - 1] = own.hazard[:, :, :-1]
    to_curve[1 : num_points - 1, : own.num_coefficients] = own.to_curve
    scales[1 : 1 + num_scales] = own.ends
    parts = (part.to(device) for part in (to_log_largest, ends, points, to_curve, scales))
    return Tables(own.reach, own.bend, own.num_moments, *parts)


def prob(scores: Logits, noise: Noise, strength: float = 1.0, lapse: float = 0.0) -> Probs:
    """(1 − l) p + l/k at s = z/ε, (n, k), in the type of the logits."""
    scores = scores.contiguous()
    num_classes = scores.shape[1]
    out = torch.empty_like(scores)
    table = tables(noise, scores.device)
    for start, curves in _curves_of(scores, table, strength):
        kernels.prob[(len(curves),)](
            scores[start:],
            out[start:],
            curves,
            num_classes,
            1 / strength,
            table.reach,
            table.bend,
            lapse,
            STRIDE=curves.shape[1],
            **_OF_PROBS,
        )
    return out


def prob_of(scores: Logits, noise: Noise, labels: Labels, strength: float = 1.0) -> tuple[Tensor, Tensor]:
    """p of the labeled classes and of the top ones, two times (n,) in float32."""
    scores = scores.contiguous()
    of_label, of_top = (torch.empty(len(scores), device=scores.device) for _ in range(2))
    table = tables(noise, scores.device)
    for start, curves in _curves_of(scores, table, strength):
        kernels.prob_of[(triton.cdiv(len(curves), 128),)](
            scores[start:],
            labels[start:],
            of_label[start:],
            of_top[start:],
            curves,
            len(curves),
            scores.shape[1],
            1 / strength,
            table.reach,
            table.bend,
            STRIDE=curves.shape[1],
            ROWS=128,
            num_warps=4,
        )
    return of_label, of_top


def _curves_of(scores: Logits, table: Tables, strength: float) -> Iterator[tuple[int, Tensor]]:
    """The first row of each portion, and the portion's curves."""
    num_rows, num_classes = scores.shape
    stride = table.num_moments + _SPARE
    most = max(64, _SCRATCH_BYTES // (4 * stride))
    scratch = torch.empty(min(num_rows, most), stride, device=scores.device)
    for start in range(0, num_rows, most):
        curves = scratch[: min(most, num_rows - start)]
        kernels.moments[(len(curves),)](
            scores[start:],
            curves,
            num_classes,
            1 / strength,
            table.reach,
            table.bend,
            STRIDE=stride,
            MOMENTS=table.num_moments,
            **_OF_MOMENTS,
        )
        kernels.curves[(triton.cdiv(len(curves), _OF_CURVES["ROWS"]),)](
            curves,
            table.to_log_largest,
            table.ends,
            table.points,
            table.to_curve,
            table.scales,
            len(curves),
            math.exp(ENOUGH),
            STRIDE=stride,
            MOMENTS=table.num_moments,
            SCALES=len(table.points),
            NODES=len(table.ends),
            **_OF_CURVES,
        )
        yield start, curves
