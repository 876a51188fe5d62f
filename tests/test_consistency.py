"""Consistency calibration, exact and sampled: identities, search, and figures on the paper's network."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

import poise
from conftest import load_shared
from poise import ConsistencyCalibration, Link, SampledConsistency, TemperatureScaling, metrics
from poise.calibrators.consistency import SHAPES
from poise.calibrators.lapse import fit_lapse, with_lapse
from poise.neighbors import Additive
from poise.noise import Gaussian, GeneralizedNormal, Gumbel, LogGamma, Uniform
from poise.sampling import estimate

PAPER = "cifar10-resnet50-ce"


def random_logits(num_samples=400, num_classes=4, seed=0, sharpness=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, num_classes, generator=generator, dtype=torch.float64) * 3
    return logits, torch.multinomial(torch.softmax(logits / sharpness, 1), 1, generator=generator)[:, 0]


# Identities


@pytest.mark.parametrize("criterion", ["nll", "brier", "ece", "adaptive_ece"])
def test_gumbel_noise_is_temperature_scaling(criterion):
    """The same temperature and the same probabilities, by whatever it is fitted."""
    logits, labels = random_logits()
    consistency = ConsistencyCalibration(Gumbel(), criterion, lapse=False).fit(logits, labels)
    temperature = TemperatureScaling(criterion).fit(logits, labels)
    assert consistency.strength_ == pytest.approx(temperature.temperature_, rel=1e-9)
    torch.testing.assert_close(consistency.predict_proba(logits), temperature.predict_proba(logits), rtol=0, atol=1e-12)


def test_gumbel_noise_is_temperature_scaling_on_a_real_network():
    val, test = load_shared(PAPER, "val"), load_shared(PAPER, "test")
    consistency = ConsistencyCalibration(Gumbel(), lapse=False).fit(*val)
    assert consistency.strength_ == pytest.approx(2.4975, abs=5e-4)
    expected = TemperatureScaling().fit(*val).predict_proba(test[0])
    torch.testing.assert_close(consistency.predict_proba(test[0]), expected, rtol=0, atol=1e-6)


def test_the_unit_of_a_noise_does_not_matter():
    """LogGamma(1) is Gumbel with variance 1; a generalised normal of β = 2 is Gaussian, of β = ∞ uniform on ±√3."""
    logits, labels = random_logits()
    for same, other, unit in [
        (LogGamma(1.0), Gumbel(), math.pi / math.sqrt(6)),
        (GeneralizedNormal(2.0), Gaussian(), 1.0),
        (GeneralizedNormal(math.inf), Uniform(), 1 / math.sqrt(3)),
    ]:
        first, second = (ConsistencyCalibration(noise).fit(logits, labels) for noise in (same, other))
        assert first.strength_ == pytest.approx(second.strength_ * unit, rel=1e-4)
        torch.testing.assert_close(first.predict_proba(logits), second.predict_proba(logits), rtol=0, atol=1e-5)


def test_two_classes_under_gaussian_noise_are_a_probit():
    """Fitted from the log-odds alone: the slope of a probit regression without intercept."""
    logits, labels = random_logits(num_classes=2)
    odds = logits[:, 1] - logits[:, 0]
    calibrator = ConsistencyCalibration(Gaussian(), lapse=False).fit(odds, labels)
    signed = torch.where(labels == 1, odds, -odds)
    slope = minimize_scalar(lambda a: -torch.special.log_ndtr(a * signed).mean().item(), bounds=(1e-3, 10)).x
    assert calibrator.strength_ == pytest.approx(1 / (math.sqrt(2) * slope), rel=1e-3)
    expected = torch.special.ndtr(odds / (math.sqrt(2) * calibrator.strength_))
    torch.testing.assert_close(calibrator.predict_proba(odds)[:, 1], expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("noise", [Gaussian(), LogGamma(0.25), GeneralizedNormal(8.0)], ids=repr)
def test_the_optimum_is_exact(noise):
    """The derivative of the likelihood in log ε vanishes where the fit says it does, and not beside it."""
    logits, labels = random_logits()
    strength = ConsistencyCalibration(noise, lapse=False).fit(logits, labels).strength_

    def slope(at):
        log_strength = torch.tensor(math.log(at), dtype=torch.float64, requires_grad=True)
        loss = -Link(noise).log_prob_of(logits / log_strength.exp(), labels).mean()
        return torch.autograd.grad(loss, log_strength)[0].item()

    assert abs(slope(strength)) < 2e-4
    assert slope(strength * 0.9) < -2e-3
    assert slope(strength * 1.1) > 2e-3


@pytest.mark.parametrize("noise", [Gaussian(), Gumbel()], ids=repr)
def test_few_wrong_rows_are_seen_wherever_they_stand(noise):
    """The first look is at every other row here, all of them right: the more certain, the better, it seems."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 4, generator=generator) * 3
    logits[:, 0] += 12
    labels = logits.argmax(1)
    labels[1::400] = logits[1::400].topk(2).indices[:, 1]
    order = torch.randperm(4000, generator=generator)
    apart, mixed = (
        ConsistencyCalibration(noise, lapse=False).fit(logits[rows], labels[rows]).strength_
        for rows in (torch.arange(4000), order)
    )
    assert apart == pytest.approx(mixed, rel=1e-3)


