"""Temperature scaling: the exact optimum, the published figures, and no way to diverge."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from netcal.scaling import TemperatureScaling as NetcalTemperatureScaling
from scipy.optimize import minimize
from sklearn.calibration import _TemperatureScaling

from conftest import load_shared
from poise import BoundWarning, TemperatureScaling, metrics

PAPER = "cifar10-resnet50-ce"
SMALL = [
    PAPER,
    "cifar10-wrn28-10-ce",
    "cifar100-wrn16-4-ce",
    "20news-text",
    "pathmnist-shifted",
    "retinopathy-augmented",
]


def test_the_network_as_it_came():
    """The first row of the paper's tables; our AdaECE counts the smallest confidence, theirs (4.33) drops it."""
    logits, labels = load_shared(PAPER, "test")
    probs = torch.softmax(logits, 1)
    assert 100 * metrics.ece(probs, labels) == pytest.approx(4.354, abs=0.001)
    assert 100 * metrics.adaptive_ece(probs, labels) == pytest.approx(4.338, abs=0.001)
    assert 100 * metrics.classwise_ece(probs, labels) == pytest.approx(0.908, abs=0.001)
    assert metrics.nll(probs, labels) == pytest.approx(0.4121, abs=0.0001)
    assert metrics.accuracy(probs, labels) == pytest.approx(0.9505, abs=1e-9)


@pytest.mark.parametrize(
    ("criterion", "temperature", "ece", "nll"),
    [("nll", 2.4975, 1.373, 0.20381), ("brier", 2.881, 2.965, 0.20851)],
)
def test_the_published_figures(criterion, temperature, ece, nll):
    calibrator = TemperatureScaling(criterion).fit(*load_shared(PAPER, "val"))
    assert calibrator.temperature_ == pytest.approx(temperature, abs=6e-4)
    logits, labels = load_shared(PAPER, "test")
    probs = calibrator.predict_proba(logits)
    assert 100 * metrics.ece(probs, labels) == pytest.approx(ece, abs=0.003)
    assert metrics.nll(probs, labels) == pytest.approx(nll, abs=2e-5)
    assert metrics.accuracy(probs, labels) == metrics.accuracy(torch.softmax(logits, 1), labels)


@pytest.mark.parametrize("criterion", ["ece", "adaptive_ece"])
def test_a_calibration_error_is_searched_as_well_as_by_the_published_grid(criterion):
    """T = 0.1, 0.2, …, 10, the first minimum (Mukhoti et al.): ours is no worse on the data it is fitted on."""
    logits, labels = load_shared(PAPER, "val")
    calibrator = TemperatureScaling(criterion).fit(logits, labels)
    measure = getattr(metrics, criterion)
    grid = {t: measure(torch.softmax(logits.double() / t, 1), labels) for t in np.arange(1, 101) / 10}
    assert measure(calibrator.predict_proba(logits.double()), labels) <= min(grid.values())
    assert calibrator.temperature_ == pytest.approx(2.5, abs=0.1)


@pytest.mark.parametrize("name", [PAPER, "20news-text"])
def test_netcal_finds_the_same_temperature(name):
    logits, labels = load_shared(name, "val")
    theirs = NetcalTemperatureScaling()
    with warnings.catch_warnings():
        # What it is built on warns of itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        theirs.fit(torch.softmax(logits.double(), 1).numpy(), labels.numpy())
    assert TemperatureScaling().fit(logits, labels).temperature_ == pytest.approx(1 / theirs.temperature[0], rel=1e-3)


