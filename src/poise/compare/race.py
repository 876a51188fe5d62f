"""Methods compared by cross-validated likelihood, within a time budget."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from sklearn.base import clone
from torch import Tensor

from poise._types import Labels
from poise.calibrators import Calibrator
from poise.calibrators.criteria import NLL_FLOOR
from poise.compare.methods import short
from poise.compare.run import Progress, heard
from poise.compare.sets import Sample

_FEWEST = 60
"""Rows that the first fit of a method may have, which tells what it costs."""

_PROBING = 0.4
"""The share of the budget that may go into such fits, if all methods are as slow as they may be."""

_GROWTH, _MOST_GROWTH = 0.7, 1.1
"""The power of the rows that a cost is taken to grow with until two fits tell, and what two fits may tell at most."""

_HOPELESS = 3.0
"""Standard errors behind the best on the first fold, after which a method is not fitted on the others."""

_CHANCE = 0.05
"""Of finding any gain over temperature scaling where there is none."""


@dataclass(frozen=True)
class Candidate:
    """A method that was considered, and how far it got."""

    method: str
    nll: float | None = None
    """Cross-validated; None where it was left out."""
    gain: float | None = None
    """Of NLL over temperature scaling on the same rows; positive is better."""
    standard_error: float | None = None
    """Of the gain, from the differences row by row."""
    num_folds: int = 0
    """How many folds it was judged on."""
    seconds: float = 0.0
    reason: str = ""
    """Why it was left out."""


@dataclass(eq=False)
class _Entry:
    """A method on its way through the folds."""

    name: str
    calibrator: Calibrator
    losses: Tensor
    """(n,) −log p_y of rows that were held out; NaN where they were not yet."""
    cost: float = 0.0
    """Predicted seconds of a fit on one fold's training rows."""
    seconds: float = 0.0
    reason: str = ""
    folds_done: int = 0
    probes: list[float] = field(default_factory=list)
    """Seconds of fits on few rows."""

    @property
    def is_left_out(self) -> bool:
        return bool(self.reason)

    def ahead_of(self, other: _Entry) -> tuple[float, float]:
        """By how much its losses are lower than another's on the rows that both have, and the standard error."""
        both = ~torch.isnan(self.losses + other.losses)
        difference = (other.losses - self.losses)[both]
        spread = difference.std(correction=0)
        return float(difference.mean()), float(spread / math.sqrt(max(1, len(difference) - 1)))


