"""The training recipe's random crop and mirror, of a whole batch at once and on its own device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def crop_and_flip(pixels: Tensor, padding: int = 4, *, generator: torch.Generator | None = None) -> Tensor:
    """Each image (n, 3, h, w) shifted by up to `padding` pixels each way, with black, and mirrored half the time.

    Padding by zeros before the normalization, then a crop to the old size, as torchvision's RandomCrop(32, padding=4)
    with RandomHorizontalFlip. The draws come from `generator`, or the device's own.
    """
    num, _, height, width = pixels.shape

    def draw(below: int) -> Tensor:
        return torch.randint(below, (num, 1), generator=generator, device=pixels.device)

    rows = draw(2 * padding + 1) + torch.arange(height, device=pixels.device)
    columns = torch.arange(width, device=pixels.device)
    columns = torch.where(draw(2).bool(), columns, columns.flip(0)) + draw(2 * padding + 1)
    padded = F.pad(pixels, (padding,) * 4).permute(0, 2, 3, 1)
    which = torch.arange(num, device=pixels.device)[:, None, None]
    return padded[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