@pytest.mark.parametrize("criterion", ["nll", "brier", "ece"])
@pytest.mark.parametrize("factor", [1e-3, 40.0])
def test_the_strength_scales_with_the_logits(criterion, factor):
    logits, labels = random_logits()
    once, scaled = (ConsistencyCalibration(Gaussian(), criterion).fit(logits * c, labels) for c in (1.0, factor))
    assert scaled.strength_ == pytest.approx(factor * once.strength_, rel=1e-4)
    assert scaled.lapse_ == pytest.approx(once.lapse_, rel=1e-2)


# The lapse


def test_a_lapse_is_its_formula():
    logits, labels = random_logits()
    calibrator = ConsistencyCalibration(Uniform()).fit(logits, labels)
    lapse = calibrator.lapse_
    assert 1 / 401 <= lapse < 0.2
    expected = (1 - lapse) * Link(Uniform()).log_prob(logits / calibrator.strength_).exp() + lapse / 4
    torch.testing.assert_close(calibrator.predict_proba(logits), expected, rtol=1e-12, atol=0)
    assert calibrator.predict_proba(logits).min() >= lapse / 4 * (1 - 1e-12)
    zeros = ConsistencyCalibration(Uniform(), lapse=False).fit(logits, labels)
    assert zeros.lapse_ == 0
    assert (zeros.predict_proba(logits) == 0).any()
    far = torch.tensor([[0.0, -1e4, -2e4, -3e4]], dtype=torch.float64)
    assert torch.isfinite(calibrator.predict_log_proba(far)).all()


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
def test_the_lapse_is_the_most_likely_one(share):
    """With one pseudo-count: the maximum of Σ log((1 − l) p + l/k) + log l."""
    generator = torch.Generator().manual_seed(0)
    true = torch.rand(2000, generator=generator, dtype=torch.float64) ** 0.2
    true[torch.rand(2000, generator=generator) < share] = 0
    lapse = fit_lapse(true, 10)
    best = minimize_scalar(
        lambda share: -(torch.log((1 - share) * true + share / 10).sum().item() + math.log(share)),
        bounds=(1e-6, 0.99),
        method="bounded",
        options={"xatol": 1e-9},
    ).x
    assert lapse == pytest.approx(best, rel=1e-3)
    assert lapse >= 1 / 2001


def test_the_lapse_counts_weights_like_repetitions_and_is_never_everything():
    true = torch.linspace(0, 1, 50, dtype=torch.float64)
    count = torch.arange(50) % 3
    repeated = torch.repeat_interleave(true, count)
    assert fit_lapse(true, 10, count.double()) == pytest.approx(fit_lapse(repeated, 10), rel=1e-6)
    assert fit_lapse(torch.zeros(98, dtype=torch.float64), 10) == pytest.approx(0.99)
    log_prob = torch.log_softmax(torch.tensor([[3.0, 2.0, 1.0]], dtype=torch.float64), 1)
    assert torch.equal(with_lapse(log_prob, 0.0), log_prob)
    nearly = with_lapse(log_prob, 0.99).exp()
    assert (nearly.diff() < 0).all(), "the order is kept"
    torch.testing.assert_close(nearly.sum(), torch.tensor(1.0, dtype=torch.float64))


