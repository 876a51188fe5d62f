"""Every method, on every set of a folder, against temperature scaling.

Run it as ``python benchmarks/baselines.py FOLDER``, where FOLDER holds pairs ``NAME.val.npz`` and ``NAME.test.npz``
with `logits`, `labels` and, where they are known, `features`; where they are not, methods that need features take the
logits for them. Calibrators are fitted on val and scored on test, on all classes and on the two that are most often
confused, if they have 50 rows. A warning counts as a failure, and any failure as the command's. The same in every run,
but for the times.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

import poise
from poise import metrics
from poise.calibrators import Calibrator

METHODS: list[Calibrator] = [
    poise.TemperatureScaling(),
    poise.TemperatureScaling("ece"),
    poise.EnsembleTemperatureScaling(),
    poise.EnsembleTemperatureScaling("mse"),
    poise.ParameterizedTemperatureScaling(),
    poise.ParameterizedTemperatureScaling(criterion="mse"),
    poise.ClasswiseTemperatureScaling(),
    poise.ClasswiseTemperatureScaling("ece"),
    poise.VectorScaling(),
    poise.MatrixScaling(),
    poise.DirichletCalibration(),
    poise.StructuredVectorScaling(),
    poise.StructuredMatrixScaling(),
    poise.ConsistencyCalibration(),
    poise.ConsistencyCalibration(scaling="vector"),
    poise.ConsistencyCalibration(scaling="matrix"),
    poise.ConsistencyCalibration(scaling="auto"),
    poise.ConsistencyCalibration(poise.noise.Uniform(), "ece"),
    poise.GroupCalibration(),
    poise.GroupCalibration(base="ets"),
    poise.ProximityCalibration(),
    poise.ProximityCalibration("bin_mean_shift"),
    poise.DensityAwareCalibration(),
    poise.HistogramBinning(),
    poise.HistogramBinning(strategy="equal_mass"),
    poise.HistogramBinning(mode="top_label"),
    poise.BayesianBinning(),
    poise.BayesianBinning("top_label"),
    poise.IsotonicCalibration(),
    poise.IsotonicCalibration("multiclass"),
    poise.SplineCalibration(),
    poise.BetaCalibration(),
    poise.FeatureClipping(),
    poise.IntraOrderPreserving(),
    poise.IntraOrderPreserving("diag"),
]
SAMPLED = {
    "the paper's": poise.paper_consistency(),
    "its soft readout": poise.SampledConsistency(readout="soft", criterion="nll"),
}
"""Random draws, T = 1,000 for each of some hundred strengths: on request, and left out beyond some hundred classes."""


_FEWEST = 50
"""Rows of two classes; of fewer, some methods rightly say that they cannot be fitted on them."""


@dataclass(frozen=True)
class Rows:
    """What is fitted on or asked about."""

    logits: torch.Tensor
    labels: torch.Tensor
    features: torch.Tensor | None

    def of_classes(self, one: int, other: int) -> Rows:
        """Rows of two classes alone, and the logits of those two."""
        kept = (self.labels == one) | (self.labels == other)
        features = None if self.features is None else self.features[kept]
        return Rows(self.logits[kept][:, [one, other]], (self.labels[kept] == other).long(), features)


def read(file: Path) -> Rows:
    scores = poise.read_scores(file)
    features = None if scores.features is None else torch.as_tensor(scores.features)
    return Rows(scores.as_logits().double(), torch.as_tensor(scores.labels), features)


def measured(method: Calibrator, val: Rows, test: Rows) -> tuple[float, float, float, float, float]:
    """NLL, ECE in percent, accuracy in percent, seconds of the fit and its processor time; a warning is an error."""
    given = val.features, test.features
    features = (val.logits, test.logits) if method.needs_features and given[0] is None else given
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start, busy = time.perf_counter(), time.process_time()
        method.fit(val.logits, val.labels, features=features[0])
        seconds, processor = time.perf_counter() - start, time.process_time() - busy
        probs = method.predict_proba(test.logits, features=features[1])
    assert bool(torch.isfinite(probs).all()), method
    assert bool(((probs.sum(1) - 1).abs() < 1e-6).all()), method
    found = metrics.nll(probs, test.labels), metrics.ece(probs, test.labels), metrics.accuracy(probs, test.labels)
    return found[0], 100 * found[1], 100 * found[2], seconds, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", help="names of sets")
    parser.add_argument("--sampled", action="store_true", help="with the methods that draw at random")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = sorted(file.name.removesuffix(".val.npz") for file in arguments.folder.glob("*.val.npz"))
    methods = {repr(method): method for method in METHODS} | (SAMPLED if arguments.sampled else {})
    print("| set | method | NLL / TS | NLL | ECE % | accuracy % | fit s | processor s |")
    print("|---|---|---|---|---|---|---|---|")
    num_failed = 0
    for name in arguments.only or names:
        val, test = (read(arguments.folder / f"{name}.{split}.npz") for split in ("val", "test"))
        pair = two_classes(val, test)
        tables = {name: (val, test)} | ({f"{name}, two classes": pair} if len(pair[0].labels) >= _FEWEST else {})
        for title, rows in tables.items():
            common = None
            for called, method in methods.items():
                if method in SAMPLED.values() and rows[0].logits.shape[1] > 200:
                    continue
                try:
                    nll, ece, accuracy, seconds, processor = measured(method, *rows)
                except Exception as error:  # the others go on, and all are counted at the end
                    num_failed += 1
                    print(f"| {title} | {called} | FAILED: {type(error).__name__}: {error} |", flush=True)
                    continue
                common = common or (nll, accuracy)
                scores = f"{nll / common[0]:.3f} | {nll:.4f} | {ece:.2f} | {accuracy - common[1]:+.2f}"
                print(f"| {title} | {called} | {scores} | {seconds:.2f} | {processor:.2f} |", flush=True)
    if num_failed:
        sys.exit(f"{num_failed} fits failed or warned")


def two_classes(val: Rows, test: Rows) -> tuple[Rows, Rows]:
    """The two classes that are most often taken for each other, for only they leave something to tell."""
    num_classes = val.logits.shape[1]
    mistaken = torch.zeros(num_classes, num_classes)
    for label, told in zip(val.labels.tolist(), val.logits.argmax(1).tolist(), strict=True):
        mistaken[label, told] += label != told
    one, other = divmod(int((mistaken + mistaken.T).argmax()), num_classes)
    return val.of_classes(one, other), test.of_classes(one, other)


if __name__ == "__main__":
    main()
