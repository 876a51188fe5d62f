"""Fits, measures and compares: `poise.compare`."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from sklearn.base import clone

from poise import _check, metrics
from poise._arrays import to_floating
from poise._types import Probs
from poise.calibrators import Calibrator
from poise.compare import measures, methods
from poise.compare.comparison import Cell, Column, Comparison, Row
from poise.compare.measures import Measure, Metric
from poise.compare.sets import Sample, scores_of, shared_rows
from poise.io import Scores
from poise.metrics import Difference, Interval

LEVEL = 0.95

_FLOOR_DRAWS = 100

Progress = Callable[[int, int, str], None]
"""Told how many steps are done, of how many, and what comes next."""


def compare(
    val: Any,
    test: Any,
    methods: methods.Methods = None,
    metrics: str | Sequence[str] | Mapping[str, Metric] | None = None,
    seeds: int = 5,
    bootstrap: int = 1000,
    *,
    progress: Progress | None = None,
) -> Comparison:
    """Every method on your own logits: fitted on val, judged on test, with intervals, ties and noise floors.

    val and test are (logits, labels) or (logits, labels, features), Scores, or paths. Methods are names or unfitted
    calibrators, or a dictionary of them; by default all that do not sample and have what they need; "variants" are
    other published forms of those, and "all" adds both these and the paper's own. Metrics are names, "all", or a
    dictionary of functions (probs, labels) -> float, of which less is better. The row "uncalibrated" is always there.

    A method that has a seed runs `seeds` times, unless the second run gives the very same; cells are means over runs.
    Intervals and differences are those of `metrics.interval` and `metrics.paired_difference`, which know that a
    measured calibration error is too large by its noise. The differences are to the best of the column as measured; see
    `Comparison` for what `ties_best` says. The noise floor is that of the method with the lowest NLL.

    A method that fails is a row with its reason. On Ctrl-C the rows that are finished are compared and returned, with
    is_complete=False. Costs the fits, and for 10,000 rows of 10 classes about half a second per method, ten with
    all metrics. The rows must be independent and drawn like each other; those that stand in both sets are listed in
    `shared_rows`.

    >>> from poise import zoo
    >>> found = compare(*zoo.shipped_scores(), methods=["TemperatureScaling"], metrics=["nll"], bootstrap=100)
    >>> [(row.method, round(row.cells["nll"].value, 3), row.cells["nll"].ties_best) for row in found.rows]
    [('uncalibrated', 0.23, False), ('TemperatureScaling', 0.18, True)]

    Reference: Efron, Tibshirani, 1993; the guarded comparison with the best as in Hsu, Annals of Statistics 1981.
    """
    _check.whole(seeds, "seeds")
    _check.whole(bootstrap, "bootstrap", least=20)
    bench = _Bench.of(scores_of(val, "val"), scores_of(test, "test"), methods, metrics, seeds, bootstrap, progress)
    is_complete = bench.run_all()
    return bench.comparison(bench.rank() and is_complete)


@dataclass(frozen=True, eq=False)
class _Run:
    probs: Probs
    fit_seconds: float
    predict_seconds: float
    note: str | None


@dataclass(eq=False)
class _Bench:
    """What is being compared, and as much of the table as is finished."""

    val: Sample
    test: Sample
    network: Probs
    contenders: dict[str, Calibrator | None]
    measures: list[Measure]
    seeds: int
    bootstrap: int
    progress: Progress
    notes: list[str]
    shared: tuple[int, ...]
    rows: list[Row] = field(default_factory=list)
    probs: dict[str, list[Probs]] = field(default_factory=dict)
    floors: dict[str, metrics.NoiseFloor] = field(default_factory=dict)
    floor_of: str | None = None
    steps_done: int = 0

    @classmethod
    def of(
        cls,
        val: Scores,
        test: Scores,
        wanted_methods: methods.Methods,
        wanted_metrics: str | Sequence[str] | Mapping[str, Metric] | None,
        seeds: int,
        bootstrap: int,
        progress: Progress | None,
    ) -> _Bench:
        if val.num_classes != test.num_classes:
            raise ValueError(
                f"val has {val.num_classes} classes but test has {test.num_classes}; pass scores of one network."
            )
        if val.classes and test.classes and val.classes != test.classes:
            raise ValueError("val and test name their classes differently; bring the columns into the same order.")
        notes = []
        both = val.features is not None and test.features is not None
        if not both and (val.features is not None or test.features is not None):
            notes.append("Only one of the two sets has features, so they are not used.")
        shared = shared_rows(val, test)
        if shared:
            notes.append(
                f"{len(shared):,} of the {test.num_samples:,} test rows stand in the validation set too, number "
                "for number: if they are the same samples, what is fitted there looks better here than it is."
            )
        columns = measures.chosen(wanted_metrics, test.features)
        contenders: dict[str, Calibrator | None] = {methods.UNCALIBRATED: None}
        contenders |= methods.chosen(wanted_methods, with_features=both)
        least = 20 * (len(contenders) - 1)
        if bootstrap < least:
            notes.append(
                f"With {bootstrap} resamples nothing can be told from the best of {len(contenders)} methods; it takes "
                f"{least} or more."
            )
        network = torch.softmax(to_floating(test.as_logits()), 1) if test.probs is None else test.probs
        silent: Progress = lambda done, total, what: None  # noqa: E731
        return cls(
            Sample.of(val),
            Sample.of(test),
            network,
            contenders,
            columns,
            seeds,
            bootstrap,
            progress or silent,
            notes,
            shared,
        )

    @property
    def num_steps(self) -> int:
        seeded = sum(c is not None and methods.is_seeded(c) for c in self.contenders.values())
        return len(self.contenders) + seeded * (self.seeds - 1) + len(self.measures)

    def step(self, what: str) -> None:
        self.progress(self.steps_done, self.num_steps, what)

    def run_all(self) -> bool:
        """Fits and measures one method after the other; whether it came to the end."""
        planned = 0
        for name, calibrator in self.contenders.items():
            self.steps_done = planned
            planned += self.seeds if calibrator is not None and methods.is_seeded(calibrator) else 1
            try:
                self.run(name, calibrator)
            except KeyboardInterrupt:
                if not self.rows:
                    raise
                return False
        self.steps_done = planned
        return True

    def run(self, name: str, calibrator: Calibrator | None) -> None:
        """One method: as many runs as it has seeds, and its cells."""
        try:
            runs = list(self.runs(name, calibrator))
            self.step(f"measuring {methods.short(name)}")
            cells = {measure.name: self.cell(measure, runs) for measure in self.measures}
            change = self.difference(_ACCURACY, [run.probs for run in runs], [self.network]) if calibrator else None
        # Whatever a method dies of, the others go on.
        except Exception as error:
            said = " ".join(str(error).split()) or "no reason was given"
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            self.rows.append(Row(name, {}, error=kind + said))
            return
        row = Row(name, cells, len(runs), accuracy_change=change, note=runs[0].note)
        if calibrator is not None:
            fit, predict = (statistics.median(getattr(run, each) for run in runs) for each in _TIMES)
            row = replace(row, fit_seconds=fit, predict_seconds=predict)
        self.probs[name] = [run.probs for run in runs]
        self.rows.append(row)

    def runs(self, name: str, calibrator: Calibrator | None) -> Iterator[_Run]:
        if calibrator is None:
            self.step(name)
            yield _Run(self.network, 0.0, 0.0, None)
            return
        is_seeded = methods.is_seeded(calibrator)
        first: _Run | None = None
        for number in range(self.seeds if is_seeded else 1):
            self.step(methods.short(name) + (f", run {number + 1} of {self.seeds}" if is_seeded else ""))
            fresh = clone(calibrator)
            if number:
                fresh.set_params(seed=fresh.get_params(deep=False)["seed"] + number)
            run = self.fitted(fresh)
            if number == 1 and first is not None and torch.equal(run.probs, first.probs):
                return  # its seed plays no part here
            first = first or run
            yield run
            self.steps_done += 1

    def fitted(self, calibrator: Calibrator) -> _Run:
        val, test = self.val, self.test
        with heard() as said:
            start = time.perf_counter()
            # Some methods look at features where there are any.
            both = val.features is not None and test.features is not None
            calibrator.fit(val.logits, val.labels, features=val.features if both else None)
            middle = time.perf_counter()
            probs = calibrator.predict_proba(test.logits, features=test.features if both else None)
            end = time.perf_counter()
        wrong = int((~torch.isfinite(probs)).any(1).sum())
        if wrong:
            raise ValueError(f"{wrong:,} of {len(probs):,} rows came out without finite probabilities.")
        return _Run(probs, middle - start, end - middle, said[0] if said else None)

    def cell(self, measure: Measure, runs: list[_Run]) -> Cell:
        found = [self.interval(measure, run.probs) for run in runs]
        value, low, high, corrected = _means(found)
        spread = statistics.stdev([one.value for one in found]) if len(found) > 1 else None
        return Cell(value, low, high, corrected, spread)

    def interval(self, measure: Measure, probs: Probs) -> Interval:
        return metrics.interval(measure.function, probs, self.test.labels, level=LEVEL, resamples=self.bootstrap)

    def difference(self, measure: Measure, ours: list[Probs], theirs: list[Probs]) -> Difference:
        """Run by run: the means, and of the p-values the largest."""
        pairs = [(ours[i % len(ours)], theirs[i % len(theirs)]) for i in range(max(len(ours), len(theirs)))]
        found = [
            metrics.paired_difference(measure.function, a, b, self.test.labels, level=LEVEL, resamples=self.bootstrap)
            for a, b in pairs
        ]
        value, low, high, corrected = _means(found)
        return Difference(value, low, high, corrected, max(one.p_value for one in found), LEVEL)

    def rank(self) -> bool:
        """Tells the methods from the best, metric by metric, and finds the noise floors; whether it came to the end."""
        finished = [row for row in self.rows if row.error is None]
        try:
            for measure in self.measures:
                self.step(f"comparing by {measure.title}")
                if finished:
                    self.rank_by(measure, [row.method for row in finished])
                self.steps_done += 1
            self.step("done")
        except KeyboardInterrupt:
            return False
        return True

    def rank_by(self, measure: Measure, names: list[str]) -> None:
        sign = -1 if measure.higher_is_better else 1
        values = {row.method: sign * row.cells[measure.name].value for row in self.rows if row.method in names}
        best = min(values, key=lambda name: values[name])
        if measure.has_floor:
            self.floor_of = self.floor_of or self.most_likely(names)
            floor = metrics.noise_floor(self.probs[self.floor_of][0], measure.function, draws=_FLOOR_DRAWS)
            self.floors[measure.name] = floor
        cells: dict[str, dict[str, Any]] = {best: {"ties_best": True}}
        for name in names:
            if name != best:
                found = self.difference(measure, self.probs[name], self.probs[best])
                # One-sided, shared among the tests: so the truly best one keeps its mark.
                ties = found.p_value / 2 * (len(names) - 1) > 1 - LEVEL
                cells[name] = {"difference": found, "ties_best": ties}
        for index, row in enumerate(self.rows):
            if row.method in cells:
                cell = replace(row.cells[measure.name], **cells[row.method])
                self.rows[index] = replace(row, cells={**row.cells, measure.name: cell})

    def most_likely(self, names: list[str]) -> str:
        return min(names, key=lambda name: metrics.nll(self.probs[name][0], self.test.labels))

    def comparison(self, is_complete: bool) -> Comparison:
        return Comparison(
            tuple(
                Column(one.name, one.title, one.in_percent, one.higher_is_better, self.floors.get(one.name))
                for one in self.measures
            ),
            tuple(self.rows),
            num_val=len(self.val.labels),
            num_test=len(self.test.labels),
            num_classes=self.val.logits.shape[1],
            seeds=self.seeds,
            bootstrap=self.bootstrap,
            level=LEVEL,
            shared_rows=self.shared,
            floor_of=self.floor_of,
            notes=tuple(self.notes),
            is_complete=is_complete,
        )


_TIMES = ("fit_seconds", "predict_seconds")
_ACCURACY = measures.MEASURES["accuracy"]


def _means(found: Sequence[Interval] | Sequence[Difference]) -> tuple[float, float, float, float]:
    """Value, low, high and corrected."""
    each = [(one.value, one.low, one.high, one.corrected) for one in found]
    value, low, high, corrected = (statistics.fmean(parts) for parts in zip(*each, strict=True))
    return value, low, high, corrected


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is warned of meanwhile, as sentences."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
        said += [" ".join(str(one.message).split()) for one in caught]
