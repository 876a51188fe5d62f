"""Group calibration: groups that err alike are found, one group is temperature scaling, and the order stays."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

import poise
from conftest import load_features, load_shared
from poise import metrics
from poise.calibrators import EnsembleTemperatureScaling, GroupCalibration, TemperatureScaling
from poise.calibrators.grouping import _Table
from poise.search import BoundWarning


def sample(n=1500, k=4, seed=0, sharpness=(1.0, 4.0)):
    """Half of the samples, told by the sign of a feature, have logits four times too sharp."""
    rng = np.random.default_rng(seed)
    true = rng.normal(size=(n, k)) * 2
    labels = np.array([rng.choice(k, p=p) for p in np.exp(log_softmax(true, axis=1))])
    side = rng.integers(0, 2, n)
    features = np.concatenate([(2 * side - 1)[:, None] * 2.0, rng.normal(size=(n, 5))], axis=1)
    logits = true * np.array(sharpness)[side][:, None]
    return tuple(map(torch.from_numpy, (logits, labels, features, side)))


def nll(calibrator, logits, labels, features=None):
    log_prob = calibrator.predict_log_proba(logits, features=features)
    return -float(log_prob.gather(1, labels[:, None]).mean())


def test_groups_that_err_alike_are_found():
    """Each planted group gets about its own temperature, and most of what knowing the groups would win is won."""
    logits, labels, features, side = sample()
    calibrator = GroupCalibration().fit(logits, labels, features=features)
    for gate, temperatures in zip(calibrator.gates_, calibrator.temperatures_, strict=True):
        group = (features @ gate.T).argmax(1)
        found = torch.stack([(group == side), (group != side)]).double().mean(1).max()
        assert found > 0.95
        assert sorted(temperatures.tolist()) == pytest.approx([1.0, 4.0], rel=0.25)
    fresh, truth, more, side = sample(n=4000, seed=1)
    known = -log_softmax(fresh / torch.tensor([1.0, 4.0])[side][:, None], axis=1)[np.arange(4000), truth].mean()
    common = nll(TemperatureScaling().fit(logits, labels), fresh, truth)
    assert nll(calibrator, fresh, truth, more) < known + 0.1 * (common - known)


def test_one_group_is_the_base_calibrator():
    logits, labels, features, _ = sample(n=300)
    one = GroupCalibration(num_groups=1, split=False, num_partitions=3).fit(logits, labels, features=features)
    base = TemperatureScaling().fit(logits, labels)
    assert one.temperatures_.flatten().tolist() == pytest.approx([base.temperature_] * 3, rel=1e-4)
    torch.testing.assert_close(
        one.predict_proba(logits, features=features), base.predict_proba(logits), rtol=0, atol=1e-5
    )
    ets = GroupCalibration(num_groups=1, split=False, num_partitions=1, base="ets").fit(logits, labels)
    # Its temperature is fitted first, the shares then: at best as good as both together.
    both = EnsembleTemperatureScaling().fit(logits, labels)
    assert nll(both, logits, labels) - 1e-9 <= nll(ets, logits, labels) <= nll(base, logits, labels) + 1e-9


def test_every_group_has_the_temperature_of_its_samples():
    """And of one sample more, the mean of all: the loop over groups and partitions, with scipy's search."""
    logits, labels, features, _ = sample(n=200)
    calibrator = GroupCalibration(num_partitions=2, split=False).fit(logits, labels, features=features)
    z, y = logits.numpy(), labels.numpy()
    expected = np.zeros(z.shape)
    for gate, temperatures in zip(calibrator.gates_.numpy(), calibrator.temperatures_.numpy(), strict=True):
        group = (features.numpy() @ gate.T).argmax(1)
        for g in range(2):
            member = group == g

            def loss(log_t, member=member):
                lost = -log_softmax(z / math.exp(log_t), axis=1)[np.arange(200), y]
                return lost[member].sum() + lost.mean()

            best = math.exp(minimize_scalar(loss, bounds=(-3, 4), method="bounded", options={"xatol": 1e-7}).x)
            assert temperatures[g] == pytest.approx(best, rel=1e-4)
            expected[member] += np.exp(log_softmax(z[member] / temperatures[g], axis=1)) / 2
    np.testing.assert_allclose(calibrator.predict_proba(logits, features=features), expected, atol=1e-12)


def test_two_halves_keep_groups_from_fitting_noise():
    """Features that say nothing, as many as samples: temperatures of fresh samples stay close to the common one."""
    logits, labels, _, _ = sample(n=400, sharpness=(2.0, 2.0))
    fresh, truth, _, _ = sample(n=2000, seed=1, sharpness=(2.0, 2.0))
    noise, more = torch.from_numpy(np.random.default_rng(0).normal(size=(2400, 300))).split([400, 2000])
    common = nll(TemperatureScaling().fit(logits, labels), fresh, truth)
    lost = {}
    for split in (True, False):
        calibrator = GroupCalibration(num_partitions=3, split=split).fit(logits, labels, features=noise)
        lost[split] = nll(calibrator, fresh, truth, more) - common
    assert lost[True] < 0.02
    assert lost[False] > 2 * lost[True] + 0.02


