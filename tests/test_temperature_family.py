"""Ensemble, parameterized and class-wise temperature scaling: identities, slow references and the paper's network."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch

from conftest import load_shared
from poise import metrics
from poise.calibrators import TemperatureScaling
from poise.calibrators.classwise import ClasswiseTemperatureScaling
from poise.calibrators.ensemble import EnsembleTemperatureScaling
from poise.calibrators.parameterized import ParameterizedTemperatureScaling
from poise.search import BoundWarning

FAMILY = {
    "ets": EnsembleTemperatureScaling,
    "ets-mse": lambda: EnsembleTemperatureScaling("mse"),
    "pts": ParameterizedTemperatureScaling,
    "pts-mse": lambda: ParameterizedTemperatureScaling(criterion="mse"),
    "cts": ClasswiseTemperatureScaling,
    "cts-ece": lambda: ClasswiseTemperatureScaling("ece"),
}
each = pytest.mark.parametrize("name", FAMILY)
NETWORK = "cifar10-resnet50-ce"


def sample(n=600, k=5, seed=0, sharpness=3.0, temperature=2.0):
    """Logits, and labels drawn from what they are at a temperature: one for all, one per class or one per row."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, k)) * sharpness
    probs = torch.softmax(torch.from_numpy(logits / temperature), 1).numpy()
    labels = np.array([rng.choice(k, p=p / p.sum()) for p in probs])
    return torch.from_numpy(logits), torch.from_numpy(labels)


def nll(calibrator, logits, labels):
    return -float(calibrator.predict_log_proba(logits).gather(1, labels[:, None]).mean())


# All three


@each
def test_a_weight_is_so_many_repetitions(name):
    logits, labels = sample(n=150)
    weight = torch.from_numpy(np.random.default_rng(1).integers(0, 4, 150))
    weighted = FAMILY[name]().fit(logits, labels, sample_weight=weight)
    repeated = FAMILY[name]().fit(logits.repeat_interleave(weight, 0), labels.repeat_interleave(weight, 0))
    torch.testing.assert_close(weighted.predict_proba(logits), repeated.predict_proba(logits), rtol=0, atol=1e-4)


@each
def test_only_differences_and_scale_of_logits_matter(name):
    logits, labels = sample()
    shifts = torch.from_numpy(np.random.default_rng(1).normal(size=(len(logits), 1)) * 10)
    expected = FAMILY[name]().fit(logits, labels).predict_proba(logits)
    shifted = FAMILY[name]().fit(logits + shifts, labels)
    torch.testing.assert_close(shifted.predict_proba(logits), expected, rtol=0, atol=1e-5)
    if "ets" not in name:
        # The raw softmax in the ensemble is of the network's own scale.
        scaled = FAMILY[name]().fit(50 * logits, labels)
        torch.testing.assert_close(scaled.predict_proba(50 * logits), expected, rtol=0, atol=1e-4)


@each
def test_classes_have_no_order(name):
    logits, labels = sample()
    order = torch.tensor([3, 0, 4, 1, 2])
    calibrator = FAMILY[name]().fit(logits, labels)
    permuted = FAMILY[name]().fit(logits[:, order], order.argsort()[labels])
    # The greedy search visits the classes in turn: there the order is part of the method.
    close = {"rtol": 0, "atol": 0.05 if name == "cts-ece" else 1e-4}
    torch.testing.assert_close(
        permuted.predict_proba(logits[:, order]), calibrator.predict_proba(logits)[:, order], **close
    )


