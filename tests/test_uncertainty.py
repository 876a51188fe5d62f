"""Intervals, noise floors and paired differences: against loops, the truth in simulations, and the real network."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference_metrics as reference
from poise import metrics
from poise.metrics import neighborhoods, resampling

OURS = [metric for metric in resampling._BUILDERS if metric is not neighborhoods.grouped_ece]  # it needs groups
NAMES = [getattr(metric, "__name__", str(metric)) for metric in OURS]
RE_BINNED = {"adaptive_ece", "adaptive_classwise_ece", "debiased_ece", "ece_sweep"}
by_metric = pytest.mark.parametrize("metric", OURS, ids=NAMES)


def population(temperature, k=4, size=20_000):
    """Probabilities of a model that states them at a temperature, where the true ones have temperature 1."""
    logits = torch.randn(size, k, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2.5
    return (logits / temperature).softmax(1), logits.softmax(1)


def sample(stated, true, n, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(stated), (n,), generator=generator)
    return rows, torch.multinomial(true[rows], 1, generator=generator)[:, 0]


def true_errors(stated, true, num_bins=15):
    """The metrics of infinitely many samples: labels replaced by their probabilities."""
    confidence, predicted = stated.max(1)
    residual = (confidence - true.gather(1, predicted[:, None])[:, 0]).numpy() / len(stated)
    place = np.ceil(confidence.numpy() * num_bins).astype(int)
    order = confidence.numpy().argsort()
    gaps = [
        np.abs(np.bincount(np.ceil(p * num_bins).astype(int), (p - t) / len(p))).sum()
        for p, t in zip(stated.T.numpy(), true.T.numpy(), strict=True)
    ]
    return {
        "ece": np.abs(np.bincount(place, residual)).sum(),
        "ks_error": np.abs(residual[order].cumsum()).max(),
        "classwise_ece": np.mean(gaps),
        "nll": -(true * stated.log()).sum(1).mean().item(),
        "accuracy": true.gather(1, predicted[:, None]).mean().item(),
    }


# ---- many weightings at once are the metric, one at a time ---------------------------------------------------------


def weights_and_rows(n, draws, seed=0):
    weights = torch.cat(list(resampling.resampled_weights(n, draws, seed, torch.device("cpu"))), dim=1)
    return weights, [torch.arange(n).repeat_interleave(column.long()) for column in weights.T]


@by_metric
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_unit_weights_give_the_metric(metric, temperature):
    stated, true = population(temperature)
    rows, labels = sample(stated, true, 700, 0)
    found = resampling.statistic(metric, stated[rows], labels)
    value = found.value(found.sums(torch.ones(700, 1, dtype=torch.float64)))
    assert float(value[0]) == pytest.approx(metric(stated[rows], labels), rel=2e-3, abs=1e-9)


@by_metric
def test_weights_give_the_metric_of_repeated_rows(metric):
    stated, true = population(0.6)
    rows, labels = sample(stated, true, 700, 0)
    probs = stated[rows]
    weights, drawn = weights_and_rows(700, 20)
    found = resampling.statistic(metric, probs, labels)
    values = found.value(found.sums(weights))
    expected = torch.tensor([metric(probs[chosen], labels[chosen]) for chosen in drawn])
    if metric.__name__ in RE_BINNED:  # the loop moves its bins with every resample; ours stay
        assert values.mean() == pytest.approx(float(expected.mean()), rel=0.15)
    else:
        tolerance = 0.04 if metric.__name__ == "smooth_ece" else 1e-6  # one step towards its width
        assert values.numpy() == pytest.approx(expected.numpy(), rel=tolerance)


def test_bins_stay_those_of_the_full_sample():
    stated, true = population(0.6)
    rows, labels = sample(stated, true, 300, 0)
    confidence, predicted = stated[rows].max(1)
    edges = metrics.Bins.equal_mass(confidence, predicted == labels).edges.numpy()
    weights, drawn = weights_and_rows(300, 5)
    found = resampling.statistic(metrics.adaptive_ece, stated[rows], labels)
    for value, chosen in zip(found.value(found.sums(weights)), drawn, strict=True):
        correct = (predicted == labels)[chosen].numpy()
        bins = reference.gaps(confidence[chosen].numpy(), correct, edges)
        assert float(value) == pytest.approx(reference.error(bins), abs=1e-9)


def test_classes_in_blocks_give_the_same(monkeypatch):
    stated, true = population(0.6)
    rows, labels = sample(stated, true, 200, 0)
    weights, _ = weights_and_rows(200, 6)

    def values():
        found = resampling.statistic(metrics.classwise_ece, stated[rows], labels)
        return found.value(found.sums(weights))

    whole = values()
    monkeypatch.setattr(resampling, "_ENTRIES_AT_A_TIME", 250)
    assert torch.allclose(values(), whole, atol=1e-12)


def test_weights_are_whole_seeded_and_add_up():
    first, _ = weights_and_rows(50, 40)
    assert torch.equal(first, weights_and_rows(50, 40)[0])
    assert not torch.equal(first, weights_and_rows(50, 40, seed=1)[0])
    assert torch.equal(first.sum(0), torch.full((40,), 50.0, dtype=torch.float64))
    assert first.var() == pytest.approx(1, abs=0.15)


def test_draws_that_are_kept_are_the_same_as_draws_that_are_not(monkeypatch):
    kept, _ = weights_and_rows(60, 30, seed=3)
    monkeypatch.setattr(resampling, "_KEPT", 0)
    assert torch.equal(weights_and_rows(60, 30, seed=3)[0], kept)


# ---- intervals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.8, 0.5])
def test_intervals_cover_the_truth(temperature):
    """80 samples of 1,000: at a coverage of .95 fewer than 67 hits has probability 1e-5, at .89 (the lowest) .05."""
    stated, true = population(temperature)
    truth = true_errors(stated, true)
    covered = dict.fromkeys(truth, 0)
    for seed in range(80):
        rows, labels = sample(stated, true, 1000, seed)
        for name, target in truth.items():
            found = metrics.interval(getattr(metrics, name), stated[rows], labels, resamples=300)
            covered[name] += found.low - 1e-9 <= target <= found.high + 1e-9
    assert min(covered.values()) >= 67, covered


def test_the_plain_bootstrap_would_not_cover_a_calibrated_model():
    """The reason for the correction: resampled errors of a perfect model never come near zero, ours reach it."""
    stated, true = population(1.0)
    reached = 0
    for seed in range(20):
        rows, labels = sample(stated, true, 1000, seed)
        weights, _ = weights_and_rows(1000, 200)
        found = resampling.statistic(metrics.ece, stated[rows], labels)
        assert found.value(found.sums(weights)).quantile(0.025) > 0.01
        reached += metrics.interval(metrics.ece, stated[rows], labels, resamples=200).low == 0
    assert reached >= 16


def test_the_correction_takes_most_of_the_bias_out():
    stated, true = population(0.8)
    target = true_errors(stated, true)["classwise_ece"]
    found = []
    for seed in range(30):
        rows, labels = sample(stated, true, 1000, seed)
        found.append(metrics.interval(metrics.classwise_ece, stated[rows], labels, resamples=200))
    bias = abs(np.mean([each.value for each in found]) - target)
    assert abs(np.mean([each.corrected for each in found]) - target) < 0.5 * bias


@by_metric
@settings(deadline=None, max_examples=12)
@given(n=st.integers(1, 60), k=st.integers(2, 4), seed=st.integers(0, 1000), votes=st.sampled_from([None, 5]))
def test_intervals_are_ordered_and_wider_at_a_higher_level(metric, n, k, seed, votes):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(k, 0.5), size=n)
    if votes:
        probs = np.array([rng.multinomial(votes, row) for row in probs]) / votes
    labels = rng.integers(0, k, n)
    narrow = metrics.interval(metric, probs, labels, level=0.5, resamples=60)
    wide = metrics.interval(metric, probs, labels, level=0.95, resamples=60)
    assert narrow.value == wide.value == metric(probs, labels)
    for found in (narrow, wide):
        assert all(math.isfinite(number) for number in (found.low, found.high, found.corrected))
        assert found.low <= found.high
        if metric is not metrics.debiased_ece:
            assert found.low - 1e-12 <= found.corrected <= found.high + 1e-12
        if metric is metrics.calibration_part:
            assert found.low >= 0
        elif metric not in (metrics.nll, metrics.refinement_part):
            assert found.low >= 0
            assert found.high <= (2 if metric is metrics.brier else 1) + 1e-9
    assert wide.low <= narrow.low + 2e-3
    assert wide.high >= narrow.high - 2e-3


@by_metric
def test_sure_and_right_has_no_width(metric):
    labels = np.array([2, 0, 1, 1, 2])
    found = metrics.interval(metric, np.eye(3)[labels], labels, resamples=50)
    assert found.low == pytest.approx(found.value, abs=1e-9)
    assert found.high == pytest.approx(found.value, abs=1e-9)


def test_the_interval_of_a_mean_is_its_standard_error():
    stated, true = population(1.0)
    rows, labels = sample(stated, true, 4000, 0)
    found = metrics.interval(metrics.accuracy, stated[rows], labels)
    half = 1.96 * math.sqrt(found.value * (1 - found.value) / 4000)
    assert found.high - found.value == pytest.approx(half, rel=0.12)
    assert found.value - found.low == pytest.approx(half, rel=0.12)


def test_options_are_bound_by_partial():
    stated, true = population(0.8)
    rows, labels = sample(stated, true, 500, 0)
    one_bin = metrics.interval(functools.partial(metrics.ece, num_bins=1), stated[rows], labels)
    assert one_bin.value == metrics.ece(stated[rows], labels, 1)
    assert one_bin != metrics.interval(metrics.ece, stated[rows], labels)
    assert metrics.interval(functools.partial(metrics.top_k_accuracy, k=4), stated[rows], labels).low == 1


def test_another_metric_is_called_on_drawn_rows_and_reflected():
    stated, true = population(0.8)
    rows, labels = sample(stated, true, 200, 0)
    probs = stated[rows]
    found = metrics.interval(lambda p, y: metrics.ece(p, y), probs, labels, resamples=60, seed=5)
    _, drawn = weights_and_rows(200, 60, seed=5)
    values = np.array([metrics.ece(probs[chosen], labels[chosen]) for chosen in drawn])
    value = metrics.ece(probs, labels)
    assert found.low == pytest.approx(2 * value - np.quantile(values, 0.975))
    assert found.high == pytest.approx(2 * value - np.quantile(values, 0.025))


def test_arrays_of_numpy_and_torch_give_the_same_interval():
    stated, true = population(0.8)
    rows, labels = sample(stated, true, 100, 0)
    first = metrics.interval(metrics.ece, stated[rows], labels, resamples=50)
    assert metrics.interval(metrics.ece, stated[rows].numpy(), labels.numpy(), resamples=50) == first
    assert metrics.interval(metrics.ece, stated[rows], labels, resamples=50, seed=1) != first


# ---- differences --------------------------------------------------------------------------------------------------


@by_metric
def test_a_model_does_not_differ_from_itself(metric):
    stated, true = population(0.8)
    rows, labels = sample(stated, true, 200, 0)
    found = metrics.paired_difference(metric, stated[rows], stated[rows], labels, resamples=50)
    assert (found.value, found.low, found.high, found.corrected, found.p_value) == pytest.approx((0, 0, 0, 0, 1))


@pytest.mark.parametrize("metric", [metrics.ece, metrics.classwise_ece, metrics.ks_error, metrics.nll])
def test_errors_that_are_equal_are_seldom_told_apart(metric):
    """One over-, one underconfident with the same error; of 60, more than 13 at a rate of .1 has probability .005."""
    stated_a, true = population(0.8)
    target = true_errors(stated_a, true)[metric.__name__]
    low, high = 1.0, 3.0
    for _ in range(25):
        middle = (low + high) / 2
        below = true_errors(population(middle)[0], true)[metric.__name__] < target
        low, high = (middle, high) if below else (low, middle)
    stated_b = population(high)[0]
    found = 0
    for seed in range(60):
        rows, labels = sample(stated_a, true, 1000, seed)
        outcome = metrics.paired_difference(metric, stated_a[rows], stated_b[rows], labels, resamples=200)
        assert (outcome.p_value < 0.05) <= (not outcome.low < 0 < outcome.high)
        found += outcome.p_value < 0.05
    assert found <= 13


@pytest.mark.parametrize("metric", [metrics.ece, metrics.ks_error, metrics.smooth_ece, metrics.nll, metrics.brier])
def test_a_clear_difference_is_found_and_has_its_sign(metric):
    worse, true = population(0.5)
    better = population(0.8)[0]
    for seed in range(10):
        rows, labels = sample(worse, true, 1000, seed)
        found = metrics.paired_difference(metric, worse[rows], better[rows], labels, resamples=200)
        assert 0 < found.low <= found.corrected <= found.high
        assert found.p_value == pytest.approx(2 / 201)
        back = metrics.paired_difference(metric, better[rows], worse[rows], labels, resamples=200)
        assert (back.low, back.high) == pytest.approx((-found.high, -found.low), abs=1e-9)


def test_pairing_narrows_the_difference_of_means():
    stated, true = population(0.8)
    near = population(0.82)[0]
    rows, labels = sample(stated, true, 1000, 0)
    paired = metrics.paired_difference(metrics.nll, stated[rows], near[rows], labels)
    alone = metrics.interval(metrics.nll, stated[rows], labels)
    assert paired.high - paired.low < 0.2 * (alone.high - alone.low)


# ---- the floor ----------------------------------------------------------------------------------------------------


def test_the_floor_of_a_coin_is_known():
    """One bin, so the error is |mean − ½|: half-normal."""
    found = metrics.noise_floor(torch.full((2500, 2), 0.5), draws=2000)
    assert found.mean == pytest.approx(0.01 * math.sqrt(2 / math.pi), rel=0.05)
    assert found.high == pytest.approx(0.01 * 1.96, rel=0.05)


def test_the_floor_of_a_score_is_its_expectation():
    _, true = population(1.0)
    probs = true[:2000]
    entropy = float(-(probs * probs.log()).sum(1).mean())
    assert metrics.noise_floor(probs, metrics.nll).mean == pytest.approx(entropy, rel=0.01)


def test_the_floor_falls_with_the_root_of_the_samples():
    probs = population(1.0)[0][:1000]
    few, many = (metrics.noise_floor(probs, num_samples=n, draws=60).mean for n in (500, 8000))
    assert few / many == pytest.approx(4, rel=0.2)


def test_classes_of_probability_zero_are_never_drawn():
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).expand(500, 5)
    assert metrics.noise_floor(probs, lambda p, y: float(p.gather(1, y[:, None]).min()), draws=20).mean > 0.29


def test_the_floor_is_seeded():
    probs = population(1.0)[0][:200]
    assert metrics.noise_floor(probs, draws=20) == metrics.noise_floor(probs, draws=20)
    assert metrics.noise_floor(probs, draws=20) != metrics.noise_floor(probs, draws=20, seed=1)


def test_a_perfect_model_with_the_papers_confidences_shows_four_tenths_of_a_percent():
    """METHODS §4: ECE .37–.44, AdaECE .31–.47, CECE .20–.25 on 10,000 samples; a bootstrap deviation of .15–.20."""
    logits, labels = reference.real_logits("cifar10-resnet50-ce.test")
    probs = (logits.double() / 2.4975199).softmax(1)
    floors = [metrics.noise_floor(probs, metric).mean for metric in (metrics.ece, metrics.adaptive_ece)]
    assert floors[0] == pytest.approx(0.0040, abs=0.0004)
    assert floors[1] == pytest.approx(0.0042, abs=0.0008)
    assert metrics.noise_floor(probs, metrics.classwise_ece).mean == pytest.approx(0.00225, abs=0.0003)
    found = metrics.interval(metrics.ece, probs, labels)
    assert 100 * found.value == pytest.approx(1.373, abs=5e-4)
    assert found.low > metrics.noise_floor(probs).high
    assert 0.006 < found.high - found.low < 0.012


# ---- what is refused ----------------------------------------------------------------------------------------------

PROBS, LABELS = [[0.5, 0.5], [0.2, 0.8]], [0, 1]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: metrics.interval(metrics.ece, PROBS, LABELS, level=95), "level must lie between 0 and 1, like 0.95"),
        (
            lambda: metrics.interval(metrics.ece, PROBS, LABELS, resamples=1),
            "resamples must be a whole number, 2 or more",
        ),
        (lambda: metrics.interval(metrics.ece, PROBS, [0]), "2 rows of scores but 1 labels"),
        (
            lambda: metrics.interval(functools.partial(metrics.nll, floor=0), [[0.0, 1.0]], [0]),
            "the metric is inf on these samples, so it has no interval",
        ),
        (
            lambda: metrics.interval(functools.partial(metrics.ece, sample_weight=[1, 2]), PROBS, LABELS),
            "sample_weight cannot be bound",
        ),
        (lambda: metrics.paired_difference(metrics.ece, PROBS, PROBS[:1], LABELS), "1 rows of scores but 2 labels"),
        (lambda: metrics.paired_difference(metrics.ece, PROBS, PROBS, LABELS, level=0), "level must lie between"),
        (lambda: metrics.noise_floor(PROBS, draws=0), "draws must be a whole number, 1 or more"),
        (lambda: metrics.noise_floor(PROBS, num_samples=0), "num_samples must be a whole number, 1 or more"),
        (lambda: metrics.noise_floor(np.zeros((0, 2))), "0 rows of probs came"),
        (lambda: metrics.noise_floor([[3.0, -2.0]]), "probs must lie between 0 and 1"),
    ],
)
def test_refuses(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
