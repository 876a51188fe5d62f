"""How a map of one probability serves many classes: each class against the rest, or the top class alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from poise._types import Labels, Logits, Probs

MODES = ("one_vs_rest", "top_label")

_TRACE = 1e-9
"""Of the network's own probabilities in every result: it parts what a plateau made equal and leaves no row of zeros."""


def binary_problems(logits: Logits, labels: Labels, mode: str) -> tuple[Probs, Tensor]:
    """(b, n) probabilities and whether they came true: one row per class, or a single one for the top class."""
    probs = torch.softmax(logits.double(), dim=1)
    if mode == "top_label":
        top = logits.argmax(dim=1)
        return probs.gather(1, top[:, None]).T, (top == labels)[None]
    return probs.T.contiguous(), labels == torch.arange(logits.shape[1], device=labels.device)[:, None]


def asked(logits: Logits, mode: str) -> Probs:
    """(b, n) probabilities that the maps of `binary_problems` are asked about."""
    probs = torch.softmax(logits.double(), dim=1)
    return (probs.amax(dim=1)[None] if mode == "top_label" else probs.T).contiguous()


def recombined(logits: Logits, rates: Tensor, mode: str) -> Logits:
    """(n, k) log-probabilities from the (b, n) rates that the maps answered with."""
    if mode == "top_label":
        return with_confidence(logits, rates[0])
    return traced(rates.log().T, logits).to(logits.dtype)


def with_confidence(logits: Logits, confidence: Tensor) -> Logits:
    """The top class gets this probability, the others share what is left as before; in float64 but for the result.

    A confidence below what the runner-up would get is raised to that, so no two classes ever change places.
    """
    scores = logits.double()
    best, top = scores.max(dim=1, keepdim=True)
    # The rest is normalized by itself: 1 − p of a sure top class would be all rounding.
    rest = torch.log_softmax(scores.scatter(1, top, -torch.inf), dim=1)
    runner_up = rest.amax(dim=1).exp()
    confidence = torch.maximum(confidence.clamp(max=1), runner_up / (1 + runner_up))[:, None]
    log_prob = (rest + torch.log1p(-confidence)).scatter(1, top, confidence.log())
    # Equal logits are equally likely, also where one of them had to be called the top.
    tied = scores == best
    shared = log_prob.masked_fill(~tied, -torch.inf).logsumexp(dim=1, keepdim=True)
    log_prob = torch.where(tied, shared - tied.sum(dim=1, keepdim=True).log(), log_prob)
    return in_order(traced(log_prob, logits), logits)


def traced(log_rates: Tensor, logits: Logits) -> Tensor:
    """Rates, one class a column, with a trace of the softmax, divided by their sum: float64 log-probabilities."""
    trace = torch.log_softmax(logits.double(), dim=1) + math.log(_TRACE)
    return torch.log_softmax(torch.logaddexp(log_rates, trace), dim=1)


def in_order(log_prob: Tensor, logits: Logits) -> Logits:
    """What is ordered like the logits but for rounding, in their precision: ordered exactly, equal where they are.

    The top leads by a hair that outlasts rounding: whoever looks for the largest probability finds it.
    """
    ordered, order = logits.detach().contiguous().sort(dim=1)
    last_equal = torch.searchsorted(ordered, ordered, right=True) - 1
    values = log_prob.gather(1, order).cummax(dim=1).values.gather(1, last_equal).to(logits.dtype)
    top = ordered == ordered[:, -1:]
    runner_up = values.masked_fill(top, -torch.inf).amax(dim=1, keepdim=True)
    values = torch.where(top, torch.maximum(values, runner_up + 8 * torch.finfo(values.dtype).eps), values)
    return torch.empty_like(values).scatter(1, order, values)


def steps(values: Tensor, edges: Tensor, levels: Tensor) -> Tensor:
    """Rows of step functions at rows of values: (b, n) from (b, m) inner edges and (b, m + 1) levels, bins (lo, hi]."""
    return levels.to(values).gather(1, torch.searchsorted(edges.to(values), values.contiguous()))


def polygons(values: Tensor, knots: Tensor, levels: Tensor) -> Tensor:
    """Rows of piecewise linear functions at rows of values: (b, n) from (b, m) knots and levels, constant outside."""
    knots, levels = knots.to(values), levels.to(values)
    above = torch.searchsorted(knots, values.contiguous(), right=True).clamp(1, knots.shape[1] - 1)
    start, end = knots.gather(1, above - 1), knots.gather(1, above)
    part = ((values - start) / (end - start).clamp(min=1e-300)).clamp(0, 1)
    return torch.lerp(levels.gather(1, above - 1), levels.gather(1, above), part)


def padded(rows: list[Tensor]) -> Tensor:
    """Rows of different lengths as one table of two columns or more, each continued by its last entry."""
    width = max(2, *(len(row) for row in rows))
    return torch.stack([torch.cat([row, row[-1:].expand(width - len(row))]) for row in rows])
