"""Errors without fixed bins, debiased, by proximity, and the split of a score, against loops and other libraries."""

from __future__ import annotations

import calibration as kumar
import numpy as np
import pytest
import relplot
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.isotonic import IsotonicRegression

import reference_metrics as reference
from poise import metrics

UNBINNED = [metrics.smooth_ece, metrics.ks_error]
NEW = [*UNBINNED, metrics.debiased_ece, metrics.ece_sweep]
by_name = pytest.mark.parametrize("metric", NEW, ids=lambda metric: metric.__name__)


def binary(n, seed=0, bend=1.5):
    """Two classes, distinct confidences, true probability a bent version of the stated one."""
    rng = np.random.default_rng(seed)
    second = rng.uniform(0.02, 0.98, n)
    true = second**bend / (second**bend + (1 - second) ** bend)
    return np.stack([1 - second, second], axis=1), (rng.uniform(size=n) < true).astype(np.int64)


def several(n, k=5, seed=0, sharpness=2.0, votes=None):
    rng = np.random.default_rng(seed)
    probs = torch.from_numpy(rng.normal(size=(n, k)) * sharpness).softmax(1).numpy()
    labels = np.array([rng.choice(k, p=row) for row in np.sqrt(probs) / np.sqrt(probs).sum(1, keepdims=True)])
    if votes:
        probs = np.array([rng.multinomial(votes, row) for row in probs]) / votes
    return probs, labels


data = st.tuples(
    st.integers(1, 60), st.integers(2, 5), st.integers(0, 10**6), st.floats(0, 8), st.sampled_from([None, 7])
)


# ---- smooth, cumulative, swept ------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", [*UNBINNED, metrics.ece_sweep], ids=lambda metric: metric.__name__)
@pytest.mark.parametrize(
    "problem",
    [binary(80), several(80, 4), several(80, 3, sharpness=9.0), several(100, 3, votes=10)],
    ids=["binary", "several", "sharp", "votes"],
)
def test_equals_the_slow_loop(metric, problem):
    assert metric(*problem) == pytest.approx(getattr(reference, metric.__name__)(*problem), abs=2e-6)


@pytest.mark.parametrize("seed", range(3))
def test_smooth_ece_is_relplots_to_its_steps(seed):
    probs, labels = binary(3000, seed)
    confidence, correct = probs.max(1), (probs.argmax(1) == labels).astype(float)
    assert metrics.smooth_ece(probs, labels) == pytest.approx(relplot.smECE(confidence, correct), abs=2e-3)


def test_smooth_ece_follows_small_changes():
    probs, labels = binary(500)
    moved = np.clip(probs[:, 1] + 1e-5, 0, 1)
    assert metrics.smooth_ece(moved, labels) == pytest.approx(metrics.smooth_ece(probs, labels), abs=5e-5)


