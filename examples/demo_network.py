"""Train a small residual network on CIFAR-10 and write the validation and test logits that `poise demo` calibrates."""

from __future__ import annotations

import argparse
import os
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32  # pixels along one side of an image
TILES = 50  # images along one side of a mosaic
PADDING = 4  # pixels added on every side before a random crop
MOSAICS = {"train": 20, "test": 4}
VALIDATION = 5_000
BATCH = 128
PEAK_RATE = 0.15
WEIGHT_DECAY = 5e-5


class DataError(Exception):
    """The folder of images is not what this script expects."""


def load_split(folder: Path, split: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The images (n, 32, 32, 3) and labels (n,) of `split`, read from WebP mosaics of 50 x 50 images."""
    parts = []
    for number in range(MOSAICS[split]):
        path = folder / f"{split}_{number:02d}.webp"
        try:
            with Image.open(path) as picture:
                mosaic = np.asarray(picture.convert("RGB"))
        except FileNotFoundError:
            raise DataError(f"The mosaic {path} does not exist.") from None
        except (UnidentifiedImageError, OSError) as error:
            raise DataError(f"The file {path} cannot be read as an image: {error}.") from None
        if mosaic.shape != (TILES * SIDE, TILES * SIDE, 3):
            raise DataError(f"The mosaic {path} is {mosaic.shape[1]} x {mosaic.shape[0]} pixels, not 1600 x 1600.")
        tiles = mosaic.reshape(TILES, SIDE, TILES, SIDE, 3).transpose(0, 2, 1, 3, 4)
        parts.append(tiles.reshape(-1, SIDE, SIDE, 3))
    images = np.concatenate(parts)

    path = folder / "labels.npz"
    try:
        with np.load(path) as archive:
            labels = archive[split].astype(np.int64)
    except FileNotFoundError:
        raise DataError(f"The label file {path} does not exist.") from None
    except KeyError:
        raise DataError(f"The label file {path} has no array named {split!r}.") from None
    except (AttributeError, OSError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"The label file {path} cannot be read: {error}.") from None
    if labels.shape != (len(images),):
        raise DataError(f"The labels {split!r} in {path} have shape {labels.shape}, not ({len(images)},).")
    if labels.min() < 0 or labels.max() >= len(CLASSES):
        raise DataError(f"The labels {split!r} in {path} are not all between 0 and {len(CLASSES) - 1}.")
    return images, labels


class Block(nn.Module):
    """Two 3 x 3 convolutions with batch normalization, and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x), inplace=True)


class SmallResNet(nn.Sequential):
    """A narrow residual network of three stages, each at half the resolution of the one before."""

    def __init__(self, stem: int = 16, widths: tuple[int, ...] = (32, 64, 128)) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(3, stem, 3, padding=1, bias=False),
            nn.BatchNorm2d(stem),
            nn.ReLU(inplace=True),
        ]
        inputs = stem
        for width in widths:
            layers.append(Block(inputs, width, stride=2))
            inputs = width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, len(CLASSES))]
        super().__init__(*layers)


class Normalize:
    """Turns uint8 images (n, 32, 32, 3) into standardized float32 images (n, 3, 32, 32), channels last in memory."""

    def __init__(self, images: Tensor) -> None:
        pixels = images.reshape(-1, 3).double()
        self.mean = pixels.mean(0).float()
        self.scale = pixels.std(0).float()

    def __call__(self, images: Tensor) -> Tensor:
        return ((images.float() - self.mean) / self.scale).permute(0, 3, 1, 2)


def augment(padded: Tensor, rows: Tensor) -> Tensor:
    """A random 32 x 32 crop, mirrored half the time, of each of the padded images that `rows` names."""
    n = len(rows)
    steps = torch.arange(SIDE)
    across = torch.where(torch.rand(n, 1) < 0.5, steps, steps.flip(0))
    y = torch.randint(2 * PADDING + 1, (n, 1)) + steps
    x = torch.randint(2 * PADDING + 1, (n, 1)) + across
    return padded[rows[:, None, None], y[:, :, None], x[:, None, :]]


@torch.inference_mode()
def predict(network: nn.Module, images: Tensor, normalize: Normalize) -> NDArray[np.float32]:
    """The logits (n, 10) of `images`."""
    network.eval()
    return torch.cat([network(normalize(part)) for part in images.split(500)]).numpy()


