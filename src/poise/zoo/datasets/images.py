"""Images with labels, in memory or in files: what a batch of them is, whatever they were read from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from poise.io.files import existing, reading


class Normalization(NamedTuple):
    """(pixel / 255 − mean) / std of each color; networks answer sensibly only to what they were trained with."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __call__(self, pixels: Tensor) -> Tensor:
        """Bytes (n, 3, h, w) to standardized float32, channels last in memory."""
        mean, std = (pixels.new_tensor(value, dtype=torch.float32)[:, None, None] for value in self)
        scaled = (pixels.float() / 255 - mean) / std
        return scaled.contiguous(memory_format=torch.channels_last)


NORMALIZATIONS = {
    "cifar": Normalization((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "imagenet": Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


class Images(ABC):
    """n images, their labels (n,) and the names of the classes."""

    def __init__(self, labels: Any, classes: Sequence[str], source: str) -> None:
        self.labels = torch.as_tensor(labels, dtype=torch.int64)
        self.classes = tuple(classes)
        if len(self.labels) == 0:
            raise ValueError(f"{source} holds no images; check the path.")
        wrong = self.labels[(self.labels < 0) | (self.labels >= len(self.classes))]
        if len(wrong):
            raise ValueError(
                f"labels must lie between 0 and {len(self.classes) - 1} for {len(self.classes)} classes, but a label "
                f"{int(wrong[0])} came in {source}; the file is damaged, or of another data set."
            )

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def batch(self, rows: Tensor) -> Tensor:
        """The images of some rows, as bytes (n, 3, h, w)."""

    @abstractmethod
    def take(self, rows: Tensor) -> Self:
        """A part, in the given order."""

    def to(self, device: torch.device) -> Self:
        """On the device whatever can lie there."""
        return self


class Pixels(Images):
    """Images of one size in memory, (n, 3, h, w) bytes."""

    def __init__(self, pixels: Tensor, labels: Any, classes: Sequence[str], source: str = "the data") -> None:
        super().__init__(labels, classes, source)
        if len(pixels) != len(self.labels):
            raise ValueError(
                f"{source} has {len(pixels)} images but {len(self.labels)} labels; a part of it is missing."
            )
        self.pixels = pixels

    def batch(self, rows: Tensor) -> Tensor:
        return self.pixels[rows.to(self.pixels.device)]

    def take(self, rows: Tensor) -> Pixels:
        return Pixels(self.pixels[rows], self.labels[rows], self.classes)

    def to(self, device: torch.device) -> Pixels:
        return Pixels(self.pixels.to(device), self.labels, self.classes)


class ImageFiles(Images):
    """Images in files, each read when it is wanted: its shorter side scaled to `shorter`, its middle cut out."""

    def __init__(
        self,
        files: Sequence[Path],
        labels: Any,
        classes: Sequence[str],
        source: str = "the data",
        *,
        shorter: int = 256,
        size: int = 224,
    ) -> None:
        super().__init__(labels, classes, source)
        self.files, self.shorter, self.size = list(files), shorter, size

    def batch(self, rows: Tensor) -> Tensor:
        # Decoding leaves Python's lock, so threads help.
        with ThreadPoolExecutor() as pool:
            return torch.stack(list(pool.map(self._read, rows.tolist())))

    def take(self, rows: Tensor) -> ImageFiles:
        files = [self.files[row] for row in rows.tolist()]
        return ImageFiles(files, self.labels[rows], self.classes, shorter=self.shorter, size=self.size)

    def in_memory(self) -> Pixels:
        """All of them, read now."""
        return Pixels(self.batch(torch.arange(len(self))), self.labels, self.classes)

    def _read(self, row: int) -> Tensor:
        image = read_image(self.files[row], shorter=self.shorter)
        top, left = (image.shape[1] - self.size) // 2, (image.shape[2] - self.size) // 2
        return image[:, top : top + self.size, left : left + self.size].clone()


def read_image(path: Path, *, shorter: int | None = None) -> Tensor:
    """An image as bytes (3, h, w), scaled so that its shorter side has that many pixels."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError('reading images needs pillow: pip install "poise[zoo]".') from error
    file = existing(path)
    with reading(file, "an image", "download it again"), Image.open(file) as opened:
        image = opened.convert("RGB")
        if shorter is not None and min(image.size) != shorter:
            scale = shorter / min(image.size)
            width, height = (max(shorter, round(scale * side)) for side in image.size)
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.array(image)
    return torch.from_numpy(pixels).permute(2, 0, 1)