@pytest.mark.parametrize("criterion", ["ece", "adaptive_ece"])
def test_a_calibration_error_is_not_won_by_the_lapse(criterion):
    """A constant confidence equal to the accuracy has no calibration error and says nothing."""
    logits, labels = random_logits(sharpness=4.0)
    with_it, without = (
        ConsistencyCalibration(Uniform(), criterion, lapse=lapse).fit(logits, labels) for lapse in (1, 0)
    )
    assert with_it.strength_ == without.strength_
    assert with_it.predict_proba(logits).amax(1).std() > 0.05


# The choice of a shape


def test_the_shape_of_the_best_likelihood_is_chosen():
    logits, labels = random_logits()
    calibrator = ConsistencyCalibration().fit(logits, labels)
    assert [candidate["noise"] for candidate in calibrator.candidates_] == list(SHAPES)
    best = min(calibrator.candidates_, key=lambda candidate: candidate["nll"])
    assert (calibrator.noise_, calibrator.strength_, calibrator.lapse_) == (
        best["noise"],
        best["strength"],
        best["lapse"],
    )
    alone = ConsistencyCalibration(best["noise"]).fit(logits, labels)
    assert torch.equal(calibrator.predict_proba(logits), alone.predict_proba(logits))
    probs, n = calibrator.predict_proba(logits), len(labels)
    assert best["nll"] == pytest.approx(metrics.nll(probs, labels) - math.log(best["lapse"]) / n, abs=1e-7)


