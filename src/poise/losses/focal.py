"""The focal family: cross-entropy weighed by how far the true class still is from being sure.

All weights are taken in log space, so that a sure row has a slope, and γ below 1 no infinite one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from scipy.special import lambertw
from torch import Tensor

from poise import _check
from poise._types import Array
from poise.losses.base import Loss, log_true_and_rest, reduced, top_label


def focal_loss(logits: Array, labels: Array, gamma: float = 3.0, reduction: str = "mean") -> Tensor:
    """Cross-entropy that counts a row less the surer it is.

    −(1 − p_y)^γ log p_y

    The weight has its own gradient. γ = 0 is cross-entropy; γ of 3 to 5 makes networks less overconfident, and a well
    trained one underconfident: it is not proper.

    >>> focal_loss(torch.zeros(1, 2), torch.tensor([0]), gamma=2.0)
    tensor(0.1733)

    Reference: Lin et al., ICCV 2017; Mukhoti et al., NeurIPS 2020.
    """
    _check.nonnegative(gamma, "gamma")
    log_true, log_rest = log_true_and_rest(*_check.training_batch(logits, labels))
    return reduced(-torch.exp(gamma * log_rest) * log_true, reduction)


def flsd_loss(
    logits: Array,
    labels: Array,
    gammas: Sequence[float] = (5.0, 3.0),
    bounds: Sequence[float] = (0.2,),
    reduction: str = "mean",
) -> Tensor:
    """Focal loss with a sample-dependent γ, by default FLSD-53.

    −(1 − p_y)^γ(p_y) log p_y,   γ(p) = gammas[j] for bounds[j − 1] ≤ p < bounds[j]

    γ is 5 while p_y < 0.2 and 3 from there on; it is a constant for the gradient, though the loss jumps at a bound.

    >>> flsd_loss(torch.zeros(1, 2), torch.tensor([0]))  # p_y = 1/2, so γ = 3
    tensor(0.0866)

    Reference: Mukhoti et al., Calibrating Deep Neural Networks using Focal Loss, NeurIPS 2020.
    """
    edges = [0.0, *bounds, 1.0]
    if len(gammas) != len(bounds) + 1 or any(low >= high for low, high in pairwise(edges)):
        raise ValueError(
            f"bounds must rise between 0 and 1 and gammas be one more than they are, but bounds={tuple(bounds)} and "
            f"gammas={tuple(gammas)} came; FLSD-53 is gammas=(5.0, 3.0) and bounds=(0.2,)."
        )
    for gamma in gammas:
        _check.nonnegative(gamma, "each of gammas")
    log_true, log_rest = log_true_and_rest(*_check.training_batch(logits, labels))
    chosen = torch.bucketize(log_true.detach().exp(), log_true.new_tensor(bounds), right=True)
    gamma_of_row = log_true.new_tensor(gammas)[chosen]
    return reduced(-torch.exp(gamma_of_row * log_rest) * log_true, reduction)


def focal_gamma(pivot: float) -> float:
    """The γ* > 0 at which the focal loss pushes a row of p_y = pivot as hard as cross-entropy does.

    (1 − p)^γ − γ p (1 − p)^(γ−1) log p = 1 at p = pivot, so with a = 1 − p, b = p log p:
    γ* = a/b + W₋₁(−a^(1 − a/b) log(a)/b) / log a

    Surer rows are pushed less. It falls with the pivot: from one half on, the focal loss with any γ > 0 pushes less
    than cross-entropy, and γ* is 0.

    >>> round(focal_gamma(0.2), 2), round(focal_gamma(0.25), 2), focal_gamma(0.5)
    (4.85, 3.07, 0.0)

    Reference: Mukhoti et al., NeurIPS 2020, proposition 1.
    """
    if _check.positive(pivot, "pivot") >= 1:
        raise ValueError(f"pivot is a probability, above 0 and below 1, but is {pivot!r}.")
    if pivot >= 0.5:
        return 0.0
    log_a = math.log1p(-pivot)
    a, b = 1 - pivot, pivot * math.log(pivot)
    return max(0.0, a / b + float(lambertw(-math.exp((1 - a / b) * log_a) * log_a / b, -1).real) / log_a)


def adaptive_gamma_loss(logits: Array, labels: Array, pivot: float = 0.25, reduction: str = "mean") -> Tensor:
    """Focal loss whose γ follows from the p_y below which it shall push harder than cross-entropy.

    −(1 − p_y)^γ* log p_y,   γ* = `focal_gamma` (pivot)

    A pivot of 0.2 gives γ near 5, 0.25 near 3, and 0.5 or above gives cross-entropy.

    >>> adaptive_gamma_loss(torch.zeros(1, 2), torch.tensor([0]), pivot=0.5)
    tensor(0.6931)

    Reference: Mukhoti et al., NeurIPS 2020.
    """
    return focal_loss(logits, labels, focal_gamma(pivot), reduction)


def dual_focal_loss(logits: Array, labels: Array, gamma: float = 5.0, reduction: str = "mean") -> Tensor:
    """Focal loss that also looks at the strongest class below the true one.

    −(1 − p_y + p_j)^γ log p_y,   p_j = max {p_k : p_k < p_y}, 0 if there is none

    Ties with the true class do not count. γ = 0 is cross-entropy. The authors' γ for CIFAR-10: ResNet-50 and
    DenseNet-121 5, ResNet-110 4.5, Wide-ResNet-26-10 2.6; CIFAR-100: 5, 6.1, 3.9 (Wide-ResNet), 3.4 (DenseNet).

    >>> dual_focal_loss(torch.zeros(1, 2), torch.tensor([0]), gamma=1.0)
    tensor(0.3466)

    Reference: Tao, Dong, Xu, Dual Focal Loss for Calibration, ICML 2023.
    """
    _check.nonnegative(gamma, "gamma")
    scores, truth = _check.training_batch(logits, labels)
    log_true, log_rest = log_true_and_rest(scores, truth)
    is_below = scores < scores.gather(1, truth[:, None])
    # A finite stand-in for log 0, which would make the gradient NaN.
    lowest = torch.finfo(scores.dtype).min
    log_next = torch.log_softmax(scores, dim=1).masked_fill(~is_below, lowest).amax(dim=1)
    return reduced(-torch.exp(gamma * torch.logaddexp(log_rest, log_next)) * log_true, reduction)


def adafocal_loss(logits: Array, labels: Array, gammas: Tensor, edges: Tensor, reduction: str = "mean") -> Tensor:
    """Focal loss with a γ for every bin of p_y, and the inverse focal loss where that γ is negative.

    −(1 − p_y)^γ_b log p_y for γ_b ≥ 0, −(1 + p_y)^|γ_b| log p_y for γ_b < 0, b the bin (lo, hi] of p_y

    `edges` are the inner edges of the bins, one fewer than `gammas`; `AdaFocalLoss` learns both from a validation set.

    >>> adafocal_loss(torch.zeros(1, 2), torch.tensor([0]), torch.tensor([0.0, 3.0]), torch.tensor([0.5]))
    tensor(0.6931)

    Reference: Ghosh, Schaaf, Gormley, AdaFocal, NeurIPS 2022.
    """
    if gammas.ndim != 1 or edges.shape != (len(gammas) - 1,):
        raise ValueError(
            f"gammas must be one number per bin and edges one fewer, but have shapes {tuple(gammas.shape)} and "
            f"{tuple(edges.shape)}; take AdaFocalLoss, which learns both."
        )
    log_true, log_rest = log_true_and_rest(*_check.training_batch(logits, labels))
    true = log_true.exp()
    gamma = gammas.to(log_true)[torch.bucketize(true.detach(), edges.to(log_true))]
    log_weight = torch.where(gamma >= 0, gamma * log_rest, -gamma * torch.log1p(true))
    return reduced(-torch.exp(log_weight) * log_true, reduction)


class FocalLoss(Loss):
    """`focal_loss` as a module."""

    def __init__(self, gamma: float = 3.0, reduction: str = "mean") -> None:
        super().__init__(focal_loss, gamma=gamma, reduction=reduction)


class FLSDLoss(Loss):
    """`flsd_loss` as a module."""

    def __init__(
        self, gammas: Sequence[float] = (5.0, 3.0), bounds: Sequence[float] = (0.2,), reduction: str = "mean"
    ) -> None:
        super().__init__(flsd_loss, gammas=gammas, bounds=bounds, reduction=reduction)


class AdaptiveGammaLoss(Loss):
    """`adaptive_gamma_loss` as a module."""

    def __init__(self, pivot: float = 0.25, reduction: str = "mean") -> None:
        super().__init__(adaptive_gamma_loss, pivot=pivot, reduction=reduction)


class DualFocalLoss(Loss):
    """`dual_focal_loss` as a module."""

    def __init__(self, gamma: float = 5.0, reduction: str = "mean") -> None:
        super().__init__(dual_focal_loss, gamma=gamma, reduction=reduction)


class AdaFocalLoss(Loss):
    """`adafocal_loss` as a module that learns its γ, and the bins they are for, from the validation set.

    It begins with γ = 1 in bins of equal width. Call ``update(val_logits, val_labels)`` after every epoch: the bins
    become those of equal mass of the validation confidences, and in bin b, with the gap d = confidence − accuracy,
    γ_b ← γ_b exp(±rate · d), + where γ_b > 0 and − where not. A γ that falls below `switch` in size becomes `switch`
    with the other sign, and none leaves [lowest, highest]. Both are part of the state_dict.

    The validation set then belongs to the training: a calibrator fitted on it afterwards sees confidences that look
    better than they are.

    >>> loss = AdaFocalLoss(num_bins=2)
    >>> loss.update(torch.tensor([[3.0, 0.0], [0.2, 0.0]]), torch.tensor([1, 0]))  # surely wrong, doubtfully right
    >>> loss.gammas
    tensor([0.6375, 2.5924])
    """

    gammas: Tensor
    edges: Tensor

    def __init__(
        self,
        num_bins: int = 15,
        rate: float = 1.0,
        switch: float = 0.2,
        lowest: float = -2.0,
        highest: float = 20.0,
        reduction: str = "mean",
    ) -> None:
        _check.whole(num_bins, "num_bins")
        state = {"gammas": torch.ones(num_bins), "edges": torch.linspace(0, 1, num_bins + 1)[1:-1]}
        super().__init__(adafocal_loss, **state, reduction=reduction)
        for name, tensor in state.items():
            self.register_buffer(name, tensor)
            self.options.pop(name)
        self.rate = _check.positive(rate, "rate")
        self.switch = _check.positive(switch, "switch")
        self.lowest, self.highest = lowest, highest

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._function(logits, labels, self.gammas, self.edges, **self.options)

    @torch.no_grad()
    def update(self, val_logits: Tensor, val_labels: Tensor) -> None:
        scores, truth = _check.training_batch(val_logits, val_labels)
        confidence, correct = top_label(scores, truth)
        num_bins = len(self.gammas)
        ranked = confidence.sort().values
        # The last confidence of each part of equal mass closes its bin.
        last = torch.arange(1, num_bins, device=ranked.device) * len(ranked) // num_bins - 1
        self.edges = ranked[last.clamp(min=0)]
        bins = torch.bucketize(confidence, self.edges)
        count = torch.bincount(bins, minlength=num_bins).clamp(min=1)
        gap = torch.bincount(bins, confidence - correct.to(confidence), minlength=num_bins) / count
        sign = torch.where(self.gammas > 0, 1.0, -1.0)
        grown = self.gammas * torch.exp(sign * self.rate * gap.to(self.gammas))
        grown = torch.where(grown.abs() < self.switch, -sign * self.switch, grown)
        self.gammas = grown.clamp(self.lowest, self.highest)