@each
def test_nothing_breaks_it(name):
    """Separable, tiny, one-sided, constant and enormous logits: finite fits, probabilities that sum to one."""
    logits, labels = sample(n=60, k=3)
    cases = [
        (logits, logits.argmax(1)),
        (logits, logits.argmin(1)),
        (logits[:2], torch.tensor([0, 1])),
        (logits, labels.clamp(max=1)),
        (torch.zeros(6, 3, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 2, 2])),
        (logits * 1e6, labels),
        (logits * 1e-6, labels),
        (logits.float(), labels),
    ]
    for scores, truth in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # A temperature without an optimum is told, and is no failure.
            warnings.simplefilter("ignore", BoundWarning)
            calibrator = FAMILY[name]().fit(scores, truth)
        log_probs = calibrator.predict_log_proba(torch.cat([scores, 100 * scores]))
        assert torch.isfinite(log_probs).all()
        torch.testing.assert_close(log_probs.exp().sum(1), torch.ones_like(log_probs[:, 0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in FAMILY if "cts" not in name])
def test_order_is_kept(name):
    logits, labels = sample()
    calibrator = FAMILY[name]().fit(logits, labels)
    ordered = calibrator.predict_log_proba(10 * logits).gather(1, (10 * logits).argsort(1))
    assert calibrator.keeps_order
    assert (ordered.diff(dim=1) >= 0).all()


@pytest.mark.parametrize(
    "wrong",
    [
        EnsembleTemperatureScaling("nil"),
        ParameterizedTemperatureScaling(criterion="ece"),
        ParameterizedTemperatureScaling(num_nodes=0),
        ParameterizedTemperatureScaling(weight_decay=-1.0),
        ClasswiseTemperatureScaling("mse"),
    ],
    ids=repr,
)
def test_parameters_are_judged(wrong):
    with pytest.raises(ValueError, match="must be"):
        wrong.fit(*sample(n=20))


# Ensemble temperature scaling


def mixture_score(criterion, logits, labels, temperature, mixture):
    """The formula, in numpy."""
    logits = logits.numpy()

    def softmax(z):
        e = np.exp(z - z.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    k = logits.shape[1]
    probs = mixture[0] * softmax(logits / temperature) + mixture[1] * softmax(logits) + mixture[2] / k
    if criterion == "nll":
        return -np.log(probs[np.arange(len(probs)), labels]).mean(), probs
    return ((probs - np.eye(k)[labels]) ** 2).sum(1).mean(), probs


def noisy(n=800, seed=0):
    """Logits that are too sharp, and a sixth of the labels drawn at random: all three parts have work."""
    logits, labels = sample(n=n, k=3, seed=seed, temperature=2.5)
    rng = np.random.default_rng(seed + 1)
    guess = torch.from_numpy(rng.random(n) < 0.15)
    return logits, torch.where(guess, torch.from_numpy(rng.integers(0, 3, n)), labels)


@pytest.mark.parametrize("criterion", ["nll", "mse"])
@pytest.mark.parametrize(
    "data", [sample(n=300, k=3), noisy(300), sample(n=300, k=4, temperature=0.5)], ids=["sharp", "noisy", "flat"]
)
def test_no_mixture_on_a_grid_is_better(criterion, data):
    logits, labels = data
    calibrator = EnsembleTemperatureScaling(criterion).fit(logits, labels)
    weights = calibrator.weights_.numpy()
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1)
    found, probs = mixture_score(criterion, logits, labels, calibrator.temperature_, weights)
    np.testing.assert_allclose(calibrator.predict_proba(logits), probs, atol=1e-12)
    simplex = [np.array(w) / 10 for w in itertools.product(range(11), repeat=3) if sum(w) == 10]
    for temperature in np.geomspace(0.2, 10, 25):
        for mixture in simplex:
            assert found <= mixture_score(criterion, logits, labels, temperature, mixture)[0] + 1e-7


def test_the_share_of_guesses_is_found():
    calibrator = EnsembleTemperatureScaling().fit(*noisy(20000))
    assert float(calibrator.weights_[2]) == pytest.approx(0.15, abs=0.04)


@pytest.mark.parametrize(("criterion", "temperature"), [("nll", 2.4975), ("mse", 2.881)])
def test_on_the_network_of_the_paper_the_ensemble_is_temperature_scaling(criterion, temperature):
    calibrator = EnsembleTemperatureScaling(criterion).fit(*load_shared(NETWORK, "val"))
    assert calibrator.temperature_ == pytest.approx(temperature, abs=1e-3)
    torch.testing.assert_close(calibrator.weights_, torch.eye(3, dtype=torch.float64)[0], rtol=0, atol=1e-4)
    logits, labels = load_shared(NETWORK, "test")
    if criterion == "mse":
        assert metrics.ece(calibrator.predict_proba(logits), labels) == pytest.approx(0.02965, abs=2e-4)
        assert nll(calibrator, logits, labels) == pytest.approx(0.20851, abs=1e-4)


# Parameterized temperature scaling


def row_temperatures(calibrator, logits):
    """Read off the probabilities: the ratio of differences of logits to differences of log-probabilities."""
    log_probs = calibrator.predict_log_proba(logits)
    return (logits.amax(1) - logits.amin(1)) / (log_probs.amax(1) - log_probs.amin(1))


def by_confidence(n=3000, seed=0):
    """Labels drawn at a temperature that depends on the margin."""
    logits, _ = sample(n=n, k=4, seed=seed)
    top = logits.topk(2, dim=1).values
    temperature = torch.where(top[:, 0] - top[:, 1] > 3, 3.0, 1.0)
    probs = torch.softmax(logits / temperature[:, None], 1)
    return logits, torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(seed))[:, 0], temperature


