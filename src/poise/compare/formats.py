"""A comparison as text: figures for people, CSV and LaTeX."""

from __future__ import annotations

import csv as tables
import io
import re

from poise.compare.comparison import Cell, Column, Comparison, Row
from poise.compare.methods import short

_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_TEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"<": r"\textless{}", ">": r"\textgreater{}"}


def figure(value: float, column: Column) -> str:
    """Percent with two digits, or four digits."""
    return f"{100 * value:z.2f}" if column.in_percent else f"{value:z.4f}"


def between(cell: Cell, column: Column, dash: str = "-") -> str:
    """The interval, with no more digits than it can bear."""
    digits = 3 if not column.in_percent else 2 if cell.high < 0.1 else 1
    low, high = (f"{100 * end if column.in_percent else end:z.{digits}f}" for end in (cell.low, cell.high))
    return f"{low}{dash}{high}"


def seconds(value: float | None) -> str:
    """A time with two digits, but no finer than hundredths."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 9.5 else f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def csv(comparison: Comparison) -> str:
    """One line per row of `records`; what is not there is empty."""
    records = comparison.records()
    text = io.StringIO()
    writer = tables.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def latex(comparison: Comparison) -> str:
    """Value and interval in one cell; bold is what ties the best; the floor stands under the rule."""
    columns = comparison.columns
    lines = [
        rf"\begin{{tabular}}{{l{'r' * (len(columns) + 1)}}}",
        r"\toprule",
        " & ".join(["method", *(tex(column.heading) for column in columns), "fit (s)"]) + r" \\",
        r"\midrule",
        *(_line(row, comparison) for row in comparison.ranked()),
    ]
    floors = [column.floor for column in columns]
    if any(floors):
        cells = ["" if one.floor is None else figure(one.floor.mean, one) for one in columns]
        lines += [r"\midrule", " & ".join(["noise floor", *cells, ""]) + r" \\"]
    said = [f"{comparison.num_val} validation and {comparison.num_test} test rows, {comparison.num_classes} classes"]
    said.append(f"{100 * comparison.level:.0f} % intervals from {comparison.bootstrap} resamples; bold: ties the best")
    if not comparison.is_complete:
        said.append("INCOMPLETE: interrupted before the end")
    comments = [f"% {sentence}" for sentence in said]
    return "\n".join([*comments, *lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def tex(text: str) -> str:
    """Text as LaTeX shows it.

    >>> print(tex("a_b & 5 %"))
    a\\_b \\& 5 \\%
    """
    return re.sub(r"[\\~^&%$#_{}<>]", lambda sign: _TEX[sign[0]], text)


def _line(row: Row, comparison: Comparison) -> str:
    if row.error is not None:
        width = len(comparison.columns) + 1
        reason = tex(" ".join(row.error.split()))
        return rf"{tex(short(row.method))} & \multicolumn{{{width}}}{{l}}{{failed: {reason}}} \\"
    cells = []
    for column in comparison.columns:
        cell = row.cells.get(column.name)
        if cell is None:
            cells.append("")
            continue
        value = figure(cell.value, column)
        value = rf"\textbf{{{value}}}" if cell.ties_best else value
        spread = "" if cell.spread is None else rf"$\pm${figure(cell.spread, column)}"
        cells.append(rf"{value}{spread} {{\scriptsize {between(cell, column, '--')}}}")
    return " & ".join([tex(short(row.method)), *cells, seconds(row.fit_seconds)]) + r" \\"
