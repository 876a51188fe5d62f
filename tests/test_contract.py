"""The contract of every calibrator, in one table: what DESIGN section 6 promises for all of them."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

import poise
from poise.calibrators.base import CALIBRATORS, Calibrator
from poise.neighbors import Additive
from poise.noise import Gaussian, GeneralizedNormal, Gumbel, LogGamma, Uniform

K, NUM_INPUTS = 4, 5
MIXING = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(8), dtype=torch.float64)).Q
HEAD_WEIGHT = torch.randn(NUM_INPUTS, K, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def linear_head(inputs: torch.Tensor) -> torch.Tensor:
    return inputs @ HEAD_WEIGHT.to(inputs.dtype)


@dataclass(frozen=True)
class Example:
    """An unfitted calibrator, and how closely it keeps what exact arithmetic would keep; None where it need not."""

    make: Callable[[], Calibrator]
    order: bool | None = None
    """Whether it keeps the order of the classes, where that is not what its class says."""
    head: bool = False
    """Inputs are not logits but (n, 5) activations."""
    weights: float | None = 1e-4
    """A weight of m is m equal rows; None where draws belong to rows, then rows of weight 0 at the end are none."""
    shift: float | None = 1e-5
    permutation: float | None = 1e-5
    scale: float | None = 1e-4
    """None for what is learned from the softmax of the logits as they are."""
    steps: bool = False
    """Bins, groups or a bound that a rounded row may find itself beyond: then only the mean change is small."""
    calibrates: bool = True
    differentiable: bool = True


def sampled(**changes) -> Callable[[], Calibrator]:
    return lambda: poise.SampledConsistency(**{"num_samples": 200, **changes})


DRAWS = {"weights": None, "shift": 0.02, "permutation": 0.2, "scale": 1e-2, "differentiable": False}
CURVE = {"scale": None, "differentiable": False}
STEPS = CURVE | {"steps": True}
EXAMPLES: dict[str, Example] = {
    "temperature": Example(poise.TemperatureScaling),
    "temperature-ece": Example(lambda: poise.TemperatureScaling(criterion="ece")),
    "consistency": Example(poise.ConsistencyCalibration),
    "consistency-gaussian": Example(lambda: poise.ConsistencyCalibration(Gaussian())),
    "consistency-gumbel-brier": Example(lambda: poise.ConsistencyCalibration(Gumbel(), "brier", lapse=False)),
    "consistency-uniform-ece": Example(lambda: poise.ConsistencyCalibration(Uniform(), "ece")),
    "consistency-steep": Example(lambda: poise.ConsistencyCalibration(GeneralizedNormal(8.0), lapse=False)),
    "consistency-adaptive": Example(lambda: poise.ConsistencyCalibration(LogGamma(0.25), "adaptive_ece")),
    "consistency-vector": Example(lambda: poise.ConsistencyCalibration(Gaussian(), scaling="vector"), order=False),
    "consistency-matrix": Example(lambda: poise.ConsistencyCalibration(LogGamma(0.25), scaling="matrix"), order=False),
    "consistency-auto": Example(lambda: poise.ConsistencyCalibration(scaling="auto"), order=False),
    "ensemble": Example(poise.EnsembleTemperatureScaling, scale=None),
    "ensemble-mse": Example(lambda: poise.EnsembleTemperatureScaling(criterion="mse"), scale=None),
    "parameterized": Example(poise.ParameterizedTemperatureScaling),
    "classwise": Example(poise.ClasswiseTemperatureScaling),
    # Its sweep visits the classes in their order.
    "classwise-ece": Example(lambda: poise.ClasswiseTemperatureScaling("ece"), permutation=None),
    "vector": Example(poise.VectorScaling),
    "matrix": Example(poise.MatrixScaling),
    "dirichlet": Example(poise.DirichletCalibration, scale=None),
    "structured-vector": Example(poise.StructuredVectorScaling),
    "structured-matrix": Example(poise.StructuredMatrixScaling),
    "histogram": Example(lambda: poise.HistogramBinning(6), **STEPS),
    "histogram-mass": Example(lambda: poise.HistogramBinning(8, "equal_mass"), **STEPS),
    "histogram-top": Example(lambda: poise.HistogramBinning(4, mode="top_label"), order=True, **STEPS),
    "bayesian-binning": Example(poise.BayesianBinning, **STEPS),
    "bayesian-binning-top": Example(lambda: poise.BayesianBinning("top_label"), order=True, **STEPS),
    "isotonic": Example(poise.IsotonicCalibration, **CURVE),
    "isotonic-multiclass": Example(lambda: poise.IsotonicCalibration("multiclass"), order=True, **CURVE),
    "spline": Example(poise.SplineCalibration, **CURVE),
    "beta": Example(poise.BetaCalibration, scale=None),
    "group": Example(poise.GroupCalibration, steps=True),
    "group-ets": Example(
        lambda: poise.GroupCalibration(num_partitions=3, num_groups=3, base="ets"), scale=None, steps=True
    ),
    # Repeated rows are each other's neighbors.
    "proximity": Example(poise.ProximityCalibration, weights=None, **STEPS),
    "proximity-bins": Example(lambda: poise.ProximityCalibration("bin_mean_shift", num_bins=2), weights=None, **STEPS),
    "density-aware": Example(poise.DensityAwareCalibration, weights=None),
    # Here no row is sure because its features are extreme: tests/test_clipping.py has such rows.
    "clipping": Example(poise.FeatureClipping, scale=None, steps=True, calibrates=False),
    "order": Example(poise.IntraOrderPreserving),
    "order-diag": Example(lambda: poise.IntraOrderPreserving("diag")),
    "sampled": Example(sampled(), **DRAWS),
    "sampled-soft": Example(
        sampled(neighbors=Additive(Uniform()), readout="soft", criterion="nll"), **DRAWS | {"scale": None}
    ),
    "sampled-kinds": Example(sampled(neighbors=(Additive(Gaussian()), Additive(Uniform()))), **DRAWS),
    "sampled-head": Example(sampled(head=linear_head), head=True, **DRAWS | {"shift": None, "permutation": None}),
}
ON_LOGITS = [name for name, example in EXAMPLES.items() if not example.head]


def test_every_calibrator_is_in_the_table():
    registered = {c for c in CALIBRATORS.values() if c.__module__.startswith("poise.") and not inspect.isabstract(c)}
    assert {type(example.make()) for example in EXAMPLES.values()} == registered


@dataclass(frozen=True)
class Data:
    inputs: torch.Tensor
    labels: torch.Tensor
    features: torch.Tensor

    def __getitem__(self, rows) -> Data:
        return Data(self.inputs[rows], self.labels[rows], self.features[rows])


@cache
def data(head: bool = False, *, num_classes: int = K, num_samples: int = 240, seed: int = 0) -> Data:
    """Twice too confident logits, and labels drawn from what they should be."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, NUM_INPUTS if head else num_classes, generator=generator, dtype=torch.float64) * 4
    probs = torch.softmax((linear_head(inputs) if head else inputs) / 2, dim=1)
    labels = torch.multinomial(probs, 1, generator=generator)[:, 0]
    # What a last layer may have read: the logits are linear in it, each in all of it.
    rest = torch.randn(num_samples, 6 - inputs.shape[1], generator=generator, dtype=torch.float64)
    return Data(inputs, labels, torch.cat([inputs, rest], dim=1) @ MIXING)