def test_smooth_ece_of_a_constant_confidence_is_its_gap():
    assert metrics.smooth_ece([[0.9, 0.1]] * 10, [0] * 7 + [1] * 3) == pytest.approx(0.2, abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(data)
def test_bounds(sizes):
    n, k, seed, sharpness, votes = sizes
    probs, labels = several(n, k, seed, sharpness, votes)
    signed = abs(probs.max(1).mean() - (probs.argmax(1) == labels).mean())
    finest = metrics.adaptive_ece(probs, labels, 4 * n)
    assert signed - 1e-9 <= metrics.ks_error(probs, labels) <= finest + 1e-9
    assert signed - 1e-9 <= metrics.smooth_ece(probs, labels) <= finest + 1e-9
    assert signed - 1e-9 <= metrics.ece_sweep(probs, labels) <= 1
    assert metrics.ece_sweep(probs, labels) <= metrics.ece_sweep(probs, labels, p=2) + 1e-9
    assert 0 <= metrics.debiased_ece(probs, labels, p=1) <= metrics.adaptive_ece(probs, labels) + 1e-9


@by_name
@settings(deadline=None, max_examples=25)
@given(sizes=data)
def test_order_of_rows_does_not_matter(metric, sizes):
    n, k, seed, sharpness, votes = sizes
    probs, labels = several(n, k, seed, sharpness, votes)
    order = np.random.default_rng(seed).permutation(n)
    assert metric(probs[order], labels[order]) == pytest.approx(metric(probs, labels), abs=1e-9)


@pytest.mark.parametrize("metric", UNBINNED, ids=lambda metric: metric.__name__)
def test_whole_weights_are_repetitions(metric):
    probs, labels = several(80)
    weight = np.random.default_rng(0).integers(0, 4, 80)
    repeated = metric(probs.repeat(weight, axis=0), labels.repeat(weight))
    assert metric(probs, labels, sample_weight=weight) == pytest.approx(repeated, abs=1e-9)
    assert metric(probs, labels, sample_weight=weight / 7) == pytest.approx(repeated, abs=1e-9)


@by_name
def test_sure_and_right_is_perfect(metric):
    labels = np.array([2, 0, 1, 1, 2])
    assert metric(np.eye(3)[labels], labels) == pytest.approx(0, abs=1e-12)


def test_the_sweep_takes_all_bins_where_every_prediction_is_right():
    probs, _ = binary(40)
    labels = probs.argmax(1)
    assert metrics.ece_sweep(probs, labels) == pytest.approx(1 - probs.max(1).mean())


# ---- debiased -----------------------------------------------------------------------------------------------------


def kumars_bins(probs, labels, num_bins=15):
    confidence, correct = reference.top(probs, labels)
    edges = reference.equal_mass_edges(confidence, num_bins)
    return kumar.bin(list(zip(confidence, np.array(correct, dtype=float), strict=True)), [*edges[1:-1], 1.0])


@pytest.mark.parametrize("seed", range(4))
def test_debiased_ece_is_kumars_on_the_same_bins(seed):
    probs, labels = binary(1000, seed)
    bins = kumars_bins(probs, labels)
    assert metrics.debiased_ece(probs, labels) == pytest.approx(kumar.unbiased_l2_ce(bins), abs=1e-9)
    np.random.seed(0)  # noqa: NPY002 - their generator
    theirs = kumar.normal_debiased_ce(bins, power=1, resamples=4000)
    assert metrics.debiased_ece(probs, labels, p=1) == pytest.approx(theirs, abs=1e-3)


def test_debiasing_removes_most_of_the_noise_of_a_calibrated_model():
    plain, first, squares = [], [], []
    for seed in range(30):
        problem = binary(1000, seed, bend=1.0)
        plain.append(metrics.adaptive_ece(*problem))
        first.append(metrics.debiased_ece(*problem, p=1))
        squares.append(metrics.debiased_ece(*problem))
    assert np.mean(first) < 0.7 * np.mean(plain)
    assert np.median(squares) < 0.7 * np.mean(plain)


# ---- proximity ----------------------------------------------------------------------------------------------------


def test_piece_equals_the_slow_loop(monkeypatch):
    probs, labels = several(120, 4)
    features = np.random.default_rng(0).normal(size=(120, 3))
    expected = reference.piece(probs, labels, features, num_groups=4, num_neighbors=5)
    assert metrics.piece(probs, labels, features, num_groups=4, num_neighbors=5) == pytest.approx(expected, abs=1e-9)
    monkeypatch.setattr("poise.metrics.neighborhoods._ENTRIES_AT_A_TIME", 700)
    assert metrics.piece(probs, labels, features, num_groups=4, num_neighbors=5) == pytest.approx(expected, abs=1e-9)


def test_piece_is_at_least_the_ece_and_equals_it_for_one_group():
    probs, labels = several(300, 4)
    features = np.random.default_rng(0).normal(size=(300, 3))
    whole = metrics.ece(probs, labels)
    assert metrics.piece(probs, labels, features, num_groups=1) == pytest.approx(whole)
    assert metrics.piece(probs, labels, features) >= whole


def test_proximity_of_a_reference_counts_the_sample_itself_if_it_is_there():
    features = np.random.default_rng(0).normal(size=(20, 4))
    assert metrics.proximity(features, features, num_neighbors=1).numpy() == pytest.approx(1, abs=1e-12)
    assert metrics.proximity(features, num_neighbors=1).max() < 1
    far = metrics.proximity([[1.0, 0.0]], [[-1.0, 0.0]], num_neighbors=1)
    assert float(far[0]) == pytest.approx(np.exp(-4))


@pytest.mark.parametrize(
    ("features", "options", "sentence"),
    [
        (np.ones((3, 2)), {}, "features have 3 rows but 8 were expected"),
        (np.ones((8, 2)), {"num_neighbors": 8}, "only 7 other rows"),
        (np.ones((8, 2)), {"reference": np.ones((20, 3))}, "must come from the same layer"),
        (np.full((8, 2), np.nan), {}, "features must be finite"),
        (np.ones((8, 2)), {"num_groups": 0, "num_neighbors": 2}, "num_groups must be a whole number"),
    ],
)
def test_piece_refuses_wrong_features(features, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        metrics.piece(*several(8, 3), features, **options)


# ---- the split of a score -----------------------------------------------------------------------------------------


def scores_of(probs, labels, score):
    return getattr(metrics, score)(probs, labels)


def recalibrated(probs, certainty):
    rest = probs / (1 - probs.max(1, keepdims=True)) * (1 - certainty)[:, None]
    rest[np.arange(len(probs)), probs.argmax(1)] = certainty
    return rest


@pytest.mark.parametrize("score", ["nll", "brier"])
@settings(deadline=None, max_examples=30)
@given(sizes=data)
def test_the_parts_add_up_and_calibration_is_a_gain(score, sizes):
    n, k, seed, sharpness, votes = sizes
    problem = several(n, k, seed, sharpness, votes)
    parts = metrics.decompose(*problem, score)
    assert parts.score == pytest.approx(scores_of(*problem, score), abs=1e-9)
    assert parts.calibration + parts.refinement == pytest.approx(parts.score, abs=1e-12)
    assert parts.calibration >= -1e-9
    assert parts.refinement >= -1e-9


@pytest.mark.parametrize("score", ["nll", "brier"])
def test_no_monotone_recalibration_does_better(score):
    probs, labels = several(60, 4, sharpness=3.0)
    best = metrics.decompose(probs, labels, score).refinement
    confidence = probs.max(1)
    order = confidence.argsort()

    def reached(steps):
        certainty = np.empty(len(probs))
        certainty[order] = np.cumsum(np.abs(steps)) / (np.abs(steps).sum() + 1e-3)
        return scores_of(recalibrated(probs, np.clip(certainty, 1e-9, 1 - 1e-9)), labels, score)

    starts = [np.full(60, 1 / 60), np.diff(np.sort(confidence), prepend=0.0)]
    found = [minimize(reached, start, method="L-BFGS-B", options={"maxiter": 60}).fun for start in starts]
    powers = [scores_of(recalibrated(probs, confidence**t), labels, score) for t in (0.3, 0.5, 1.0, 1.5, 3.0)]
    assert best <= min(found + powers) + 1e-9
    assert min(found) <= best + 0.05


def test_two_classes_are_the_corp_decomposition():
    """Calibration there is the miscalibration of Dimitriadis, Gneiting and Jordan, of the event 'right'."""
    probs, labels = binary(400)
    confidence, correct = probs.max(1), (probs.argmax(1) == labels).astype(float)
    fitted = IsotonicRegression(y_min=0, y_max=1).fit_transform(confidence, correct)
    expected = 2 * (((confidence - correct) ** 2).mean() - ((fitted - correct) ** 2).mean())
    assert metrics.decompose(probs, labels, "brier").calibration == pytest.approx(expected, abs=1e-9)


def test_a_temperature_changes_only_the_calibration_of_two_classes():
    probs, labels = binary(400)
    odds = np.log(probs[:, 1] / probs[:, 0])
    plain = metrics.decompose(probs, labels)
    bent = metrics.decompose(1 / (1 + np.exp(-3 * odds)), labels)
    assert bent.refinement == pytest.approx(plain.refinement, abs=1e-9)
    assert bent.calibration > plain.calibration + 0.03


def test_decompose_refuses_other_scores():
    with pytest.raises(ValueError, match="score must be one of 'nll', 'brier', but is 'brie'; did you mean 'brier'"):
        metrics.decompose([[0.5, 0.5]], [0], "brie")


# ---- what is refused ----------------------------------------------------------------------------------------------


@by_name
def test_refuses_wrong_data(metric):
    with pytest.raises(ValueError, match="probs must lie between 0 and 1"):
        metric([[2.0, -1.0]], [0])
    with pytest.raises(ValueError, match="0 rows came"):
        metric(np.zeros((0, 2)), [])


@pytest.mark.parametrize("metric", [metrics.debiased_ece, metrics.ece_sweep], ids=lambda metric: metric.__name__)
@pytest.mark.parametrize("p", [0, 3, "2"])
def test_refuses_other_norms(metric, p):
    with pytest.raises(ValueError, match="p must be 1 or 2"):
        metric([[0.5, 0.5]], [0], p=p)


@pytest.mark.parametrize("metric", [*NEW, lambda p, y: metrics.decompose(p, y).calibration])
def test_one_row_is_enough(metric):
    assert 0 <= metric([[0.7, 0.3]], [0]) <= 1
