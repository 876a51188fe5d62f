"""Scores as a table for other programs: a column `label`, then one column per class; csv without an extra."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from poise import _check
from poise.io.files import atomic, listed, reading

_LABEL = "label"
_NOT_A_CLASS = ("label", "labels", "target", "targets")
_AN_INDEX = ("Unnamed: ", "__index_level_")


class Table(NamedTuple):
    """Checked scores on their way into a table; `labels` count the columns of `values`."""

    values: np.ndarray
    kind: str
    labels: Sequence[int] | None
    classes: Sequence[str] | None

    @property
    def names(self) -> list[str]:
        return list(self.classes or map(str, range(self.values.shape[1])))

    @property
    def written_labels(self) -> list[Any] | None:
        if self.labels is None or self.classes is None:
            return None if self.labels is None else list(self.labels)
        return [self.classes[label] for label in self.labels]


def read_csv(file: Path) -> dict[str, Any]:
    """The parts of a comma-separated file, all values in float64."""
    labels: list[int] = []
    cells = array("d")
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            rows = csv.reader(lines, skipinitialspace=True, strict=True)
            header = [name.strip() for name in next(rows, [])]
            names = _class_columns(file, header)
            column_of = _label_reader(names)
            at = header.index(_LABEL) if _LABEL in header else None
            for row in filter(None, rows):
                place = f"{file}, line {rows.line_num}"
                if len(row) != len(header):
                    raise ValueError(
                        f"{place}: {len(header)} cells were expected, as in the header, but {len(row)} came; the file "
                        "is truncated, or a cell with a comma is not quoted."
                    )
                if at is not None:
                    labels.append(column_of(row.pop(at), place))
                try:
                    cells.extend(map(float, row))
                except ValueError:
                    name, cell = next(pair for pair in zip(names, row, strict=True) if not _is_number(pair[1]))
                    raise _not_a_number(place, name, cell) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file} is not comma-separated text in UTF-8: {error}; save it as CSV (UTF-8).") from error
    values = np.frombuffer(cells, dtype=np.float64).reshape(-1, len(names))
    return _parts(values, names, labels if at is not None else None, None)


def write_csv(file: Path, table: Table) -> None:
    """Numbers are written with all their digits, so that float64 gives back every bit of them."""
    header = _header(file, table)
    if table.kind != (taken_for := _kind(table.values.astype(np.float64))):
        raise ValueError(
            f"these {table.kind} would be taken for {taken_for} when {file.name} is read again, for a csv cannot say "
            "which it holds; write a .parquet or an .npz."
        )
    labels = table.written_labels
    with atomic(file) as temporary, temporary.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(header)
        for index, row in enumerate(table.values):
            writer.writerow(row.tolist() if labels is None else [labels[index], *row.tolist()])


def read_parquet(file: Path) -> dict[str, Any]:
    """The parts of a parquet file; what poise wrote says itself whether it holds logits or probs."""
    _, parquet = _pyarrow()
    with reading(file, "a parquet table", "write it again, e.g. with poise.io.write_scores"):
        with parquet.ParquetFile(file) as content:
            table = content.read()
        columns = {name.strip(): table.column(at).to_numpy() for at, name in enumerate(table.column_names)}
    names = _class_columns(file, [name.strip() for name in table.column_names])
    for name in names:
        if len(columns[name]) and columns[name].dtype.kind not in "fiu":
            cells = enumerate(columns[name])
            row, cell = next(((row, cell) for row, cell in cells if not isinstance(cell, (int, float))), (0, "it"))
            raise _not_a_number(f"{file}, row {row}", name, str(cell))
    labels = None
    if _LABEL in columns:
        column_of = _label_reader(names)
        labels = [column_of(cell, f"{file}, row {row}") for row, cell in enumerate(columns[_LABEL].tolist())]
    kind = (table.schema.metadata or {}).get(b"poise", b"").decode()
    return _parts(np.stack([columns[name] for name in names], axis=1), names, labels, kind)


def write_parquet(file: Path, table: Table) -> None:
    """Numbers keep their dtype, and the metadata says which scores they are."""
    header = _header(file, table)
    pyarrow, parquet = _pyarrow()
    columns = [pyarrow.array(np.ascontiguousarray(column)) for column in table.values.T]
    if table.labels is not None:
        kind = pyarrow.int64() if table.classes is None else pyarrow.string()
        columns.insert(0, pyarrow.array(table.written_labels, kind))
    content = pyarrow.Table.from_arrays(columns, names=header)
    with atomic(file) as temporary:
        parquet.write_table(content.replace_schema_metadata({"poise": table.kind}), temporary)


def _class_columns(file: Path, header: list[str]) -> list[str]:
    """The header without `label`, once it is sure that every other column is a class."""
    names = [name for name in header if name != _LABEL]
    expected = f"a column `{_LABEL}` and one column per class"
    if any(not name or name.startswith(_AN_INDEX) for name in names):
        raise ValueError(f"{file} has a column without a name, as pandas gives its index; write it with index=False.")
    if _LABEL not in header:
        other = next((name for name in names if name.lower() in _NOT_A_CLASS), None)
        if other is not None:
            raise ValueError(f"{file} must have {expected}, but has {other!r}; rename that column `{_LABEL}`.")
        if names != _numbered(len(names)) and all(map(_is_number, names)):
            raise ValueError(f"{file} begins with numbers ({listed(names)}), but its first line must name {expected}.")
    if len(set(header)) != len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise ValueError(f"{file} has two columns called {twice!r}, but columns must differ; rename one.")
    if len(names) < 2:
        raise ValueError(
            f"{file} must have {expected}, two at least, but has {listed(header)}; separate cells by commas, and write "
            "one log-odds as two columns, 0 and the log-odds."
        )
    return names


def _header(file: Path, table: Table) -> list[str]:
    """The first line, if it is one that would be understood when it is read again."""
    header = [_LABEL, *table.names] if table.labels is not None else table.names
    wrong = next((name for name in table.names if name != name.strip() or name.lower() in _NOT_A_CLASS), None)
    if wrong is not None:
        raise ValueError(f"{file.name}, a table, cannot hold a class called {wrong!r}; rename it, or write an .npz.")
    _class_columns(file, header)
    return header


def _label_reader(names: Sequence[str]) -> Callable[[Any, str], int]:
    """How a cell of the column `label` names a class; a function of the header alone, whatever labels occur."""
    columns = {name: column for column, name in enumerate(names)}
    if not any(map(_is_number, names)):
        columns |= {number: column for column, number in enumerate(_numbered(len(names)))}

    def column_of(cell: Any, place: str) -> int:
        word = "" if cell is None else str(cell).strip()
        if word not in columns and _is_number(word) and float(word).is_integer():
            word = str(int(float(word)))
        if word not in columns:
            hint = _check._nearest(word, columns) or f"; labels here are {listed(columns)}."
            raise ValueError(f"{place}, column `{_LABEL}`: {word!r} is not the name or number of a class{hint}")
        return columns[word]

    return column_of


def _parts(values: np.ndarray, names: list[str], labels: list[int] | None, kind: str | None) -> dict[str, Any]:
    parts: dict[str, Any] = {kind if kind in ("logits", "probs") else _kind(values): values}
    if labels is not None:
        parts["labels"] = np.array(labels, dtype=np.int64)
    if names != _numbered(len(names)):
        parts["classes"] = names
    return parts


def _kind(values: np.ndarray) -> str:
    """What the values of a table that does not say it are taken for."""
    try:
        _check.probs(values)
    except ValueError:
        return "logits"
    return "probs" if len(values) else "logits"


def _numbered(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _not_a_number(place: str, name: str, cell: str) -> ValueError:
    return ValueError(
        f"{place}, column {name!r}: {cell!r} is not a number; every column but `{_LABEL}` is taken for a class, so "
        "drop columns that are none."
    )


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError('a .parquet file needs pyarrow: pip install "poise[tables]", or use .npz or .csv.') from error
    return pyarrow, pyarrow.parquet
