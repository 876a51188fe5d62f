"""A progress bar with the time that is left, for work of minutes and days."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from poise.cli.screen import Screen


@contextmanager
def bar(screen: Screen, what: str, total: float) -> Iterator[Bar]:
    """A bar on standard error if someone is looking."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen.err, transient=True, disable=not screen.err.is_terminal) as progress:
        yield Bar(screen, progress, progress.add_task(what, total=total))


class Bar:
    """How far something is, and lines that stay above it."""

    def __init__(self, screen: Screen, progress: Progress, task: TaskID) -> None:
        self._screen, self._progress, self._task = screen, progress, task
        self._begun = False

    def reach(self, done: float, what: str | None = None) -> None:
        """So much of the total is done; the words before the bar change if there are any."""
        if not self._begun:
            # What a resumed run finds done was not done in this second: it must not count for the speed.
            self._progress.reset(self._task, completed=int(done))
            self._begun = True
        self._progress.update(self._task, completed=done, description=what)

    def say(self, line: str) -> None:
        """A line of standard output; where both are one terminal, the bar makes room for it."""
        shared = self._screen.out.is_terminal and self._screen.err.is_terminal
        (self._progress.console if shared else self._screen.out).print(Text(line))
