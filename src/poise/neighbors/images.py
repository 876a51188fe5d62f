"""The paper's three image neighbourhoods: train-time crop and flip, with jittered colours, and blurred besides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from poise import _check
from poise._types import Inputs
from poise.neighbors import colors
from poise.neighbors.base import Neighbors

_CROP_Y, _CROP_X, _FLIP, _BRIGHTNESS, _CONTRAST, _SATURATION, _HUE, _SHARPNESS = range(8)

_BLUR = (0.1, 2.0)
"""Standard deviations in pixels; torchvision's range."""


@dataclass(frozen=True)
class TrainAugmentation(Neighbors):
    """Images as in training: zero-padded, cropped back, flipped; then jittered in colour, and blurred.

    Images are (n, channels, height, width) with values from 0 to 1, before any normalisation, which belongs into the
    network. Every image of every draw is augmented by itself, in torch alone: the same neighbours wherever it runs.
    `jitter` and `blur` take three channels.

    Args:
        padding: zeros around the image before the crop; None is an eighth of its side, 4 of 32 pixels.
        flip: left and right, half of the time; not for digits and words.
        jitter: s, with brightness, contrast and saturation factors from U(max(0, 1 − s), 1 + s) and a hue shift from
            U(−s, s), at most half the circle, in this order; None makes it the strength that a fit chooses.
        blur: Gaussian, of a standard deviation from U(0.1, 2) pixels.
    """

    padding: int | None = None
    flip: bool = True
    jitter: float | None = 0.0
    blur: bool = False

    def __post_init__(self) -> None:
        if self.padding is not None:
            _check.whole(self.padding, "padding", least=0)
        if self.jitter is not None:
            _check.nonnegative(self.jitter, "jitter")

    @property
    def has_strength(self) -> bool:
        return self.jitter is None

    def draw(self, inputs: Inputs, num_samples: int, generator: torch.Generator) -> Tensor:
        return torch.rand(num_samples, len(inputs), 8, generator=generator, device=inputs.device)

    def place(self, inputs: Inputs, z: Tensor, strength: float) -> Tensor:
        jitter = strength if self.jitter is None else self.jitter
        _check.images(inputs, in_color=jitter > 0 or self.blur)
        z = z[:, : len(inputs)]
        images = self._cropped(inputs, z)
        if jitter > 0 or self.blur:
            images = _recolored(images.flatten(0, 1), z.flatten(0, 1), jitter, self.blur).view_as(images)
        return images

    def _cropped(self, images: Tensor, z: Tensor) -> Tensor:
        """All crops and flips by one gather, (num_samples, n, channels, height, width)."""
        n, channels, height, width = images.shape
        pad_y, pad_x = (side // 8 if self.padding is None else self.padding for side in (height, width))
        padded = torch.nn.functional.pad(images, (pad_x, pad_x, pad_y, pad_y))
        row, column = (torch.arange(side, device=images.device) for side in (height, width))
        is_flipped = self.flip & (z[..., _FLIP, None] < 0.5)
        rows = _whole(z[..., _CROP_Y, None], 2 * pad_y + 1) + row
        columns = _whole(z[..., _CROP_X, None], 2 * pad_x + 1) + torch.where(is_flipped, width - 1 - column, column)
        image = torch.arange(n, device=images.device)[:, None, None, None]
        channel = torch.arange(channels, device=images.device)[:, None, None]
        return padded[image, channel, rows[:, :, None, :, None], columns[:, :, None, None, :]]


def weak(*, padding: int | None = None, flip: bool = True) -> TrainAugmentation:
    """The paper's weak augmentation: crop and flip, as in training. There is no strength, so nothing to validate.

    >>> weak().has_strength
    False
    """
    return TrainAugmentation(padding, flip)


def moderate(s: float | None = None, *, padding: int | None = None, flip: bool = True) -> TrainAugmentation:
    """The paper's moderate augmentation: crop, flip, and colours jittered by s; None leaves s to the fit.

    >>> moderate(0.1).has_strength, moderate().has_strength
    (False, True)
    """
    return TrainAugmentation(padding, flip, s)


def strong(s: float | None = 0.1, *, padding: int | None = None, flip: bool = True) -> TrainAugmentation:
    """The paper's stronger augmentation: crop, flip, jitter and blur; the network may no longer know the image."""
    return TrainAugmentation(padding, flip, s, blur=True)


def _whole(u: Tensor, count: int) -> Tensor:
    """U(0, 1) to 0 … count − 1."""
    return (u * count).long().clamp(max=count - 1)


def _factors(u: Tensor, jitter: float) -> Tensor:
    """U(max(0, 1 − s), 1 + s)."""
    low = max(0.0, 1 - jitter)
    return low + (1 + jitter - low) * u


def _recolored(images: Tensor, u: Tensor, jitter: float, blur: bool) -> Tensor:
    """Each image by its own numbers."""
    if jitter > 0:
        images = colors.brightness(images, _factors(u[:, _BRIGHTNESS], jitter))
        images = colors.contrast(images, _factors(u[:, _CONTRAST], jitter))
        images = colors.saturation(images, _factors(u[:, _SATURATION], jitter))
        images = colors.hue(images, min(jitter, 0.5) * (2 * u[:, _HUE] - 1))
    if blur:
        low, high = _BLUR
        images = colors.blur(images, low + (high - low) * u[:, _SHARPNESS])
    return images
