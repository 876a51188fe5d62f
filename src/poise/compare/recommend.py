"""Chooses a method on validation data alone, by cross-validated likelihood within a time budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from poise import _check
from poise.calibrators import Calibrator, TemperatureScaling
from poise.compare.methods import Methods, chosen, label
from poise.compare.race import Candidate, Race
from poise.compare.run import Progress
from poise.compare.sets import Sample, scores_of


@dataclass(frozen=True, eq=False)
class Recommendation:
    """The method chosen, fitted on all validation rows, and the evidence."""

    calibrator: Calibrator
    method: str
    reason: str
    """Why, in two sentences."""
    candidates: tuple[Candidate, ...]
    """From the lowest cross-validated NLL; those left out come last."""
    num_folds: int
    budget: float
    seconds: float


def recommend(
    val: Any,
    methods: Methods = None,
    *,
    budget: float = 120.0,
    num_folds: int = 5,
    seed: int = 0,
    progress: Progress | None = None,
) -> Recommendation:
    """The method with the lowest cross-validated NLL on validation data, if its gain over temperature scaling is real.

    A gain is the mean over rows of log p_y(method) − log p_y(TS), each row predicted by a fit that has not seen it.
    The lowest NLL wins if its gain exceeds z standard errors of the rows' differences, z the normal quantile at
    1 − .05/m for m rivals: where nothing is better than temperature scaling, that is chosen in 95 of 100 cases.
    Otherwise temperature scaling wins, and the reason says what the lowest NLL was.

    val and methods are as for `compare`. A method is fitted on few rows first, which tells what it costs, then on the
    first of the stratified folds, the cheap ones first, and if it is not 3 standard errors behind the best there, on
    the others, the best ones first. A fold is left out where it, and the fit of that method on all rows, are predicted
    to end after the budget (seconds): then the method is judged on the folds it has, by its difference there from the
    best of those that have all, or it is listed with that reason. A fit that runs is not broken off. The floor of p_y
    is 1e-12.

    The rows' differences know of the noise in the rows and not of that in the fits: with fewer than a few hundred rows
    the choice is unsure. What fits in the budget depends on the machine; all else is repeatable.

    >>> from poise import zoo
    >>> found = recommend(zoo.shipped_scores()[0], methods=["StructuredVectorScaling"])
    >>> print(found.method, found.candidates[0].method)
    StructuredVectorScaling StructuredVectorScaling
    >>> found.reason.split('. ')[1]
    'It may change predictions; the best that changes none is Temperature, 0.1609.'

    Reference: Stone, JRSS B 1974 (cross-validation); Diebold, Mariano, 1995 (paired differences of losses).
    """
    _check.positive(budget, "budget")
    scores = scores_of(val, "val")
    sample = Sample.of(scores)
    _check.several_classes(sample.labels)
    _check.whole(num_folds, "num_folds", least=2)
    _check.whole(seed, "seed", least=0)
    calibrators: dict[str, Calibrator] = {label(TemperatureScaling()): TemperatureScaling()}
    calibrators |= chosen(methods, with_features=sample.features is not None)
    race = Race(sample, min(num_folds, len(sample.labels)), seed, budget, progress or (lambda done, total, what: None))
    winner, reason, candidates = race.run(calibrators)
    fitted = race.fitted(calibrators[winner], sample, scores.classes)
    return Recommendation(fitted, winner, reason, candidates, race.num_folds, budget, race.spent)