def test_it_finds_temperatures_that_depend_on_the_margin():
    logits, labels, _ = by_confidence()
    calibrator = ParameterizedTemperatureScaling().fit(logits, labels)
    fresh, truth, temperature = by_confidence(seed=1)
    found = row_temperatures(calibrator, fresh)
    top = fresh.topk(2, dim=1).values
    clear = ((top[:, 0] - top[:, 1]) - 3).abs() > 1
    assert float((found - temperature)[clear].abs().mean()) < 0.5
    assert nll(calibrator, fresh, truth) < nll(TemperatureScaling().fit(logits, labels), fresh, truth) - 0.02


def test_a_silent_network_is_temperature_scaling():
    logits, labels = sample()
    expected = TemperatureScaling().fit(logits, labels)
    calibrator = ParameterizedTemperatureScaling().fit(logits, labels)
    calibrator.parameters_ = torch.zeros_like(calibrator.parameters_)
    torch.testing.assert_close(calibrator.predict_proba(logits), expected.predict_proba(logits))
    decayed = ParameterizedTemperatureScaling(weight_decay=1e9).fit(logits, labels)
    torch.testing.assert_close(decayed.predict_proba(logits), expected.predict_proba(logits), rtol=0, atol=1e-4)


@pytest.mark.parametrize("criterion", ["nll", "mse"])
def test_the_gradient_of_the_network_is_that_of_its_loss(criterion):
    """At the numbers found, the loss by its formula has no slope."""
    logits, labels, _ = by_confidence(n=400)
    calibrator = ParameterizedTemperatureScaling(
        num_layers=1, num_nodes=2, criterion=criterion, weight_decay=1.0, num_steps=3000
    ).fit(logits, labels)

    def loss(parameters):
        calibrator.parameters_ = parameters
        probs = calibrator.predict_proba(logits)
        if criterion == "nll":
            value = -torch.log(probs[torch.arange(400), labels]).mean()
        else:
            value = (probs - torch.nn.functional.one_hot(labels, 4)).square().sum(1).mean()
        weights = torch.cat([parameters[:8], parameters[10:12]])
        return value + weights.square().sum() / 400

    found = calibrator.parameters_.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(found), found)
    assert float(slope.abs().max()) < 1e-6
    (far,) = torch.autograd.grad(loss(found + 0.1), found)
    assert float(far.abs().max()) > 1e-4


def test_the_weight_decay_is_the_one_of_least_loss_on_rows_held_out():
    """Much of the network where temperatures differ, and next to nothing where they do not."""
    logits, labels, _ = by_confidence()
    assert ParameterizedTemperatureScaling().fit(logits, labels).weight_decay_ < 50
    plain, truth = sample(n=3000, k=4)
    calibrator = ParameterizedTemperatureScaling().fit(plain, truth)
    common = TemperatureScaling().fit(plain, truth).predict_proba(plain)
    torch.testing.assert_close(calibrator.predict_proba(plain), common, rtol=0, atol=0.05)
    given = ParameterizedTemperatureScaling(weight_decay=3.0).fit(plain, truth)
    assert given.weight_decay_ == 3.0


def test_temperatures_stay_within_a_factor_of_twenty():
    logits, labels, _ = by_confidence(n=300)
    calibrator = ParameterizedTemperatureScaling(weight_decay=0.0).fit(logits, labels)
    for scale in (1e-3, 1.0, 100.0, 1e4):
        ratio = row_temperatures(calibrator, logits * scale) / calibrator.temperature_
        assert (ratio > 0.0499).all()
        assert (ratio < 20.01).all()


def test_only_the_largest_logits_are_seen():
    """Exchanging what lies below the top k moves no temperature, and k beyond the classes is all of them."""
    logits, labels = sample(k=6)
    calibrator = ParameterizedTemperatureScaling(top_k=3).fit(logits, labels)
    assert calibrator.center_.shape == (3,)
    low = logits.topk(2, dim=1, largest=False)
    spread = torch.tensor([0.5, -0.5], dtype=torch.float64).expand_as(low.values)
    moved = logits.scatter(1, low.indices, low.values + spread)
    still = (moved.topk(3, dim=1).values == logits.topk(3, dim=1).values).all(1)
    inputs = [calibrator._top(z)[still] for z in (logits, moved)]
    torch.testing.assert_close(*inputs)
    wide = ParameterizedTemperatureScaling(top_k=99).fit(logits, labels)
    assert wide.center_.shape == (6,)


