"""The one search of poise: the best positive number, in log scale, from the data's own scale outward."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

FloatArray = np.ndarray[Any, np.dtype[np.float64]]

Objective = Callable[[Sequence[float]], Sequence[float]]
"""Values of a criterion at several strengths at once, so that one set of draws serves them all."""

_REACH = 100.0
_WIDENINGS = 2


class Minimum(NamedTuple):
    """Where the criterion is smallest, and its value there."""

    argument: float
    value: float


class BoundWarning(UserWarning):
    """The best strength lies at an end of a range of twelve powers of ten around the data's scale."""


def minimize(objective: Objective, scale: float, *, smooth: bool, coarse: Objective | None = None) -> Minimum:
    """Minimize over one positive number, around `scale`.

    A grid in log scale from scale/100 to 100·scale, widened where its end wins; then a bounded scalar solve between the
    neighbours of the best (`smooth`), or three finer grids there (for step-like criteria such as ECE, on common random
    numbers). It cannot leave the positive numbers; if the best stays at an end after widening, a `BoundWarning` says
    so. `coarse`, of fewer rows, may stand for the objective on the first grid, and does not count where it is not sure:
    if it is lowest at an end or at several strengths, or if the objective falls towards an end of the bracket it gave.
    """
    refine = _refine_smooth if smooth else _refine_steps
    if coarse is not None:
        grid, values = _widened_grid(coarse, scale, smooth)
        best = _best(values)
        if 0 < best < len(grid) - 1 and (values == values[best]).sum() == 1:
            low, high = grid[best - 1], grid[best + 1]
            found = refine(objective, low, high)
            if 1.01 * low < found.argument < high / 1.01:
                return found
    grid, values = _widened_grid(objective, scale, smooth)
    best = _best(values)
    if best in (0, len(grid) - 1):
        side = "smaller" if best == 0 else "larger"
        warnings.warn(
            f"the criterion still improves at strength {grid[best]:.3g}, the end of the searched range, towards {side} "
            "ones; the validation set may be too small or too easy to fit on.",
            BoundWarning,
            stacklevel=4,
        )
    found = refine(objective, grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    # Between the points of the grid a criterion may be higher than at them.
    return found if found.value <= values[best] else Minimum(float(grid[best]), float(values[best]))


def polished(objective: Objective, near: float) -> float:
    """The lowest point of the parabola through an exact objective's values a thousandth apart, near its minimum.

    What was minimized in single precision is known to a ten-thousandth; this is the same number on every machine.
    """
    step = 1e-3
    left, middle, right = objective([near * math.exp(-step), near, near * math.exp(step)])
    bend, tilt = left - 2 * middle + right, (right - left) / 2
    return near * math.exp(-step * tilt / bend) if bend > abs(tilt) else near


def margin_scale(logits: Tensor, weight: Tensor | None = None) -> float:
    """The median distance of the top logit from the runner-up: what a strength at the logits is measured against."""
    top = logits.topk(2, dim=1).values.double()
    margin, order = (top[:, 0] - top[:, 1]).sort()
    heavy = torch.where(margin > 0, 1.0 if weight is None else weight[order].double(), 0.0).cumsum(0)
    if len(heavy) == 0 or heavy[-1] == 0:
        return 1.0
    return float(margin[torch.searchsorted(heavy, heavy[-1] / 2)])


def _widened_grid(objective: Objective, scale: float, smooth: bool) -> tuple[FloatArray, FloatArray]:
    """Strengths around the scale and the objective's values there, so many that an end is not the best, if possible."""
    grid = _log_grid(scale / _REACH, scale * _REACH, 17 if smooth else 33)
    values = _evaluate(objective, grid)
    for _ in range(_WIDENINGS):
        best = _best(values)
        if 0 < best < len(grid) - 1:
            break
        more = (
            _log_grid(grid[0] / _REACH, grid[0], 9)[:-1] if best == 0 else _log_grid(grid[-1], grid[-1] * _REACH, 9)[1:]
        )
        at = 0 if best == 0 else len(grid)
        grid, values = np.insert(grid, at, more), np.insert(values, at, _evaluate(objective, more))
    return grid, values


def _refine_smooth(objective: Objective, low: float, high: float) -> Minimum:
    result = minimize_scalar(
        lambda log_x: float(objective([math.exp(log_x)])[0]),
        bounds=(math.log(low), math.log(high)),
        method="bounded",
        options={"xatol": 1e-5},
    )
    return Minimum(math.exp(result.x), float(result.fun))


def _refine_steps(objective: Objective, low: float, high: float) -> Minimum:
    found = Minimum(math.sqrt(low * high), math.inf)
    for _ in range(3):
        grid = _log_grid(low, high, 17)
        values = _evaluate(objective, grid)
        best = _best(values)
        if values[best] < found.value:
            found = Minimum(float(grid[best]), float(values[best]))
        low, high = grid[max(best - 2, 0)], grid[min(best + 2, len(grid) - 1)]
    return found


def _log_grid(low: float, high: float, num: int) -> FloatArray:
    return np.exp(np.linspace(math.log(low), math.log(high), num))


def _evaluate(objective: Objective, grid: FloatArray) -> FloatArray:
    values = np.asarray(objective([float(x) for x in grid]), dtype=np.float64)
    return np.where(np.isfinite(values), values, np.inf)


def _best(values: FloatArray) -> int:
    """The smallest; among equals the middle one, away from ends where a criterion is merely flat."""
    equals = np.flatnonzero(values == values.min())
    return int(equals[len(equals) // 2])
