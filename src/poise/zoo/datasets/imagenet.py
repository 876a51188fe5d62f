"""ImageNet-1K folders, ImageNet-LT's lists and Tiny-ImageNet: images in files, read when they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from poise.io.files import existing, reading
from poise.zoo.datasets.images import ImageFiles, Pixels

SUFFIXES = (".jpeg", ".jpg", ".png")
NUM_IMAGENET_CLASSES = 1000


def read_class_folders(folder: Path, *, shorter: int = 256, size: int = 224) -> ImageFiles:
    """``<folder>/<class>/<image>``: the classes in the order of their names, the images in the order of theirs."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder} with one folder of images for every class.")
    classes = sorted(child.name for child in folder.iterdir() if child.is_dir())
    if len(classes) < 2:
        raise ValueError(
            f"{folder} must hold one folder of images for every class, but holds {len(classes)} folder(s); "
            "sort the images into folders that are called after their classes."
        )
    files, labels = [], []
    for label, name in enumerate(classes):
        images = _images_in(folder / name)
        files += images
        labels += [label] * len(images)
    return ImageFiles(files, labels, classes, str(folder), shorter=shorter, size=size)


def read_list(
    list_file: Path, root: Path, classes: Sequence[str] | None = None, *, shorter: int = 256, size: int = 224
) -> ImageFiles:
    """A text file of lines ``path label``, the paths from `root` on, as those of ImageNet-LT."""
    files, labels = [], []
    for number, line in enumerate(existing(list_file).read_text("utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        name, _, label = line.strip().rpartition(" ")
        if not name or not label.isdigit():
            raise ValueError(f"{list_file}, line {number}: `path label` was expected, but {line!r} came.")
        files.append(root / name.strip())
        labels.append(int(label))
    names = classes or [str(label) for label in range(NUM_IMAGENET_CLASSES)]
    found = ImageFiles(files, labels, names, str(list_file), shorter=shorter, size=size)
    # One look at the first tells a wrong root before hours of work.
    existing(files[0])
    return found


def read_tiny(folder: Path) -> tuple[ImageFiles, ImageFiles]:
    """Tiny-ImageNet's train and val folders: 200 classes in the order of ``wnids.txt`` sorted, 64 × 64 pixels."""
    classes = sorted(existing(folder / "wnids.txt").read_text("utf-8").split())
    number = {name: label for label, name in enumerate(classes)}
    files, labels = [], []
    for name in classes:
        images = _images_in(folder / "train" / name / "images")
        files += images
        labels += [number[name]] * len(images)
    train = ImageFiles(files, labels, classes, str(folder / "train"), shorter=64, size=64)
    table = existing(folder / "val" / "val_annotations.txt")
    with reading(table, "Tiny-ImageNet's annotations", "each line is a file, a tab and a class, and more"):
        rows = [line.split("\t")[:2] for line in table.read_text("utf-8").splitlines() if line]
        val_files = [folder / "val" / "images" / file for file, _ in rows]
        val_labels = [number[name] for _, name in rows]
    return train, ImageFiles(val_files, val_labels, classes, str(table), shorter=64, size=64)


def tiny_in_memory(folder: Path) -> tuple[Pixels, Pixels]:
    """Both, read now: 1.4 GB."""
    train, val = read_tiny(folder)
    return train.in_memory(), val.in_memory()


def _images_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; a class of the data set is missing.")
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
