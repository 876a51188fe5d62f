"""The validation and the test set of a comparison, from whatever a user has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poise._arrays import to_floating
from poise._types import Labels, Logits
from poise.io import Scores, read_scores


def scores_of(given: Any, name: str) -> Scores:
    """Scores with labels, from what a user may pass."""
    if isinstance(given, (str, os.PathLike)):
        given = read_scores(given)
    if isinstance(given, (tuple, list)) and len(given) in (2, 3):
        given = Scores(logits=given[0], labels=given[1], features=given[2] if len(given) == 3 else None)
    if not isinstance(given, Scores):
        came = f"{len(given)} things" if isinstance(given, (tuple, list)) else f"a {type(given).__name__}"
        raise TypeError(f"{name} must be (logits, labels) or (logits, labels, features), or Scores, but {came} came.")
    if given.labels is None:
        raise ValueError(f"{name} has no labels, but they are needed here; pass one label for every row.")
    if given.num_samples == 0:
        raise ValueError(f"{name} has 0 rows; pass the logits and labels of some.")
    return given


@dataclass(frozen=True, eq=False)
class Sample:
    """Checked scores, ready for calibrators."""

    logits: Logits
    labels: Labels
    features: Tensor | None

    @classmethod
    def of(cls, scores: Scores) -> Sample:
        assert scores.labels is not None  # scores_of saw to it
        return cls(to_floating(scores.as_logits()), scores.labels, scores.features)

    def __getitem__(self, rows: Tensor) -> Sample:
        return Sample(self.logits[rows], self.labels[rows], None if self.features is None else self.features[rows])


def shared_rows(val: Scores, test: Scores) -> tuple[int, ...]:
    """Test rows whose scores stand in the validation set, number for number, at the coarser of their precisions."""
    ours, theirs = val.as_logits(), test.as_logits()
    dtype = min((ours.dtype, theirs.dtype), key=lambda one: torch.finfo(one).bits)
    # Adding zero makes -0 and 0 the same bytes.
    known = {row.tobytes() for row in (ours.to(dtype).float() + 0).cpu().numpy()}
    rows = (theirs.to(dtype).float() + 0).cpu().numpy()
    return tuple(index for index, row in enumerate(rows) if row.tobytes() in known)