def fit(name: str, val: Data, **more) -> Calibrator:
    calibrator = EXAMPLES[name].make()
    return calibrator.fit(val.inputs, val.labels, **with_features(calibrator, val), **more)


def with_features(calibrator: Calibrator, rows: Data) -> dict:
    return {"features": rows.features} if calibrator.needs_features else {}


def predict(calibrator: Calibrator, rows: Data, method: str = "predict_proba"):
    return getattr(calibrator, method)(rows.inputs, **with_features(calibrator, rows))


@cache
def fitted(name: str) -> Calibrator:
    return fit(name, data(EXAMPLES[name].head))


@cache
def test_rows(name: str) -> Data:
    return data(EXAMPLES[name].head, num_samples=70, seed=1)


test_rows.__test__ = False  # type: ignore[attr-defined]

each = pytest.mark.parametrize("name", EXAMPLES)
KEEPS_ORDER = [
    name
    for name, example in EXAMPLES.items()
    if (example.make().keeps_order if example.order is None else example.order)
]
each_on_logits = pytest.mark.parametrize("name", ON_LOGITS)


# What comes out


@each
def test_probabilities(name):
    calibrator, rows = fitted(name), test_rows(name)
    probs, log_probs = predict(calibrator, rows), predict(calibrator, rows, "predict_log_proba")
    assert probs.shape == (70, K)
    assert (probs >= 0).all()
    torch.testing.assert_close(probs.sum(1), torch.ones(70, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(torch.log(probs), log_probs, rtol=1e-9, atol=1e-9)
    predicted = predict(calibrator, rows, "predict")
    assert predicted.dtype == torch.int64
    assert torch.equal(probs.gather(1, predicted[:, None])[:, 0], probs.amax(1))
    assert 0.3 < (predicted == rows.labels).double().mean() <= 1


@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if example.calibrates])
def test_it_calibrates(name):
    """Twice too confident logits come out with a lower likelihood loss than the softmax gives."""
    rows = data(EXAMPLES[name].head, num_samples=1000, seed=2)
    logits = linear_head(rows.inputs) if EXAMPLES[name].head else rows.inputs
    raw = poise.metrics.brier(torch.softmax(logits, 1), rows.labels)
    assert poise.metrics.brier(predict(fitted(name), rows), rows.labels) < raw - 0.005


