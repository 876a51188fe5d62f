"""How the networks are trained: the paper's recipe, a short one, and the losses by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from poise import losses
from poise.losses import Loss
from poise.zoo.words import nearest


@dataclass(frozen=True)
class Recipe:
    """SGD with momentum: its length, its step sizes, and what is done to the gradient.

    The rate is `peak_rate` times a tenth for every epoch of `drops` that has begun; without drops it rises linearly for
    `warmup` epochs and falls to zero with a half cosine. `clip` bounds the norm of the whole gradient. Under
    reduction="sum" nearly every gradient of the paper's recipe is longer than that, so the steps are normalized ones,
    and the weight decay counts for more than beside a mean.
    """

    epochs: int = 350
    batch_size: int = 128
    peak_rate: float = 0.1
    drops: tuple[int, ...] = (149, 249)
    warmup: int = 0
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    clip: float = 2.0
    reduction: str = "sum"

    def rate(self, epoch: float) -> float:
        """The learning rate after so many epochs.

        >>> [PAPER.rate(epoch) for epoch in (0, 148.9, 149, 349)]
        [0.1, 0.1, 0.010000000000000002, 0.0010000000000000002]
        """
        if self.drops:
            return self.peak_rate * math.pow(0.1, sum(epoch >= drop for drop in self.drops))
        if epoch < self.warmup:
            return self.peak_rate * epoch / self.warmup
        return self.peak_rate * (1 + math.cos(math.pi * (epoch - self.warmup) / (self.epochs - self.warmup))) / 2

    def of_length(self, epochs: int) -> Recipe:
        """The same recipe in more or fewer epochs, its drops and its warmup at the same share of them."""
        if epochs < 1:
            raise ValueError(f"epochs must be 1 or more, but is {epochs}.")
        drops = tuple(round(drop * epochs / self.epochs) for drop in self.drops)
        return replace(self, epochs=epochs, drops=drops, warmup=self.warmup * epochs // self.epochs)


PAPER = Recipe()
"""Of the published networks (Mukhoti et al., 2020): drops at 150 and 250, one epoch early, as their code has it."""

SHORT = Recipe(
    epochs=60, batch_size=256, peak_rate=0.2, drops=(), warmup=5, nesterov=True, weight_decay=5e-4, reduction="mean"
)
"""For a GPU and some minutes: large batches and a mean loss, under one cosine. Another recipe, and another network."""

RECIPES = {"paper": PAPER, "short": SHORT}

_DUAL_GAMMA = {
    ("cifar10", "resnet50"): 5.0,
    ("cifar10", "resnet110"): 4.5,
    ("cifar10", "wide-resnet-26-10"): 2.6,
    ("cifar10", "densenet121"): 5.0,
    ("cifar100", "resnet50"): 5.0,
    ("cifar100", "resnet110"): 6.1,
    ("cifar100", "wide-resnet-26-10"): 3.9,
    ("cifar100", "densenet121"): 3.4,
    ("tiny-imagenet", "resnet50"): 2.3,
}
"""The authors' choices."""

LOSSES: dict[str, Callable[[str], Loss]] = {
    "cross-entropy": lambda reduction: losses.CrossEntropyLoss(reduction),
    # The published code divides by the batch size where its other losses are sums.
    "brier": lambda reduction: losses.BrierLoss("mean"),
    "label-smoothing": lambda reduction: losses.LabelSmoothingLoss(0.05, "others", reduction),
    "focal": lambda reduction: losses.FocalLoss(3.0, reduction),
    "flsd53": lambda reduction: losses.FLSDLoss(reduction=reduction),
    "adaptive-gamma": lambda reduction: losses.AdaptiveGammaLoss(reduction=reduction),
    "dual-focal": lambda reduction: losses.DualFocalLoss(reduction=reduction),
    "mmce": lambda reduction: losses.WeightedMMCELoss(2.0, normalization="published", reduction=reduction),
    "mmce-kumar": lambda reduction: losses.WeightedMMCELoss(2.0, normalization="kumar", reduction=reduction),
    "mmce-unweighted": lambda reduction: losses.MMCELoss(2.0, reduction=reduction),
    "soft-ece": lambda reduction: losses.SoftECELoss(reduction=reduction),
    "adafocal": lambda reduction: losses.AdaFocalLoss(reduction=reduction),
}
"""Losses by name, as functions of the recipe's reduction; `mmce` is the paper's: weighted, normalized as published."""


def loss_for(name: str, *, dataset: str, network: str, reduction: str) -> Loss:
    """The loss of that name with its authors' parameters for this data set and network.

    >>> loss_for("dual-focal", dataset="cifar10", network="resnet110", reduction="sum")
    DualFocalLoss(gamma=4.5, reduction='sum')
    """
    if name not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}, but is {name!r}{nearest(name, LOSSES)}")
    if name == "dual-focal":
        return losses.DualFocalLoss(_DUAL_GAMMA.get((dataset, network), 5.0), reduction)
    return LOSSES[name](reduction)
