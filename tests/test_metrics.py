"""The metrics against slow loops, identities, ties and the real network of the paper."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference_metrics as reference
from poise import metrics
from poise.metrics import Bins

BINNED = [
    metrics.ece,
    metrics.mce,
    metrics.average_calibration_error,
    metrics.adaptive_ece,
    metrics.classwise_ece,
    metrics.adaptive_classwise_ece,
]
SCORES = [metrics.nll, metrics.brier, metrics.accuracy, metrics.top_k_accuracy]
ALL = BINNED + SCORES
WITH_WEIGHTED_LOOP = [metric for metric in ALL if "adaptive" not in metric.__name__]
by_name = pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.__name__)


def sample(n, k, seed=0, dtype=np.float32, sharpness=2.0):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(n, k)) * sharpness)
    probs = logits.softmax(1).numpy().astype(dtype)
    return probs, np.array([rng.choice(k, p=p / p.sum()) for p in np.sqrt(probs.astype(float))])


def votes(n, k, draws, seed=0):
    """Shares of a few votes: full of ties, zeros and ones."""
    rng = np.random.default_rng(seed)
    counts = np.array([rng.multinomial(draws, row) for row in rng.dirichlet(np.full(k, 0.4), size=n)])
    return (counts / draws).astype(np.float32), rng.integers(0, k, n)


# ---- the slow loops ----------------------------------------------------------------------------------------------


@by_name
@pytest.mark.parametrize(
    "data",
    [
        sample(301, 4),
        sample(60, 2, seed=1),
        sample(97, 7, dtype=np.float64, sharpness=6.0),
        votes(250, 5, 10),
        votes(40, 3, 1000, seed=2),
    ],
    ids=["float32", "two classes", "float64", "ten votes", "thousand votes"],
)
def test_equals_the_slow_loop(metric, data):
    probs, labels = data
    assert metric(probs, labels) == pytest.approx(getattr(reference, metric.__name__)(probs, labels), abs=1e-7)


@pytest.mark.parametrize("metric", BINNED, ids=lambda metric: metric.__name__)
@pytest.mark.parametrize("num_bins", [1, 2, 10, 100])
def test_equals_the_slow_loop_for_other_numbers_of_bins(metric, num_bins):
    probs, labels = votes(200, 4, 20)
    expected = getattr(reference, metric.__name__)(probs, labels, num_bins)
    assert metric(probs, labels, num_bins) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("metric", WITH_WEIGHTED_LOOP, ids=lambda metric: metric.__name__)
def test_weighted_equals_the_slow_loop(metric):
    probs, labels = sample(200, 6, seed=3)
    weight = np.random.default_rng(0).exponential(size=200)
    expected = getattr(reference, metric.__name__)(probs, labels, weight=weight)
    assert metric(probs, labels, sample_weight=weight) == pytest.approx(expected, abs=1e-7)


def test_classes_in_blocks_equal_all_at_once(monkeypatch):
    probs, labels = sample(50, 7)
    whole = metrics.classwise_ece(probs, labels), metrics.adaptive_classwise_ece(probs, labels)
    monkeypatch.setattr("poise.metrics.bins._ENTRIES_AT_A_TIME", 120)
    assert (metrics.classwise_ece(probs, labels), metrics.adaptive_classwise_ece(probs, labels)) == whole


@pytest.mark.parametrize("k", [1, 2, 3, 9])
def test_top_k_breaks_ties_by_the_first_column(k):
    probs, labels = votes(200, 8, 4)
    assert metrics.top_k_accuracy(probs, labels, k) == pytest.approx(reference.top_k_accuracy(probs, labels, k))


def test_nll_floor():
    zeros = [[1.0, 0.0], [1.0, 0.0]]
    assert metrics.nll(zeros, [1, 0]) == pytest.approx(27.631021115928547 / 2)
    assert metrics.nll(zeros, [1, 0], floor=1e-3) == pytest.approx((-np.log(1e-3) - np.log(1.001)) / 2)
    assert metrics.nll(zeros, [1, 0], floor=0) == np.inf


# ---- the paper's network -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "percent"),
    [
        (metrics.ece, 4.3543254),
        # The published 4.33376 leaves the smallest confidence out; with it the same bins give this.
        (metrics.adaptive_ece, 4.3375973),
        (metrics.classwise_ece, 0.9079532),
        (metrics.nll, 41.2120247),
        (metrics.brier, 9.2177366),
        (metrics.accuracy, 95.05),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_papers_network(metric, percent):
    logits, labels = reference.real_logits("cifar10-resnet50-ce.test")
    assert 100 * metric(logits.double().softmax(1), labels) == pytest.approx(percent, abs=5e-7)
    assert 100 * metric(logits.softmax(1), labels) == pytest.approx(percent, abs=1e-5)


def test_the_published_adaptive_ece_is_ours_without_the_smallest_confidence():
    logits, labels = reference.real_logits("cifar10-resnet50-ce.test")
    probs = logits.double().softmax(1).numpy()
    published = reference.adaptive_ece(probs, labels.numpy(), drop_lowest=True)
    confidence, correct = reference.top(probs, labels.numpy())
    smallest = int(confidence.argmin())
    assert 100 * published == pytest.approx(4.333759634, abs=1e-8)
    # The one sample moves the signed sum of its bin by c − a, and no other bin.
    gap = abs(metrics.adaptive_ece(probs, labels) - published)
    assert gap == pytest.approx(abs(confidence[smallest] - correct[smallest]) / len(labels), rel=1e-9)


# ---- ties, ones and zeros ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_bins", [5, 7, 10, 15, 20, 25, 100])
def test_a_confidence_on_an_edge_belongs_below_it(dtype, num_bins):
    confidence = torch.tensor([j / num_bins for j in range(1, num_bins + 1)], dtype=torch.float64).to(dtype)
    if len(confidence.unique()) < num_bins:
        pytest.skip("the edges coincide at this precision")
    bins = Bins.equal_width(confidence, torch.ones(num_bins), num_bins)
    assert bins.count.tolist() == [1.0] * num_bins


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_shares_of_a_thousand_votes_fall_where_the_fractions_do(dtype):
    votes_for_top = np.arange(1, 1001)
    bins = Bins.equal_width((votes_for_top / dtype(1000)).astype(dtype), np.ones(1000), 15)
    expected = np.bincount([-(-v * 15 // 1000) - 1 for v in votes_for_top.tolist()], minlength=15)
    assert bins.count.tolist() == expected.tolist()


def test_just_above_an_edge_belongs_above_it():
    above = np.nextafter(np.float32(0.8), np.float32(1))
    bins = Bins.equal_width(np.array([0.8, above], dtype=np.float32), [True, True], 15)
    assert bins.count.nonzero().flatten().tolist() == [11, 12]


def test_zero_and_one_count_in_the_first_and_last_bin():
    bins = Bins.equal_width([0.0, 1.0], [False, True], 4)
    assert bins.count.tolist() == [1, 0, 0, 1]
    assert bins.confidence[[0, 3]].tolist() == [0, 1]
    assert bins.accuracy.isnan().tolist() == [False, True, True, False]
    assert float(bins.error) == 0


def test_probability_zero_falls_in_no_classwise_bin_even_of_the_true_class():
    bins = Bins.classwise([[1.0, 0.0], [1.0, 0.0]], [1, 0], 5)
    assert bins.count.sum(1).tolist() == [2, 0]
    assert metrics.classwise_ece([[1.0, 0.0], [1.0, 0.0]], [1, 0]) == pytest.approx(0.25)
    assert Bins.classwise([[1.0, 0.0], [1.0, 0.0]], [1, 0], 5, equal_mass=True).count.sum(1).tolist() == [2, 2]


def test_equal_mass_bins_never_part_ties_and_lose_nobody():
    confidence = np.array([0.3, 0.3, 0.3, 0.3, 0.7, 0.7, 0.9])
    bins = Bins.equal_mass(confidence, np.ones(7), 3)
    assert bins.count.tolist() == [4, 2, 1]
    assert Bins.equal_mass(np.full(9, 0.4), np.ones(9), 4).count.tolist() == [9, 0, 0, 0]
    assert Bins.equal_mass([0.4], [True]).count.sum() == 1


def test_equal_mass_bins_of_distinct_confidences_are_equal():
    confidence = np.random.default_rng(0).uniform(size=3000)
    counts = Bins.equal_mass(confidence, np.ones(3000), 15).count
    assert counts.min() >= 199
    assert counts.max() <= 201


def test_fractional_weights_of_equal_mass_bins_do_not_depend_on_their_unit():
    confidence = np.random.default_rng(0).uniform(size=500)
    plain = Bins.equal_mass(confidence, np.ones(500))
    shares = Bins.equal_mass(confidence, np.ones(500), sample_weight=np.full(500, 1 / 512))
    assert torch.allclose(plain.edges, shares.edges, atol=1e-14)


def test_the_bins_of_a_class_are_those_of_its_probabilities():
    probs, labels = sample(80, 3)
    row = Bins.classwise(probs, labels, 6)[1]
    alone = Bins.equal_width(probs[:, 1], labels == 1, 6)
    for field in ("edges", "count", "confidence", "accuracy", "mass", "gap", "error"):
        assert torch.equal(getattr(row, field).nan_to_num(), getattr(alone, field).nan_to_num())


# ---- what must hold for any data ---------------------------------------------------------------------------------


@st.composite
def problems(draw):
    n, k = draw(st.integers(1, 40)), draw(st.integers(2, 6))
    seed = draw(st.integers(0, 10**6))
    if draw(st.booleans()):
        return votes(n, k, draw(st.integers(1, 12)), seed)
    return sample(n, k, seed, draw(st.sampled_from([np.float32, np.float64])), draw(st.floats(0, 20)))


@settings(deadline=None)
@given(problems(), st.integers(1, 30))
def test_bounds(data, num_bins):
    probs, labels = data
    confidence, correct = probs.max(1).astype(float), probs.argmax(1) == labels
    signed = abs(confidence.mean() - correct.mean())
    error, worst = metrics.ece(probs, labels, num_bins), metrics.mce(probs, labels, num_bins)
    assert signed - 1e-9 <= error <= worst + 1e-9 <= 1 + 1e-6
    assert metrics.average_calibration_error(probs, labels, num_bins) <= worst + 1e-9
    assert signed - 1e-9 <= metrics.adaptive_ece(probs, labels, num_bins) <= 1 + 1e-6
    assert metrics.ece(probs, labels, 1) == pytest.approx(signed, abs=1e-9)
    assert metrics.adaptive_ece(probs, labels, 1) == pytest.approx(signed, abs=1e-9)
    assert 0 <= metrics.brier(probs, labels) <= 2 + 1e-6
    assert metrics.accuracy(probs, labels) == pytest.approx(correct.mean())
    assert metrics.top_k_accuracy(probs, labels, probs.shape[1]) == 1


@settings(deadline=None)
@given(problems())
def test_adding_bins_by_halving_never_lowers_the_error(data):
    errors = [metrics.ece(*data, num_bins) for num_bins in (1, 2, 4, 8, 16, 32)]
    assert all(coarse <= fine + 1e-9 for coarse, fine in itertools.pairwise(errors))


@by_name
@settings(deadline=None, max_examples=30)
@given(data=problems(), seed=st.integers(0, 1000))
def test_order_of_rows_and_repetition_do_not_matter(metric, data, seed):
    probs, labels = data
    plain = metric(probs, labels)
    order = np.random.default_rng(seed).permutation(len(labels))
    assert metric(probs[order], labels[order]) == pytest.approx(plain, abs=1e-9)
    if "adaptive" not in metric.__name__:  # their edges lie at ranks j·n/b, which move with n
        assert metric(np.concatenate([probs, probs]), np.concatenate([labels, labels])) == pytest.approx(
            plain, abs=1e-9
        )


@by_name
@settings(deadline=None, max_examples=30)
@given(data=problems(), seed=st.integers(0, 1000))
def test_whole_weights_are_repetitions(metric, data, seed):
    probs, labels = data
    weight = np.random.default_rng(seed).integers(0, 4, len(labels))
    weight[0] += 1
    repeated = metric(probs.repeat(weight, axis=0), labels.repeat(weight))
    assert metric(probs, labels, sample_weight=weight) == pytest.approx(repeated, abs=1e-9)


@by_name
@settings(deadline=None, max_examples=20)
@given(data=problems(), factor=st.floats(0.01, 100))
def test_only_ratios_of_weights_matter(metric, data, factor):
    if "adaptive" in metric.__name__:
        return  # there a weight is a number of repetitions
    probs, labels = data
    weight = np.random.default_rng(0).exponential(size=len(labels)) + 0.01
    scaled = metric(probs, labels, sample_weight=factor * weight)
    assert scaled == pytest.approx(metric(probs, labels, sample_weight=weight), abs=1e-9)


@pytest.mark.parametrize("metric", [m for m in BINNED if "classwise" not in m.__name__], ids=lambda m: m.__name__)
@pytest.mark.parametrize("right", range(2, 5))
def test_constant_confidence_equal_to_the_accuracy_is_no_error(metric, right):
    probs = np.tile([right / 4, 1 - right / 4], (8, 1))
    labels = np.array([0] * right + [1] * (4 - right)).repeat(2)
    assert metric(probs, labels) == pytest.approx(0, abs=1e-12)


@by_name
def test_sure_and_right_is_perfect(metric):
    labels = np.array([2, 0, 1, 1, 2])
    value = metric(np.eye(3, dtype=np.float32)[labels], labels)
    assert value == pytest.approx(float("accuracy" in metric.__name__), abs=1e-11)


@by_name
def test_columns_may_be_permuted(metric):
    probs, labels = sample(100, 5)
    order = np.array([3, 1, 4, 0, 2])
    assert metric(probs[:, order], np.argsort(order)[labels]) == pytest.approx(metric(probs, labels), abs=1e-12)


# ---- what comes in, what goes out --------------------------------------------------------------------------------


class Foreign:
    """An array of another library, which can only pass itself on."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@by_name
