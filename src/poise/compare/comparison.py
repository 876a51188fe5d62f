"""The comparison as pure data: rows of methods, cells of metrics, what they differ from the best by, and notes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from poise.io.files import FilePath, atomic, existing, reading
from poise.metrics import Difference, NoiseFloor


@dataclass(frozen=True)
class Column:
    """A metric, and the noise floor of the most likely method's confidences where it has one."""

    name: str
    title: str
    in_percent: bool
    higher_is_better: bool
    floor: NoiseFloor | None = None

    @property
    def heading(self) -> str:
        """The title with its unit."""
        return f"{self.title} %" if self.in_percent else self.title


@dataclass(frozen=True)
class Cell:
    """A metric of a method: the mean over its runs, with the mean ends of their intervals."""

    value: float
    low: float
    high: float
    corrected: float
    """With the upward bias of a calibration error taken out."""
    spread: float | None = None
    """Standard deviation over the seeds; None where there was one run."""
    difference: Difference | None = None
    """To the best of the column, drawing the same rows for both; None for the best itself, or where none was found."""
    ties_best: bool | None = None
    """Whether it is the best, or cannot be told from it; None where the comparison ended before that was tested."""


@dataclass(frozen=True)
class Row:
    """A method: its cells by metric, or the reason why there are none."""

    method: str
    cells: Mapping[str, Cell]
    num_runs: int = 0
    fit_seconds: float | None = None
    predict_seconds: float | None = None
    accuracy_change: Difference | None = None
    """Against the network's own predictions."""
    error: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Methods by metrics on one validation and one test set; pure data, and the same input gives the same but times.

    `ties_best` marks a cell whose one-sided paired test against the best, at 5 % divided by the number of such tests,
    finds no difference: the method that is truly best loses its mark in at most 5 % of tables, if the test keeps its
    level (for calibration errors it does so approximately, see `metrics.paired_difference`).
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    num_val: int
    num_test: int
    num_classes: int
    seeds: int
    bootstrap: int
    level: float
    shared_rows: tuple[int, ...] = ()
    """Test rows whose logits stand in the validation set too."""
    floor_of: str | None = None
    """The method whose confidences the noise floors are of."""
    notes: tuple[str, ...] = ()
    is_complete: bool = True

    def __getitem__(self, method: str) -> Row:
        """The row of a method."""
        for row in self.rows:
            if row.method == method:
                return row
        raise KeyError(f"there is no row {method}; there are {', '.join(row.method for row in self.rows)}.")

    def ranked(self) -> tuple[Row, ...]:
        """Rows from the best, by NLL where it was measured and else by the first metric; what failed comes last."""
        by = next((column for column in self.columns if column.name == "nll"), self.columns[0])

        def rank(row: Row) -> float:
            cell = row.cells.get(by.name)
            return float("inf") if cell is None else -cell.value if by.higher_is_better else cell.value

        return tuple(sorted(self.rows, key=rank))

    def best(self, metric: str) -> tuple[str, ...]:
        """The methods that are best by a metric, or cannot be told from the best; the best comes first."""
        tied = [row for row in self.rows if metric in row.cells and row.cells[metric].ties_best]
        return tuple(row.method for row in sorted(tied, key=lambda row: row.cells[metric].difference is not None))

    def records(self) -> list[dict[str, Any]]:
        """One flat dictionary per row, in fractions: what a table of any kind is made of."""
        found = []
        for row in self.rows:
            record: dict[str, Any] = {"method": row.method}
            for column in self.columns:
                cell = row.cells.get(column.name)
                kept = ("low", "high", "corrected", "spread", "ties_best")
                record[column.name] = None if cell is None else cell.value
                record |= {f"{column.name}_{part}": getattr(cell, part, None) for part in kept}
                record[f"{column.name}_p_value"] = getattr(getattr(cell, "difference", None), "p_value", None)
            record["accuracy_change"] = getattr(row.accuracy_change, "value", None)
            names = ("num_runs", "fit_seconds", "predict_seconds", "error", "note")
            found.append(record | {name: getattr(row, name) for name in names})
        return found

    def table(self) -> Any:
        """A DataFrame of `records`: pandas where it is installed, else polars."""
        try:
            import pandas
        except ImportError:
            try:
                import polars  # type: ignore[import-not-found, unused-ignore]
            except ImportError as error:
                raise ImportError(
                    'a table needs pandas or polars: pip install "poise[tables]", or use records() or to_csv.'
                ) from error
            return polars.DataFrame(self.records())
        return pandas.DataFrame(self.records())

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, in fractions, as JSON has them."""
        return asdict(self)

    def to_json(self, path: FilePath | None = None) -> str:
        """The text of `to_dict`, also written to a file if one is named; `from_json` reads it back."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        return write(text, path)

    @classmethod
    def from_json(cls, path: FilePath) -> Self:
        """What `to_json` or `poise compare --json` wrote."""
        file = existing(path)
        with reading(file, "a comparison", "write it again with Comparison.to_json or poise compare --json"):
            return cls.from_dict(json.loads(file.read_text("utf-8")))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The comparison that `to_dict` made plain."""

        def differing(value: dict[str, Any] | None) -> Difference | None:
            return None if value is None else Difference(**value)

        def cell(value: dict[str, Any]) -> Cell:
            return Cell(**value | {"difference": differing(value["difference"])})

        def row(value: dict[str, Any]) -> Row:
            cells = {name: cell(each) for name, each in value["cells"].items()}
            return Row(**value | {"cells": cells, "accuracy_change": differing(value["accuracy_change"])})

        def column(value: dict[str, Any]) -> Column:
            return Column(**value | {"floor": None if value["floor"] is None else NoiseFloor(**value["floor"])})

        known = {name: content[name] for name in cls.__dataclass_fields__}
        return cls(
            **known
            | {
                "columns": tuple(map(column, content["columns"])),
                "rows": tuple(map(row, content["rows"])),
                "shared_rows": tuple(content["shared_rows"]),
                "notes": tuple(content["notes"]),
            }
        )

    def to_csv(self, path: FilePath | None = None) -> str:
        """The text of `records` with commas, also written to a file if one is named."""
        from poise.compare.formats import csv

        return write(csv(self), path)

    def to_latex(self, path: FilePath | None = None) -> str:
        """A tabular for booktabs, rows `ranked`, also written to a file if one is named."""
        from poise.compare.formats import latex

        return write(latex(self), path)


def write(text: str, path: FilePath | None) -> str:
    """The text, and if a path is given it stands there too."""
    if path is not None:
        with atomic(Path(path)) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="")
    return text
