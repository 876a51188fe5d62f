"""Isotonic, spline and beta calibration: identities, slow loops, scikit-learn and scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

import reference_calibrators as reference
from conftest import load_shared
from poise import metrics
from poise.calibrators import BetaCalibration, IsotonicCalibration, SplineCalibration, TemperatureScaling

CURVES = {
    "isotonic": IsotonicCalibration,
    "multiclass": lambda: IsotonicCalibration("multiclass"),
    "spline": SplineCalibration,
    "beta": BetaCalibration,
}
KEEPING = ["multiclass", "spline"]
each = pytest.mark.parametrize("name", CURVES)


def sample(n=500, k=3, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, k)) * 3
    probs = reference.softmax(logits / 2)
    labels = np.array([rng.choice(k, p=p) for p in probs])
    return torch.from_numpy(logits), torch.from_numpy(labels)


def normalized(rows):
    return rows / rows.sum(1, keepdims=True)


# Isotonic


def test_one_vs_rest_equals_a_slow_one():
    (logits, labels), (fresh, _) = sample(n=300), sample(n=100, seed=1)
    before, asked = reference.softmax(logits), reference.softmax(fresh)
    expected = [
        reference.isotonic_curve(before[:, k], labels.numpy() == k)(asked[:, k]) + 1e-9 * asked[:, k] for k in range(3)
    ]
    found = IsotonicCalibration().fit(logits, labels).predict_proba(fresh)
    np.testing.assert_allclose(found, normalized(np.stack(expected, axis=1)), atol=1e-9)


def test_the_multiclass_form_equals_scikit_learn_on_all_pairs():
    val, test = (load_shared("cifar10-resnet56-ce", split) for split in ("val", "test"))
    before, asked = (torch.softmax(z.double(), 1).numpy() for z, _ in (val, test))
    truth = np.eye(10)[val[1].numpy()]
    curve = IsotonicRegression(out_of_bounds="clip").fit(before.ravel(), truth.ravel())
    expected = normalized(curve.predict(asked.ravel()).reshape(asked.shape) + 1e-9 * asked)
    found = IsotonicCalibration("multiclass").fit(val[0].double(), val[1]).predict_proba(test[0].double())
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_the_multiclass_form_parts_what_plateaus_make_equal():
    """Without the trace of p the top class of many rows would be a matter of luck."""
    logits, labels = sample(n=60)
    calibrator = IsotonicCalibration("multiclass").fit(logits, labels)
    fresh, _ = sample(n=2000, seed=1)
    values = torch.softmax(fresh, 1).topk(2, dim=1).values
    plain = np.interp(values, calibrator.knots_[0], calibrator.rates_[0])
    level = plain[:, 0] == plain[:, 1]
    assert level.sum() > 20
    probs = calibrator.predict_proba(fresh)
    assert torch.equal(probs.argsort(1), fresh.argsort(1))
    top = probs.topk(2, dim=1).values
    assert (top[level, 0] > top[level, 1]).all()


def test_an_isotonic_curve_is_the_best_increasing_one():
    """No other increasing curve through the validation samples has a smaller squared error: not the truth, nor any."""
    logits, labels = sample(n=800, k=2)
    p, hit = torch.softmax(logits, 1)[:, 1], (labels == 1).double()
    calibrator = IsotonicCalibration().fit(logits, labels)
    found = torch.from_numpy(np.interp(p, calibrator.knots_[1], calibrator.rates_[1]))
    error = (found - hit).square().mean()
    for power in (0.3, 0.5, 1.0, 2.0):
        odds = power * torch.logit(p)
        assert error < (torch.sigmoid(odds) - hit).square().mean()
    assert float(found.mean()) == pytest.approx(float(hit.mean()))


# Spline


def test_the_spline_equals_a_slow_one():
    # As many samples as the mesh has steps: then both fit the same points.
    logits, labels = sample(n=1000)
    probs = reference.softmax(logits)
    confidence, hits = probs.max(1), probs.argmax(1) == labels.numpy()
    expected = reference.spline_confidences(confidence, hits)
    calibrator = SplineCalibration().fit(logits, labels)
    np.testing.assert_allclose(calibrator.confidences_, expected, atol=1e-9)
    order = np.argsort(confidence)
    whole = reference.with_confidence(probs[order], expected)
    np.testing.assert_allclose(calibrator.predict_proba(logits)[order], whole, atol=1e-8)


def test_two_knots_move_every_confidence_by_the_same():
    """A natural cubic through two knots is a line; its slope is the mean of what confidence lacks."""
    logits, labels = sample(n=1000)
    confidence = torch.softmax(logits, 1).amax(1)
    calibrator = SplineCalibration(num_knots=2).fit(logits, labels)
    moved = calibrator.confidences_ - confidence.sort().values
    inside = (calibrator.confidences_ < 0.99) & (calibrator.confidences_ > 0.1)
    assert float(moved[inside].std()) == pytest.approx(0, abs=1e-9)
    gap = float(((logits.argmax(1) == labels).double() - confidence).mean())
    # By least squares on the cumulated residuals, which weighs the middle more than the ends.
    assert float(moved[inside].mean()) == pytest.approx(gap, abs=0.05)


def test_the_spline_is_never_sure_beyond_its_samples():
    logits, labels = sample(n=200)
    sure = torch.cat([logits, 50 * torch.nn.functional.one_hot(labels, 3)])
    calibrator = SplineCalibration().fit(sure, torch.cat([labels, labels]))
    probs = calibrator.predict_proba(100 * logits)
    assert float(probs.max()) <= 1 - 1 / 401 + 1e-9


# Beta


@pytest.mark.parametrize("seed", range(3))
def test_beta_equals_scipy(seed):
    logits, labels = sample(n=300, seed=seed)
    calibrator = BetaCalibration().fit(logits, labels)
    probs = reference.softmax(logits)
    for k in range(3):
        expected = reference.beta_coefficients(probs[:, k], labels.numpy() == k)
        np.testing.assert_allclose(calibrator.coefficients_[k], expected, atol=2e-4)


def test_beta_equals_scikit_learn_where_the_prior_is_nothing():
    logits, labels = sample(n=20_000, k=2)
    p = reference.softmax(logits)[:, 1]
    design = np.stack([np.log(p), -np.log1p(-p)], axis=1)
    plain = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000).fit(design, labels)
    expected = [*plain.coef_[0], *plain.intercept_]
    np.testing.assert_allclose(BetaCalibration().fit(logits, labels).coefficients_[1], expected, atol=2e-3)


def test_equal_slopes_are_a_line_in_the_log_odds():
    """a = b = 1, c = 0 changes nothing; a = b is Platt's sigmoid of the log-odds."""
    logits, labels = sample(k=2)
    calibrator = BetaCalibration().fit(logits, labels)
    calibrator.coefficients_ = torch.tensor([[1.0, 1.0, 0.0]] * 2, dtype=torch.float64)
    torch.testing.assert_close(calibrator.predict_proba(logits), torch.softmax(logits, 1))
    calibrator.coefficients_ = torch.tensor([[0.7, 0.7, -0.4], [0.7, 0.7, 0.4]], dtype=torch.float64)
    odds = logits[:, 1] - logits[:, 0]
    torch.testing.assert_close(calibrator.predict_proba(logits)[:, 1], torch.sigmoid(0.7 * odds + 0.4))


