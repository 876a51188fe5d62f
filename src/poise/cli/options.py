"""Arguments and options that several commands share, and the judging of the paths they are given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

DEBUG = "poise.debug"


def _remember_debug(ctx: typer.Context, wanted: bool) -> bool:
    if wanted:
        ctx.meta[DEBUG] = True
    return wanted


Json: TypeAlias = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the figures as JSON too; - is standard output."),
]
Debug: TypeAlias = Annotated[
    bool, typer.Option("--debug", help="Show where an error came from.", callback=_remember_debug, is_eager=True)
]
NumBins: TypeAlias = Annotated[int, typer.Option("--num-bins", help="Bins of the calibration errors.")]


def check_outputs(inputs: dict[str, Path], outputs: dict[str, Path | None]) -> None:
    """Refuses paths that cannot be written, or must not be, before anything is computed."""
    taken: dict[str, str] = {os.path.realpath(path): name for name, path in inputs.items()}
    for name, path in outputs.items():
        if path is None or str(path) == "-":
            continue
        real = os.path.realpath(path)
        if real in taken:
            raise ValueError(f"{name} {path} would overwrite {taken[real]}; give it another name.")
        taken[real] = name
        if Path(real).is_dir():
            raise IsADirectoryError(f"{name} must be a file, but {path} is a folder; name a file in it.")
        folder = Path(real).parent
        if not folder.is_dir():
            raise FileNotFoundError(f"{name} {path} cannot be written, for there is no folder {folder}; make it first.")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{name} {path} cannot be written: the folder {folder} is read-only for you.")
