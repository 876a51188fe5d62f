"""The words of the command line for methods and noises, and what a fitted calibrator has learned, in words and JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import Tensor

from poise import _check
from poise.calibrators import (
    Calibrator,
    ConsistencyCalibration,
    SampledConsistency,
    TemperatureScaling,
    paper_consistency,
)
from poise.calibrators.criteria import CRITERIA
from poise.compare import named
from poise.neighbors import Additive
from poise.noise import Gaussian, GeneralizedNormal, Gumbel, Laplace, LogGamma, Logistic, Noise, Uniform

METHODS = ("auto", "consistency", "temperature", "sampled", "paper")
"""Words with options of their own; every other method is known by its name, with its defaults."""

_MOST_NUMBERS = 1000
"""Of a learned table that is written out; a larger one is told by its shape."""

NOISES: dict[str, type[Noise]] = {
    "gaussian": Gaussian,
    "uniform": Uniform,
    "gumbel": Gumbel,
    "logistic": Logistic,
    "laplace": Laplace,
    "generalized-normal": GeneralizedNormal,
    "log-gamma": LogGamma,
}

_WITH_A_NUMBER = ("generalized-normal", "log-gamma")


def calibrator(
    method: str, noise: str | None = None, criterion: str | None = None, scaling: str | None = None, seed: int = 0
) -> Calibrator:
    """The calibrator that a few words ask for; words that do not go together are refused."""
    if method not in METHODS:
        if (noise, criterion, scaling) != (None, None, None):
            raise ValueError(
                f"--noise, --criterion and --scaling are for {', '.join(METHODS[1:])}, but --method {method} came; "
                "write options in brackets, as in --method \"consistency(scaling='auto')\"."
            )
        return named(method)
    if criterion is not None:
        _check.choice(criterion, CRITERIA, "--criterion")
    if noise is not None and method in ("temperature", "paper"):
        fixed = "has no noise to choose" if method == "temperature" else "tries Gaussian and uniform noise itself"
        raise ValueError(f"--method {method} {fixed}, but --noise {noise} came; leave --noise out.")
    if scaling is not None and method != "consistency":
        raise ValueError(f"--scaling is for --method consistency, but --method {method} came; leave --scaling out.")
    if method == "temperature":
        return TemperatureScaling(criterion or "nll")
    if method == "consistency":
        shape = "auto" if noise in (None, "auto") else parse_noise(str(noise))
        return ConsistencyCalibration(shape, criterion or "nll", scaling or "none")
    found = paper_consistency()
    if method == "sampled":
        if noise == "auto":
            raise ValueError(
                "--noise auto is for --method consistency; name one noise, or take --method paper, which keeps the "
                "better of Gaussian and uniform."
            )
        found = SampledConsistency(Additive(parse_noise(noise or "gaussian")))
    found.set_params(seed=seed, criterion=criterion or "ece")
    return found


def parse_noise(word: str) -> Noise:
    """`gaussian` or `generalized-normal:8`."""
    name, _, number = word.partition(":")
    kind = NOISES[_check.choice(name, NOISES, "--noise")]
    if name == word:
        return kind()
    if name not in _WITH_A_NUMBER:
        raise ValueError(f"--noise {name} takes no number, but {word!r} came; write --noise {name}.")
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"--noise {name} takes a number, as in {name}:8, but {word!r} came.") from None
    return kind(value)  # type: ignore[call-arg]


def noise_word(noise: Noise) -> str:
    """What `parse_noise` understands."""
    name = next((name for name, kind in NOISES.items() if type(noise) is kind), repr(noise))
    values = [getattr(noise, field.name) for field in dataclasses.fields(noise)]  # type: ignore[arg-type]
    return ":".join([name, *(f"{value:g}" for value in values)])


def learned(fitted: Calibrator) -> dict[str, Any]:
    """The learned values that are there, without what is known anyway and the candidates."""
    known = ("classes_", "n_features_in_", "candidates_")
    values = {name: value for name, value in vars(fitted).items() if name.endswith("_") and name not in known}
    return {name.removesuffix("_"): value for name, value in values.items() if value is not None}


def kept(fitted: Calibrator) -> int | None:
    """Which of the candidates was kept as it is; none where it was only the start of something better."""
    values = {name: plain(value) for name, value in learned(fitted).items()}
    for index, candidate in enumerate(getattr(fitted, "candidates_", ())):
        if all(plain(value) == values.get(name, plain(value)) for name, value in candidate.items()):
            return index
    return None


def plain(value: Any) -> Any:
    """The value as JSON has it: noises and neighbours by their words, and null for what is no number."""
    if isinstance(value, Noise):
        return noise_word(value)
    if isinstance(value, Additive):
        return {"additive": noise_word(value.noise)}
    if isinstance(value, Tensor):
        return plain(value.tolist()) if value.numel() <= _MOST_NUMBERS else {"shape": list(value.shape)}
    if isinstance(value, Calibrator):
        return {type(value).__name__: plain(learned(value))}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def in_words(value: Any) -> str:
    """One learned value for people."""
    if isinstance(value, Tensor):
        return f"({' x '.join(map(str, value.shape))} numbers)"
    if isinstance(value, tuple) and any(isinstance(item, (Tensor, Calibrator)) for item in value):
        return f"({len(value)} {'tables' if isinstance(value[0], Tensor) else type(value[0]).__name__})"
    match plain(value):
        case {"additive": noise}:
            return f"{noise} noise"
        case float() as number:
            return f"{number:.4g}"
        case other:
            return str(other)