def test_any_kind_of_array_gives_the_same_float(metric):
    probs, labels = sample(50, 4)
    plain = metric(probs, labels)
    assert type(plain) is float
    tensor, whole = torch.from_numpy(probs).requires_grad_(), torch.from_numpy(labels)
    assert metric(tensor, whole) == plain
    assert metric(Foreign(tensor.detach()), Foreign(whole)) == plain
    assert metric(probs.tolist(), labels.tolist()) == pytest.approx(plain, abs=1e-6)
    assert metric(np.asfortranarray(probs)[::-1], labels.astype(np.int8)[::-1]) == pytest.approx(plain, abs=1e-12)


@by_name
def test_one_column_is_the_second_class(metric):
    second = np.random.default_rng(0).uniform(size=30)
    labels = np.random.default_rng(1).integers(0, 2, 30)
    assert metric(second, labels) == metric(np.stack([1 - second, second], axis=1), labels)


@pytest.mark.parametrize("metric", SCORES, ids=lambda metric: metric.__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_counted_as_what_they_hold(metric, dtype):
    probs, labels = sample(300, 4)
    half = torch.from_numpy(probs).to(dtype)
    assert metric(half, labels) == pytest.approx(metric(half.double(), labels), abs=1e-7)


@pytest.mark.parametrize("num_bins", [1, 15])
def test_sums_are_taken_in_double(num_bins):
    probs = np.full((200_000, 2), (0.9, 0.1), dtype=np.float32)
    labels = np.zeros(200_000, dtype=np.int64)
    labels[:20_000] = 1
    assert metrics.ece(probs, labels, num_bins) == pytest.approx(0.9 - float(np.float32(0.9)), abs=1e-12)


# ---- what is refused ---------------------------------------------------------------------------------------------

GOOD = [[0.5, 0.5], [0.2, 0.8]]


@by_name
@pytest.mark.parametrize(
    ("probs", "labels", "sentence"),
    [
        ([[2.0, -1.0], [0.5, 0.5]], [0, 1], "probs must lie between 0 and 1, but came with values from -1 to 2"),
        ([[0.5, 0.7], [0.5, 0.5]], [0, 1], "row 0 sums to 1.2"),
        ([[np.nan, 0.5], [0.5, 0.5]], [0, 1], "probs must be finite, but row 0 holds NaN"),
        ([[[0.5, 0.5]]], [0], "probs must be a table of samples by classes"),
        (GOOD, [0, 2], "a label 2 came"),
        (GOOD, [-1, 0], "a label -1 came"),
        (GOOD, [0, 0.5], "labels must be whole numbers"),
        (GOOD, [0], "2 rows of scores but 1 labels"),
        (np.zeros((0, 2)), [], "nothing to score: 0 rows came"),
    ],
)
def test_refuses_wrong_data(metric, probs, labels, sentence):
    with pytest.raises(ValueError, match=sentence):
        metric(probs, labels)


@by_name
@pytest.mark.parametrize(
    ("weight", "sentence"),
    [
        ([1.0], "sample_weight must be one number per row"),
        ([1.0, -1.0], "finite and nonnegative"),
        ([0.0, 0.0], "every weight is zero"),
    ],
)
def test_refuses_wrong_weights(metric, weight, sentence):
    with pytest.raises(ValueError, match=sentence):
        metric(GOOD, [0, 1], sample_weight=weight)


@pytest.mark.parametrize("metric", BINNED, ids=lambda metric: metric.__name__)
@pytest.mark.parametrize("num_bins", [0, -3, 2.5, True, "15"])
def test_refuses_wrong_numbers_of_bins(metric, num_bins):
    with pytest.raises(ValueError, match="num_bins must be a whole number, 1 or more"):
        metric(GOOD, [0, 1], num_bins)


def test_refuses_a_wrong_floor_and_k():
    with pytest.raises(ValueError, match="floor must be a finite number, 0 or above"):
        metrics.nll(GOOD, [0, 1], floor=-1e-9)
    with pytest.raises(ValueError, match="k must be a whole number, 1 or more"):
        metrics.top_k_accuracy(GOOD, [0, 1], 0)


@pytest.mark.parametrize("make", [Bins.equal_width, Bins.equal_mass], ids=["equal_width", "equal_mass"])
@pytest.mark.parametrize(
    ("confidence", "correct", "sentence"),
    [
        ([[0.5]], [True], "confidence must be one number per row"),
        ([], [], "at least one row"),
        ([50.0, 80.0], [True, False], "divide percentages by 100"),
        ([0.5, np.inf], [True, False], "confidence must be finite"),
        ([0.5, 0.6], [True], "correct must have one entry per confidence"),
        ([0.5, 0.6], [0, 3], "correct must be true or false"),
    ],
)
def test_bins_refuse_wrong_data(make, confidence, correct, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(confidence, correct)


def test_the_public_list_is_sorted_and_true():
    assert metrics.__all__ == sorted(metrics.__all__)
    assert all(hasattr(metrics, name) for name in metrics.__all__)