@pytest.mark.parametrize("name", SMALL)
def test_the_optimum_is_exact(name):
    """Σ (q − Y) z = 0, the temperature of two other solvers, and 1 when it is fitted again on what it made."""
    logits, labels = load_shared(name, "val")
    logits = logits.double()
    calibrator = TemperatureScaling().fit(logits, labels)
    temperature = calibrator.temperature_
    q = calibrator.predict_proba(logits)
    residual = (q - torch.nn.functional.one_hot(labels, q.shape[1])) * (logits - logits.mean(1, keepdim=True))
    assert residual.sum().abs() < 1e-4 * residual.abs().sum()

    def loss(beta):
        beta = torch.tensor(beta[0], dtype=torch.float64, requires_grad=True)
        value = torch.nn.functional.cross_entropy(logits * beta, labels)
        (slope,) = torch.autograd.grad(value, beta)
        return value.item(), np.array([slope.item()])

    solved = minimize(loss, [1.0], jac=True, method="BFGS", options={"gtol": 1e-9})
    assert 1 / temperature == pytest.approx(solved.x[0], rel=2e-4)
    assert 1 / temperature == pytest.approx(_TemperatureScaling().fit(logits.numpy(), labels.numpy()).beta_, rel=1e-3)
    assert TemperatureScaling().fit(logits / temperature, labels).temperature_ == pytest.approx(1, rel=1e-4)


def test_clipped_scores_hide_under_no_floor():
    """31 of 3,766 true classes were clipped at e^-27.6: a likelihood with a floor would answer with T = 0.40."""
    calibrator = TemperatureScaling().fit(*load_shared("20news-text", "val"))
    assert calibrator.temperature_ == pytest.approx(0.7672, abs=1e-3)
    logits, labels = load_shared("20news-text", "test")
    assert metrics.nll(calibrator.predict_proba(logits), labels) == pytest.approx(0.5429, abs=1e-3)


def random_logits(num_samples=500, num_classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, num_classes, generator=generator, dtype=torch.float64) * 3
    return logits, torch.multinomial(torch.softmax(logits, 1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("factor", [1e-5, 0.1, 7.0, 1e6])
def test_the_temperature_scales_with_the_logits(factor):
    logits, labels = random_logits()
    once = TemperatureScaling().fit(logits, labels).temperature_
    assert TemperatureScaling().fit(logits * factor, labels).temperature_ == pytest.approx(factor * once, rel=1e-4)
    assert once == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("criterion", ["nll", "brier", "ece"])
def test_separable_data_end_in_certainty(criterion):
    """Nothing is wrong, so nothing but certainty is best: a small positive temperature, no warning, no NaN."""
    labels = torch.arange(60) % 3
    logits = torch.nn.functional.one_hot(labels, 3) * 5.0 + torch.rand(
        60, 3, generator=torch.Generator().manual_seed(0)
    )
    calibrator = TemperatureScaling(criterion).fit(logits, labels)
    assert 0 < calibrator.temperature_ < 2
    assert calibrator.predict_proba(logits).amax(1).min() > 0.99


@pytest.mark.parametrize("criterion", ["nll", "brier"])
def test_scores_that_say_less_than_nothing_end_in_a_guess(criterion):
    logits, labels = random_logits()
    with pytest.warns(BoundWarning, match="towards larger ones"):
        calibrator = TemperatureScaling(criterion).fit(-logits, labels)
    torch.testing.assert_close(calibrator.predict_proba(logits), torch.full((500, 5), 0.2).double(), rtol=0, atol=1e-3)


def test_limits_of_the_temperature():
    logits, _ = random_logits()
    calibrator = TemperatureScaling().fit(*random_logits())
    for temperature, expected in [
        (1.0, torch.softmax(logits, 1)),
        (1e-6, torch.nn.functional.one_hot(logits.argmax(1), 5).double()),
        (1e9, torch.full_like(logits, 0.2)),
    ]:
        calibrator.temperature_ = temperature
        torch.testing.assert_close(calibrator.predict_proba(logits), expected, rtol=0, atol=1e-8)


def test_large_scores_do_not_overflow():
    logits, labels = random_logits()
    calibrator = TemperatureScaling().fit((logits * 1e30).float(), labels)
    probs = calibrator.predict_proba((logits * 1e30).float())
    assert torch.isfinite(probs).all()
    expected = TemperatureScaling().fit(logits, labels).predict_proba(logits)
    torch.testing.assert_close(probs, expected.float(), rtol=0, atol=1e-4)
