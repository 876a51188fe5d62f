"""What all tests share: one thread, repeatable examples, and the real networks' logits."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data" / "logits"
"""Beside the clone, not in it: real networks' logits are too large for a repository."""

torch.set_num_threads(1)
os.environ.setdefault("MPLBACKEND", "Agg")

settings.register_profile("poise", deadline=None, derandomize=True)
settings.load_profile("poise")


def load_shared(name: str, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels of ``name``, split "val" or "test"; without the data the test is skipped, in CI it fails."""
    if not SHARED.is_dir():
        sentence = "the real logits are not here: they are looked for in ../shared/data/logits, beside the repository."
        if os.environ.get("CI"):
            pytest.fail(sentence)
        pytest.skip(sentence)
    with np.load(SHARED / f"{name}.{split}.npz") as arrays:
        return torch.from_numpy(arrays["logits"]), torch.from_numpy(arrays["labels"])


def load_features(name: str, split: str) -> torch.Tensor:
    """What the last layer of the network of `load_shared` read, where that is known."""
    load_shared(name, split)
    with np.load(SHARED / f"{name}.{split}.npz") as arrays:
        return torch.from_numpy(arrays["features"])


@pytest.fixture(scope="session")
def shared_logits():
    """`load_shared` for tests that take fixtures: ``logits, labels = shared_logits("cifar10-resnet50-ce", "val")``."""
    return load_shared
