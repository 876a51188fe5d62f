"""ProCal and density-aware calibration: what being far from all that is known does, against slow loops."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax
from sklearn.neighbors import KernelDensity

import reference_calibrators as reference
from conftest import load_features, load_shared
from poise import metrics
from poise.calibrators import (
    DensityAwareCalibration,
    IsotonicCalibration,
    ProximityCalibration,
    TemperatureScaling,
)
from poise.calibrators.proximity import _log_density
from poise.metrics.neighborhoods import neighbor_distances
from poise.search import BoundWarning

METHODS = {
    "ratio": ProximityCalibration,
    "bins": lambda **more: ProximityCalibration("bin_mean_shift", **more),
    "density": DensityAwareCalibration,
}
each = pytest.mark.parametrize("name", METHODS)


def sample(n=800, k=3, seed=0):
    """Features around one direction or anywhere; where they are anywhere, logits are three times too sharp."""
    rng = np.random.default_rng(seed)
    true = rng.normal(size=(n, k)) * 2
    labels = np.array([rng.choice(k, p=p) for p in reference.softmax(true)])
    rare = rng.uniform(size=n) < 0.3
    spread = np.where(rare, 1.0, 0.05)[:, None]
    features = np.eye(6)[0] + spread * rng.normal(size=(n, 6))
    logits = true * np.where(rare, 3.0, 1.0)[:, None]
    return tuple(map(torch.from_numpy, (logits, labels, features)))


def nll(calibrator, logits, labels, features=None):
    log_prob = calibrator.predict_log_proba(logits, features=features)
    return -float(log_prob.gather(1, labels[:, None]).mean())


@pytest.mark.parametrize("name", ["ratio", "density"])
def test_what_is_far_from_all_that_is_known_is_less_certain(name):
    """A temperature that is one for all cannot do it."""
    val, test = sample(), sample(n=2000, seed=1)
    calibrator = METHODS[name]().fit(*val[:2], features=val[2])
    common = TemperatureScaling().fit(*val[:2])
    assert nll(calibrator, *test) < nll(common, *test[:2]) - 0.01
    logits = torch.tensor([[6.0, 0.0, 0.0]] * 2, dtype=torch.float64)
    near, far = torch.eye(6, dtype=torch.float64)[0], torch.tensor([-0.5, 1.0, 1.0, -1.0, 0.0, 0.0]).double()
    probs = calibrator.predict_proba(logits, features=torch.stack([near, far]))
    assert float(probs[0, 0]) > float(probs[1, 0]) + 0.02


@pytest.mark.parametrize("num_neighbors", [1, 4])
def test_neighbors_equal_a_loop(num_neighbors):
    features, others = (rng.normal(size=(40, 3)) for rng in map(np.random.default_rng, (0, 1)))
    for given, alone in ((None, True), (others, False)):
        found = neighbor_distances(features, given, num_neighbors=num_neighbors)
        slow = reference.nearest(features, features if alone else others, num_neighbors, alone)
        np.testing.assert_allclose(found, slow, atol=1e-12)


def test_the_density_ratio_equals_a_loop():
    (logits, labels, features), (asked, _, places) = sample(n=120), sample(n=30, seed=1)
    calibrator = ProximityCalibration(num_neighbors=5).fit(logits, labels, features=features)
    probs, fresh = reference.softmax(logits), reference.softmax(asked)
    near = np.exp(-reference.nearest(features, features, 5, True)).mean(1)
    points = np.stack([probs.max(1), near], axis=1)
    hit = probs.argmax(1) == labels.numpy()
    new = np.stack([fresh.max(1), np.exp(-reference.nearest(places, features, 5, False)).mean(1)], axis=1)
    confidence = [reference.density_ratio(point, points[hit], points[~hit]) for point in new]
    expected = reference.with_confidence(fresh, confidence)
    np.testing.assert_allclose(calibrator.predict_proba(asked, features=places), expected, atol=1e-8)


def test_the_densities_equal_scikit_learns():
    rng = np.random.default_rng(0)
    seen, points, weight = rng.normal(size=(200, 2)), rng.normal(size=(50, 2)), rng.integers(1, 4, 200)
    found = _log_density(torch.from_numpy(points), torch.from_numpy(np.column_stack([seen, weight])))
    width = 1.06 * np.repeat(seen, weight, axis=0).std(0) * weight.sum() ** (-1 / 6)
    plain = KernelDensity(bandwidth=1.0).fit(seen / width, sample_weight=weight)
    np.testing.assert_allclose(found, plain.score_samples(points / width) - np.log(width).sum(), atol=1e-9)


def test_the_bins_are_isotonic_calibrators_of_their_own():
    (logits, labels, features), (asked, _, places) = sample(n=400), sample(n=100, seed=1)
    calibrator = ProximityCalibration("bin_mean_shift", num_neighbors=5, num_bins=3)
    found = calibrator.fit(logits, labels, features=features).predict_proba(asked, features=places)
    near = np.exp(-reference.nearest(features, features, 5, True)).mean(1)
    new = np.exp(-reference.nearest(places, features, 5, False)).mean(1)
    edges = np.quantile(near, [1 / 3, 2 / 3])
    group, fresh = np.searchsorted(edges, near, side="right"), np.searchsorted(edges, new, side="right")
    for g in range(3):
        assert (fresh == g).sum() > 10
        alone = IsotonicCalibration("multiclass").fit(logits[group == g], labels[group == g])
        torch.testing.assert_close(found[fresh == g], alone.predict_proba(asked[fresh == g]), rtol=0, atol=1e-9)
    one = ProximityCalibration("bin_mean_shift", num_bins=1).fit(logits, labels, features=features)
    alone = IsotonicCalibration("multiclass").fit(logits, labels)
    torch.testing.assert_close(one.predict_proba(asked, features=places), alone.predict_proba(asked))


@pytest.mark.parametrize("seed", [0, 1])
def test_density_aware_equals_scipy(seed):
    logits, labels, features = sample(n=300, seed=seed)
    calibrator = DensityAwareCalibration(num_neighbors=3).fit(logits, labels, features=features)
    far = reference.nearest(features, features, 3, True)[:, -1]

    def loss(theta):
        scaled = logits.numpy() / (theta[0] + theta[1] * far)[:, None]
        return -log_softmax(scaled, axis=1)[np.arange(300), labels].mean()

    bounds = [(1e-2, None), (0, None)]
    best = min(
        (minimize(loss, start, bounds=bounds, method="L-BFGS-B") for start in ([1, 1], [3, 0.1])), key=lambda r: r.fun
    )
    assert loss([calibrator.base_, calibrator.slope_]) == pytest.approx(best.fun, abs=1e-6)
    assert [calibrator.base_, calibrator.slope_] == pytest.approx(best.x, rel=0.02)


def test_density_aware_without_a_slope_is_temperature_scaling():
    logits, labels, features = sample(n=200)
    common = TemperatureScaling().fit(logits, labels)
    # Where all are equally far there is nothing to learn but the temperature.
    alike = torch.ones(200, 2)
    calibrator = DensityAwareCalibration().fit(logits, labels, features=alike)
    torch.testing.assert_close(
        calibrator.predict_proba(logits, features=alike), common.predict_proba(logits), rtol=0, atol=1e-5
    )
    calibrator = DensityAwareCalibration().fit(logits, labels, features=features)
    calibrator.base_, calibrator.slope_ = common.temperature_, 0.0
    torch.testing.assert_close(calibrator.predict_proba(logits, features=features), common.predict_proba(logits))


def test_a_reference_of_training_features():
    logits, labels, features = sample(n=200)
    training = sample(n=500, seed=3)[2]
    calibrator = DensityAwareCalibration(num_neighbors=2, reference=training).fit(logits, labels, features=features)
    far = torch.from_numpy(reference.nearest(features, training, 2, False)[:, -1])
    temperature = calibrator.base_ + calibrator.slope_ * far[:, None]
    expected = torch.softmax(logits / temperature, 1)
    torch.testing.assert_close(calibrator.predict_proba(logits, features=features), expected)


@each
def test_nothing_breaks_it(name):
    logits, labels, features = sample(n=60)
    cases = [
        (logits, logits.argmax(1), features),
        (logits, logits.argmin(1), features),
        (logits[:3], torch.tensor([0, 1, 0]), features[:3]),
        (logits[:1].expand(8, -1), torch.arange(8) % 2, features[:1].expand(8, -1)),
        (logits, labels, torch.zeros(60, 3)),
        (logits.float() * 100, labels, features.float()),
        (logits, labels.clamp(max=1), features[:, None, :, None]),
    ]
    for scores, truth, more in cases:
        with warnings.catch_warnings():
            # A temperature without an optimum is told, and is no failure.
            warnings.simplefilter("ignore", BoundWarning)
            calibrator = METHODS[name](num_neighbors=1).fit(scores, truth, features=more)
        for asked, places in ((scores, more), (torch.zeros(1, 3), -more[:1])):
            log_probs = calibrator.predict_log_proba(asked, features=places)
            assert torch.isfinite(log_probs).all()
            torch.testing.assert_close(log_probs.exp().sum(1), torch.ones_like(log_probs[:, 0]), rtol=0, atol=1e-5)


@each
def test_features_are_judged(name):
    logits, labels, features = sample(n=60)
    calibrator = METHODS[name]()
    with pytest.raises(ValueError, match="needs the network's features"):
        calibrator.fit(logits, labels)
    with pytest.raises(ValueError, match="features have 59 rows but 60 were expected"):
        calibrator.fit(logits, labels, features=features[1:])
    with pytest.raises(ValueError, match="num_neighbors is 10 but there are only 4"):
        calibrator.fit(logits[:5], labels[:5], features=features[:5])
    with pytest.raises(ValueError, match="2 and 6 columns"):
        calibrator.fit(logits, labels, features=features).predict_proba(logits, features=features[:, :2])


@pytest.mark.parametrize(
    "wrong",
    [
        ProximityCalibration("ratio"),
        ProximityCalibration(num_bins=0),
        ProximityCalibration(num_neighbors=0),
        DensityAwareCalibration(num_neighbors=1.5),
    ],
    ids=repr,
)
def test_parameters_are_judged(wrong):
    logits, labels, features = sample(n=20)
    with pytest.raises(ValueError, match="must be"):
        wrong.fit(logits, labels, features=features)


@each
def test_a_network_with_features(name):
    """Accuracy stays, and on the network's own distribution none of the three is ruin."""
    val, test = (load_shared("cifar10-resnet56-ce", split) for split in ("val", "test"))
    seen, fresh = (load_features("cifar10-resnet56-ce", split) for split in ("val", "test"))
    common = TemperatureScaling().fit(*val).predict_proba(test[0].double())
    calibrator = METHODS[name]().fit(val[0].double(), val[1], features=seen)
    probs = calibrator.predict_proba(test[0].double(), features=fresh)
    assert metrics.accuracy(probs, test[1]) == metrics.accuracy(common, test[1])
    raw = torch.softmax(test[0].double(), 1)
    assert metrics.ece(probs, test[1]) < metrics.ece(raw, test[1]) / 2