def test_a_seed_is_repeatable_and_seeds_differ():
    logits, labels, _ = by_confidence(n=300)
    first, again, other = (ParameterizedTemperatureScaling(seed=seed).fit(logits, labels) for seed in (0, 0, 1))
    assert torch.equal(first.parameters_, again.parameters_)
    assert not torch.equal(first.parameters_, other.parameters_)


def test_every_seed_learns_on_the_network_of_the_paper():
    val, (logits, labels) = load_shared(NETWORK, "val"), load_shared(NETWORK, "test")
    for seed in range(5):
        calibrator = ParameterizedTemperatureScaling(seed=seed).fit(*val)
        assert metrics.adaptive_ece(calibrator.predict_proba(logits), labels) <= 0.013
        assert nll(calibrator, logits, labels) <= 0.198


# Class-wise temperature scaling


@pytest.mark.parametrize("method", ["nll", "ece"])
def test_equal_temperatures_are_temperature_scaling(method):
    logits, labels = sample()
    calibrator = ClasswiseTemperatureScaling(method).fit(logits, labels)
    calibrator.temperatures_ = torch.full_like(calibrator.temperatures_, 1.7)
    torch.testing.assert_close(calibrator.predict_proba(logits), torch.softmax(logits / 1.7, 1))


def test_the_likelihood_has_no_slope_left():
    logits, labels = sample()
    centered = logits - logits.mean(1, keepdim=True)
    calibrator = ClasswiseTemperatureScaling().fit(logits, labels)
    inverse = (1 / calibrator.temperatures_).requires_grad_()
    torch.nn.functional.cross_entropy(centered * inverse, labels).backward()
    assert float(inverse.grad.abs().max()) < 2e-5


def test_classes_find_their_own_temperatures():
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(20000, 3)) * 3)
    logits -= logits.mean(1, keepdim=True)
    temperatures = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(logits / temperatures, 1), 1, generator=torch.Generator().manual_seed(0))
    found = ClasswiseTemperatureScaling().fit(logits, labels[:, 0]).temperatures_
    torch.testing.assert_close(found, temperatures, rtol=0.1, atol=0)


def greedy_reference(logits, labels):
    """The search written out, every ECE from the whole table of probabilities."""
    logits = logits - logits.mean(1, keepdim=True)
    common = TemperatureScaling("ece").fit(logits, labels).temperature_
    factors = np.ones(logits.shape[1])

    def error(candidate):
        return metrics.ece(torch.softmax(logits / (common * torch.from_numpy(candidate)), 1), labels)

    best, moved = error(factors), True
    while moved:
        moved = False
        for k in range(len(factors)):
            candidates = [
                np.where(np.arange(len(factors)) == k, factors + d, factors) for d in (-0.08, -0.04, 0.04, 0.08)
            ]
            errors = [error(candidate) for candidate in candidates]
            if min(errors) < best - 1e-12:
                best, factors, moved = min(errors), candidates[int(np.argmin(errors))], True
    return common * factors, best


@pytest.mark.parametrize("seed", range(4))
def test_the_greedy_search_equals_the_slow_one(seed):
    logits, labels = sample(n=250, k=6, seed=seed, temperature=torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0]).numpy())
    calibrator = ClasswiseTemperatureScaling("ece").fit(logits, labels)
    temperatures, error = greedy_reference(logits, labels)
    np.testing.assert_allclose(calibrator.temperatures_, temperatures, rtol=1e-6)
    assert metrics.ece(calibrator.predict_proba(logits), labels) == pytest.approx(error, abs=1e-6)
    common = TemperatureScaling("ece").fit(logits, labels)
    assert error <= metrics.ece(common.predict_proba(logits), labels) + 1e-9


def test_the_network_of_the_paper_by_class():
    calibrator = ClasswiseTemperatureScaling().fit(*load_shared(NETWORK, "val"))
    logits, labels = load_shared(NETWORK, "test")
    probs = calibrator.predict_proba(logits)
    figures = [
        100 * metric(probs, labels) for metric in (metrics.ece, metrics.adaptive_ece, metrics.nll, metrics.accuracy)
    ]
    assert figures == pytest.approx([1.454, 1.729, 20.153, 94.98], abs=0.02)
    greedy = ClasswiseTemperatureScaling("ece").fit(*load_shared(NETWORK, "val"))
    assert 100 * metrics.ece(greedy.predict_proba(logits), labels) == pytest.approx(1.459, abs=0.1)
    assert math.isclose(nll(greedy, logits, labels), 0.2036, abs_tol=1e-3)
