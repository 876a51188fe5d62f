"""The metrics as slow loops, written from their formulas and from the published code's conventions."""

from __future__ import annotations

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
