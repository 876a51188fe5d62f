"""Calibration methods as slow loops, from their papers, in numpy and scipy."""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize, special


def softmax(logits):
    return special.softmax(np.asarray(logits, dtype=float), axis=1)


def histogram_rate(values, hits, p, num_bins) -> float:
    """Share of hits in the equal-width bin (lo, hi] of p; its centre where nobody is."""
    bin_of = [max(0, math.ceil(value * num_bins) - 1) for value in values]
    mine = max(0, math.ceil(p * num_bins) - 1)
    inside = [hit for place, hit in zip(bin_of, hits, strict=True) if place == mine]
    return sum(inside) / len(inside) if inside else (mine + 0.5) / num_bins


def bbq_rate(values, hits, p) -> float:
    """BBQ of one probability: Naeini et al., equations 5 to 9, for values that all differ."""
    order = np.argsort(values)
    values, hits = np.asarray(values)[order], np.asarray(hits)[order]
    n = len(values)
    least = max(1, math.floor(n ** (1 / 3) / 10))
    most = max(1, min(math.ceil(10 * n ** (1 / 3)), n // 5))
    scores, rates = [], []
    for size in range(min(least, most), most + 1):
        # Where b·n/B is whole the edge lies between two samples, else at the sample that rank falls into.
        edges, cuts = [0.0], [0]
        for b in range(1, size):
            last = -(-b * n // size)
            whole = b * n % size == 0
            edges.append((values[last - 1] + values[last]) / 2 if whole else values[last - 1])
            cuts.append(last)
        edges, cuts = [*edges, 1.0], [*cuts, n]
        log_score, rate = 0.0, None
        for b in range(size):
            count = cuts[b + 1] - cuts[b]
            right = hits[cuts[b] : cuts[b + 1]].sum()
            prior, middle = 2 / size, (edges[b] + edges[b + 1]) / 2
            alpha, beta = prior * middle, prior * (1 - middle)
            log_score += math.lgamma(prior) - math.lgamma(count + prior)
            log_score += math.lgamma(right + alpha) - math.lgamma(alpha)
            log_score += math.lgamma(count - right + beta) - math.lgamma(beta)
            if edges[b] < p <= edges[b + 1]:
                rate = (right + alpha) / (count + prior)
        scores.append(log_score)
        rates.append(rate)
    return float(special.softmax(scores) @ rates)


def isotonic_curve(values, hits):
    """p → increasing least squares fit, linear between the values it was fitted on (which all differ)."""
    order = np.argsort(values)
    heights = optimize.isotonic_regression(np.asarray(hits, dtype=float)[order]).x
    return lambda p: np.interp(p, np.asarray(values)[order], heights)


def spline_confidences(confidence, hits, num_knots=6):
    """The calibrated validation confidences, in increasing order: h by least squares, its slope half way up each step.

    The natural cubic basis of truncated powers (Hastie, Tibshirani, Friedman, section 5.2.1).
    """
    order = np.argsort(confidence)
    confidence, hits = np.asarray(confidence)[order], np.asarray(hits, dtype=float)[order]
    n = len(confidence)
    cumulated = np.concatenate([[0.0], np.cumsum(hits - confidence) / n])
    knots = np.linspace(0, 1, num_knots)

    def powers(t, k, slope):
        def cube(at):
            above = np.clip(t - at, 0, None)
            return 3 * above**2 if slope else above**3

        return (cube(knots[k]) - cube(knots[-1])) / (knots[-1] - knots[k])

    def basis(t, slope=False):
        bent = [powers(t, k, slope) - powers(t, num_knots - 2, slope) for k in range(num_knots - 2)]
        line = [np.zeros_like(t), np.ones_like(t)] if slope else [np.ones_like(t), t]
        return np.stack([*line, *bent], axis=1)

    heights = np.linalg.lstsq(basis(np.linspace(0, 1, n + 1)), cumulated, rcond=None)[0]
    middle = (np.arange(n) + 0.5) / n
    return np.clip(confidence + basis(middle, slope=True) @ heights, 1 / (n + 1), n / (n + 1))


def beta_coefficients(values, hits):
    """(a, b, c) of sigmoid(a log p − b log(1 − p) + c) with a, b ≥ 0, by likelihood and a prior N((1, 1, 0), 1)."""
    design = np.stack([np.log(values), -np.log1p(-values), np.ones_like(values)], axis=1)

    def loss(theta):
        scores = design @ theta
        return np.logaddexp(0, scores).sum() - scores @ hits + ((theta - [1, 1, 0]) ** 2).sum() / 2

    found = optimize.minimize(
        loss, [1.0, 1.0, 0.0], method="L-BFGS-B", bounds=[(0, None), (0, None), (None, None)], options={"ftol": 1e-15}
    )
    return found.x


def nearest(features, reference, num_neighbors, alone) -> np.ndarray:
    """(n, num_neighbors) squared distances of directions, nearest first; nobody is their own neighbour."""
    directions = [row / np.linalg.norm(row) for row in np.asarray(features, dtype=float)]
    others = [row / np.linalg.norm(row) for row in np.asarray(reference, dtype=float)]
    found = []
    for i, row in enumerate(directions):
        distances = [((row - other) ** 2).sum() for j, other in enumerate(others) if not (alone and i == j)]
        found.append(sorted(distances)[:num_neighbors])
    return np.array(found)


def density_ratio(point, right, wrong) -> float:
    """ProCal's confidence: f₁/(f₁ + ρ f₀) with products of normal kernels whose widths are 1.06 s n^(-1/6)."""

    def density(seen):
        width = 1.06 * seen.std(axis=0) * len(seen) ** (-1 / 6)
        kernels = np.exp(-(((point - seen) / width) ** 2) / 2) / (width * math.sqrt(2 * math.pi))
        return kernels.prod(axis=1).mean()

    first, second = density(right), density(wrong)
    return float(first / (first + len(wrong) / len(right) * second))


def with_confidence(probs, confidence):
    """The top class gets the confidence, at least what makes it no smaller than the next; the others share the rest."""
    result = []
    for row, c in zip(np.asarray(probs), confidence, strict=True):
        top = row.argmax()
        rest = np.delete(row, top) / np.delete(row, top).sum()
        c = max(c, rest.max() / (1 + rest.max()))
        result.append(np.insert((1 - c) * rest, top, c))
    return np.array(result)


def intra_order_preserving(logits, factors):
    """f(z) = S⁻¹ U (y ⊙ m) by Rahimi et al., less its own last entry: out_(i) = Σ_{j ≥ i} (z_(j) − z_(j+1)) m_j."""
    result = np.zeros(logits.shape)
    for row, (z, m) in enumerate(zip(logits, factors, strict=True)):
        order = np.argsort(-z)
        for i in range(len(z)):
            result[row, order[i]] = sum((z[order[j]] - z[order[j + 1]]) * m[j] for j in range(i, len(z) - 1))
    return result