@pytest.mark.parametrize("shape", [LogGamma(0.25), Gumbel(), GeneralizedNormal(8.0)], ids=repr)
def test_a_shape_is_found_again(shape):
    """Labels drawn from the link of a shape: that shape or a neighbour of it is chosen, and its strength comes back."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 5, generator=generator, dtype=torch.float64) * 4
    labels = torch.multinomial(Link(shape).log_prob(logits / 3.0).exp(), 1, generator=generator)[:, 0]
    calibrator = ConsistencyCalibration().fit(logits, labels)
    assert abs(SHAPES.index(calibrator.noise_) - SHAPES.index(shape)) <= 1
    assert ConsistencyCalibration(shape).fit(logits, labels).strength_ == pytest.approx(3.0, rel=0.06)


# Figures


def percent(probs, labels):
    return {
        "ece": 100 * metrics.ece(probs, labels),
        "adaptive_ece": 100 * metrics.adaptive_ece(probs, labels),
        "classwise_ece": 100 * metrics.classwise_ece(probs, labels),
        "nll": metrics.nll(probs, labels),
        "accuracy": 100 * metrics.accuracy(probs, labels),
    }


def test_the_limit_of_the_published_votes():
    """U(−8.10, 8.10) without end: the paper's row (.78, .64, .39, 95.06) and a likelihood loss below temperature's."""
    logits, labels = load_shared(PAPER, "test")
    found = percent(Link(Uniform()).log_prob(logits.double() / 8.10).exp(), labels)
    assert found["ece"] == pytest.approx(0.773, abs=0.002)
    assert found["adaptive_ece"] == pytest.approx(0.836, abs=0.01)
    assert found["classwise_ece"] == pytest.approx(0.387, abs=0.002)
    assert found["nll"] == pytest.approx(0.1914, abs=1e-4)
    assert found["accuracy"] == pytest.approx(95.05, abs=1e-9)


FIGURES = {
    "gaussian": (Gaussian(), "nll", 3.80, 1.41, 0.1936),
    "steep": (GeneralizedNormal(8.0), "nll", 4.40, 1.28, 0.1833),
    "uniform": (Uniform(), "ece", 8.08, 0.80, 0.1914),
}


@pytest.mark.parametrize(("noise", "criterion", "strength", "ece", "nll"), FIGURES.values(), ids=FIGURES)
def test_the_figures_on_the_papers_network(noise, criterion, strength, ece, nll):
    calibrator = ConsistencyCalibration(noise, criterion, lapse=False).fit(*load_shared(PAPER, "val"))
    logits, labels = load_shared(PAPER, "test")
    found = percent(calibrator.predict_proba(logits), labels)
    assert calibrator.strength_ == pytest.approx(strength, abs=0.04 if criterion == "ece" else 0.01)
    assert found["ece"] == pytest.approx(ece, abs=0.05 if criterion == "ece" else 0.01)
    assert found["nll"] == pytest.approx(nll, abs=2e-4)
    assert found["accuracy"] == pytest.approx(95.05, abs=1e-9)


def test_a_calibration_error_is_searched_as_well_as_by_the_published_grid():
    logits, labels = load_shared(PAPER, "val")
    calibrator = ConsistencyCalibration(Uniform(), "ece", lapse=False).fit(logits, labels)
    link = Link(Uniform())
    grid = [metrics.ece(link.log_prob(logits.double() / e).exp(), labels) for e in np.linspace(0, 10, 101)[1:]]
    assert calibrator.candidates_[0]["ece"] <= min(grid)


REAL = [
    PAPER,
    "cifar10-densenet40-ce",
    "cifar10-resnet56-ce",
    "cifar10-wrn28-10-ce",
    "cifar100-wrn16-4-ce",
    "imagenet-efficientnet-lite0",
    "retinopathy-augmented",
    "pathmnist-shifted",
    "20news-text",
]


def test_the_chosen_shape_on_real_networks():
    """Never worse than temperature scaling by more than half a percent, better by more than three in the mean."""
    ratios = {}
    for name in REAL:
        val, (logits, labels) = load_shared(name, "val"), load_shared(name, "test")
        calibrator = ConsistencyCalibration().fit(*val)
        probs = calibrator.predict_proba(logits)
        plain = TemperatureScaling().fit(*val).predict_proba(logits)
        ratios[name] = metrics.nll(probs, labels) / metrics.nll(plain, labels)
        assert metrics.accuracy(probs, labels) == metrics.accuracy(torch.softmax(logits.double(), 1), labels), name
        if name == PAPER:
            assert metrics.nll(probs, labels) <= 0.185
            assert calibrator.noise_ == GeneralizedNormal(8.0)
    assert max(ratios.values()) <= 1.005, ratios
    assert ratios.pop("20news-text") == pytest.approx(0.53, abs=0.02), "the lapse rescues clipped scores"
    assert math.exp(np.mean(np.log(list(ratios.values())))) <= 0.97, ratios
    assert ratios["pathmnist-shifted"] < 0.95, "a shifted test set, where it could have gone either way"


# The sampled method


@pytest.fixture(scope="module")
def published():
    """The published uniform votes on the paper's network, with T = 200 for 1,000: five times quicker."""
    neighbors = Additive(Uniform())
    return SampledConsistency(neighbors=neighbors, num_samples=200).fit(*load_shared(PAPER, "val"))


def test_the_published_method(published):
    """METHODS' ablation for T = 256: ECE .87; spread over seeds .11. Zeros make the likelihood loss: 30 at T = 256."""
    logits, labels = load_shared(PAPER, "test")
    found = percent(published.predict_proba(logits), labels)
    assert published.strength_ == pytest.approx(8.08, abs=0.15)
    assert found["ece"] == pytest.approx(0.87, abs=3 * 0.11)
    assert found["adaptive_ece"] == pytest.approx(0.84, abs=3 * 0.07)
    assert found["classwise_ece"] == pytest.approx(0.383, abs=0.03)
    assert found["accuracy"] == pytest.approx(95.04, abs=0.06)
    assert 0.21 < found["nll"] < 0.31
    assert found["nll"] > percent(Link(Uniform()).log_prob(logits / published.strength_).exp(), labels)["nll"] + 0.02


