"""What `poise fit --method auto` shows of its choice."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from poise.cli.screen import Screen, rows_table
from poise.compare import Recommendation
from poise.compare.formats import seconds
from poise.compare.methods import short


def refuse_options(noise: str | None, criterion: str | None, scaling: str | None) -> None:
    """What is chosen cannot be asked for as well."""
    came = [f"--{name}" for name, value in locals().items() if value is not None]
    if came:
        raise ValueError(f"--method auto chooses by itself, but {came[0]} came; leave it out, or name the method.")


def told(advice: Recommendation) -> dict[str, Any]:
    """The evidence as plain values."""
    return {
        "method": advice.method,
        "reason": advice.reason,
        "num_folds": advice.num_folds,
        "budget": advice.budget,
        "seconds": advice.seconds,
        "candidates": [asdict(candidate) for candidate in advice.candidates],
    }


def show_advice(screen: Screen, advice: Recommendation) -> None:
    """The candidates from the lowest NLL, why the others are out, and why this one was chosen."""
    columns = {"": "left", "NLL": "right", "gain over temperature": "right", "folds": "right", "seconds": "right"}
    judged = [candidate for candidate in advice.candidates if candidate.nll is not None]
    rows = []
    for one in judged:
        gain = f"{one.gain:+.4f} ± {one.standard_error:.4f}" if one.standard_error else ""
        rows.append((short(one.method), f"{one.nll:.4f}", gain, str(one.num_folds), seconds(one.seconds)))
    chosen = [candidate.method for candidate in judged].index(advice.method)
    screen.show(rows_table(columns, rows, best=chosen))
    left_out = [candidate for candidate in advice.candidates if candidate.reason]
    screen.say(*(f"Left out: {short(candidate.method)}; {candidate.reason}." for candidate in left_out))
    screen.say("", advice.reason, "")
