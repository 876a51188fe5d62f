"""The methods a comparison knows: every registered calibrator with its defaults, and those that a word asks for."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from poise import _check
from poise.calibrators import Calibrator, ConsistencyCalibration, TemperatureScaling, paper_consistency
from poise.calibrators.base import CALIBRATORS

UNCALIBRATED = "uncalibrated"
PAPER = "paper"

_SAMPLED = "SampledConsistency"
"""Not among the default methods: it takes T passes for each of a hundred strengths, hours with a thousand classes."""

_VARIANTS = (
    "EnsembleTemperatureScaling(criterion='mse')",
    "ClasswiseTemperatureScaling(method='ece')",
    "HistogramBinning(strategy='equal_mass')",
    "HistogramBinning(mode='top_label')",
    "BayesianBinning(mode='top_label')",
    "IsotonicCalibration(mode='multiclass')",
    "IntraOrderPreserving(variant='diag')",
    "GroupCalibration(base='ets')",
    "ProximityCalibration(method='bin_mean_shift')",
)
"""The other forms in which methods were published."""

_SUFFIX = re.compile("(scaling|calibration)$")

Methods = str | Calibrator | Sequence[str | Calibrator] | Mapping[str, Calibrator] | None


def default_methods(*, with_features: bool) -> dict[str, Calibrator]:
    """Every registered method with its default arguments, but those that draw at random, or lack their features."""
    found: list[Calibrator] = []
    for name, kind in _registered().items():
        if name == _SAMPLED or (kind.needs_features and not with_features):
            continue
        found.append(kind())
        if kind is ConsistencyCalibration:
            found.append(ConsistencyCalibration(scaling="auto"))
    # The one that all are measured by comes first.
    found.sort(key=lambda calibrator: not isinstance(calibrator, TemperatureScaling))
    return {label(calibrator): calibrator for calibrator in found}


def variants(*, with_features: bool) -> dict[str, Calibrator]:
    """Other published forms of the default methods."""
    found = [named(word) for word in _VARIANTS]
    return {label(calibrator): calibrator for calibrator in found if with_features or not calibrator.needs_features}


def chosen(wanted: Methods, *, with_features: bool) -> dict[str, Calibrator]:
    """Unfitted calibrators by their names in the table."""
    if isinstance(wanted, Mapping):
        found = {str(name): _calibrator(calibrator) for name, calibrator in wanted.items()}
        if UNCALIBRATED in found:
            raise ValueError(f"the row {UNCALIBRATED!r} is there already; give your method another name.")
        return found
    if wanted is None:
        return default_methods(with_features=with_features)
    found = {}
    for one in [wanted] if isinstance(wanted, (str, Calibrator)) else wanted:
        if isinstance(one, str) and one in ("default", "variants", "all"):
            if one != "variants":
                found |= default_methods(with_features=with_features)
            if one != "default":
                found |= variants(with_features=with_features)
            found |= {PAPER: paper_consistency()} if one == "all" else {}
        elif one == PAPER:
            found[PAPER] = paper_consistency()
        elif one != UNCALIBRATED:  # it is always there
            calibrator = named(one) if isinstance(one, str) else _calibrator(one)
            found[label(calibrator)] = calibrator
    return found


def named(word: str) -> Calibrator:
    """The calibrator of a word: `TemperatureScaling`, `temperature`, `TS` or `ConsistencyCalibration(scaling="auto")`.

    >>> named("structured-vector"), named("consistency(scaling='auto')")
    (StructuredVectorScaling(), ConsistencyCalibration(scaling='auto'))
    """
    if word == PAPER:
        return paper_consistency()
    name, options = _parsed(word)
    known = _registered()
    found = {_plain(each): each for each in known} | _initials(known)
    if _plain(name) not in found:
        _check.choice(name, [*map(short, known), PAPER], "a method")
    kind = known[found[_plain(name)]]
    accepted = inspect.signature(kind).parameters
    for option in options:
        _check.choice(option, accepted, f"an option of {kind.__name__}")
    return kind(**options)


def label(calibrator: Calibrator) -> str:
    """What a row is called: the calibrator as it would be written, on one line."""
    return " ".join(repr(calibrator).split()).removesuffix("()")


def short(name: str) -> str:
    """The name without what all names end in; `named` understands it too.

    >>> short("ConsistencyCalibration(scaling='auto')")
    "Consistency(scaling='auto')"
    """
    head, bracket, rest = name.partition("(")
    return (re.sub("(Scaling|Calibration)$", "", head) if head in CALIBRATORS else head) + bracket + rest


def is_seeded(calibrator: Calibrator) -> bool:
    """Whether another seed may give another result."""
    return "seed" in calibrator.get_params(deep=False)


def _registered() -> dict[str, type[Calibrator]]:
    """poise's own: a user's class is compared when it is passed."""
    kinds = CALIBRATORS.items()
    return {name: kind for name, kind in kinds if kind.__module__.startswith("poise.") and not inspect.isabstract(kind)}


def _plain(name: str) -> str:
    bare = re.sub(r"[\s_-]", "", name).lower()
    return _SUFFIX.sub("", bare) or bare


def _initials(names: Mapping[str, Any]) -> dict[str, str]:
    """The field's short names, TS, ETS and so on, where only one method has them."""
    every = [re.sub("[^A-Z]", "", name).lower() for name in names]
    return {short: name for short, name in zip(every, names, strict=True) if len(short) > 1 and every.count(short) == 1}


def _parsed(word: str) -> tuple[str, dict[str, Any]]:
    """A name, and what stands in brackets after it: plain values by their names."""
    name, bracket, _ = word.partition("(")
    if not bracket:
        return word, {}
    try:
        call = ast.parse(f"method{word[len(name) :].strip()}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(option.arg for option in call.keywords):
            raise ValueError(word)
        return name.strip(), {str(option.arg): ast.literal_eval(option.value) for option in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"a method with options is written like ConsistencyCalibration(scaling='auto'), with plain values, but "
            f"{word!r} came; in Python pass the calibrator itself."
        ) from error


def _calibrator(value: Any) -> Calibrator:
    if not isinstance(value, Calibrator):
        raise TypeError(
            f"a method must be a name or an unfitted calibrator, but {value!r} came; pass TemperatureScaling() or "
            "'TemperatureScaling'."
        )
    return value
