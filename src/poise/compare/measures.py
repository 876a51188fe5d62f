"""The metrics a comparison knows by name: their titles, their direction, and which of them have a noise floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from poise import _check, metrics
from poise._types import Array
from poise.metrics.neighborhoods import grouped_ece, proximity_groups

Metric = Callable[[Array, Array], float]

DEFAULT_METRICS = ("ece", "adaptive_ece", "classwise_ece", "nll", "brier", "accuracy")


@dataclass(frozen=True)
class Measure:
    """One column of the table."""

    name: str
    title: str
    function: Metric
    in_percent: bool = True
    higher_is_better: bool = False
    has_floor: bool = False
    """Whether a calibrated model would show 0 but for noise."""


def _error(name: str, title: str) -> Measure:
    return Measure(name, title, getattr(metrics, name), has_floor=True)


def _part(name: str, title: str, function: Callable[..., float], score: str) -> Measure:
    is_calibration = function is metrics.calibration_part
    return Measure(name, title, partial(function, score=score), in_percent=False, has_floor=is_calibration)


MEASURES = {
    measure.name: measure
    for measure in (
        _error("ece", "ECE"),
        _error("adaptive_ece", "AdaECE"),
        _error("classwise_ece", "CECE"),
        _error("adaptive_classwise_ece", "AdaCECE"),
        _error("smooth_ece", "smECE"),
        _error("debiased_ece", "debiased ECE"),
        _error("ece_sweep", "ECE sweep"),
        _error("ks_error", "KS"),
        _error("mce", "MCE"),
        _error("average_calibration_error", "ACE"),
        Measure("piece", "PIECE", metrics.piece, has_floor=True),  # type: ignore[arg-type]  # its groups are bound below
        Measure("nll", "NLL", metrics.nll, in_percent=False),
        Measure("brier", "Brier", metrics.brier, in_percent=False),
        _part("nll_calibration", "NLL cal.", metrics.calibration_part, "nll"),
        _part("nll_refinement", "NLL ref.", metrics.refinement_part, "nll"),
        _part("brier_calibration", "Brier cal.", metrics.calibration_part, "brier"),
        _part("brier_refinement", "Brier ref.", metrics.refinement_part, "brier"),
        Measure("accuracy", "accuracy", metrics.accuracy, higher_is_better=True),
        Measure("top_k_accuracy", "top-5 acc.", metrics.top_k_accuracy, higher_is_better=True),
    )
}
"""Every metric by name."""


def chosen(wanted: str | Sequence[str] | Mapping[str, Metric] | None, features: Tensor | None) -> list[Measure]:
    """The columns that were asked for: names, "all", or functions of (probs, labels) by their titles."""
    if isinstance(wanted, Mapping):
        return [_own(title, function) for title, function in wanted.items()]
    names = list(DEFAULT_METRICS) if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)
    if names == ["all"]:
        names = [name for name in MEASURES if name != "piece" or features is not None]
    for name in names:
        _check.choice(name, (*MEASURES, "all"), "a metric")
    names = list(dict.fromkeys(names))
    if not names or "all" in names:
        raise ValueError("metrics must name at least one metric, or be 'all' alone; leave them out for the usual six.")
    return [_with_groups(MEASURES[name], features) if name == "piece" else MEASURES[name] for name in names]


def _own(title: str, function: Any) -> Measure:
    if not callable(function):
        raise TypeError(f"the metric {title!r} must be a function of (probs, labels), but is {function!r}.")
    return Measure(title, title, function, in_percent=False)


def _with_groups(measure: Measure, features: Tensor | None) -> Measure:
    """The neighbours are the same for all methods, so they are sought once."""
    if features is None:
        raise ValueError("the metric piece needs the features of the test set; pass them, or leave piece out.")
    group = proximity_groups(metrics.proximity(features.float()))
    return Measure(measure.name, measure.title, partial(grouped_ece, group=group), has_floor=True)
