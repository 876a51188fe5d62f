"""Histogram binning and BBQ: what their bins promise, slow loops from the papers, and netcal."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from netcal.binning import BBQ as NetcalBBQ
from netcal.binning import HistogramBinning as NetcalHistogramBinning

import reference_calibrators as reference
from conftest import load_shared
from poise import metrics
from poise.calibrators import BayesianBinning, HistogramBinning, TemperatureScaling
from poise.metrics.bins import Bins

BINNINGS = {
    "width": HistogramBinning,
    "mass": lambda **more: HistogramBinning(strategy="equal_mass", **more),
    "bayesian": BayesianBinning,
}
each = pytest.mark.parametrize("name", BINNINGS)


def sample(n=500, k=3, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, k)) * 3
    probs = reference.softmax(logits / 2)
    labels = np.array([rng.choice(k, p=p) for p in probs])
    return torch.from_numpy(logits), torch.from_numpy(labels)


def rates(calibrator, values):
    """What the map of each class (or of the top one) answers, before rows are divided by their sums."""
    places = [np.searchsorted(edges, v) for edges, v in zip(calibrator.edges_.numpy(), values, strict=True)]
    return np.stack([row[at] for row, at in zip(calibrator.rates_.numpy(), places, strict=True)])


# Histograms


@pytest.mark.parametrize("strategy", ["equal_width", "equal_mass"])
def test_the_bins_are_calibrated_on_what_they_were_fitted_on(strategy):
    """The top label's validation error in the same bins is zero: each answers with its own accuracy."""
    logits, labels = sample()
    calibrator = HistogramBinning(10, strategy, "top_label").fit(logits, labels)
    confidence, top = torch.softmax(logits, 1).max(1)
    calibrated = rates(calibrator, [confidence.numpy()])[0]
    correct = top == labels
    place = np.searchsorted(calibrator.edges_[0].numpy(), confidence.numpy())
    assert len(set(place)) >= 6
    for b in set(place):
        assert calibrated[place == b] == pytest.approx(correct.numpy()[place == b].mean(), abs=1e-12)
    before = Bins.equal_width(confidence, correct, 10).error
    after = metrics.ece(calibrator.predict_proba(logits), labels, num_bins=10)
    assert after < before / 4


def test_one_vs_rest_equals_a_loop():
    logits, labels = sample(n=200)
    probs = reference.softmax(logits)
    expected = np.array(
        [[reference.histogram_rate(probs[:, k], labels.numpy() == k, row[k], 7) for k in range(3)] for row in probs]
    )
    found = HistogramBinning(7).fit(logits, labels).predict_proba(logits)
    np.testing.assert_allclose(found, expected / expected.sum(1, keepdims=True), atol=1e-8)


@pytest.mark.parametrize("num_bins", [5, 15])
def test_one_vs_rest_equals_netcal(num_bins):
    val, test = (load_shared("cifar10-resnet56-ce", split) for split in ("val", "test"))
    before, after = (torch.softmax(z.double(), 1).numpy() for z, _ in (val, test))
    expected = NetcalHistogramBinning(bins=num_bins).fit(before, val[1].numpy()).transform(after)
    found = HistogramBinning(num_bins).fit(val[0].double(), val[1]).predict_proba(test[0].double())
    np.testing.assert_allclose(found, expected, atol=1e-7)


def test_equal_mass_bins_hold_equal_shares():
    logits, labels = sample(n=600)
    calibrator = HistogramBinning(6, "equal_mass").fit(logits, labels)
    for edges, values in zip(calibrator.edges_, torch.softmax(logits, 1).T.contiguous(), strict=True):
        assert torch.bincount(torch.searchsorted(edges, values)).tolist() == pytest.approx([100] * 6, abs=1)


def test_a_bin_without_samples_answers_with_its_centre():
    logits = torch.tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    calibrator = HistogramBinning(4, mode="top_label").fit(logits, torch.tensor([0, 1, 1]))
    assert calibrator.rates_[0].tolist() == pytest.approx([0.125, 0.375, 0.625, 2 / 3])
    asked = torch.tensor([[0.5, 0.0]], dtype=torch.float64)
    assert float(calibrator.predict_proba(asked)[0, 0]) == pytest.approx(0.625, abs=1e-6)


# BBQ


