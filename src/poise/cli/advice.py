"""What `poise fit --method auto` shows of its choice."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from poise.cli.screen import rows_table
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


def recommendation_table(advice: Recommendation) -> Table:
    """The candidates, from the lowest NLL, and why the last ones are out."""
    columns = {"": "left", "NLL": "right", "gain over temperature": "right", "s": "right", "folds": "right"}
    rows, chosen = [], None
    for index, one in enumerate(advice.candidates):
        chosen = index if one.method == advice.method else chosen
        gain = "" if one.gain is None or one.standard_error is None else f"{one.gain:+.4f} ± {one.standard_error:.4f}"
        nll = "" if one.nll is None else f"{one.nll:.4f}"
        rows.append((short(one.method), nll, gain, seconds(one.seconds), str(one.num_folds)))
    return rows_table(columns, rows, best=chosen)
