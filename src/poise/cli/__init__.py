"""The command line: `poise demo`, `fit`, `apply`, `evaluate`, `train`, `extract`; all that imports typer and rich."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line on the program's arguments and leaves with its exit code."""
    try:
        from poise.cli.app import app
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        print(f'Error: the command line needs {error.name}: pip install "poise[cli]".', file=sys.stderr)
        sys.exit(2)
    app(prog_name="poise")