@pytest.mark.parametrize("n", [7, 60, 211])
def test_bbq_equals_a_loop(n):
    logits, labels = sample(n=n, k=2)
    calibrator = BayesianBinning().fit(logits, labels)
    # To the last digit what it was fitted on, for samples lie on edges.
    values = torch.softmax(logits, 1).numpy()
    asked = np.concatenate([values[:, 1], [0.001, 0.3, 0.999]])
    expected = [reference.bbq_rate(values[:, 1], labels.numpy() == 1, p) for p in asked]
    np.testing.assert_allclose(rates(calibrator, [1 - asked, asked])[1], expected, atol=1e-9)


@pytest.mark.parametrize("network", ["cifar10-resnet56-ce", "retinopathy-augmented"])
def test_bbq_agrees_with_netcal_in_the_large(network):
    """Not row by row: netcal averages equal-width bins by exp(−BIC/2); the paper, and the loop above, equal-frequency
    bins by their marginal likelihood."""
    val, test = (load_shared(network, split) for split in ("val", "test"))
    (before, top), (after, _) = (torch.softmax(z.double(), 1).max(1) for z, _ in (val, test))
    expected = NetcalBBQ().fit(before.numpy(), (top == val[1]).numpy().astype(int)).transform(after.numpy())
    found = BayesianBinning("top_label").fit(val[0].double(), val[1]).predict_proba(test[0].double()).amax(1)
    assert float(found.mean()) == pytest.approx(expected.mean(), abs=0.005)


def test_bbq_knows_how_fine_to_look():
    """A straight line wants few bins, a staircase its stairs: closer to the truth than any one histogram."""
    rng = np.random.default_rng(0)
    p = rng.uniform(0.5, 1, 4000)
    truth = np.where(p < 0.7, 0.6, np.where(p < 0.85, 0.9, 0.7))
    hits = rng.uniform(size=4000) < truth
    logits = torch.from_numpy(np.stack([np.log(p), np.log1p(-p)], 1))
    labels = torch.from_numpy(np.where(hits, 0, 1))
    found = BayesianBinning("top_label").fit(logits, labels).predict_proba(logits).amax(1).numpy()
    histograms = [
        HistogramBinning(b, mode="top_label").fit(logits, labels).predict_proba(logits).amax(1).numpy()
        for b in (5, 15, 100)
    ]
    assert np.abs(found - truth).mean() < min(np.abs(other - truth).mean() for other in histograms)
    assert np.abs(found - truth).mean() < 0.015


# All of them


@each
def test_the_top_label_alone_keeps_the_rest_in_proportion(name):
    logits, labels = sample()
    probs = BINNINGS[name](mode="top_label").fit(logits, labels).predict_proba(logits)
    before = torch.softmax(logits, 1)
    top = before.argmax(1)
    assert torch.equal(probs.argmax(1), top)
    others = torch.ones_like(before, dtype=torch.bool).scatter(1, top[:, None], False)
    ratio = (probs / before)[others].view(-1, 2)
    clear = probs.amax(1) > 0.55
    assert clear.sum() > 200
    torch.testing.assert_close(ratio[clear, 0], ratio[clear, 1], rtol=1e-6, atol=0)


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
        (logits.float(), labels),
    ]
    for (scores, truth), mode in itertools.product(cases, ["one_vs_rest", "top_label"]):
        calibrator = BINNINGS[name](mode=mode).fit(scores, truth)
        for asked in (scores, 100 * logits, torch.zeros(1, 3)):
            log_probs = calibrator.predict_log_proba(asked)
            assert torch.isfinite(log_probs).all()
            torch.testing.assert_close(log_probs.exp().sum(1), torch.ones_like(log_probs[:, 0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "wrong", [HistogramBinning(0), HistogramBinning(strategy="mass"), HistogramBinning(mode="top"), BayesianBinning("")]
)
def test_parameters_are_judged(wrong):
    with pytest.raises(ValueError, match="must be"):
        wrong.fit(*sample(n=20))


@each
def test_the_network_of_the_paper(name):
    """A step function of the confidence mends what a temperature cannot; one for each class is dear in likelihood."""
    val, test = (load_shared("cifar10-resnet50-ce", split) for split in ("val", "test"))
    common = TemperatureScaling().fit(*val).predict_proba(test[0].double())
    top = BINNINGS[name](mode="top_label").fit(*val).predict_proba(test[0].double())
    assert metrics.ece(top, test[1]) < metrics.ece(common, test[1])
    assert metrics.accuracy(top, test[1]) == metrics.accuracy(common, test[1])
    classes = BINNINGS[name]().fit(*val).predict_proba(test[0].double())
    assert metrics.accuracy(classes, test[1]) < metrics.accuracy(common, test[1])
