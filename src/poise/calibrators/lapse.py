"""The lapse: a small share of predictions that are a guess, p ← (1 − l) p + l/k."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from poise._types import Logits


def fit_lapse(true: Tensor, num_classes: int, weight: Tensor | None = None) -> float:
    """The share of guesses in p ← (1 − l) p + l/k, by EM with one pseudo-count; `true` is p of the true classes."""
    weight = torch.ones_like(true) if weight is None else weight.to(true)
    total = weight.sum() + 1
    lapse = 1 / total
    # The other pseudo-count: something is known, or the order of the classes would be lost.
    most = 1 - 1 / (total + 1)
    for _ in range(500):
        guess = lapse / num_classes
        updated = (1 + torch.dot(weight, guess / ((1 - lapse) * true + guess))) / total
        updated = updated.clamp(max=most)
        done = bool((updated - lapse).abs() <= 1e-9 * lapse)
        lapse = updated
        if done:
            break
    return float(lapse)


def with_lapse(log_prob: Logits, lapse: float) -> Logits:
    """log((1 − l) p + l/k)."""
    if lapse == 0:
        return log_prob
    return torch.logaddexp(log_prob + math.log1p(-lapse), log_prob.new_tensor(math.log(lapse / log_prob.shape[1])))
