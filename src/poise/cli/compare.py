"""`poise compare`: every method on a validation and a test set, as a table with intervals, ties and noise floors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

import poise
from poise.cli.options import Debug, Json, check_outputs
from poise.cli.screen import Screen
from poise.compare import DEFAULT_METRICS, MEASURES, Column, Comparison, Row, default_methods
from poise.compare.formats import between, figure, seconds
from poise.compare.methods import short
from poise.io import read_scores

_BETWEEN_COMMAS = re.compile(r",\s*(?![^()]*\))")

_COSTS = ("acc. change", "fit s", "predict s")

_WIDEST = 120

_Texts = tuple[str, list[Text]]


def compare(
    val: Annotated[Path, typer.Option(metavar="FILE", help="Validation scores with labels.", show_default=False)],
    test: Annotated[Path, typer.Option(metavar="FILE", help="Test scores with labels.", show_default=False)],
    methods: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="With commas between them: default, variants (other published forms), all (these and the paper's, "
            "which samples), or names such as temperature, TS, or \"consistency(scaling='auto')\".",
        ),
    ] = "default",
    metrics: Annotated[str, typer.Option(metavar="NAMES", help="With commas between them, or all.")] = ",".join(
        DEFAULT_METRICS
    ),
    seeds: Annotated[int, typer.Option(help="Runs of a method that has a seed.")] = 5,
    bootstrap: Annotated[int, typer.Option(help="Resamples of the test rows.")] = 1000,
    json: Json = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as CSV.")] = None,
    latex: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as a LaTeX tabular.")] = None,
    debug: Debug = False,
) -> None:
    """Compare methods on your own scores: fitted on val, judged on test, with error bars one can believe."""
    screen = Screen(json, widest=_WIDEST)
    check_outputs({"--val": val, "--test": test}, {"--json": json, "--csv": csv, "--latex": latex})
    wanted, columns = _names(methods), _names(metrics)
    both = read_scores(val), read_scores(test)
    with screen.steps() as progress:
        found = poise.compare(*both, wanted, columns, seeds=seeds, bootstrap=bootstrap, progress=progress)
    screen.write_json(
        {"poise": poise.__version__, "command": "compare", "val": str(val), "test": str(test), **found.to_dict()}
    )
    if csv is not None:
        found.to_csv(csv)
    if latex is not None:
        found.to_latex(latex)
    show(screen, found)
    for path in (csv, latex):
        if path is not None:
            screen.say(f"Saved: {path}")
    if not found.is_complete:
        raise KeyboardInterrupt


def show(screen: Screen, found: Comparison, *, with_legend: bool = True) -> None:
    """The comparison in as many tables as the width asks for, and what must be known to read them."""
    screen.head(
        f"{len(found.rows)} methods, fitted on {found.num_val:,} rows of {found.num_classes:,} classes, judged on "
        f"{found.num_test:,} others"
    )
    for note in found.notes:
        screen.warn(note)
    if not found.is_complete:
        screen.warn("Interrupted: only what was finished is shown.")
    screen.show(*_tables(found, screen.out.width))
    screen.say(*(_legend(found) if with_legend else ()), *_spreads(found))
    for row in found.rows:
        if row.error is not None:
            screen.warn(f"{short(row.method)} failed: {row.error}")
        if row.note is not None:
            screen.say(f"{short(row.method)}: {row.note}")


def _names(words: str) -> list[str]:
    """The words between commas that are not in brackets."""
    return [word.strip() for word in _BETWEEN_COMMAS.split(words) if word.strip()]


def _legend(found: Comparison) -> Iterator[str]:
    tests = max(1, sum(row.error is None for row in found.rows) - 1)
    tied = any(cell.ties_best for row in found.rows for cell in row.cells.values())
    if tied:
        yield (
            "* the best of its column, or not told from it by the paired bootstrap (one-sided, 5 % shared among "
            f"{tests} tests)."
        )
    yield (
        f"Small figures: {100 * found.level:.0f} % intervals from {found.bootstrap:,} resamples of the test rows, less "
        "the upward bias of calibration errors; so they may lie below the value."
    )
    if found.floor_of is not None:
        yield (
            "Noise floor: what a perfectly calibrated network with the confidences of "
            f"{short(found.floor_of)} would show on as many rows, on average and in 95 of 100 cases at most."
        )


def _spreads(found: Comparison) -> Iterator[str]:
    for row in found.ranked():
        spreads = [(column, row.cells[column.name].spread) for column in found.columns if column.name in row.cells]
        if row.num_runs > 1:
            words = ", ".join(f"{one.title} {figure(value, one)}" for one, value in spreads if value is not None)
            yield f"{short(row.method)}: means of {row.num_runs} seeds; standard deviations {words}."


def _tables(found: Comparison, width: int) -> list[Table]:
    """One column after the other, in as few tables as the width asks for."""
    rows = found.ranked()
    names = [*(short(row.method) for row in rows), "noise floor"]
    groups = [[(column.heading, _cells(column, rows))] for column in found.columns]
    groups.append([(title, _costs(title, rows)) for title in _COSTS])
    return [_table(names, some) for some in _packed(groups, width - max(map(len, names)))]


def _packed(groups: list[list[_Texts]], available: int) -> list[list[_Texts]]:
    """Columns in order, as many as fit beside each other; a group stays together."""
    packed: list[list[_Texts]] = []
    left = 0
    for group in groups:
        wide = sum(max(len(heading), *map(len, cells)) + 3 for heading, cells in group)
        if wide > left:
            packed.append([])
            left = available
        packed[-1] += group
        left -= wide
    return packed


def _table(names: list[str], columns: list[_Texts]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading, _ in columns:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    *lines, floors = zip(names, *(cells for _, cells in columns), strict=True)
    for line in lines:
        table.add_row(Text(line[0]), *line[1:], end_section=line is lines[-1])
    if any(map(len, floors[1:])):
        table.add_row(*floors, style="dim")
    return table


def _cells(column: Column, rows: Sequence[Row]) -> list[Text]:
    """The column's texts, values and intervals each under each other; the floor comes last."""
    cells = [row.cells.get(column.name) for row in rows]
    values = ["" if cell is None else figure(cell.value, column) for cell in cells]
    intervals = ["" if cell is None else between(cell, column) for cell in cells]
    if column.floor is not None:
        values.append(figure(column.floor.mean, column))
        intervals.append(f"to {figure(column.floor.high, column)}")
    left, right = (max(map(len, texts), default=0) for texts in (values, intervals))
    texts = []
    for cell, value, between_them in zip([*cells, None], values, intervals, strict=False):
        tied = cell is not None and bool(cell.ties_best)
        shown = Text(value.rjust(left) + ("*" if tied else " "), "bold" if tied else "")
        texts.append(Text.assemble(shown, " ", (between_them.rjust(right), "dim")) if value else Text(""))
    return texts + [Text("")] * (len(rows) + 1 - len(texts))


def _costs(title: str, rows: Sequence[Row]) -> list[Text]:
    texts = {
        "acc. change": ["" if row.accuracy_change is None else _change(row.accuracy_change.value) for row in rows],
        "fit s": [seconds(row.fit_seconds) for row in rows],
        "predict s": [seconds(row.predict_seconds) for row in rows],
    }
    return [*map(Text, texts[title]), Text("")]


def _change(value: float) -> str:
    return f"{100 * value:+z.2f}" if value else "0"


def known() -> str:
    """The names of methods and metrics, for the help."""
    names = ", ".join(short(name) for name in default_methods(with_features=True))
    return f"Methods: {names}. Metrics: {', '.join(MEASURES)}."
