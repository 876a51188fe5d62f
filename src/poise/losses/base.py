"""What all losses share: the probability of the true class and of the others, the reduction, and the modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poise import _check
from poise._types import Labels, Logits

REDUCTIONS = ("mean", "sum", "none")


class Loss(nn.Module):
    """A loss as a module: ``loss(logits, labels)`` calls its function with the options it was made with."""

    def __init__(self, function: Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        # Judged here, not in the first training step.
        function(torch.zeros(2, 2), torch.arange(2), **options)
        self._function = function
        self.options = options

    def forward(self, logits: Logits, labels: Labels) -> Tensor:
        return self._function(logits, labels, **self.options)

    def update(self, val_logits: Logits, val_labels: Labels) -> None:
        """What a loss learns from the validation set after an epoch: nothing, unless it says so."""

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


def log_true_and_rest(logits: Logits, labels: Labels) -> tuple[Tensor, Tensor]:
    """log p_y and log(1 − p_y), both with all their digits as p_y → 0 and 1.

    Both are functions of the true class's margin over the others taken together. 1 − p_y itself is never formed: in
    float32 it is 0 from a margin of 17 on, where its powers have no slope, or an infinite one.
    """
    column = labels[:, None]
    rest = torch.logsumexp(logits.scatter(1, column, -torch.inf), dim=1)
    margin = logits.gather(1, column)[:, 0] - rest
    return F.logsigmoid(margin), F.logsigmoid(-margin)


def top_label(logits: Logits, labels: Labels) -> tuple[Tensor, Tensor]:
    """The confidence in the predicted class, and whether it is right, which has no slope."""
    confidence, predicted = torch.softmax(logits, dim=1).max(dim=1)
    return confidence, predicted == labels


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """One number of the rows' losses, or all of them."""
    _check.choice(reduction, REDUCTIONS, "reduction")
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


def of_the_batch(loss: Tensor, num_samples: int, reduction: str) -> Tensor:
    """A mean over the batch, or the sum that it stands for."""
    if reduction == "none":
        raise ValueError(
            "reduction='none' has no meaning for a loss that compares the rows of a batch with each other; "
            "take 'mean', or 'sum', which is the mean times the number of rows."
        )
    _check.choice(reduction, REDUCTIONS, "reduction")
    return loss if reduction == "mean" else loss * num_samples
