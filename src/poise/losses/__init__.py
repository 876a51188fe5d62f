"""Losses that train calibrated networks: a function of logits and labels each, and an `nn.Module` that calls it.

Halves are computed in float32, so the losses work under autocast. The published networks were trained with
reduction="sum" (with "mean" for the Brier score); their learning rate, clipping and weight decay belong to that.
"""

from poise.losses.base import Loss
from poise.losses.batchwise import (
    MMCELoss,
    SoftECELoss,
    WeightedMMCELoss,
    mmce_loss,
    soft_ece_loss,
    soft_temperature,
    weighted_mmce_loss,
)
from poise.losses.focal import (
    AdaFocalLoss,
    AdaptiveGammaLoss,
    DualFocalLoss,
    FLSDLoss,
    FocalLoss,
    adafocal_loss,
    adaptive_gamma_loss,
    dual_focal_loss,
    flsd_loss,
    focal_gamma,
    focal_loss,
)
from poise.losses.proper import (
    BrierLoss,
    CrossEntropyLoss,
    LabelSmoothingLoss,
    brier_loss,
    cross_entropy_loss,
    label_smoothing_loss,
)

__all__ = [
    "AdaFocalLoss",
    "AdaptiveGammaLoss",
    "BrierLoss",
    "CrossEntropyLoss",
    "DualFocalLoss",
    "FLSDLoss",
    "FocalLoss",
    "LabelSmoothingLoss",
    "Loss",
    "MMCELoss",
    "SoftECELoss",
    "WeightedMMCELoss",
    "adafocal_loss",
    "adaptive_gamma_loss",
    "brier_loss",
    "cross_entropy_loss",
    "dual_focal_loss",
    "flsd_loss",
    "focal_gamma",
    "focal_loss",
    "label_smoothing_loss",
    "mmce_loss",
    "soft_ece_loss",
    "soft_temperature",
    "weighted_mmce_loss",
]
