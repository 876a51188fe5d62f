"""Affine maps: convexity, calibration in the large, shrinkage, a slow reference and the real networks."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax

from conftest import load_shared
from poise import metrics
from poise.calibrators import TemperatureScaling
from poise.calibrators.affine import (
    DirichletCalibration,
    MatrixScaling,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    VectorScaling,
)
from poise.calibrators.fitting import TINY, Map, Ridge, fit_map, unthreaded
from poise.search import BoundWarning

MAPS = {
    "vector": VectorScaling,
    "matrix": MatrixScaling,
    "matrix-odir": lambda: MatrixScaling(reg="odir"),
    "dirichlet": DirichletCalibration,
    "dirichlet-plain": lambda: DirichletCalibration(reg="none"),
    "structured-vector": StructuredVectorScaling,
    "structured-matrix": StructuredMatrixScaling,
}
PLAIN = ["vector", "matrix", "dirichlet-plain"]
each = pytest.mark.parametrize("name", MAPS)


def sample(n=600, k=4, seed=0):
    """Twice too sharp logits with an offset and a factor of each class, and a pair of classes taken for each other."""
    rng = np.random.default_rng(seed)
    true = rng.normal(size=(n, k)) * 1.5
    probs = np.exp(log_softmax(true, axis=1))
    labels = np.array([rng.choice(k, p=p / p.sum()) for p in probs])
    mixing = np.eye(k)
    mixing[0, 1] = 0.4
    logits = 2 * true @ mixing.T * np.linspace(0.7, 1.3, k) + np.linspace(-1, 1, k)
    return torch.from_numpy(logits), torch.from_numpy(labels)


def nll(calibrator, logits, labels):
    return -float(calibrator.predict_log_proba(logits).gather(1, labels[:, None]).mean())


def inputs_of(calibrator, logits):
    """What the map is applied to, written out."""
    if isinstance(calibrator, DirichletCalibration):
        return torch.log_softmax(logits, 1)
    if isinstance(calibrator, (StructuredVectorScaling, StructuredMatrixScaling)):
        probs = torch.softmax(logits / calibrator.temperature_, 1)
        return torch.log((1 - calibrator.uniform_) * probs + calibrator.uniform_ / logits.shape[1])
    return logits - logits.mean(1, keepdim=True)


# All of them


@each
def test_the_formula(name):
    logits, labels = sample()
    calibrator = MAPS[name]().fit(logits, labels)
    weights = calibrator.weights_ if calibrator.weights_.ndim == 2 else torch.diag(calibrator.weights_)
    expected = torch.softmax(inputs_of(calibrator, logits) @ weights.T + calibrator.bias_, 1)
    torch.testing.assert_close(calibrator.predict_proba(logits), expected)


@each
def test_it_mends_what_a_temperature_cannot(name):
    logits, labels = sample(n=3000)
    calibrator = MAPS[name]().fit(logits, labels)
    fresh, truth = sample(n=3000, seed=1)
    assert nll(calibrator, fresh, truth) < nll(TemperatureScaling().fit(logits, labels), fresh, truth) - 0.03


@each
def test_a_weight_is_so_many_repetitions(name):
    logits, labels = sample(n=200)
    weight = torch.from_numpy(np.random.default_rng(1).integers(0, 4, 200))
    weighted = MAPS[name]().fit(logits, labels, sample_weight=weight)
    repeated = MAPS[name]().fit(logits.repeat_interleave(weight, 0), labels.repeat_interleave(weight, 0))
    torch.testing.assert_close(weighted.predict_proba(logits), repeated.predict_proba(logits), rtol=0, atol=1e-5)


@each
def test_only_differences_of_logits_and_no_order_of_classes_matter(name):
    logits, labels = sample()
    shifts = torch.from_numpy(np.random.default_rng(1).normal(size=(len(logits), 1)) * 10)
    order = torch.tensor([2, 0, 3, 1])
    expected = MAPS[name]().fit(logits, labels).predict_proba(logits)
    shifted = MAPS[name]().fit(logits + shifts, labels).predict_proba(logits)
    permuted = MAPS[name]().fit(logits[:, order], order.argsort()[labels]).predict_proba(logits[:, order])
    torch.testing.assert_close(shifted, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(permuted, expected[:, order], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in MAPS if "dirichlet" not in name])
def test_the_scale_of_logits_does_not_matter(name):
    logits, labels = sample()
    expected = MAPS[name]().fit(logits, labels).predict_proba(logits)
    for scale in (1e-4, 1e4):
        scaled = MAPS[name]().fit(scale * logits, labels).predict_proba(scale * logits)
        torch.testing.assert_close(scaled, expected, rtol=0, atol=1e-5)


@each
def test_nothing_breaks_it(name):
    """Separable, tiny, one-sided, constant and enormous logits: finite maps, probabilities that sum to one."""
    logits, labels = sample(n=60)
    cases = [
        (logits, logits.argmax(1)),
        (logits, logits.argmin(1)),
        (logits[:2], torch.tensor([0, 1])),
        (logits, labels.clamp(max=1)),
        (torch.zeros(6, 4, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 2, 2])),
        (logits * 1e6, labels),
        (logits * 1e-6, labels),
        (logits.float(), labels),
    ]
    for scores, truth in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # A temperature without an optimum is told, and is no failure.
            warnings.simplefilter("ignore", BoundWarning)
            calibrator = MAPS[name]().fit(scores, truth)
        log_probs = calibrator.predict_log_proba(torch.cat([scores, 100 * scores]))
        assert torch.isfinite(log_probs).all()
        assert log_probs.dtype == scores.dtype
        torch.testing.assert_close(log_probs.exp().sum(1), torch.ones_like(log_probs[:, 0]), rtol=0, atol=1e-5)


# Convex: one optimum, wherever one starts


@pytest.mark.parametrize("name", PLAIN)
def test_the_likelihood_has_no_slope_left(name):
    logits, labels = sample()
    calibrator = MAPS[name]().fit(logits, labels)
    weights, bias = calibrator.weights_.clone().requires_grad_(), calibrator.bias_.clone().requires_grad_()
    scores = inputs_of(calibrator, logits)
    mapped = scores * weights if weights.ndim == 1 else scores @ weights.T
    torch.nn.functional.cross_entropy(mapped + bias, labels).backward()
    assert float(weights.grad.abs().max()) < 5e-5
    # Calibration in the large: as much probability as there are samples, in every class.
    assert float(bias.grad.abs().max()) < 5e-6


@pytest.mark.parametrize("matrix", [False, True])
def test_the_optimum_does_not_depend_on_the_start(matrix):
    logits, labels = sample(n=300)
    ridge = Ridge(0.01, 0.02, 0.03)
    expected = fit_map(logits, labels, None, ridge, matrix=matrix)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        draws = (torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in expected)
        found = fit_map(logits, labels, None, ridge, matrix=matrix, start=Map(*draws))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def structured_reference(logits, labels, kind):
    """The structured loss in numpy and scipy, slopes by differences; x from the temperature as fitted."""
    n, k = logits.shape
    scaling = StructuredVectorScaling().fit(logits, labels)
    x, labels = inputs_of(scaling, logits).numpy(), labels.numpy()

    def mapped(theta):
        weights = np.diag(1 + theta[:k])
        if kind == "matrix":
            weights[~np.eye(k, dtype=bool)] = theta[2 * k :]
        return log_softmax(x @ weights.T + theta[k : 2 * k], axis=1)

    def loss(theta):
        penalty = k / n * (theta[: 2 * k] ** 2).sum() + k * (k - 1) / n * (theta[2 * k :] ** 2).sum()
        return -mapped(theta)[np.arange(n), labels].mean() + penalty

    start = np.zeros(2 * k + (k * (k - 1) if kind == "matrix" else 0))
    return np.exp(mapped(minimize(loss, start, method="BFGS", options={"gtol": 1e-7}).x))


@pytest.mark.parametrize("kind", ["vector", "matrix"])
def test_structured_scaling_equals_the_slow_one(kind):
    logits, labels = sample(n=150, k=3)
    calibrator = MAPS[f"structured-{kind}"]().fit(logits, labels)
    np.testing.assert_allclose(calibrator.predict_proba(logits), structured_reference(logits, labels, kind), atol=1e-5)


# Reductions to temperature scaling


@pytest.mark.parametrize("name", ["vector", "matrix", "dirichlet-plain"])
def test_an_equal_diagonal_is_temperature_scaling(name):
    logits, labels = sample()
    calibrator = MAPS[name]().fit(logits, labels)
    one = torch.full((4,), 1 / 1.7, dtype=torch.float64)
    calibrator.weights_ = one if calibrator.weights_.ndim == 1 else torch.diag(one)
    calibrator.bias_ = torch.zeros_like(one)
    torch.testing.assert_close(calibrator.predict_proba(logits), torch.softmax(logits / 1.7, 1))


@pytest.mark.parametrize("matrix", [False, True])
def test_an_endless_ridge_leaves_the_identity(matrix):
    logits, labels = sample()
    found = fit_map(logits, labels, None, Ridge(1e9, 1e9, 1e9), matrix=matrix)
    one = torch.ones(4, dtype=torch.float64)
    torch.testing.assert_close(found.weights, torch.diag(one) if matrix else one, rtol=0, atol=1e-7)
    torch.testing.assert_close(found.bias, torch.zeros_like(one), rtol=0, atol=1e-7)


@pytest.mark.parametrize("calibrator", [DirichletCalibration(strength=1e6), MatrixScaling(reg="odir", strength=1e6)])
def test_a_strong_odir_leaves_a_diagonal(calibrator):
    logits, labels = sample()
    calibrator.fit(logits, labels)
    off = calibrator.weights_ - torch.diag(calibrator.weights_.diagonal())
    assert float(off.abs().max()) < 1e-4
    assert float(calibrator.bias_.abs().max()) < 1e-4
    assert float(calibrator.weights_.diagonal().std()) > 0.01
    assert calibrator.strength_ == 1e6


def test_many_classes_and_few_samples_stay_at_temperature_scaling():
    """Where the plain maps are ruin, the structured ones lose next to nothing."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(4000, 40)) * 4)
    labels = torch.multinomial(torch.softmax(logits / 2, 1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
    val, test = (logits[:400], labels[:400]), (logits[400:], labels[400:])
    common = nll(TemperatureScaling().fit(*val), *test)
    assert nll(StructuredVectorScaling().fit(*val), *test) < common + 0.02
    assert nll(StructuredMatrixScaling().fit(*val), *test) < common + 0.05
    assert nll(MatrixScaling().fit(*val), *test) > common + 1


# Choosing a strength


@pytest.mark.parametrize("num_samples", [100, 3000])
def test_cross_validation_chooses_well(num_samples):
    """The strength it takes does on fresh data almost what the best of the grid does, and far better than the worst."""
    val, test = sample(n=num_samples, k=6), sample(n=5000, k=6, seed=1)
    chosen = nll(DirichletCalibration().fit(*val), *test)
    others = [nll(DirichletCalibration(strength=10.0**power).fit(*val), *test) for power in range(-4, 3)]
    assert chosen - min(others) < 0.2 * (max(others) - min(others)) + 1e-6


def test_a_seed_draws_the_folds_and_is_repeatable():
    logits, labels = sample(n=100)
    first, again = (DirichletCalibration(seed=3).fit(logits, labels) for _ in range(2))
    assert torch.equal(first.weights_, again.weights_)
    assert len({DirichletCalibration(seed=seed, num_folds=2).fit(logits, labels).strength_ for seed in range(8)}) > 1


@pytest.mark.parametrize(
    "wrong",
    [
        MatrixScaling(reg="l2"),
        MatrixScaling(num_folds=1),
        DirichletCalibration(strength=0.0),
        DirichletCalibration(seed=-1),
    ],
    ids=repr,
)
def test_parameters_are_judged(wrong):
    with pytest.raises(ValueError, match="must be"):
        wrong.fit(*sample(n=20))


# Real networks


@pytest.mark.parametrize(
    "network", ["cifar10-resnet50-ce", "cifar10-wrn28-10-ce", "retinopathy-augmented", "cifar100-wrn16-4-ce"]
)
def test_structured_scaling_equals_probmetrics(network):
    with warnings.catch_warnings():
        # What it is built on compiles with torch.jit.script, which torch has given up.
        warnings.simplefilter("ignore", DeprecationWarning)
        from probmetrics.calibrators.logistic import SMSCalibrator, SVSCalibrator
    val, test = ((scores.double(), labels) for scores, labels in (load_shared(network, s) for s in ("val", "test")))
    probs = [torch.softmax(scores, 1).numpy() for scores in (val[0], test[0])]
    for ours, theirs in ((StructuredVectorScaling(), SVSCalibrator()), (StructuredMatrixScaling(), SMSCalibrator())):
        theirs.fit(probs[0], val[1].numpy())
        expected = metrics.nll(theirs.predict_proba(probs[1]), test[1])
        assert nll(ours.fit(*val), *test) == pytest.approx(expected, abs=1e-4)


def test_the_network_of_the_paper():
    """An affine map repairs what a temperature cannot, and Dirichlet with ODIR no less than the structured matrix."""
    val, test = load_shared("cifar10-resnet50-ce", "val"), load_shared("cifar10-resnet50-ce", "test")
    common = nll(TemperatureScaling().fit(*val), *test)
    losses = {name: nll(make().fit(*val), *test) for name, make in MAPS.items() if name != "dirichlet-plain"}
    assert all(loss < common - 0.001 for loss in losses.values())
    assert max(losses["dirichlet"], losses["matrix-odir"], losses["structured-matrix"]) < 0.1945
    vector = VectorScaling().fit(*val)
    probs = vector.predict_proba(val[0].double())
    shares = torch.bincount(val[1], minlength=10) / len(val[1])
    torch.testing.assert_close(probs.mean(0), shares.double(), rtol=0, atol=10 * TINY)
    assert metrics.accuracy(vector.predict_proba(test[0]), test[1]) == pytest.approx(0.9498, abs=5e-4)


def test_few_scores_are_passed_over_on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with unthreaded(torch.zeros(100, 10)):
            assert torch.get_num_threads() == 1
        with unthreaded(torch.zeros(2000, 1000)):
            assert torch.get_num_threads() == 3
        with pytest.raises(KeyError), unthreaded(torch.zeros(2, 2)):
            raise KeyError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