def test_a_beta_slope_below_zero_is_held_at_zero():
    """Where more confidence means fewer hits, the curve is level rather than falling."""
    rng = np.random.default_rng(0)
    odds = rng.normal(size=2000)
    labels = (rng.uniform(size=2000) < 1 / (1 + np.exp(odds))).astype(int)
    logits = torch.from_numpy(np.stack([np.zeros(2000), odds], 1))
    coefficients = BetaCalibration().fit(logits, torch.from_numpy(labels)).coefficients_
    assert float(coefficients[:, :2].abs().max()) == pytest.approx(0, abs=1e-12)
    probs = BetaCalibration().fit(logits, torch.from_numpy(labels)).predict_proba(logits)
    assert float(probs.std(0).max()) == pytest.approx(0, abs=1e-9)


# All of them


@each
def test_nothing_breaks_it(name):
    """One class never seen, equal rows, certain and hopeless networks, two rows: whole rows, never NaN."""
    logits, labels = sample(n=50)
    certain = 1e4 * torch.nn.functional.one_hot(labels, 3).double()
    cases = [
        (logits, labels.clamp(max=1)),
        (logits[:1].expand(20, -1), labels[:20]),
        (torch.zeros(10, 3, dtype=torch.float64), labels[:10]),
        (certain, labels),
        (certain, (labels + 1) % 3),
        (logits[:2], torch.tensor([0, 1])),
        (logits * 1e6, labels),
        (logits.float(), labels),
    ]
    for scores, truth in cases:
        calibrator = CURVES[name]().fit(scores, truth)
        for asked in (scores, 100 * logits, torch.zeros(1, 3)):
            log_probs = calibrator.predict_log_proba(asked)
            assert torch.isfinite(log_probs).all()
            torch.testing.assert_close(log_probs.exp().sum(1), torch.ones_like(log_probs[:, 0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrong", [IsotonicCalibration("irm"), SplineCalibration(1), SplineCalibration(2.5)])
def test_parameters_are_judged(wrong):
    with pytest.raises(ValueError, match="must be"):
        wrong.fit(*sample(n=20))


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("network", ["cifar10-resnet50-ce", "20news-text", "imagenet-efficientnet-lite0"])
def test_accuracy_and_order_stay_on_real_networks(name, network):
    """To the last place of a thousand classes; one-vs-rest curves move the accuracy of the same network."""
    val, test = load_shared(network, "val"), load_shared(network, "test")
    asked = test[0][:500].double()
    calibrator = CURVES[name]().fit(val[0][:1000], val[1][:1000])
    ordered = calibrator.predict_log_proba(asked).gather(1, asked.argsort(1))
    assert (ordered.diff(dim=1) >= 0).all()
    assert metrics.accuracy(calibrator.predict_proba(asked), test[1][:500]) == metrics.accuracy(
        torch.softmax(asked, 1), test[1][:500]
    )
    moved = IsotonicCalibration().fit(val[0][:1000], val[1][:1000]).predict_proba(asked)
    assert not torch.equal(moved.argmax(1), asked.argmax(1))


def test_the_network_of_the_paper():
    """One increasing curve for all classes has a better likelihood than a temperature, as have three numbers each."""
    val, test = load_shared("cifar10-resnet50-ce", "val"), load_shared("cifar10-resnet50-ce", "test")
    scores = {
        name: metrics.nll(make().fit(*val).predict_proba(test[0].double()), test[1])
        for name, make in {"common": TemperatureScaling, **CURVES}.items()
    }
    assert max(scores["multiclass"], scores["beta"]) < scores["common"]
    assert scores["isotonic"] > scores["common"] + 0.02
