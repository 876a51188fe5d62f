"""Cross-entropy, the Brier score and label smoothing: losses that compare each row with a target distribution."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from poise import _check
from poise._types import Array
from poise.losses.base import Loss, reduced

SPREADS = ("all", "others")


def cross_entropy_loss(logits: Array, labels: Array, reduction: str = "mean") -> Tensor:
    """Cross-entropy, the negative log-likelihood of the true class.

    −log p_y

    Proper, but without a bound: a network that fits its training labels grows overconfident on others.

    >>> cross_entropy_loss(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
    tensor(0.1269)
    """
    scores, truth = _check.training_batch(logits, labels)
    return reduced(F.cross_entropy(scores, truth, reduction="none"), reduction)


def brier_loss(logits: Array, labels: Array, reduction: str = "mean") -> Tensor:
    """The Brier score as a loss: the squared distance of the probabilities from the truth, between 0 and 2.

    Σ_k (p_k − 1[y = k])²

    Proper and bounded; its gradient vanishes where the network is surely wrong, so learning starts slowly with many
    classes. The published code divides by the batch size where its other losses are sums: that is "mean".

    >>> brier_loss(torch.zeros(1, 2), torch.tensor([0]))
    tensor(0.5000)

    Reference: Brier, Monthly Weather Review 1950; as a loss, Mukhoti et al., NeurIPS 2020.
    """
    scores, truth = _check.training_batch(logits, labels)
    probs = torch.softmax(scores, dim=1)
    errors = probs - F.one_hot(truth, scores.shape[1])
    return reduced(errors.square().sum(dim=1), reduction)


def label_smoothing_loss(
    logits: Array, labels: Array, alpha: float = 0.05, spread: str = "others", reduction: str = "mean"
) -> Tensor:
    """Cross-entropy with a smoothed target.

    −Σ_k t_k log p_k,   "others": t = (1 − α) 1[y = k] + α/(K − 1) 1[y ≠ k]   "all": t = (1 − α) 1[y = k] + α/K

    "others" is the published networks', "all" is PyTorch's; the first with α is the second with α K/(K − 1). α = 0 is
    cross-entropy. It is not proper: the best answer to a sure label has confidence 1 − α, whatever the data.

    >>> label_smoothing_loss(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), alpha=0.1)
    tensor(0.3269)

    Reference: Szegedy et al., CVPR 2016; Müller, Kornblith, Hinton, NeurIPS 2019.
    """
    scores, truth = _check.training_batch(logits, labels)
    _check.below_one(alpha, "alpha")
    num_classes = scores.shape[1]
    share = alpha if _check.choice(spread, SPREADS, "spread") == "all" else alpha * num_classes / (num_classes - 1)
    log_prob = torch.log_softmax(scores, dim=1)
    losses = -(1 - share) * log_prob.gather(1, truth[:, None])[:, 0] - share * log_prob.mean(dim=1)
    return reduced(losses, reduction)


class CrossEntropyLoss(Loss):
    """`cross_entropy_loss` as a module."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(cross_entropy_loss, reduction=reduction)


class BrierLoss(Loss):
    """`brier_loss` as a module."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(brier_loss, reduction=reduction)


class LabelSmoothingLoss(Loss):
    """`label_smoothing_loss` as a module."""

    def __init__(self, alpha: float = 0.05, spread: str = "others", reduction: str = "mean") -> None:
        super().__init__(label_smoothing_loss, alpha=alpha, spread=spread, reduction=reduction)
