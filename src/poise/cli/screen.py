"""What is shown: tables, the reliability diagram in characters, JSON and a spinner, in colour or without."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from poise.cli.measure import Measured
from poise.cli.methods import plain
from poise.io import atomic
from poise.metrics import Bins

_WIDEST = 100
_NARROWEST_BAR = 8

_RIGHT, _OVER, _UNDER = "bright_blue", "dark_orange", "magenta"


class Screen:
    """Standard output for what was asked for, standard error for what is said besides.

    With JSON on standard output, everything else goes to standard error.
    """

    def __init__(self, json_path: Path | None = None) -> None:
        self._json_path = json_path
        self.json_on_stdout = json_path is not None and str(json_path) == "-"
        self.out = console(sys.stderr if self.json_on_stdout else sys.stdout)
        self.err = console(sys.stderr)

    @property
    def bars(self) -> tuple[str, str, str]:
        """Accuracy, confidence beyond it, accuracy beyond the confidence."""
        return ("█", "░", "▓") if self.out.encoding.lower().startswith("utf") else ("#", "-", "+")

    def say(self, *lines: str) -> None:
        """Sentences, wrapped; brackets are brackets."""
        for line in lines:
            self.out.print(Text(line))

    def head(self, line: str) -> None:
        """The title of a part."""
        self.out.print(Text(line, style="bold"))

    def show(self, *tables: Table) -> None:
        """Tables with air around them."""
        for table in tables:
            self.out.print("", table, sep="\n")
        self.out.print()

    def write_json(self, content: dict[str, Any]) -> None:
        """Full precision, without NaN: into the file, onto standard output, or nowhere."""
        if self._json_path is None:
            return
        text = json.dumps(plain(content), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        if self.json_on_stdout:
            sys.stdout.write(text)
            return
        with atomic(self._json_path) as temporary:
            temporary.write_text(text, encoding="utf-8")

    @contextmanager
    def working(self, what: str) -> Iterator[Status | None]:
        """A spinner on standard error while something takes long, if someone is looking."""
        if not self.err.is_terminal:
            yield None
            return
        with self.err.status(what) as status:
            yield status


def console(stream: Any) -> Console:
    """A console that is never wider than one reads with ease."""
    found = Console(file=stream, highlight=False)
    found.width = min(found.width, _WIDEST)
    return found


def metrics_table(columns: dict[str, Sequence[Measured]]) -> Table:
    """One row per metric, one column per set of probabilities, with intervals where there are any."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    sets = list(columns.values())
    intervals = [any(one.interval is not None for one in measured) for measured in sets]
    floors = [any(one.floor is not None for one in measured) for measured in sets]
    for name, with_interval, with_floor in zip(columns, intervals, floors, strict=True):
        table.add_column(Text(name), justify="right")
        if with_interval:
            table.add_column("95 % interval", justify="right", style="dim")
        if with_floor:
            table.add_column("noise floor", justify="right", style="dim")
    for row in zip(*sets, strict=True):
        cells = []
        for one, with_interval, with_floor in zip(row, intervals, floors, strict=True):
            cells.append(number(one.value, one.in_percent))
            if with_interval:
                cells.append(_between(one))
            if with_floor:
                cells.append("" if one.floor is None else number(one.floor.mean, one.in_percent))
        table.add_row(f"{row[0].title} %" if row[0].in_percent else row[0].title, *cells)
    return table


def rows_table(columns: dict[str, str], rows: Iterable[Sequence[str]], *, best: int | None = None) -> Table:
    """A small table: titles with their justification, then the cells; one row may stand out."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title, side in columns.items():
        table.add_column(Text(title), justify="right" if side == "right" else "left")
    for index, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold" if index == best else None)
    return table


def number(value: float, in_percent: bool) -> str:
    """Percent with two digits, or four digits."""
    return f"{100 * value:z.2f}" if in_percent else f"{value:z.4f}"


def reliability(screen: Screen, columns: dict[str, Bins]) -> Table:
    """Each bin of confidence as a line: how often it was right, and what the confidence claimed.

    One set of bins is shown with all its figures, several are set side by side with their gaps.
    """
    is_alone = len(columns) == 1
    # What the figures and the spaces take; the rest is shared by the bars.
    taken = 11 + len(columns) * (27 if is_alone else 15)
    width = min(40, max(_NARROWEST_BAR, (screen.out.width - taken) // len(columns)))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("confidence", justify="right", no_wrap=True)
    for name in columns:
        table.add_column(Text(name), width=width, no_wrap=True)
        if is_alone:
            table.add_column("right", justify="right")
            table.add_column("sure", justify="right")
        table.add_column("gap", justify="right")
        table.add_column("n ", justify="right")
    first = next(iter(columns.values()))
    filled = [index for index in range(len(first.count)) if any(bins.count[index] > 0 for bins in columns.values())]
    for index in range(filled[0], filled[-1] + 1):
        low, high = (100 * float(edge) for edge in first.edges[index : index + 2])
        cells: list[Text | str] = [f"{low:.0f}-{high:.0f} %"]
        for bins in columns.values():
            cells += _bin_cells(screen, bins, index, width, is_alone)
        table.add_row(*cells)
    return table


def legend(screen: Screen) -> Text:
    """What the characters of `reliability` mean."""
    right, over, under = screen.bars
    return Text.assemble(
        (right * 2, _RIGHT),
        " right   ",
        (over * 2, _OVER),
        " claimed, but not right (overconfident)   ",
        (under * 2, _UNDER),
        " right, but not claimed\n",
        ("gap: confidence less accuracy, in percentage points; n: rows in the bin", "dim"),
    )


def _bin_cells(screen: Screen, bins: Bins, index: int, width: int, is_alone: bool) -> list[Text | str]:
    count, right, sure = (float(values[index]) for values in (bins.count, bins.accuracy, bins.confidence))
    if count == 0:
        return [""] * (5 if is_alone else 3)
    right_cells, sure_cells = (round(width * min(1.0, value)) for value in (right, sure))
    solid, over, under = screen.bars
    bar = Text.assemble(
        (solid * min(right_cells, sure_cells), _RIGHT),
        (over * max(0, sure_cells - right_cells), _OVER),
        (under * max(0, right_cells - sure_cells), _UNDER),
    )
    gap = Text(f"{100 * (sure - right):+.1f}", _OVER if sure > right else _UNDER)
    figures: list[Text | str] = [f"{100 * right:.1f}", f"{100 * sure:.1f}"] if is_alone else []
    return [bar, *figures, gap, f"{count:,.0f} "]


def _between(one: Measured) -> str:
    if one.interval is None:
        return ""
    return f"{number(one.interval.low, one.in_percent)} to {number(one.interval.high, one.in_percent)}"