def test_the_winner_is_scored_on_fresh_draws(published):
    """The smallest of many noisy values flatters; another seed's draws do not, and both are kept."""
    logits, labels = load_shared(PAPER, "val")
    (candidate,) = published.candidates_
    how = {"neighbors": Additive(Uniform()), "strength": published.strength_, "num_samples": 200}
    assert candidate["ece"] == metrics.ece(estimate(logits, seed=0, **how), labels)
    assert candidate["on_fresh_draws"] == metrics.ece(estimate(logits, seed=1, **how), labels)
    others = [metrics.ece(estimate(logits, seed=seed, **how), labels) for seed in range(1, 9)]
    assert candidate["ece"] < np.mean(others)


def test_the_better_kind_of_neighbors_is_kept():
    logits, labels = random_logits()
    kinds = (Additive(Gaussian()), Additive(Uniform()), Additive(Gumbel()))
    calibrator = SampledConsistency(kinds, num_samples=100).fit(logits, labels)
    assert [candidate["neighbors"] for candidate in calibrator.candidates_] == list(kinds)
    best = min(calibrator.candidates_, key=lambda candidate: candidate["ece"])
    assert calibrator.neighbors_ == best["neighbors"]
    assert calibrator.strength_ == best["strength"]
    for kind, candidate in zip(kinds, calibrator.candidates_, strict=True):
        assert SampledConsistency(kind, num_samples=100).fit(logits, labels).strength_ == candidate["strength"]
    equal = SampledConsistency((Additive(Gaussian()), Additive(GeneralizedNormal(2.0))), num_samples=1)
    assert len(equal.fit(logits, labels).candidates_) == 2


def test_of_equal_kinds_the_last_is_kept():
    labels = torch.arange(30) % 3
    logits = torch.nn.functional.one_hot(labels, 3) * 100.0
    calibrator = SampledConsistency((Additive(Gaussian()), Additive(Uniform())), num_samples=20).fit(logits, labels)
    assert [candidate["ece"] for candidate in calibrator.candidates_] == [0, 0]
    assert calibrator.neighbors_ == Additive(Uniform())


def test_the_papers_procedure():
    calibrator = poise.paper_consistency()
    assert calibrator.get_params()["num_samples"] == 1000
    assert calibrator.get_params()["criterion"] == "ece"
    assert calibrator.neighbors == (Additive(Gaussian()), Additive(Uniform()))
    assert calibrator.head is None
    assert calibrator.readout == "vote"


@pytest.mark.parametrize("criterion", ["ece", "adaptive_ece"])
def test_guessing_is_no_calibration(criterion):
    """At an endless strength confidence and accuracy agree, at 1/k: such strengths are not considered."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 4, generator=generator) * 3
    flipped = torch.rand(300, generator=generator) < 0.4
    labels = torch.where(flipped, torch.randint(4, (300,), generator=generator), logits.argmax(1))
    calibrator = SampledConsistency(num_samples=200, criterion=criterion).fit(logits, labels)
    before, after = (metrics.accuracy(p, labels) for p in (torch.softmax(logits, 1), calibrator.predict_proba(logits)))
    assert after > 0.93 * before > 0.6
    guesses = estimate(logits, neighbors=Additive(Gaussian()), strength=1e5, num_samples=200)
    assert metrics.accuracy(guesses, labels) < 0.4


@pytest.mark.parametrize("noise", [Gaussian(), Uniform(), Gumbel()], ids=repr)
def test_sampled_and_exact_agree(noise):
    """With the draws of a thousand votes, the strength by likelihood is the exact one and so are the probabilities."""
    logits, labels = random_logits(num_samples=1000)
    exact = ConsistencyCalibration(noise, "brier", lapse=False).fit(logits, labels)
    sampled = SampledConsistency(Additive(noise), num_samples=1000, criterion="brier").fit(logits, labels)
    assert sampled.strength_ == pytest.approx(exact.strength_, rel=0.1)
    difference = sampled.predict_proba(logits[:200]) - exact.predict_proba(logits[:200])
    assert difference.abs().max() < 0.12
    assert difference.pow(2).mean().sqrt() < 0.025