class OnlyDLPack:
    """An array of a library that knows nothing but DLPack."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **how):
        return self.tensor.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class ArrayApi(OnlyDLPack):
    """An array of a library that follows the array API standard."""

    def __array_namespace__(self, api_version=None):
        return SimpleNamespace(from_dlpack=lambda other: ArrayApi(torch.from_dlpack(other)))


def reversed_view(x):
    return x.numpy()[::-1].copy()[::-1]


def read_only(x):
    array = x.numpy().copy()
    array.flags.writeable = False
    return array


KINDS = {
    "torch-float64": (lambda x: x, torch.Tensor, torch.float64),
    "torch-float32": (lambda x: x.float(), torch.Tensor, torch.float32),
    "torch-float16": (lambda x: x.half(), torch.Tensor, torch.float16),
    "torch-bfloat16": (lambda x: x.bfloat16(), torch.Tensor, torch.bfloat16),
    "torch-int64": (lambda x: x.round().long(), torch.Tensor, torch.float64),
    "torch-strided": (lambda x: x.T.contiguous().T, torch.Tensor, torch.float64),
    "numpy-float64": (lambda x: x.numpy(), np.ndarray, np.float64),
    "numpy-float32": (lambda x: x.float().numpy(), np.ndarray, np.float32),
    "numpy-float16": (lambda x: x.half().numpy(), np.ndarray, np.float16),
    "numpy-int32": (lambda x: x.round().int().numpy(), np.ndarray, np.float64),
    "numpy-int8": (lambda x: x.round().to(torch.int8).numpy(), np.ndarray, np.float64),
    "numpy-big-endian": (lambda x: x.numpy().astype(">f8"), np.ndarray, np.float64),
    "numpy-reversed": (reversed_view, np.ndarray, np.float64),
    "numpy-read-only": (read_only, np.ndarray, np.float64),
    "numpy-object": (lambda x: x.numpy().astype(object), np.ndarray, np.float64),
    "numpy-longdouble": (lambda x: x.numpy().astype(np.longdouble), np.ndarray, np.float64),
    "list": (lambda x: x.tolist(), np.ndarray, np.float64),
    "pandas": (lambda x: pd.DataFrame(x.numpy(), columns=[f"class {k}" for k in range(x.shape[1])]), np.ndarray, float),
    "dlpack": (OnlyDLPack, np.ndarray, np.float64),
    "array-api": (ArrayApi, ArrayApi, torch.float64),
}


@pytest.mark.parametrize("kind", KINDS)
@each
def test_arrays_of_any_kind(name, kind):
    """The same kind and precision comes back, with the values of the same numbers in float32 or float64."""
    convert, out_type, dtype = KINDS[kind]
    rows, calibrator = test_rows(name), fitted(name)
    given = convert(rows.inputs)
    probs = predict(calibrator, Data(given, rows.labels, rows.features))
    labels = predict(calibrator, Data(given, rows.labels, rows.features), "predict")
    assert isinstance(probs, out_type)
    assert isinstance(labels, out_type)
    if out_type is ArrayApi:
        probs, labels = probs.tensor, labels.tensor
    assert probs.dtype == dtype
    halves = kind.endswith("float16")
    values = torch.as_tensor(np.asarray(convert(rows.inputs).float() if halves and "torch" in kind else rows.inputs))
    if "int" in kind:
        values = rows.inputs.round()
    elif halves or "float32" in kind:
        values = values.to(dtype if isinstance(dtype, torch.dtype) else getattr(torch, np.dtype(dtype).name)).float()
    expected = predict(calibrator, Data(values, rows.labels, rows.features))
    atol = {"torch-float16": 1e-3, "torch-bfloat16": 4e-3, "numpy-float16": 1e-3}.get(kind, 1e-12)
    torch.testing.assert_close(torch.as_tensor(probs).double(), expected.double(), rtol=0, atol=atol)
    np.testing.assert_array_equal(
        np.asarray(labels), predict(calibrator, Data(values, rows.labels, rows.features), "predict")
    )


@pytest.mark.parametrize(
    "kind", ["torch-float16", "numpy-float32", "numpy-int32", "list", "pandas", "dlpack", "array-api"]
)
@each
def test_fitting_on_arrays_of_any_kind(name, kind):
    convert = KINDS[kind][0]
    val, rows = data(EXAMPLES[name].head), test_rows(name)
    calibrator = EXAMPLES[name].make()
    labels = convert(val.labels) if kind in ("dlpack", "array-api") else val.labels
    calibrator.fit(convert(val.inputs), labels, **with_features(calibrator, val))
    assert calibrator.n_features_in_ == val.inputs.shape[1]
    # Rounding the logits moves the optimum a little, and a step-like criterion's by a step.
    moved = (predict(calibrator, rows) - predict(fitted(name), rows)).abs()
    assert moved.mean() < 0.03 if EXAMPLES[name].steps else moved.max() < 0.15
    if kind in ("list", "pandas", "dlpack", "array-api"):
        assert torch.equal(predict(calibrator, rows), predict(fitted(name), rows))


LABELS = {
    "numpy-uint8": lambda y: y.numpy().astype(np.uint8),
    "numpy-float32": lambda y: y.numpy().astype(np.float32),
    "torch-int32": lambda y: y.int(),
    "column": lambda y: y[:, None],
    "list": lambda y: y.tolist(),
    "pandas": lambda y: pd.Series(y.numpy(), index=np.arange(len(y))[::-1]),
    "object": lambda y: y.numpy().astype(object),
}


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("name", ["temperature", "sampled-head"])
def test_labels_of_any_kind(name, kind):
    val, rows = data(EXAMPLES[name].head), test_rows(name)
    calibrator = EXAMPLES[name].make().fit(val.inputs, LABELS[kind](val.labels))
    assert torch.equal(predict(calibrator, rows), predict(fitted(name), rows))


# Repeatable, and without side effects


@each
def test_same_input_same_output(name):
    rows = test_rows(name)
    torch.manual_seed(0)
    first = predict(fitted(name), rows)
    torch.manual_seed(1)
    assert torch.equal(first, predict(fitted(name), rows))
    assert torch.equal(first, predict(fit(name, data(EXAMPLES[name].head)), rows))


@each
def test_a_second_fit_forgets_the_first(name):
    calibrator = fit(name, data(EXAMPLES[name].head, seed=5))
    val = data(EXAMPLES[name].head)
    calibrator.fit(val.inputs, val.labels, **with_features(calibrator, val))
    assert torch.equal(predict(calibrator, test_rows(name)), predict(fitted(name), test_rows(name)))


@each
def test_nothing_outside_is_changed(name):
    val = copy.deepcopy(data(EXAMPLES[name].head))
    calibrator = EXAMPLES[name].make()
    params, state = calibrator.get_params(), torch.get_rng_state()
    weight = torch.ones(len(val.labels))
    assert calibrator.fit(val.inputs, val.labels, sample_weight=weight, **with_features(calibrator, val)) is calibrator
    learned = {key: copy.deepcopy(value) for key, value in vars(calibrator).items() if key not in params}
    predict(calibrator, val)
    predict(calibrator, val, "predict")
    original = data(EXAMPLES[name].head)
    for attribute in ("inputs", "labels", "features"):
        assert torch.equal(getattr(val, attribute), getattr(original, attribute))
    assert torch.equal(weight, torch.ones(len(val.labels)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(calibrator.get_params()[key] is value for key, value in params.items())
    assert repr({key: value for key, value in vars(calibrator).items() if key not in params}) == repr(learned)
    assert all(key.endswith("_") for key in learned), "what is learned ends in _"


# scikit-learn's and poise's ways to copy


@each
def test_clone_and_parameters(name):
    calibrator = fitted(name)
    twin = clone(calibrator)
    assert repr(twin) == repr(calibrator)
    assert not [key for key in vars(twin) if key.endswith("_")]
    params = calibrator.get_params(deep=False)
    assert params.keys() == set(inspect.signature(type(calibrator)).parameters)
    other = type(calibrator)().set_params(**params)
    assert all(other.get_params(deep=False)[key] is value for key, value in params.items())
    with pytest.raises(ValueError, match="Invalid parameter 'sharpness'"):
        other.set_params(sharpness=1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda fit: pickle.loads(pickle.dumps(fit))], ids=["copy", "pickle"])
@each
def test_copies_of_a_fitted_one(name, copied):
    rows = test_rows(name)
    assert torch.equal(predict(copied(fitted(name)), rows), predict(fitted(name), rows))


@each
def test_save_and_load(name, tmp_path):
    file, calibrator, rows = tmp_path / "it.safetensors", copy.deepcopy(fitted(name)), test_rows(name)
    if EXAMPLES[name].head:
        with pytest.raises(TypeError, match="`head` is of type function"):
            poise.save(calibrator, file)
        assert not file.exists()
        calibrator.set_params(head=None)
    poise.save(calibrator, file)
    loaded = poise.load(file)
    assert type(loaded) is type(calibrator)
    assert repr(loaded) == repr(calibrator)
    loaded.set_params(**{"head": linear_head} if EXAMPLES[name].head else {})
    for method in ("predict_proba", "predict_log_proba", "predict"):
        assert torch.equal(predict(loaded, rows, method), predict(fitted(name), rows, method))


@pytest.mark.parametrize("method", ["predict_proba", "predict_log_proba", "predict"])
@each
def test_unfitted_raises(name, method):
    with pytest.raises(NotFittedError, match=type(EXAMPLES[name].make()).__name__):
        predict(EXAMPLES[name].make(), test_rows(name), method)


# Few rows, few classes


@each
def test_one_row_and_none(name):
    rows, calibrator = test_rows(name), fitted(name)
    torch.testing.assert_close(predict(calibrator, rows[:1]), predict(calibrator, rows)[:1], rtol=1e-12, atol=1e-15)
    assert predict(calibrator, rows[:0]).shape == (0, K)
    assert predict(calibrator, rows[:0], "predict").shape == (0,)


@each
def test_rows_do_not_know_of_each_other(name):
    rows, calibrator = test_rows(name), fitted(name)
    alone = torch.cat([predict(calibrator, rows[i : i + 1]) for i in range(3)])
    if EXAMPLES[name].differentiable:
        torch.testing.assert_close(predict(calibrator, rows)[:3], alone, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(predict(calibrator, rows)[:20], predict(calibrator, rows[:20]), rtol=1e-12, atol=1e-15)


@each
def test_a_class_missing_from_the_validation_set(name):
    val = data(EXAMPLES[name].head)
    probs = predict(fit(name, val[val.labels != K - 1]), test_rows(name))
    assert probs.shape == (70, K)
    assert torch.isfinite(probs).all()
    torch.testing.assert_close(probs.sum(1), torch.ones(70, dtype=torch.float64), rtol=0, atol=1e-9)


@each_on_logits
def test_two_classes_as_one_log_odds(name):
    """(n, 2), (n, 1) and (n,) say the same."""
    val, rows = data(num_classes=2), data(num_classes=2, num_samples=50, seed=1)
    forms = {
        "pair": lambda z: z - z[:, :1],
        "column": lambda z: z[:, 1:] - z[:, :1],
        "flat": lambda z: z[:, 1] - z[:, 0],
    }
    results = {}
    for form, of in forms.items():
        calibrator = fit(name, Data(of(val.inputs), val.labels, val.features))
        assert calibrator.n_features_in_ == (2 if form == "pair" else 1)
        results[form] = predict(calibrator, Data(of(rows.inputs), rows.labels, rows.features))
        assert results[form].shape == (50, 2)
        other = predict(calibrator, Data(forms["pair"](rows.inputs), rows.labels, rows.features))
        assert torch.equal(results[form], other), "fitted on one form, it reads the others"
    assert torch.equal(results["pair"], results["column"])
    assert torch.equal(results["pair"], results["flat"])


@each
def test_classes_have_names(name):
    val, rows = data(EXAMPLES[name].head), test_rows(name)
    columns = predict(fitted(name), rows, "predict").numpy()
    sorted_names, given = np.array(["ant", "bee", "cat", "dog"]), np.array(["dog", "ant", "cat", "bee"])
    by_words = fit(name, Data(val.inputs, sorted_names[val.labels], val.features))
    by_list = fit(name, Data(val.inputs, list(given[val.labels]), val.features), classes=list(given))
    by_columns = fit(name, val, classes=given)
    by_numbers = fit(
        name, Data(val.inputs, torch.tensor([30, 10, 20, -1])[val.labels], val.features), classes=[30, 10, 20, -1]
    )
    for calibrator, names in [
        (by_words, sorted_names),
        (by_list, given),
        (by_columns, given),
        (by_numbers, np.array([30, 10, 20, -1])),
    ]:
        assert list(calibrator.classes_) == list(names)
        np.testing.assert_array_equal(predict(calibrator, rows, "predict"), names[columns])
        assert torch.equal(predict(calibrator, rows), predict(fitted(name), rows))
    assert predict(fitted(name), rows, "predict").dtype == torch.int64
    assert list(fitted(name).classes_) == [0, 1, 2, 3]


# Weights


@each
def test_unit_weights_are_none(name):
    for unit in (1.0, np.ones(240), torch.ones(240)):
        weighted = fit(name, data(EXAMPLES[name].head), sample_weight=unit)
        torch.testing.assert_close(
            predict(weighted, test_rows(name)), predict(fitted(name), test_rows(name)), rtol=0, atol=1e-5
        )


@each
def test_a_weight_counts_like_repetitions(name):
    val, rows, tolerance = data(EXAMPLES[name].head), test_rows(name), EXAMPLES[name].weights
    if tolerance is None:
        weight = (torch.arange(240) < 180).double()
        torch.testing.assert_close(
            predict(fit(name, val, sample_weight=weight), rows), predict(fit(name, val[:180]), rows), rtol=0, atol=1e-9
        )
        weight = (val.labels == 0) * 20.0 + 1
        assert not torch.allclose(predict(fit(name, val, sample_weight=weight), rows), predict(fitted(name), rows))
        return
    count = torch.arange(240) % 4
    repeated = val[torch.repeat_interleave(torch.arange(240), count)]
    weighted = predict(fit(name, val, sample_weight=count), rows)
    torch.testing.assert_close(weighted, predict(fit(name, repeated), rows), rtol=0, atol=tolerance)
    assert (weighted - predict(fitted(name), rows)).abs().max() > 5 * tolerance, "the weights do something"


# Symmetries


def nasty_logits(dtype: torch.dtype) -> torch.Tensor:
    """Random, tied, tied but for the last digit, far apart."""
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(120, K, generator=generator, dtype=torch.float64).to(dtype) * 4
    near = z[:40].clone()
    near[:, 1] = torch.nextafter(near[:, 0], torch.tensor(torch.inf, dtype=dtype))
    near[:, 2] = torch.nextafter(near[:, 1], torch.tensor(torch.inf, dtype=dtype))
    near[20:, 3] = near[20:, 0]
    near = torch.cat([near, near.flip(1), near + 1000])
    return torch.cat([z, z.round(), near, z * 10, z * 1e3, z * 1e-6, z + 1e4, torch.zeros(2, K, dtype=dtype)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", KEEPS_ORDER)
def test_order_is_kept(name, dtype):
    """No two classes change places, equal ones stay equal, and every prediction is the network's."""
    z = nasty_logits(dtype)
    rows = Data(z, torch.zeros(len(z)), torch.randn(len(z), 6, generator=torch.Generator().manual_seed(0)))
    ordered, order = z.sort(dim=1)
    for method in ("predict_proba", "predict_log_proba"):
        values = predict(fitted(name), rows, method).gather(1, order)
        assert not torch.isnan(values).any()
        assert (values[:, 1:] >= values[:, :-1]).all(), method
        equal = ordered[:, 1:] == ordered[:, :-1]
        assert equal.sum() > 60
        assert torch.equal(values[:, 1:][equal], values[:, :-1][equal]), method
    assert torch.equal(predict(fitted(name), rows, "predict"), z.argmax(1))
    clear = ordered[:, -1] - ordered[:, -2] > 1e-4
    assert torch.equal(predict(fitted(name), rows)[clear].argmax(1), z[clear].argmax(1))
    accuracy = poise.metrics.accuracy(predict(fitted(name), test_rows(name)), test_rows(name).labels)
    assert accuracy == poise.metrics.accuracy(torch.softmax(test_rows(name).inputs, 1), test_rows(name).labels)


