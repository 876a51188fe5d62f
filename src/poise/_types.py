"""The shape alphabet: n samples, k classes, b bins, t draws; every signature in poise is spelled with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

Array: TypeAlias = Any
"""What users bring: a torch tensor, a numpy array, or anything with ``__dlpack__``."""

Logits: TypeAlias = Tensor
"""(n, k) finite scores; only their differences within a row matter."""

Probs: TypeAlias = Tensor
"""(n, k) nonnegative rows that sum to one."""

Labels: TypeAlias = Tensor
"""(n,) whole numbers 0 … k-1: the true column of each row."""

Inputs: TypeAlias = Tensor
"""(n, ...) whatever is perturbed: images, activations, features or logits."""

Head: TypeAlias = Callable[[Tensor], Tensor]
"""The rest of the network: (n, ...) inputs to (n, k) logits.

One with an attribute `num_perturbed` takes rows of which only so many leading numbers are perturbed.
"""
