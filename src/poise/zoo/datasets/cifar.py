"""CIFAR-10 and CIFAR-100: from the official archive, from its unpacked folder, or from mosaics of images."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from poise.io.files import existing, reading
from poise.zoo.datasets.batches import read_batch
from poise.zoo.datasets.images import Pixels, read_image

SIDE = 32
"""Pixels along one side of an image."""


@dataclass(frozen=True)
class Form:
    """How an official archive is laid out, and the MD5 of the archive and of every file in it."""

    title: str
    archive: str
    archive_md5: str
    folder: str
    train: Mapping[str, str]
    test: Mapping[str, str]
    meta: Mapping[str, str]
    labels: str
    names: str


CIFAR10 = Form(
    title="CIFAR-10",
    archive="cifar-10-python.tar.gz",
    archive_md5="c58f30108f718f92721af3b95e74349a",
    folder="cifar-10-batches-py",
    train={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    test={"test_batch": "40351d587109b95175f43aff81a1287e"},
    meta={"batches.meta": "5ff9c542aee3614f3951f8cda6e48888"},
    labels="labels",
    names="label_names",
)
CIFAR100 = Form(
    title="CIFAR-100",
    archive="cifar-100-python.tar.gz",
    archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
    folder="cifar-100-python",
    train={"train": "16019d7e3df5f24257cddd939b257f8d"},
    test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    meta={"meta": "7973b15100ade9c7d40fb424638fde48"},
    labels="fine_labels",
    names="fine_label_names",
)
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read_cifar(path: Path, form: Form) -> tuple[Pixels, Pixels]:
    """Training and test images, in the official order; `path` is the archive, the folder in it, or what holds them.

    CIFAR-10 may also be a folder of mosaics: ``train_00.webp``, ``test_00.webp`` and so on (any format that pillow
    reads without loss, or ``.npy`` of bytes (h, w, 3), for machines without pillow), each whole images in rows, with
    their labels in ``labels.npz`` under ``train`` and ``test``.
    """
    if path.is_file():
        return _from_archive(path, form)
    if (path / form.archive).exists():
        return _from_archive(path / form.archive, form)
    for folder in (path / form.folder, path):
        if all((folder / name).exists() for name in form.train):
            return _from_folder(folder, form)
    if form is CIFAR10 and (path / "labels.npz").exists():
        return _from_mosaics(path)
    raise FileNotFoundError(
        f"{path} holds no {form.title}: neither {form.archive}, nor its folder {form.folder}"
        + (", nor mosaics with labels.npz" if form is CIFAR10 else "")
        + "; the archive is at https://www.cs.toronto.edu/~kriz/cifar.html."
    )


def _from_archive(file: Path, form: Form) -> tuple[Pixels, Pixels]:
    with file.open("rb") as content:
        _same(hashlib.file_digest(content, "md5").hexdigest(), form.archive_md5, file, form)
    with reading(file, "a tar archive", "download it again"), tarfile.open(file) as archive:
        members = {name: archive.extractfile(f"{form.folder}/{name}") for name in _files(form)}
        contents = {name: member.read() for name, member in members.items() if member is not None}
    return _images(contents, form, file)


def _from_folder(folder: Path, form: Form) -> tuple[Pixels, Pixels]:
    contents = {name: existing(folder / name).read_bytes() for name in _files(form)}
    for name, expected in _files(form).items():
        _same(hashlib.md5(contents[name]).hexdigest(), expected, folder / name, form)
    return _images(contents, form, folder)


def _files(form: Form) -> dict[str, str]:
    return {**form.train, **form.test, **form.meta}


def _same(found: str, expected: str, file: Path, form: Form) -> None:
    if found != expected:
        raise ValueError(
            f"{file} is not the official {form.title}: its MD5 is {found} and should be {expected}; it is truncated or "
            "altered: download it again."
        )


def _images(contents: Mapping[str, bytes], form: Form, source: Path) -> tuple[Pixels, Pixels]:
    with reading(source, f"batches of {form.title}", "download it again"):
        (meta,) = (read_batch(contents[name]) for name in form.meta)
        classes = [name.decode() for name in meta[form.names]]
        parts = [[read_batch(contents[name]) for name in names] for names in (form.train, form.test)]
        pixels = [np.concatenate([batch["data"] for batch in part]).reshape(-1, 3, SIDE, SIDE) for part in parts]
        labels = [[label for batch in part for label in batch[form.labels]] for part in parts]
    train, test = (
        Pixels(torch.from_numpy(part), truth, classes, str(source)) for part, truth in zip(pixels, labels, strict=True)
    )
    return train, test


def _from_mosaics(folder: Path) -> tuple[Pixels, Pixels]:
    table = folder / "labels.npz"
    with reading(table, "labels of mosaics", "it has the arrays train and test"), np.load(table) as arrays:
        labels = {split: arrays[split] for split in ("train", "test")}
    train, test = (
        Pixels(_tiles(sorted(folder.glob(f"{split}_*.*")), folder), truth, CIFAR10_CLASSES, f"{folder} ({split})")
        for split, truth in labels.items()
    )
    return train, test


def _tiles(files: Sequence[Path], folder: Path) -> Tensor:
    if not files:
        raise FileNotFoundError(f"{folder} has labels.npz but no mosaics train_00.webp, test_00.webp and so on.")
    parts = []
    for file in files:
        image = _read_array(file) if file.suffix == ".npy" else read_image(file)
        if image.shape[1] % SIDE or image.shape[2] % SIDE:
            raise ValueError(
                f"the mosaic {file} has {image.shape[2]} x {image.shape[1]} pixels, but holds images of {SIDE} x "
                f"{SIDE}, so both must be multiples of {SIDE}; make it again."
            )
        tiles = image.unfold(1, SIDE, SIDE).unfold(2, SIDE, SIDE)
        parts.append(tiles.permute(1, 2, 0, 3, 4).reshape(-1, 3, SIDE, SIDE))
    return torch.cat(parts)


def _read_array(file: Path) -> Tensor:
    with reading(file, "an array", "make it again"):
        pixels = np.load(file, allow_pickle=False)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(
            f"{file} must hold bytes (h, w, 3), but holds {pixels.dtype} of shape {pixels.shape}; make it again."
        )
    return torch.from_numpy(pixels).permute(2, 0, 1)
