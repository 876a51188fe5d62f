"""Intra-order-preserving functions: the order of every row stays, equal factors are a temperature, slow loops agree."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

import reference_calibrators as reference
from conftest import load_shared
from poise import metrics
from poise.calibrators import IntraOrderPreserving, TemperatureScaling
from poise.search import BoundWarning

VARIANTS = ("oi", "diag")
each = pytest.mark.parametrize("variant", VARIANTS)


def sample(n=800, k=5, seed=0):
    """Logits whose sure rows are far too sure, and whose doubtful rows are right."""
    rng = np.random.default_rng(seed)
    true = rng.normal(size=(n, k)) * 2
    labels = np.array([rng.choice(k, p=p) for p in softmax(true, axis=1)])
    logits = np.sign(true) * np.abs(true) ** 1.8
    return torch.from_numpy(logits), torch.from_numpy(labels)


def nll(calibrator, logits, labels):
    return -float(calibrator.predict_log_proba(logits).gather(1, labels[:, None]).mean())


@each
def test_it_bends_what_a_temperature_cannot(variant):
    val, test = sample(n=2000), sample(n=4000, seed=1)
    found = nll(IntraOrderPreserving(variant).fit(*val), *test)
    assert found < nll(TemperatureScaling().fit(*val), *test) - 0.005


def test_equal_factors_are_a_temperature():
    """Both start there, and stay where the data give no reason to leave."""
    logits, labels = sample(n=100)
    common = TemperatureScaling().fit(logits, labels).predict_proba(logits)
    still = IntraOrderPreserving().fit(logits, labels)
    still.layers_ = tuple(0 * layer for layer in still.layers_)
    torch.testing.assert_close(still.predict_proba(logits), common, rtol=0, atol=1e-5)
    straight = IntraOrderPreserving("diag").fit(logits, labels)
    straight.slopes_ = torch.ones_like(straight.slopes_)
    torch.testing.assert_close(straight.predict_proba(logits), common, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [2, 3, 10])
def test_the_network_equals_a_loop(num_ranks):
    """Every gap times its factor, summed from the last rank up; the gaps beyond `num_ranks` share the last factor."""
    logits, labels = sample(n=300)
    calibrator = IntraOrderPreserving(num_ranks=num_ranks, hidden=(7,)).fit(logits, labels)
    calibrator.layers_ = tuple(
        torch.randn(layer.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        for i, layer in enumerate(calibrator.layers_)
    )
    first, first_bias, second, second_bias = (layer.numpy() for layer in calibrator.layers_)
    z = logits[:40].numpy() / calibrator.temperature_
    ranks = min(num_ranks + 1, 5)
    inputs = -np.sort(-z, axis=1)[:, :ranks] - z.max(1, keepdims=True)
    inputs = np.clip((inputs - calibrator.mean_.numpy()) / calibrator.spread_.numpy(), -5, 5)
    out = np.maximum(inputs @ first.T + first_bias, 0) @ second.T + second_bias
    factors = np.logaddexp(0, out + np.log(np.expm1(1 - 1e-6))) + 1e-6
    factors = np.concatenate([factors, np.repeat(factors[:, -1:], 5, axis=1)], axis=1)
    expected = softmax(reference.intra_order_preserving(z, factors), axis=1)
    np.testing.assert_allclose(calibrator.predict_proba(logits[:40]), expected, atol=1e-12)


def test_the_diagonal_is_one_increasing_polygon_for_all_classes():
    logits, labels = sample()
    calibrator = IntraOrderPreserving("diag").fit(logits, labels)
    knots, slopes = calibrator.knots_.numpy(), calibrator.slopes_.numpy()
    assert (slopes > 0).all()
    assert len(slopes) == len(knots) + 1
    z = logits.numpy() / calibrator.temperature_
    z = z - z.mean(1, keepdims=True)
    # The polygon through the knots and two far points.
    x = np.concatenate([[knots[0] - 1e3], knots, [knots[-1] + 1e3]])
    y = np.concatenate([[0], np.cumsum(slopes * np.diff(x))])
    expected = log_softmax(np.interp(z, x, y), axis=1)
    np.testing.assert_allclose(calibrator.predict_log_proba(logits), expected, atol=1e-9)


def test_a_slope_is_where_the_penalized_likelihood_has_none():
    """A step to either side of any learned slope is no better."""
    logits, labels = sample(n=400)
    calibrator = IntraOrderPreserving("diag").fit(logits, labels)

    def loss(slopes):
        calibrator.slopes_ = slopes
        return nll(calibrator, logits, labels) + float(slopes.log().square().sum()) / 800

    best = calibrator.slopes_.clone()
    lowest = loss(best)
    for j in range(len(best)):
        for factor in (0.9, 1.1):
            changed = best.clone()
            changed[j] *= factor
            assert loss(changed) > lowest


def test_it_stays_at_the_temperature_where_there_is_nothing_to_learn():
    """Two halves of the data decide how long to train: not at all where each only fits its own noise."""
    rng = np.random.default_rng(0)
    true = rng.normal(size=(150, 5)) * 2
    labels = torch.from_numpy(np.array([rng.choice(5, p=p) for p in softmax(true, axis=1)]))
    logits = torch.from_numpy(2 * true)
    fresh = torch.from_numpy(2 * rng.normal(size=(3000, 5)) * 2)
    truth = torch.multinomial(torch.softmax(fresh / 2, 1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
    common = nll(TemperatureScaling().fit(logits, labels), fresh, truth)
    for seed in range(3):
        calibrator = IntraOrderPreserving(seed=seed).fit(logits, labels)
        assert calibrator.num_steps_ < 60
        assert nll(calibrator, fresh, truth) < common + 0.01


@each
@pytest.mark.parametrize("network", ["cifar10-resnet50-ce", "imagenet-efficientnet-lite0"])
def test_the_whole_order_stays_on_real_networks(variant, network):
    val, test = load_shared(network, "val"), load_shared(network, "test")
    calibrator = IntraOrderPreserving(variant).fit(val[0][:600], val[1][:600])
    for asked in (test[0][:300], test[0][:300].double()):
        ordered = calibrator.predict_log_proba(asked).gather(1, asked.argsort(1))
        assert (ordered.diff(dim=1) >= 0).all()
    assert torch.equal(calibrator.predict_proba(asked).argmax(1), asked.argmax(1))


@each
def test_nothing_breaks_it(variant):
    logits, labels = sample(n=60)
    for scores, truth in [
        (logits, logits.argmax(1)),
        (logits, logits.argmin(1)),
        (logits[:2], torch.tensor([0, 1])),
        (logits[:1].expand(8, -1), torch.arange(8) % 2),
        (torch.zeros(6, 5, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 2, 2])),
        (logits * 1e6, labels),
        (logits[:, :2], labels.clamp(max=1)),
        (logits.float(), labels),
    ]:
        with warnings.catch_warnings():
            # A temperature without an optimum is told, and is no failure.
            warnings.simplefilter("ignore", BoundWarning)
            calibrator = IntraOrderPreserving(variant).fit(scores, truth)
        log_probs = calibrator.predict_log_proba(torch.cat([scores, 100 * scores]))
        assert not torch.isnan(log_probs).any()
        torch.testing.assert_close(log_probs.exp().sum(1), torch.ones_like(log_probs[:, 0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        IntraOrderPreserving("op"),
        IntraOrderPreserving(hidden=(0,)),
        IntraOrderPreserving(num_ranks=0),
        IntraOrderPreserving(seed=-1),
    ],
    ids=repr,
)
def test_parameters_are_judged(wrong):
    with pytest.raises(ValueError, match="must be"):
        wrong.fit(*sample(n=20))


@each
def test_the_network_of_the_paper(variant):
    val, test = load_shared("cifar10-resnet50-ce", "val"), load_shared("cifar10-resnet50-ce", "test")
    probs = IntraOrderPreserving(variant).fit(*val).predict_proba(test[0].double())
    common = TemperatureScaling().fit(*val).predict_proba(test[0].double())
    assert metrics.nll(probs, test[1]) < metrics.nll(common, test[1]) - 0.01
    assert metrics.ece(probs, test[1]) < metrics.ece(common, test[1])
    assert metrics.accuracy(probs, test[1]) == metrics.accuracy(common, test[1])
