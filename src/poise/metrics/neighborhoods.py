"""Calibration among the typical and among the rare: errors within groups of equal nearness to other samples."""

from __future__ import annotations

import torch
from torch import Tensor

from poise import _check
from poise._arrays import to_tensor
from poise._types import Array
from poise.metrics.bins import equal_width_edges, tally, top_label

_ENTRIES_AT_A_TIME = 1 << 23


def piece(
    probs: Array,
    labels: Array,
    features: Array,
    num_bins: int = 15,
    *,
    reference: Array | None = None,
    num_groups: int = 10,
    num_neighbors: int = 10,
) -> float:
    """Proximity-informed expected calibration error (PIECE): `ece` within groups of equal proximity, averaged.

    Σ_g n_g/n · ECE(samples of group g), groups cut at the quantiles of the `proximity` of the features.

    Never below the `ece` with the same bins; the difference is error that cancels between common and rare samples. The
    cells are small, so noise adds more than to `ece` (10 × 15 bins: see `noise_floor`).

    >>> probs, features = [[0.75, 0.25]] * 4, [[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [-1.0, 0.2]]
    >>> piece(probs, [0, 0, 0, 1], features, num_groups=2, num_neighbors=1)
    0.25

    Reference: Xiong et al., NeurIPS 2023. Their bins are [lo, hi), ours (lo, hi] as everywhere here.
    """
    samples = len(to_tensor(labels))
    near = proximity(_check.tensor(features, "features", num_samples=samples), reference, num_neighbors=num_neighbors)
    return grouped_ece(probs, labels, proximity_groups(near, num_groups), num_bins)


def grouped_ece(probs: Array, labels: Array, group: Tensor, num_bins: int = 15) -> float:
    """`ece` within groups of rows, averaged: Σ_g n_g/n · ECE(samples of group g)."""
    confidence, correct, _, dtype = top_label(probs, labels)
    edges = equal_width_edges(num_bins, dtype).to(confidence)[None]
    error = torch.zeros((), dtype=torch.float64, device=confidence.device)
    for members in (group == number for number in range(int(group.max()) + 1)):
        if members.any():
            bins = tally(confidence[None, members], correct[None, members], edges, None)[0]
            error += bins.error * bins.total / len(confidence)
    return float(error)


def proximity_groups(near: Tensor, num_groups: int = 10) -> Tensor:
    """The group of each sample, of groups cut at the quantiles of the proximity: (n,) whole numbers."""
    _check.whole(num_groups, "num_groups")
    cuts = torch.quantile(near, torch.linspace(0, 1, num_groups + 1, dtype=near.dtype, device=near.device)[1:-1])
    return torch.searchsorted(cuts, near, right=True)


def proximity(features: Array, reference: Array | None = None, *, num_neighbors: int = 10) -> Tensor:
    """How near each sample is to its nearest neighbours, between e⁻⁴ (far) and 1: (n,) float64.

    mean_j exp(−‖f − f_j‖²) over the nearest rows f_j of the reference, features scaled to length one.

    Without a reference the neighbours are sought among the samples themselves, each one excluded from its own.

    >>> proximity([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]], num_neighbors=1).round(decimals=4).tolist()
    [1.0, 1.0, 0.1353]

    Reference: Xiong et al., NeurIPS 2023 (the mean of exponentials, as in their code).
    """
    return torch.exp(-neighbor_distances(features, reference, num_neighbors=num_neighbors)).mean(dim=1)


def neighbor_distances(features: Array, reference: Array | None = None, *, num_neighbors: int = 10) -> Tensor:
    """(n, num_neighbors) float64 squared distances to the nearest rows of the reference, nearest first.

    Features are scaled to length one. Without a reference the neighbours are sought among the samples themselves, each
    one excluded from its own.
    """
    samples = _directions(features, "features")
    others = samples if reference is None else _directions(reference, "reference").to(samples)
    if others.shape[1] != samples.shape[1]:
        raise ValueError(
            f"features and reference must come from the same layer, but have {samples.shape[1]} and {others.shape[1]} "
            "columns."
        )
    available = len(others) - (reference is None)
    if _check.whole(num_neighbors, "num_neighbors") > available:
        raise ValueError(
            f"num_neighbors is {num_neighbors} but there are only {available} other rows to be neighbors; pass fewer "
            "neighbors or more reference features."
        )
    parts = []
    step = max(1, _ENTRIES_AT_A_TIME // len(others))
    for start in range(0, len(samples), step):
        cosine = samples[start : start + step] @ others.T
        if reference is None:
            cosine.diagonal(start).fill_(-torch.inf)
        nearest = cosine.topk(num_neighbors, dim=1).values.double()
        parts.append((2 - 2 * nearest).clamp(min=0))
    return torch.cat(parts)


def _directions(features: Array, name: str) -> Tensor:
    return torch.nn.functional.normalize(_check.tensor(features, name).detach().flatten(1), dim=1)
