"""What networks trained with this package answered: logits that ship with it, to try calibration on."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from poise.io import Scores, read_scores
from poise.zoo.words import nearest

FOLDER = resources.files("poise") / "data" / "cifar10"
"""One run per folder, as `poise train` and `poise extract` leave them, without weights and features."""


def shipped() -> tuple[str, ...]:
    """The runs whose answers are here, each "network.loss".

    >>> "resnet50.cross-entropy" in shipped()
    True
    """
    return tuple(sorted(run.name for run in FOLDER.iterdir() if (run / "scores").is_dir()))


def shipped_scores(run: str = "resnet50.cross-entropy") -> tuple[Scores, Scores]:
    """Validation and test scores of a run: logits, labels and class names of images the network never saw.

    The logits are as the network gave them; `poise/data/README.md` says how it was trained. No images are included.

    >>> val, test = shipped_scores("resnet50.cross-entropy")
    >>> val.num_samples, test.num_samples, test.num_classes
    (5000, 10000, 10)
    """
    val, test = (_read(run, f"scores/{split}.npz") for split in ("val", "test"))
    return val, test


def shipped_config(run: str = "resnet50.cross-entropy") -> dict[str, Any]:
    """What the run was: network, loss, recipe, seed, machine."""
    config: dict[str, Any] = json.loads((_folder(run) / "config.json").read_text("utf-8"))
    return config


def _folder(run: str) -> Any:
    if run not in shipped():
        raise ValueError(f"run must be one of {', '.join(shipped())}, but is {run!r}{nearest(run, shipped())}")
    return FOLDER / run


def _read(run: str, name: str) -> Scores:
    with resources.as_file(_folder(run) / name) as file:
        return read_scores(file)
