"""The commands' common ground: the program, its version, and errors told in one sentence."""

from __future__ import annotations

import errno
import traceback
import warnings
from typing import Annotated, Any, TextIO

import typer
from rich.text import Text
from typer.core import TyperGroup

import poise
from poise.cli import commands, demo
from poise.cli.bench import bench
from poise.cli.compare import compare, known
from poise.cli.options import DEBUG
from poise.cli.screen import Screen
from poise.cli.training import extract, train


class _Sentences(TyperGroup):
    """What poise refuses becomes one sentence on standard error and exit code 2; Ctrl-C is 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _note
                return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except KeyboardInterrupt:
            _tell("Interrupted:", "no file is left half-written.", "yellow")
            raise typer.Exit(130) from None
        except (ImportError, OSError, TypeError, ValueError) as error:
            if ctx.meta.get(DEBUG):
                traceback.print_exc()
            _tell("Error:", _sentence(error), "red")
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Sentences,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="New here? Run: poise demo",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"poise {poise.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Make a classifier's confidence true: 80 % sure should mean right 80 times in 100."""


app.command("demo", epilog="Example: poise demo --out demo")(demo.demo)
app.command("fit", epilog="Example: poise fit val.npz -o calibrator.safetensors")(commands.fit)
app.command("apply", epilog="Example: poise apply calibrator.safetensors test.npz -o probs.npz")(commands.apply)
app.command("evaluate", epilog="Example: poise evaluate probs.npz --plot reliability.png")(commands.evaluate)
app.command("compare", epilog=f"{known()}\n\nExample: poise compare --val val.npz --test test.npz")(compare)
app.command("bench", epilog="Example: poise bench --json bench.json")(bench)
app.command("train", epilog="Example: poise train --data cifar10 --loss flsd53 -o run --recipe short")(train)
app.command("extract", epilog="Example: poise extract run -o scores")(extract)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; no file is left half-written: make room and try again (train --resume)."
    if isinstance(error, OSError) and error.strerror:
        place = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{place}; check the path and your rights to it."
    return str(error)


def _note(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    _tell("Note:", str(message), "yellow")


def _tell(word: str, sentence: str, style: str) -> None:
    # Never wrapped, so that a path can be copied and a line be searched for.
    Screen().err.print(Text.assemble((word, f"bold {style}"), " ", (sentence, style)), soft_wrap=True)
