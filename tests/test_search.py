"""The search over one positive number: finds known minima, keeps its units, and cannot leave the positive numbers."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poise.search import BoundWarning, margin_scale, minimize, polished


def each(function):
    """A function of one number as an objective of several, and what it was asked."""
    asked = []

    def objective(strengths):
        asked.extend(strengths)
        return [function(x) for x in strengths]

    objective.asked = asked
    return objective


def valley(at):
    return lambda x: math.log(x / at) ** 2


def asymmetric(at):
    """Steep to the left, nearly flat to the right, as a likelihood in the temperature is."""
    return lambda x: at / x + math.log(x / at)


def stairs(function, step=0.01):
    """Piecewise constant, as a calibration error is."""
    return lambda x: math.floor(function(x) / step) * step


@pytest.mark.parametrize("function", [valley, asymmetric])
@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("at", [1.0, 0.0237, 7e3, 3e-4])
def test_a_known_minimum(function, smooth, at):
    """Also where it lies outside the first range, which ends at 100 times the scale."""
    found = minimize(each(function(at)), 1.0, smooth=smooth)
    assert found.argument == pytest.approx(at, rel=1e-4 if smooth else 5e-3)
    assert found.value == pytest.approx(function(at)(at), abs=1e-4)


@given(log_at=st.floats(-10, 10), log_scale=st.floats(-3, 3), smooth=st.booleans())
def test_any_minimum_within_reach(log_at, log_scale, smooth):
    at = math.exp(log_at)
    found = minimize(each(valley(at)), math.exp(log_scale), smooth=smooth)
    assert found.argument == pytest.approx(at, rel=1e-4 if smooth else 5e-3)
    assert found.value == valley(at)(found.argument), "the value is that of the argument"


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("function", [valley(1.3), asymmetric(0.4), stairs(valley(2.0))])
@pytest.mark.parametrize("c", [1e-6, 0.3, 17.0, 1e8])
def test_the_unit_does_not_matter(function, smooth, c):
    here = minimize(each(function), 1.0, smooth=smooth)
    there = minimize(each(lambda x: function(c * x)), 1.0 / c, smooth=smooth)
    assert there.argument == pytest.approx(here.argument / c, rel=1e-4)
    assert there.value == pytest.approx(here.value, abs=1e-9)


def test_a_step_like_criterion():
    """Of the lowest stair, a point well inside; never a value above the best that was seen."""
    found = minimize(each(stairs(valley(2.0))), 1.0, smooth=False)
    assert found.value == 0
    assert abs(math.log(found.argument / 2.0)) < 0.1
    rng = np.random.default_rng(0)
    noise = dict(enumerate(rng.normal(size=10_000) * 0.05))
    rough = each(lambda x: valley(2.0)(x) + noise[round(math.log(x) * 100) % 10_000])
    seen = []

    def remembered(strengths):
        values = rough(strengths)
        seen.extend(values)
        return values

    found = minimize(remembered, 1.0, smooth=False)
    assert found.value == min(seen)


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize(("slope", "side"), [(1, "smaller"), (-1, "larger")])
def test_an_end_of_the_range_warns(smooth, slope, side):
    """A criterion that always improves stops at twelve powers of ten, with a word to the user."""
    objective = each(lambda x: slope * math.log(x))
    with pytest.warns(BoundWarning, match=f"the end of the searched range, towards {side} ones; the validation set"):
        found = minimize(objective, 5.0, smooth=smooth)
    assert math.isfinite(found.argument)
    assert min(objective.asked) > 5 * 0.9e-6
    assert max(objective.asked) < 5 * 1.1e6
    assert abs(math.log10(found.argument / 5.0)) == pytest.approx(6, abs=0.3)


@pytest.mark.parametrize("smooth", [True, False])
def test_a_flat_criterion_stays_at_the_scale(smooth):
    found = minimize(each(lambda x: 0.25), 3.0, smooth=smooth)
    assert 3.0 / 100 < found.argument < 300
    assert found.value == 0.25


@pytest.mark.parametrize("smooth", [True, False])
def test_a_plateau_that_ends_the_range_is_no_bound(smooth):
    """Flat below 1, as a likelihood of separable data: any point there is best, and nothing diverges."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = minimize(each(lambda x: max(math.log(x), 0.0)), 1.0, smooth=smooth)
    assert found.value == 0
    assert 1e-6 <= found.argument <= 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("where", ["left", "right", "nearly everywhere"])