def test_the_table_of_likelihoods_is_exact_enough():
    logits, labels, _, _ = sample(n=50)
    table = _Table(logits, labels, 1.7)
    for temperature in (0.1, 0.61, 1.7, 1.75, 30.0):
        exact = log_softmax(logits.numpy() / temperature, axis=1)[np.arange(50), labels]
        found = table(torch.tensor([math.log(temperature)], dtype=torch.float64))[0]
        np.testing.assert_allclose(found, exact, atol=2e-4, rtol=2e-5)


def test_a_group_without_samples_has_the_global_temperature():
    """As has one that only test samples fall into: nothing is missing, nothing is NaN."""
    logits, labels, features, _ = sample(n=300)
    calibrator = GroupCalibration(num_groups=40, num_partitions=2).fit(logits, labels, features=features)
    common = TemperatureScaling().fit(logits, labels).temperature_
    for gate, temperatures in zip(calibrator.gates_, calibrator.temperatures_, strict=True):
        empty = ~torch.isin(torch.arange(40), (features @ gate.T).argmax(1))
        assert empty.any()
        assert temperatures[empty].tolist() == pytest.approx([common] * int(empty.sum()), rel=1e-4)
    probs = calibrator.predict_proba(logits, features=100 * features.flip(0))
    torch.testing.assert_close(probs.sum(1), torch.ones(300, dtype=torch.float64))


@pytest.mark.parametrize("base", ["temperature", "ets"])
def test_nothing_breaks_it(base):
    logits, labels, features, _ = sample(n=60)
    cases = [
        (logits, logits.argmax(1), features),
        (logits, logits.argmin(1), features),
        (logits[:2], torch.tensor([0, 1]), features[:2]),
        (logits[:1].expand(8, -1), torch.arange(8) % 2, features[:1].expand(8, -1)),
        (logits, labels, torch.zeros(60, 3)),
        (logits.float() * 100, labels, features.float() * 1e4),
        (logits, labels, None),
    ]
    for scores, truth, more in cases:
        with warnings.catch_warnings():
            # A temperature without an optimum is told, and is no failure.
            warnings.simplefilter("ignore", BoundWarning)
            calibrator = GroupCalibration(base=base, num_partitions=3).fit(scores, truth, features=more)
        log_probs = calibrator.predict_log_proba(scores, features=more)
        assert torch.isfinite(log_probs).all()
        torch.testing.assert_close(log_probs.exp().sum(1), torch.ones_like(log_probs[:, 0]), rtol=0, atol=1e-5)


def test_features_are_asked_for_as_they_were_given():
    logits, labels, features, _ = sample(n=100)
    with_features = GroupCalibration(num_partitions=2).fit(logits, labels, features=features)
    with pytest.raises(ValueError, match="fitted with features"):
        with_features.predict_proba(logits)
    with pytest.raises(ValueError, match="3 columns but this calibrator was fitted with 6"):
        with_features.predict_proba(logits, features=features[:, :3])
    with pytest.raises(ValueError, match="fitted without features"):
        GroupCalibration(num_partitions=2).fit(logits, labels).predict_proba(logits, features=features)


@pytest.mark.parametrize(
    "wrong",
    [
        GroupCalibration(num_partitions=0),
        GroupCalibration(num_groups=0),
        GroupCalibration(base="dirichlet"),
        GroupCalibration(penalty=-1.0),
        GroupCalibration(seed=-1),
    ],
    ids=repr,
)
def test_parameters_are_judged(wrong):
    logits, labels, features, _ = sample(n=20)
    with pytest.raises(ValueError, match="must be"):
        wrong.fit(logits, labels, features=features)


def test_a_network_with_features():
    """On features of a real network groups win likelihood, with the accuracy as it was; every seed does."""
    val, test = (load_shared("cifar10-resnet56-ce", split) for split in ("val", "test"))
    seen, fresh = (load_features("cifar10-resnet56-ce", split) for split in ("val", "test"))
    common = TemperatureScaling().fit(*val).predict_proba(test[0].double())
    for seed in (0, 1):
        calibrator = GroupCalibration(num_partitions=5, seed=seed).fit(*val, features=seen)
        probs = calibrator.predict_proba(test[0].double(), features=fresh)
        assert metrics.nll(probs, test[1]) < metrics.nll(common, test[1]) - 0.001
        assert metrics.accuracy(probs, test[1]) == metrics.accuracy(common, test[1])


def test_the_network_of_the_paper():
    """Groups found in the logits, temperatures inside: METHODS' NLL .2005 and ECE 1.34 % were without halves."""
    val, test = (load_shared("cifar10-resnet50-ce", split) for split in ("val", "test"))
    probs = GroupCalibration(num_partitions=5, split=False).fit(*val).predict_proba(test[0].double())
    assert metrics.nll(probs, test[1]) == pytest.approx(0.2005, abs=0.001)
    assert metrics.ece(probs, test[1]) == pytest.approx(0.0134, abs=0.002)


def test_what_was_learned_from_features_is_kept(tmp_path):
    logits, labels, features, _ = sample(n=100)
    calibrator = GroupCalibration(num_partitions=2).fit(logits, labels, features=features)
    poise.save(calibrator, tmp_path / "group.safetensors")
    loaded = poise.load(tmp_path / "group.safetensors")
    assert torch.equal(
        loaded.predict_proba(logits, features=features), calibrator.predict_proba(logits, features=features)
    )
