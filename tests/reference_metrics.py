"""The metrics as slow loops, written from their formulas and from the published code's conventions."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "logits"


def real_logits(name: str) -> tuple[Tensor, Tensor]:
    """Logits and labels of a real network; where the folder is missing CI fails and everyone else skips."""
    path = DATA / f"{name}.npz"
    if not path.exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"real data expected at {path}")
    with np.load(path) as file:
        return torch.from_numpy(file["logits"]), torch.from_numpy(file["labels"])


def gaps(values, hits, edges, weight=None, *, drop_lowest=False, drop_zero=False) -> list[tuple[float, float, float]]:
    """(weight, |gap| and weight of everything) of each bin (lo, hi]; the ends take what lies beyond them."""
    weight = np.ones(len(values)) if weight is None else np.asarray(weight, dtype=float)
    sums = [[0.0, 0.0, 0.0] for _ in edges[1:]]
    for value, hit, heavy in zip(values, hits, weight, strict=True):
        if (drop_lowest and value <= edges[0]) or (drop_zero and value <= 0) or heavy == 0:
            continue
        place = next((b for b in range(len(sums)) if value <= edges[b + 1]), len(sums) - 1)
        sums[place][0] += heavy
        sums[place][1] += heavy * float(value)
        sums[place][2] += heavy * bool(hit)
    return [(n, abs(c - a) / n if n else math.nan, weight.sum()) for n, c, a in sums]


def error(bins) -> float:
    return sum(n * gap / total for n, gap, total in bins if n)


def equal_width_edges(num_bins, dtype) -> np.ndarray:
    return np.array([dtype(j / num_bins) for j in range(num_bins + 1)])


def equal_mass_edges(values, num_bins) -> np.ndarray:
    """The published interpolation."""
    n = len(values)
    edges = np.interp(np.linspace(0, n, num_bins + 1), np.arange(n), np.sort(values).astype(float))
    return edges.astype(values.dtype)


def top(probs, labels):
    predicted = [max(range(len(row)), key=lambda k: (row[k], -k)) for row in probs]
    confidence = np.array([row[k] for row, k in zip(probs, predicted, strict=True)], dtype=probs.dtype)
    return confidence, [k == y for k, y in zip(predicted, labels, strict=True)]


def ece(probs, labels, num_bins=15, weight=None):
    confidence, correct = top(probs, labels)
    return error(gaps(confidence, correct, equal_width_edges(num_bins, probs.dtype.type), weight))


def mce(probs, labels, num_bins=15, weight=None):
    confidence, correct = top(probs, labels)
    return max(
        gap for n, gap, _ in gaps(confidence, correct, equal_width_edges(num_bins, probs.dtype.type), weight) if n
    )


def average_calibration_error(probs, labels, num_bins=15, weight=None):
    confidence, correct = top(probs, labels)
    bins = gaps(confidence, correct, equal_width_edges(num_bins, probs.dtype.type), weight)
    return float(np.mean([gap for n, gap, _ in bins if n]))


def adaptive_ece(probs, labels, num_bins=15, *, drop_lowest=False):
    confidence, correct = top(probs, labels)
    return error(gaps(confidence, correct, equal_mass_edges(confidence, num_bins), drop_lowest=drop_lowest))


def classwise_ece(probs, labels, num_bins=15, weight=None):
    edges = equal_width_edges(num_bins, probs.dtype.type)
    columns = range(probs.shape[1])
    return float(np.mean([error(gaps(probs[:, k], labels == k, edges, weight, drop_zero=True)) for k in columns]))


def adaptive_classwise_ece(probs, labels, num_bins=15):
    columns = [probs[:, k] for k in range(probs.shape[1])]
    return float(np.mean([error(gaps(p, labels == k, equal_mass_edges(p, num_bins))) for k, p in enumerate(columns)]))


def nll(probs, labels, floor=1e-12, weight=None):
    losses = [-math.log(float(row[y]) + floor) for row, y in zip(probs, labels, strict=True)]
    return float(np.average(losses, weights=weight))


def brier(probs, labels, weight=None):
    scores = [sum((float(p) - (k == y)) ** 2 for k, p in enumerate(row)) for row, y in zip(probs, labels, strict=True)]
    return float(np.average(scores, weights=weight))


def top_k_accuracy(probs, labels, k=5, weight=None):
    hits = [y in sorted(range(len(row)), key=lambda j: (-row[j], j))[:k] for row, y in zip(probs, labels, strict=True)]
    return float(np.average(hits, weights=weight))


def accuracy(probs, labels, weight=None):
    return top_k_accuracy(probs, labels, 1, weight)


def smooth_ece(probs, labels, nodes=3000):
    """The reflected Gaussian by its images, the fixed point by bisection."""
    confidence, correct = top(probs, labels)
    residual = (confidence.astype(float) - np.array(correct, dtype=float)) / len(labels)
    t = (np.arange(nodes) + 0.5) / nodes

    def error(width):
        curve = np.zeros(nodes)
        for shift in range(-4, 6, 2):
            for images in (confidence + shift, shift - confidence):
                curve += np.exp(-0.5 * ((t[:, None] - images) / width) ** 2) @ residual
        return np.abs(curve).mean() / (width * math.sqrt(2 * math.pi))

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle) > middle else (low, middle)
    return high


def ks_error(probs, labels):
    confidence, correct = top(probs, labels)
    largest = 0.0
    for level in confidence:
        below = [float(c) - bool(a) for c, a in zip(confidence, correct, strict=True) if c <= level]
        largest = max(largest, abs(sum(below)) / len(labels))
    return largest


def ece_sweep(probs, labels):
    confidence, correct = top(probs, labels)
    correct = np.array(correct, dtype=float)
    best = 1
    for num_bins in range(2, len(labels) + 1):
        edges = equal_mass_edges(confidence, num_bins)
        place = np.searchsorted(edges[1:-1], confidence)
        accuracy = [correct[place == b].mean() for b in range(num_bins) if (place == b).any()]
        if any(later < earlier for earlier, later in itertools.pairwise(accuracy)):
            break
        best = num_bins
    return error(gaps(confidence, correct, equal_mass_edges(confidence, best)))


def piece(probs, labels, features, num_bins=15, num_groups=10, num_neighbors=10):
    directions = features / np.linalg.norm(features, axis=1, keepdims=True)
    near = []
    for i, direction in enumerate(directions):
        squared = sorted(float(((direction - other) ** 2).sum()) for j, other in enumerate(directions) if j != i)
        near.append(np.mean(np.exp(-np.array(squared[:num_neighbors]))))
    cuts = np.percentile(near, np.linspace(0, 100, num_groups + 1))[1:-1]
    group = np.searchsorted(cuts, near, side="right")
    return sum(
        (group == g).mean() * ece(probs[group == g], labels[group == g], num_bins)
        for g in range(num_groups)
        if (group == g).any()
    )