def test_what_is_not_finite_is_never_best(bad, smooth, where):
    ranges = {"left": (1.0, math.inf), "right": (0.0, 4.0), "nearly everywhere": (1.0, 4.0)}
    low, high = ranges[where]
    found = minimize(each(lambda x: valley(2.0)(x) if low < x < high else bad), 3.0, smooth=smooth)
    assert found.argument == pytest.approx(2.0, rel=1e-3)
    assert math.isfinite(found.value)


@pytest.mark.parametrize("smooth", [True, False])
def test_nothing_finite(smooth):
    """The scale itself is an answer of last resort: finite and positive."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BoundWarning)
        found = minimize(each(lambda x: math.nan), 2.0, smooth=smooth)
    assert 0 < found.argument < math.inf


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=64, max_size=64), smooth=st.booleans())
def test_any_criterion_gives_a_positive_finite_strength(values, smooth):
    """No worse than any point of the first grid, whatever the criterion looks like."""
    objective = each(lambda x: values[int(math.log(x) * 7) % 64])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BoundWarning)
        found = minimize(objective, 1.0, smooth=smooth)
    assert 1e-7 < found.argument < 1e7
    assert found.value == values[int(math.log(found.argument) * 7) % 64]
    grid = objective.asked[: 17 if smooth else 33]
    assert found.value <= min(values[int(math.log(x) * 7) % 64] for x in grid)


def test_the_first_grid_may_be_coarse():
    """The stand-in only says where to look; the answer and its value are the objective's."""
    exact, coarse = each(valley(2.0)), each(valley(2.2))
    found = minimize(exact, 1.0, smooth=True, coarse=coarse)
    assert found.argument == pytest.approx(2.0, rel=1e-4)
    assert len(coarse.asked) == 17
    assert len(exact.asked) < 40
    found = minimize(each(valley(2.0)), 1.0, smooth=False, coarse=coarse)
    assert found.argument == pytest.approx(2.0, rel=1e-2)
    assert found.value == valley(2.0)(found.argument)


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize(
    "stand_in",
    [valley(0.02), valley(40.0), valley(1e-5), each(lambda x: 0.5), each(math.log), lambda x: max(math.log(x), 0.0)],
    ids=["far below", "far above", "beyond the range", "flat", "falling to the end", "flat below"],
)
def test_a_coarse_grid_that_misleads_does_not_count(smooth, stand_in):
    """As of rows among which none is wrong: the answer is the objective's all the same, without a word."""
    coarse = stand_in if hasattr(stand_in, "asked") else each(stand_in)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = minimize(each(valley(2.0)), 1.0, smooth=smooth, coarse=coarse)
    assert found.argument == pytest.approx(2.0, rel=1e-4 if smooth else 5e-3)


def test_an_end_of_the_range_warns_behind_a_coarse_grid_too():
    with pytest.warns(BoundWarning):
        minimize(each(math.log), 1.0, smooth=True, coarse=each(valley(1.0)))


# The data's own scale


def test_margin_scale():
    logits = torch.tensor([[3.0, 1.0, 0.0], [0.0, 5.0, 1.0], [1.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
    assert margin_scale(logits) == 2, "the median of 2, 4 and 1; ties say nothing"
    assert margin_scale(logits * 10 + 7) == 20
    assert margin_scale(torch.zeros(4, 3)) == 1
    assert margin_scale(logits, torch.tensor([1.0, 5.0, 9.0, 1.0])) == 4
    assert margin_scale(logits, torch.tensor([0.0, 0.0, 9.0, 0.0])) == 1


@given(st.lists(st.integers(0, 4), min_size=9, max_size=9).filter(any))
def test_margin_scale_counts_a_weight_like_repetitions(counts):
    logits = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor(counts)
    repeated = logits[torch.repeat_interleave(torch.arange(9), counts)]
    assert margin_scale(logits, counts) == margin_scale(repeated)


def test_polished_finds_the_vertex():
    """Of what is smooth; an objective without one near stays where it was."""
    objective = lambda some: [math.log(x / 1.7) ** 2 + 0.3 * math.log(x / 1.7) ** 3 for x in some]  # noqa: E731
    assert polished(objective, 1.7002) == pytest.approx(1.7, rel=1e-6)
    assert polished(lambda some: [math.log(x) for x in some], 2.0) == 2.0
    assert polished(lambda some: [0.0 for _ in some], 2.0) == 2.0
