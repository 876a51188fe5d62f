"""Colours of many images at once, each by a number of its own: what torchvision and kornia call by the same names.

In torch alone, so that the neighbours of an image do not depend on which of them is installed. Images are
(n, 3, height, width) with values from 0 to 1, numbers are (n,).
"""

from __future__ import annotations

import torch
from torch import Tensor

_GRAY = (0.299, 0.587, 0.114)
"""ITU-R BT.601."""


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    return (images * _each(factor)).clamp(0, 1)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Away from the mean gray of the image, or towards it."""
    return _between(_gray(images).mean((2, 3), keepdim=True), images, factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Away from the pixel's gray, or towards it."""
    return _between(_gray(images), images, factor)


def hue(images: Tensor, turn: Tensor) -> Tensor:
    """Turned by a part of the circle of hues; value and saturation stay.

    With value v, chroma c and hue h in sixths, channel i of red, green and blue is v − c·min(1, max(0, min(k, 4 − k))),
    k = h + (5, 3, 1)_i mod 6.
    """
    red, green, blue = images.unbind(1)
    value, least = images.amax(1), images.amin(1)
    chroma = value - least
    unit = torch.where(chroma == 0, 1.0, chroma)
    sixths = torch.where(
        value == red,
        (green - blue) / unit,
        torch.where(value == green, 2 + (blue - red) / unit, 4 + (red - green) / unit),
    )
    turned = (sixths + 6 * turn[:, None, None])[:, None]
    k = torch.remainder(turned + torch.tensor([5.0, 3.0, 1.0]).to(images)[:, None, None], 6)
    return value[:, None] - chroma[:, None] * torch.minimum(k, 4 - k).clamp(0, 1)


def blur(images: Tensor, deviation: Tensor) -> Tensor:
    """Gaussian, with its tails cut beyond about a twentieth of the side: 3 pixels of 32 count, 23 of 224."""
    reach = max(1, min(images.shape[-2:]) // 20)
    distance = torch.arange(-reach, reach + 1).to(images)
    weight = torch.softmax(-0.5 * (distance / deviation[:, None]) ** 2, dim=1)
    for axis, pad in ((2, (0, 0, reach, reach)), (3, (reach, reach, 0, 0))):
        padded = torch.nn.functional.pad(images, pad, mode="reflect")
        side = images.shape[axis]
        images = sum(
            (_each(weight[:, tap]) * padded.narrow(axis, tap, side) for tap in range(2 * reach + 1)),
            start=torch.zeros_like(images),
        )
    return images


def _gray(images: Tensor) -> Tensor:
    weight = torch.tensor(_GRAY).to(images)[:, None, None]
    return (images * weight).sum(1, keepdim=True)


def _between(gray: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(gray.expand_as(images), images, _each(factor).expand_as(images)).clamp(0, 1)


def _each(number: Tensor) -> Tensor:
    return number[:, None, None, None]