@dataclass(eq=False)
class Race:
    """Methods on the same folds, against the clock; temperature scaling comes first and is what all are measured by."""

    sample: Sample
    num_folds: int
    seed: int
    budget: float
    progress: Progress
    entries: list[_Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = time.perf_counter()
        self.folds = stratified_folds(self.sample.labels, self.num_folds, self.seed)

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.start

    def run(self, calibrators: Mapping[str, Calibrator]) -> tuple[str, str, tuple[Candidate, ...]]:
        """The winner's name, why it won, and all that ran, from the lowest NLL."""
        empty = torch.full((len(self.folds),), math.nan, dtype=torch.float64)
        self.entries = [_Entry(name, calibrator, empty.clone()) for name, calibrator in calibrators.items()]
        reference, *rivals = self.entries
        for number in range(self.num_folds):
            self.fold(reference, number)
        if reference.is_left_out:
            raise ValueError(f"temperature scaling could not be fitted here: {reference.reason}")
        for entry in rivals:
            self.probe(entry, _PROBING * self.budget / len(self.entries))
        rivals.sort(key=lambda entry: entry.cost)
        self.judge([entry for entry in rivals if self.can_afford(entry)])
        # What looked too dear on a few rows may be found cheaper on more, now that the time that is left is known.
        for entry in rivals:
            if not entry.folds_done:
                self.probe(entry, (self.budget - self.spent) / 3)
                self.judge([entry])
        return self.verdict()

    def probe(self, entry: _Entry, allowance: float) -> None:
        """Fits on a few rows, then on four times as many, and so on: how the cost grows tells what a fold will cost."""
        training = len(self.folds) * (1 - 1 / self.num_folds)
        sizes = [training / 4**power for power in range(1, 20) if training / 4**power >= _FEWEST][::-1]
        for size in sizes[len(entry.probes) :]:
            if entry.probes and entry.probes[-1] * 4**_GROWTH > allowance:
                return
            some = stratified_folds(self.sample.labels, round(len(self.folds) / size), self.seed + 1) == 0
            entry.probes.append(self.timed(entry, some, None))
            last = entry.probes[-1]
            before = entry.probes[-2] if len(entry.probes) > 1 else last / 4**_GROWTH
            growth = min(max(math.log(last / before, 4), 0.0), _MOST_GROWTH)
            entry.cost = last * (training / size) ** growth

    def can_afford(self, entry: _Entry) -> bool:
        """Whether there is time for one more fold, and for the fit on all rows that may come last."""
        whole_fit = entry.cost * self.num_folds / (self.num_folds - 1)
        return self.spent + entry.cost + whole_fit <= self.budget

    def judge(self, entries: list[_Entry]) -> None:
        """The first fold of each, and the others of those that are not hopeless after it, the most promising first."""
        for entry in entries:
            self.fold(entry, 0)
        self.drop_hopeless([entry for entry in entries if entry.folds_done and not entry.is_left_out])
        remaining = [entry for entry in entries if not entry.is_left_out]
        for entry in sorted(remaining, key=lambda entry: -entry.ahead_of(self.entries[0])[0]):
            for number in range(1, self.num_folds):
                self.fold(entry, number)

    def fold(self, entry: _Entry, number: int) -> None:
        """Fits without a fold and predicts it, if time allows; temperature scaling is always fitted."""
        if entry.is_left_out:
            return
        if not self.can_afford(entry) and entry is not self.entries[0]:
            if not entry.folds_done:
                needed = math.ceil(entry.cost * (1 + self.num_folds / (self.num_folds - 1)))
                entry.reason = f"a fold and a fit may take {needed} s, more than the budget had left"
            return
        held_out = self.folds == number
        entry.cost = max(self.timed(entry, ~held_out, held_out), entry.cost if number else 0.0)
        entry.folds_done += not entry.is_left_out

    def timed(self, entry: _Entry, training: Tensor, held_out: Tensor | None) -> float:
        """Seconds of a fit, and of the losses of the rows held out where there are any."""
        stage = "trying" if held_out is None else f"fold {entry.folds_done + 1} of {self.num_folds}:"
        self.tell(f"{stage} {short(entry.name)}")
        begin = time.perf_counter()
        try:
            with heard():
                fitted = self.fitted(entry.calibrator, self.sample[training])
                if held_out is not None:
                    entry.losses[held_out] = _losses(fitted, self.sample[held_out])
        # Whatever a method dies of, the others go on.
        except Exception as error:
            if held_out is not None:  # on few rows a class may be missing that is there later
                entry.reason = "it failed: " + (" ".join(str(error).split()) or type(error).__name__)
        seconds = time.perf_counter() - begin
        entry.seconds += seconds
        return seconds

    def drop_hopeless(self, entries: list[_Entry]) -> None:
        """Those that are far behind the best of all after their first fold."""
        racing = [entry for entry in self.entries if entry.folds_done and not entry.is_left_out]
        best = max(racing, key=lambda entry: entry.ahead_of(self.entries[0])[0])
        for entry in entries:
            ahead, error = entry.ahead_of(best)
            if ahead < -_HOPELESS * error:
                entry.reason = f"on the first fold it was {-ahead:.4f} ± {error:.4f} behind {short(best.name)}"

    def verdict(self) -> tuple[str, str, tuple[Candidate, ...]]:
        reference = self.entries[0]
        finished = [entry for entry in self.entries if not entry.is_left_out]
        complete = [entry for entry in finished if entry.folds_done == self.num_folds]
        yardstick = min(complete, key=lambda entry: float(entry.losses.mean()))
        base = float(yardstick.losses.mean())
        nll = {entry.name: base - entry.ahead_of(yardstick)[0] for entry in finished}
        best = min(finished, key=lambda entry: nll[entry.name])
        gain, error = best.ahead_of(reference)
        quantile = statistics.NormalDist().inv_cdf(1 - _CHANCE / max(1, len(self.entries) - 1))
        chosen = best if gain > quantile * error else reference
        self.tell(f"fitting {short(chosen.name)} on all rows")
        candidates = [self.candidate(entry, nll.get(entry.name)) for entry in self.entries]
        candidates.sort(key=lambda one: math.inf if one.nll is None else one.nll)
        return chosen.name, self.because(chosen, best, nll), tuple(candidates)

    def candidate(self, entry: _Entry, nll: float | None) -> Candidate:
        gain, error = (None, None) if nll is None else entry.ahead_of(self.entries[0])
        return Candidate(entry.name, nll, gain, error, entry.folds_done, entry.seconds, entry.reason)

    def because(self, chosen: _Entry, best: _Entry, nll: dict[str, float]) -> str:
        """Two sentences."""
        reference, name = self.entries[0], short(chosen.name)
        gain, error = best.ahead_of(reference)
        value = f"{self.num_folds}-fold cross-validated NLL, {nll[chosen.name]:.4f}"
        left_out = len(self.entries) - len(nll)
        among = f"the {len(nll)} methods compared" + (f" ({left_out} left out)" if left_out else "")
        if chosen is not best:
            return (
                f"Temperature has a {value}, and of {among} none is better beyond noise. The lowest is that of "
                f"{short(best.name)}, by {gain:.4f} ± {error:.4f}, which may be chance."
            )
        if chosen is reference:
            return f"Temperature has the lowest {value}, of {among}. It keeps every prediction as it is."
        first = (
            f"{name} has the lowest {value}, of {among}: {gain:.4f} ± {error:.4f} below temperature scaling, which is "
            "beyond noise."
        )
        if _keeps_order(chosen.calibrator):
            return f"{first} It keeps every prediction as it is."
        keeping = {e.name: nll[e.name] for e in self.entries if e.name in nll and _keeps_order(e.calibrator)}
        second = min(keeping, key=lambda one: keeping[one])
        return (
            f"{first} It may change predictions; the best that changes none is {short(second)}, {keeping[second]:.4f}."
        )

    def tell(self, what: str) -> None:
        """Progress is measured in seconds of the budget, for what it is spent on depends on what is found."""
        self.progress(round(min(self.spent, self.budget)), round(self.budget), what)

    @staticmethod
    def fitted(calibrator: Calibrator, sample: Sample, classes: Any = None) -> Calibrator:
        """A fit of a copy."""
        fresh: Calibrator = clone(calibrator)
        return fresh.fit(sample.logits, sample.labels, features=sample.features, classes=classes)


def stratified_folds(labels: Labels, num_folds: int, seed: int = 0) -> Tensor:
    """The fold of each row: sizes differ by one at most, and so does the number of each class in them.

    >>> stratified_folds(torch.tensor([0, 0, 1, 0, 0, 1]), 2).bincount().tolist()
    [3, 3]
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).to(labels.device)
    order = order[labels[order].argsort(stable=True)]
    fold = torch.empty_like(labels)
    fold[order] = torch.arange(len(labels), device=labels.device) % num_folds
    return fold


def _keeps_order(calibrator: Calibrator) -> bool:
    """Whether a method is sure to keep every prediction, before it is fitted."""
    return calibrator.keeps_order and calibrator.get_params(deep=False).get("scaling", "none") == "none"


def _losses(fitted: Calibrator, rows: Sample) -> Tensor:
    log_prob = fitted.predict_log_proba(rows.logits, features=rows.features)
    true: Tensor = log_prob.gather(1, rows.labels[:, None])[:, 0].double()
    if bool(torch.isnan(true).any()):
        raise ValueError("some rows came out without a probability.")
    return -true.clamp(min=math.log(NLL_FLOOR))