def train(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    val_images: Tensor,
    val_labels: NDArray[np.int64],
    normalize: Normalize,
    epochs: int,
) -> None:
    """Train with plain cross-entropy, printing one line per epoch; the last epoch's weights are the ones kept."""
    padded = F.pad(images.permute(0, 3, 1, 2), (PADDING,) * 4, mode="reflect").permute(0, 2, 3, 1).contiguous()
    batches = len(images) // BATCH
    optimizer = torch.optim.SGD(
        network.parameters(), lr=PEAK_RATE, momentum=0.9, nesterov=True, weight_decay=WEIGHT_DECAY
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_RATE, total_steps=epochs * batches, pct_start=0.2, cycle_momentum=False
    )
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        network.train()
        total = 0.0
        order = torch.randperm(len(images))[: batches * BATCH]
        for rows in order.split(BATCH):
            loss = F.cross_entropy(network(normalize(augment(padded, rows))), labels[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        accuracy = float((predict(network, val_images, normalize).argmax(1) == val_labels).mean())
        seconds = time.perf_counter() - start
        print(
            f"epoch {epoch:3d}/{epochs}  loss {total / batches:.4f}  val accuracy {accuracy:.2%}  {seconds:.1f} s",
            flush=True,
        )


def measure(logits: NDArray[np.floating], labels: NDArray[np.int64]) -> dict[str, float]:
    """Accuracy, ECE (15 equal bins (lo, hi] of the top probability) and negative log-likelihood of `logits`."""
    scores = logits.astype(np.float64)
    scores -= scores.max(1, keepdims=True)
    log_probs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    confidence = np.exp(log_probs.max(1))
    correct = log_probs.argmax(1) == labels
    bins = 15
    which = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = np.bincount(which, weights=correct - confidence, minlength=bins)
    return {
        "accuracy": float(correct.mean()),
        "ece": float(np.abs(gaps).sum() / len(labels)),
        "nll": float(-log_probs[np.arange(len(labels)), labels].mean()),
        "confidence": float(confidence.mean()),
    }


def write(path: Path, logits: NDArray[np.float16], labels: NDArray[np.int64]) -> None:
    """Write one compressed archive, replacing `path` only once it is complete."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            np.savez_compressed(file, logits=logits, labels=labels, classes=np.array(CLASSES))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def report(name: str, logits: NDArray[np.floating], labels: NDArray[np.int64]) -> None:
    """Print the figures of `measure` on one line."""
    figures = measure(logits, labels)
    print(
        f"{name:<13}  accuracy {figures['accuracy']:.4%}  mean confidence {figures['confidence']:.4%}"
        f"  ECE {figures['ece']:.4%}  NLL {figures['nll']:.6f}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True, metavar="FOLDER", help="mosaics and labels.npz")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).resolve().parents[1] / "src" / "poise" / "data",
        metavar="FOLDER",
        help="where demo.val.npz and demo.test.npz go (default: the package's data folder)",
    )
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads that PyTorch may use (default: 1)")
    arguments = parser.parse_args()
    for name in ("epochs", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if arguments.seed < 0:
        parser.error("--seed must be at least 0")
    for name in ("images", "out"):
        if not getattr(arguments, name).is_dir():
            parser.error(f"--{name}: the folder {getattr(arguments, name)} does not exist")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    try:
        images, labels = load_split(arguments.images, "train")
        test_images, test_labels = load_split(arguments.images, "test")
    except DataError as error:
        sys.exit(str(error))

    order = np.random.default_rng(arguments.seed).permutation(len(images))
    val_rows, train_rows = order[:VALIDATION], order[VALIDATION:]
    train_images, val_images = torch.from_numpy(images[train_rows]), torch.from_numpy(images[val_rows])
    val_labels = labels[val_rows]
    normalize = Normalize(train_images)

    network = SmallResNet().to(memory_format=torch.channels_last)
    print(f"{sum(p.numel() for p in network.parameters()):,} parameters, {len(train_rows):,} training images")
    train(
        network,
        train_images,
        torch.from_numpy(labels[train_rows]),
        val_images,
        val_labels,
        normalize,
        arguments.epochs,
    )

    report("train", predict(network, train_images, normalize), labels[train_rows])
    for split, split_images, split_labels in (
        ("val", val_images, val_labels),
        ("test", torch.from_numpy(test_images), test_labels),
    ):
        logits = predict(network, split_images, normalize)
        path = arguments.out / f"demo.{split}.npz"
        write(path, logits.astype(np.float16), split_labels)
        report(f"{split} float32", logits, split_labels)
        with np.load(path) as archive:
            report(f"{split} float16", archive["logits"], archive["labels"])


if __name__ == "__main__":
    main()
