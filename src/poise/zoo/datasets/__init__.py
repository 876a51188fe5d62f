"""Data sets by name, each with the paper's split into training, validation and test images."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from poise.zoo.datasets.cifar import CIFAR10, CIFAR100, Form, read_cifar
from poise.zoo.datasets.imagenet import read_class_folders, read_list, tiny_in_memory
from poise.zoo.datasets.images import NORMALIZATIONS, ImageFiles, Images, Normalization, Pixels
from poise.zoo.words import nearest

__all__ = ["DATASETS", "NORMALIZATIONS", "Dataset", "ImageFiles", "Images", "Normalization", "Pixels", "dataset"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images to train on, to fit calibrators on and to judge by; `train` is None where there are none."""

    name: str
    train: Images | None
    val: Images
    test: Images
    normalization: Normalization
    folder: Path | None = None
    """Where it was read from."""
    split_seed: int = 1

    @property
    def classes(self) -> tuple[str, ...]:
        return self.test.classes


def dataset(name: str, folder: str | os.PathLike[str], *, seed: int = 1) -> Dataset:
    """The data set of that name, read from a folder; `DATASETS` lists the names.

    cifar10, cifar100: the official archive, its unpacked folder, or mosaics (`read_cifar`); the 50,000 training
    images are split into 45,000 and 5,000 as the published networks' were, by seed 1. imagenet: ``val/<class>/``, and
    ``train/<class>/`` where it is, the validation images split into 20 % to fit on and 80 % to judge by, as in the
    paper, which names no seed. imagenet-lt: ``ImageNet_LT_{train,val,test}.txt`` beside the folders they name, with
    their own split. tiny-imagenet: train and val, the latter split as ImageNet's (the published code fits and judges on
    the same images). Nothing is ever downloaded.
    """
    if name not in DATASETS:
        raise ValueError(f"dataset must be one of {', '.join(DATASETS)}, but is {name!r}{nearest(name, DATASETS)}")
    path = Path(folder)
    if not path.exists():
        raise FileNotFoundError(f"there is no folder {path} to read {name} from; name the one that holds it.")
    return replace(DATASETS[name](name, path, seed), folder=path.absolute(), split_seed=seed)


def split(num_samples: int, num_val: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Rows of the rest and of the validation set: the first of all rows, shuffled as numpy's seeded generator did.

    >>> train, val = split(50_000, 5_000)
    >>> len(train), len(val)
    (45000, 5000)
    """
    # The legacy generator, whose stream numpy has frozen: the published split is its shuffle.
    order = torch.from_numpy(np.random.RandomState(seed).permutation(num_samples))
    return order[num_val:], order[:num_val]


def _cifar(form: Form) -> Callable[[str, Path, int], Dataset]:
    def read(name: str, folder: Path, seed: int) -> Dataset:
        images, test = read_cifar(folder, form)
        train, val = (images.take(rows) for rows in split(len(images), len(images) // 10, seed))
        return Dataset(name, train, val, test, NORMALIZATIONS["cifar"])

    return read


def _imagenet(name: str, folder: Path, seed: int) -> Dataset:
    held_out = read_class_folders(folder / "val")
    test, val = (held_out.take(rows) for rows in split(len(held_out), len(held_out) // 5, seed))
    train = read_class_folders(folder / "train") if (folder / "train").is_dir() else None
    return Dataset(name, train, val, test, NORMALIZATIONS["imagenet"])


def _imagenet_lt(name: str, folder: Path, seed: int) -> Dataset:
    train, val, test = (read_list(folder / f"ImageNet_LT_{part}.txt", folder) for part in ("train", "val", "test"))
    return Dataset(name, train, val, test, NORMALIZATIONS["imagenet"])


def _tiny(name: str, folder: Path, seed: int) -> Dataset:
    train, held_out = tiny_in_memory(folder)
    test, val = (held_out.take(rows) for rows in split(len(held_out), len(held_out) // 5, seed))
    return Dataset(name, train, val, test, NORMALIZATIONS["imagenet"])


DATASETS: dict[str, Callable[[str, Path, int], Dataset]] = {
    "cifar10": _cifar(CIFAR10),
    "cifar100": _cifar(CIFAR100),
    "imagenet": _imagenet,
    "imagenet-lt": _imagenet_lt,
    "tiny-imagenet": _tiny,
}