@pytest.mark.parametrize("name", [name for name in ON_LOGITS if EXAMPLES[name].shift is not None])
def test_a_constant_per_row_changes_nothing(name):
    val, rows, tolerance = data(), test_rows(name), EXAMPLES[name].shift

    def shifted(some):
        shift = torch.randn(len(some.inputs), 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 30
        return Data(some.inputs + shift, some.labels, some.features)

    expected = predict(fitted(name), rows)
    torch.testing.assert_close(predict(fitted(name), shifted(rows)), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(predict(fit(name, shifted(val)), rows), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in ON_LOGITS if EXAMPLES[name].permutation is not None])
def test_classes_have_no_rank(name):
    """Permuting the columns and the labels permutes the probabilities."""
    val, rows = data(), test_rows(name)
    order = torch.tensor([2, 0, 3, 1])
    permuted = fit(name, Data(val.inputs[:, order], torch.argsort(order)[val.labels], val.features))
    probs = predict(permuted, Data(rows.inputs[:, order], rows.labels, rows.features))
    expected = predict(fitted(name), rows)[:, order]
    torch.testing.assert_close(probs, expected, rtol=0, atol=EXAMPLES[name].permutation)


@pytest.mark.parametrize("factor", [3.0, 1e-4, 1e5])
@pytest.mark.parametrize("name", [name for name in ON_LOGITS if EXAMPLES[name].scale is not None])
def test_the_unit_of_the_logits_does_not_matter(name, factor):
    val, rows = data(), test_rows(name)
    scaled = fit(name, Data(val.inputs * factor, val.labels, val.features))
    probs = predict(scaled, Data(rows.inputs * factor, rows.labels, rows.features))
    torch.testing.assert_close(probs, predict(fitted(name), rows), rtol=0, atol=EXAMPLES[name].scale)


@each
def test_gradients(name):
    """What can be differentiated is, correctly; what cannot says so by a result without a gradient."""
    rows = test_rows(name)[:3]
    z = rows.inputs.clone().requires_grad_()
    probs = predict(fitted(name), Data(z, rows.labels, rows.features))
    assert probs.requires_grad == EXAMPLES[name].differentiable
    if probs.requires_grad:
        assert torch.autograd.gradcheck(
            lambda z: predict(fitted(name), Data(z, rows.labels, rows.features)), z, eps=1e-5, atol=1e-6, rtol=1e-4
        )
    fitted_with_grad = fit(
        name, Data(data(EXAMPLES[name].head).inputs.requires_grad_(False).clone().requires_grad_(), *rest(name))
    )
    assert torch.equal(predict(fitted_with_grad, test_rows(name)), predict(fitted(name), test_rows(name)))


def rest(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    val = data(EXAMPLES[name].head)
    return val.labels, val.features
