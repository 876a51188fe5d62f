"""The lapse: a small share of predictions that are a guess, p ← (1 − l) p + l/k."""

from __future__ import annotations

import importlib
import importlib.util
import math

import torch
from torch import Tensor

from poise._types import Logits


def fit_lapse(true: Tensor, num_classes: int, weight: Tensor | None = None) -> float:
    """The share of guesses in p ← (1 − l) p + l/k of most likelihood, with one pseudo-count; `true` is p of the labels.

    The root of Σ w (1/k − p)/((1 − l) p + l/k) + 1/l, which falls in l: Newton's steps, kept within a bracket.
    """
    weight = torch.ones_like(true) if weight is None else weight.to(true)
    total = float(weight.sum()) + 1
    # The other pseudo-count: something is known, or the order of the classes would be lost.
    low, high = 1 / total, 1 - 1 / (total + 1)
    less_sure, lapse = 1 / num_classes - true, low
    for _ in range(100):
        ratio = less_sure / (true + lapse * less_sure)
        weighted = weight * ratio
        slope = float(weighted.sum()) + 1 / lapse
        low, high = (lapse, high) if slope > 0 else (low, lapse)
        step = slope / (float(torch.dot(weighted, ratio)) + 1 / lapse**2)
        newton = lapse + step
        lapse, before = newton if low < newton < high else (low + high) / 2, lapse
        if abs(lapse - before) <= 1e-9 * lapse:
            break
    return lapse


def lapse_and_nll(true: Tensor, num_classes: int, weight: Tensor | None = None) -> tuple[float, float]:
    """The fitted lapse, and the mean −log p of the true classes under it with the pseudo-count's −log l."""
    if weight is None and true.device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        on_gpu: tuple[float, float] = importlib.import_module("poise.calibrators.lapse_gpu").fit(true, num_classes)
        return on_gpu
    true = true.double()
    lapse = fit_lapse(true, num_classes, weight)
    log_prob = torch.log((1 - lapse) * true + lapse / num_classes)
    if weight is None:
        return lapse, -float(log_prob.mean()) - math.log(lapse) / len(true)
    total = float(weight.sum())
    return lapse, -float(torch.dot(log_prob, weight.to(log_prob))) / total - math.log(lapse) / total


def with_lapse(log_prob: Logits, lapse: float) -> Logits:
    """log((1 − l) p + l/k)."""
    if lapse == 0:
        return log_prob
    return torch.logaddexp(log_prob + math.log1p(-lapse), log_prob.new_tensor(math.log(lapse / log_prob.shape[1])))
