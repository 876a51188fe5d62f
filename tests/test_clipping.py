"""Feature clipping: the head is found, the bound is the best of a grid, and extreme rows are calmed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from conftest import SHARED, load_features, load_shared
from poise import metrics
from poise.calibrators import FeatureClipping
from poise.calibrators.criteria import criterion_value

K, NUM_FEATURES = 3, 12
GENERATOR = torch.Generator().manual_seed(5)
HEAD = torch.randn(K, NUM_FEATURES, generator=GENERATOR, dtype=torch.float64)
BIAS = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def sample(n=600, seed=0):
    """Features as after a ReLU; in a tenth of the rows one is twenty times too large, which the labels know not."""
    rng = np.random.default_rng(seed)
    features = torch.from_numpy(np.maximum(rng.normal(size=(n, NUM_FEATURES)), 0))
    probs = torch.softmax(features @ HEAD.T + BIAS, 1)
    labels = torch.from_numpy(np.array([rng.choice(K, p=p / p.sum()) for p in probs.numpy()]))
    wild = torch.from_numpy(rng.uniform(size=n) < 0.1)
    features[wild, torch.from_numpy(rng.integers(0, NUM_FEATURES, int(wild.sum())))] = 20.0
    return features @ HEAD.T + BIAS, labels, features


def test_it_is_the_head_of_clipped_features():
    """Bias and all, wherever the logits' own level lies; without clipping it is the softmax."""
    logits, labels, features = sample()
    for given in (None, HEAD, HEAD.numpy().astype(np.float32)):
        calibrator = FeatureClipping(head_weight=given, criterion="brier").fit(logits, labels, features=features)
        assert math.isfinite(calibrator.bound_)
        expected = torch.softmax(features.clamp(-calibrator.bound_, calibrator.bound_) @ HEAD.T + BIAS, 1)
        shifted = logits + torch.linspace(-5, 5, len(logits))[:, None]
        for scores in (logits, shifted):
            found = calibrator.predict_proba(scores, features=features)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    calibrator.bound_ = math.inf
    torch.testing.assert_close(calibrator.predict_proba(logits, features=features), torch.softmax(logits, 1))


def test_the_bound_is_the_best_that_keeps_the_accuracy():
    logits, labels, features = sample()
    for criterion in ("nll", "ece"):
        calibrator = FeatureClipping(criterion=criterion).fit(logits, labels, features=features)
        least = 0.99 * metrics.accuracy(torch.softmax(logits, 1), labels)

        def value(bound, criterion=criterion, least=least):
            probs = torch.softmax(features.clamp(-bound, bound) @ HEAD.T + BIAS, 1)
            kept = metrics.accuracy(probs, labels) >= least
            return criterion_value(criterion, probs, labels, None) if kept else math.inf

        grid = min(value(bound) for bound in np.arange(0.1, 20, 0.1))
        assert value(calibrator.bound_) <= grid + (1e-4 if criterion == "nll" else 3e-3)


def test_extreme_rows_are_calmed_and_the_others_left_alone():
    val, test = sample(), sample(n=3000, seed=1)
    calibrator = FeatureClipping().fit(val[0], val[1], features=val[2])
    probs, before = calibrator.predict_proba(test[0], features=test[2]), torch.softmax(test[0], 1)
    assert metrics.nll(probs, test[1]) < 0.6 * metrics.nll(before, test[1])
    tame = test[2].amax(1) <= calibrator.bound_
    assert 0.5 < tame.double().mean() < 0.95
    torch.testing.assert_close(probs[tame], before[tame], rtol=0, atol=1e-7)


def test_it_clips_nothing_where_that_is_best():
    features = sample()[2]
    calm = features.clamp(max=2.0)
    scores = 0.1 * (calm @ HEAD.T)
    calibrator = FeatureClipping().fit(scores, scores.argmax(1), features=calm)
    torch.testing.assert_close(calibrator.predict_proba(scores, features=calm), torch.softmax(scores, 1))


def test_what_does_not_belong_together_is_refused():
    logits, labels, features = sample()
    with pytest.raises(ValueError, match="needs the network's features"):
        FeatureClipping().fit(logits, labels)
    with pytest.raises(ValueError, match="do not give these logits"):
        FeatureClipping().fit(logits, labels, features=features.flip(0))
    with pytest.raises(ValueError, match="do not give these logits"):
        FeatureClipping(head_weight=HEAD.flip(0)).fit(logits, labels, features=features)
    with pytest.raises(ValueError, match=r"shape \(3, 12\), but has shape \(12, 3\)"):
        FeatureClipping(head_weight=HEAD.T).fit(logits, labels, features=features)
    with pytest.raises(ValueError, match="10 rows of 12 features came; pass head_weight"):
        FeatureClipping().fit(logits[:10], labels[:10], features=features[:10])
    FeatureClipping(head_weight=HEAD).fit(logits[:10], labels[:10], features=features[:10])
    with pytest.raises(ValueError, match="5 columns but this calibrator was fitted with 12"):
        FeatureClipping().fit(logits, labels, features=features).predict_proba(logits, features=features[:, :5])
    with pytest.raises(ValueError, match="must be one of"):
        FeatureClipping(criterion="accuracy").fit(logits, labels, features=features)


def test_nothing_breaks_it():
    logits, labels, features = sample(n=60)
    dead = torch.cat([features, torch.zeros(60, 2), features[:, :1]], dim=1)
    for scores, truth, more in [
        (logits, logits.argmax(1), features),
        (logits, logits.argmin(1), features),
        (logits, labels.clamp(max=1), dead),
        (logits.float(), labels, features.half()),
        (0 * logits, labels, 0 * features),
    ]:
        calibrator = FeatureClipping().fit(scores, truth, features=more)
        log_probs = calibrator.predict_log_proba(scores, features=more)
        assert torch.isfinite(log_probs).all()
        torch.testing.assert_close(log_probs.exp().sum(1), torch.ones_like(log_probs[:, 0]), rtol=0, atol=1e-5)


def test_a_real_head_is_found():
    """From features and logits alone, to the digits that they were kept in; the accuracy stays within one percent."""
    name = "cifar10-resnet56-ce"
    val, seen = load_shared(name, "val"), load_features(name, "val")
    with np.load(SHARED / f"{name}.val.npz") as arrays:
        weight = torch.from_numpy(arrays["head_weight"]).double()
    weight = weight if weight.shape[0] == 10 else weight.T
    calibrator = FeatureClipping().fit(*val, features=seen)
    # Of a softmax's head only differences between classes are known.
    torch.testing.assert_close(calibrator.head_, weight - weight.mean(0), rtol=0, atol=1e-4)
    given = FeatureClipping(head_weight=weight).fit(*val, features=seen)
    assert calibrator.bound_ == pytest.approx(given.bound_, rel=1e-3)
    test, fresh = load_shared(name, "test"), load_features(name, "test")
    probs, raw = calibrator.predict_proba(test[0], features=fresh), torch.softmax(test[0], 1)
    assert metrics.nll(probs, test[1]) < metrics.nll(raw, test[1])
    assert metrics.accuracy(probs, test[1]) > 0.99 * metrics.accuracy(raw, test[1])
