"""The train-time losses, one row at a time, as the papers write them and in float64."""

from __future__ import annotations

import numpy as np


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def cross_entropy(z, y):
    return -np.log(softmax(z)[y])


def brier(z, y):
    p = softmax(z)
    return sum((p[k] - (k == y)) ** 2 for k in range(len(p)))


def smoothed(z, y, alpha, spread):
    p, total = softmax(z), 0.0
    for k in range(len(p)):
        target = (1 - alpha) * (k == y)
        target += alpha / len(p) if spread == "all" else alpha * (k != y) / (len(p) - 1)
        total -= target * np.log(p[k])
    return total


def focal(z, y, gamma):
    p = softmax(z)[y]
    return -((1 - p) ** gamma) * np.log(p)


def flsd_53(z, y):
    return focal(z, y, 5 if softmax(z)[y] < 0.2 else 3)


def dual_focal(z, y, gamma):
    p = softmax(z)
    lower = [value for value in p if value < p[y]]
    return -((1 - p[y] + max(lower, default=0.0)) ** gamma) * np.log(p[y])


def adafocal(z, y, gammas, edges):
    p = softmax(z)[y]
    gamma = gammas[sum(p > edge for edge in edges)]
    return -((1 - p) ** gamma if gamma >= 0 else (1 + p) ** -gamma) * np.log(p)


def top_labels(logits, labels):
    probs = [softmax(z) for z in logits]
    return [p.max() for p in probs], [float(p.argmax() == y) for p, y in zip(probs, labels, strict=True)]


def mmce(logits, labels, weight, width):
    c, a = top_labels(logits, labels)
    n = len(c)
    error = 0.0
    for i in range(n):
        for j in range(n):
            error += (a[i] - c[i]) * (a[j] - c[j]) * np.exp(-abs(c[i] - c[j]) / width) / n**2
    return np.mean([cross_entropy(z, y) for z, y in zip(logits, labels, strict=True)]) + weight * error


def weighted_mmce(logits, labels, weight, width, normalization):
    """Three kinds of pairs; the published code takes the mean over each kind and then divides by its size again."""
    c, a = top_labels(logits, labels)
    right = [value for value, correct in zip(c, a, strict=True) if correct]
    wrong = [value for value, correct in zip(c, a, strict=True) if not correct]
    loss = np.mean([cross_entropy(z, y) for z, y in zip(logits, labels, strict=True)])
    if not right or not wrong:
        return loss

    def mean(first, second, value):
        return np.mean([[value(x, y) * np.exp(-abs(x - y) / width) for y in second] for x in first])

    m, n = len(right), len(wrong)
    again = (1, 1, 1) if normalization == "kumar" else (m * m, n * n, m * n)
    squared = mean(right, right, lambda x, y: (1 - x) * (1 - y)) / again[0]
    squared += mean(wrong, wrong, lambda x, y: x * y) / again[1]
    squared -= 2 * mean(right, wrong, lambda x, y: (1 - x) * y) / again[2]
    return loss + weight * np.sqrt(squared + 1e-10)


def soft_ece(logits, labels, weight, num_bins, temperature):
    c, a = top_labels(logits, labels)
    n = len(c)
    anchors = [(2 * j - 1) / (2 * num_bins) for j in range(1, num_bins + 1)]
    shares = [softmax(np.array([-((value - anchor) ** 2) / temperature for anchor in anchors])) for value in c]
    total = 0.0
    for j in range(num_bins):
        mass = sum(shares[i][j] for i in range(n))
        confidence = sum(shares[i][j] * c[i] for i in range(n)) / max(mass, 1e-5)
        accuracy = sum(shares[i][j] * a[i] for i in range(n)) / max(mass, 1e-5)
        total += mass / n * (confidence - accuracy) ** 2
    loss = np.mean([cross_entropy(z, y) for z, y in zip(logits, labels, strict=True)])
    return loss + weight * np.sqrt(total + 1e-12)


def adafocal_update(gammas, logits, labels, rate=1.0, switch=0.2, lowest=-2.0, highest=20.0):
    """New γ of equal-mass bins, for sets that the bins divide evenly and without equal confidences."""
    c, a = top_labels(logits, labels)
    order, size = np.argsort(c), len(c) // len(gammas)
    new = []
    for b, gamma in enumerate(gammas):
        rows = order[b * size : (b + 1) * size]
        gap = np.mean([c[i] for i in rows]) - np.mean([a[i] for i in rows])
        gamma = gamma * np.exp(rate * gap if gamma > 0 else -rate * gap)
        if abs(gamma) < switch:
            gamma = -switch if gamma > 0 else switch
        new.append(min(max(gamma, lowest), highest))
    return new
