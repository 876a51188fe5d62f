"""Every baseline on rows of every real set, from 2 classes to 1,000: fitted without a warning, whole rows, in order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import poise
from conftest import SHARED, load_shared
from poise.calibrators import Calibrator
from poise.noise import Gaussian

SETS = [
    "20news-text",
    "cifar10-densenet40-ce",
    "cifar10-resnet50-ce",
    "cifar10-resnet56-ce",
    "cifar10-wrn28-10-ce",
    "cifar100-wrn16-4-ce",
    "imagenet-efficientnet-lite0",
    "pathmnist-shifted",
    "retinopathy-augmented",
]
BINARY = "cifar10-resnet56-ce, two classes"
METHODS: dict[str, Callable[[], Calibrator]] = {
    "temperature": poise.TemperatureScaling,
    "ensemble": poise.EnsembleTemperatureScaling,
    "ensemble-mse": lambda: poise.EnsembleTemperatureScaling("mse"),
    "parameterized": lambda: poise.ParameterizedTemperatureScaling(num_steps=50),
    "classwise": poise.ClasswiseTemperatureScaling,
    "classwise-ece": lambda: poise.ClasswiseTemperatureScaling("ece"),
    "vector": poise.VectorScaling,
    "matrix": lambda: poise.MatrixScaling(strength=1.0),
    "dirichlet": lambda: poise.DirichletCalibration(strength=1.0),
    "structured-vector": poise.StructuredVectorScaling,
    "structured-matrix": poise.StructuredMatrixScaling,
    "consistency": poise.ConsistencyCalibration,
    "consistency-vector": lambda: poise.ConsistencyCalibration(Gaussian(), scaling="vector"),
    "consistency-auto": lambda: poise.ConsistencyCalibration(scaling="auto"),
    "group": lambda: poise.GroupCalibration(num_partitions=2),
    "group-ets": lambda: poise.GroupCalibration(num_partitions=2, base="ets"),
    "proximity": poise.ProximityCalibration,
    "proximity-bins": lambda: poise.ProximityCalibration("bin_mean_shift"),
    "density-aware": poise.DensityAwareCalibration,
    "histogram": poise.HistogramBinning,
    "histogram-mass": lambda: poise.HistogramBinning(strategy="equal_mass"),
    "histogram-top": lambda: poise.HistogramBinning(mode="top_label"),
    "bayesian": poise.BayesianBinning,
    "bayesian-top": lambda: poise.BayesianBinning("top_label"),
    "isotonic": poise.IsotonicCalibration,
    "isotonic-multiclass": lambda: poise.IsotonicCalibration("multiclass"),
    "spline": poise.SplineCalibration,
    "beta": poise.BetaCalibration,
    "clipping": poise.FeatureClipping,
    "order": poise.IntraOrderPreserving,
    "order-diag": lambda: poise.IntraOrderPreserving("diag"),
}
AFFINE = ("vector", "matrix", "dirichlet", "structured-vector", "structured-matrix", "consistency-vector")
CURVES = ("histogram", "histogram-mass", "bayesian", "isotonic", "beta", "clipping")
MOVING = (*AFFINE, *CURVES, "classwise", "classwise-ece", "consistency-auto")


def rows(name: str, split: str, num_samples: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits in float32 as they came, labels, and the features; the logits themselves where there are none."""
    network = name.split(",")[0]
    logits, labels = load_shared(network, split)
    with np.load(SHARED / f"{network}.{split}.npz") as arrays:
        features = torch.from_numpy(arrays["features"]).float() if "features" in arrays else logits
    if name == BINARY:
        two = labels < 2
        logits, labels, features = logits[two, :2], labels[two], features[two]
    return logits[:num_samples], labels[:num_samples], features[:num_samples]


MILLIONS = ("matrix", "dirichlet")
"""With a thousand classes they have so many numbers: half a minute of a fit, which benchmarks/baselines.py takes."""

CASES = [
    (name, method)
    for name in [*SETS, BINARY]
    for method in METHODS
    if not (name.startswith("imagenet") and method in MILLIONS)
]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_it_fits(name, method):
    logits, labels, features = rows(name, "val", 1300 if method == "clipping" else 500)
    asked, _, places = rows(name, "test", 200)
    calibrator = METHODS[method]().fit(logits, labels, features=features)
    log_probs = calibrator.predict_log_proba(asked, features=places)
    assert log_probs.dtype == torch.float32
    assert not torch.isnan(log_probs).any()
    torch.testing.assert_close(log_probs.double().exp().sum(1), torch.ones(200).double(), rtol=0, atol=1e-4)
    if method not in MOVING:
        assert (log_probs.gather(1, asked.argsort(1)).diff(dim=1) >= 0).all()
        assert torch.equal(calibrator.predict(asked, features=places), asked.argmax(1))
