"""What a small real network said about CIFAR-10, shipped with poise: something to try calibration on."""

from __future__ import annotations

from importlib import resources

from poise.io import Scores, read_scores

NETWORK = "a residual network of 304,154 parameters, trained on CIFAR-10 in 15 minutes on one CPU"
"""What answered; `poise/data/README.md` has the whole recipe."""


def load() -> tuple[Scores, Scores]:
    """Validation and test scores: logits, labels and class names of 5,000 and 10,000 images the network never saw.

    The logits are as the network gave them, in float16; the images are not included.

    >>> val, test = load()
    >>> val.num_samples, test.num_samples, test.num_classes
    (5000, 10000, 10)
    """
    return _read("demo.val.npz"), _read("demo.test.npz")


def _read(name: str) -> Scores:
    with resources.as_file(resources.files("poise") / "data" / name) as file:
        return read_scores(file)
