"""How a row at a time becomes machine code on the CPU (numba), and how rows are shared among threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]
Function = TypeVar("Function", bound=Callable[..., Any])

_WORTH_A_THREAD = 20_000
"""Classes times rows that take longer than starting threads."""


def compiled(function: Function) -> Function:
    """Machine code, made at the first call and kept on disk; other Python threads run beside it."""
    return cast(Function, numba.njit(function, nogil=True, cache=True, error_model="numpy"))


def summing(function: Function) -> Function:
    """The same for loops over nodes, whose sums may be taken in any order, that is, several terms at once."""
    in_any_order = {"reassoc", "contract", "nsz"}
    return cast(Function, numba.njit(function, nogil=True, cache=True, error_model="numpy", fastmath=in_any_order))


def in_threads(work: Callable[[int, int], None], shape: tuple[int, ...]) -> None:
    """Work on the rows from the first number up to the second: all of them, in as many threads as torch uses.

    Python's own threads: numba's would not survive a fork, nor callers in several threads.
    """
    num_rows, num_threads = shape[0], torch.get_num_threads()
    if num_threads == 1 or num_rows * shape[1] < _WORTH_A_THREAD:
        work(0, num_rows)
        return
    # Several parts each: rows differ in what they cost, and a thread may have to wait for its core.
    edges = [num_rows * part // (8 * num_threads) for part in range(8 * num_threads + 1)]
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work, edges[:-1], edges[1:]))
