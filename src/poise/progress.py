"""How far long work has come: any function of (done, total), or a line on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int], None]
"""Called with how much is done and how much there is."""

__all__ = ["Bar"]

_PER_SECOND = 5


class Bar:
    """One line on standard error, if someone is looking: share, count, throughput and the time left.

    It begins anew whenever the work does, and writes at most five times a second.

    >>> bar = Bar("neighbors")
    >>> bar.line(2_000, 8_000, seconds=4.0)
    '  25 %   2,000 of 8,000 neighbors   500/s   0:12 left'
    """

    def __init__(self, what: str = "neighbors") -> None:
        self.what = what
        self._started = self._shown = -1.0
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._started < 0 or done < self._done:
            self._started, self._shown = now, -1.0
        self._done = done
        if not sys.stderr.isatty() or (now - self._shown < 1 / _PER_SECOND and done < total):
            return
        self._shown = now
        print("\r" + self.line(done, total, now - self._started), end="", file=sys.stderr, flush=True)
        if done >= total:
            print(file=sys.stderr)
            self._started = -1.0

    def line(self, done: int, total: int, seconds: float) -> str:
        """What is shown after that many seconds."""
        rate = done / seconds if seconds > 0 else 0.0
        left = (total - done) / rate if rate > 0 else 0.0
        minutes, rest = divmod(round(left), 60)
        share = 100 * done / total if total else 100.0
        return f"{share:4.0f} %   {done:,} of {total:,} {self.what}   {rate:,.0f}/s   {minutes}:{rest:02d} left"
