"""What is read from the logits of a neighbour: g in p = E[g(h(x ⊕ ε z))]."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from poise._types import Logits, Probs

Readout: TypeAlias = Callable[[Logits], Probs]


def vote(logits: Logits) -> Probs:
    """One for the largest logit, zero elsewhere (the paper's "Consis."); of equal logits the first wins.

    >>> vote(torch.tensor([[0.1, 2.0, 0.3]]))
    tensor([[0., 1., 0.]])
    """
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1)


def soft(logits: Logits) -> Probs:
    """The softmax (the paper's "Mean")."""
    return torch.softmax(logits, dim=-1)


READOUTS: dict[str, Readout] = {"vote": vote, "soft": soft}
