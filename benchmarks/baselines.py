"""Every method it is compared with, on every set of a folder, against temperature scaling.

Run it as ``python benchmarks/baselines.py FOLDER``, where FOLDER holds pairs ``NAME.val.npz`` and ``NAME.test.npz``
with `logits`, `labels` and, where they are known, `features`; where they are not, methods that need features take the
logits for them. Calibrators are fitted on val and scored on test. The same in every run, but for the times.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import poise
from poise import metrics
from poise.calibrators import Calibrator

METHODS: list[Calibrator] = [
    poise.TemperatureScaling(),
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


def measured(method: Calibrator, val: poise.Scores, test: poise.Scores) -> tuple[float, float, float, float]:
    """NLL, ECE in percent, accuracy in percent, and the seconds of the fit."""
    seen, asked = val.as_logits().double(), test.as_logits().double()
    features = (val.features, test.features)
    if method.needs_features and features[0] is None:
        features = (seen, asked)
    start = time.perf_counter()
    method.fit(seen, val.labels, features=features[0])
    seconds = time.perf_counter() - start
    probs = method.predict_proba(asked, features=features[1])
    scores = metrics.nll(probs, test.labels), metrics.ece(probs, test.labels), metrics.accuracy(probs, test.labels)
    return scores[0], 100 * scores[1], 100 * scores[2], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", help="names of sets")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = sorted(file.name.removesuffix(".val.npz") for file in arguments.folder.glob("*.val.npz"))
    print("| set | method | NLL / TS | NLL | ECE % | accuracy % | fit s |\n|---|---|---|---|---|---|---|")
    for name in arguments.only or names:
        val, test = (poise.read_scores(arguments.folder / f"{name}.{split}.npz") for split in ("val", "test"))
        common = None
        for method in METHODS:
            nll, ece, accuracy, seconds = measured(method, val, test)
            common = common or (nll, accuracy)
            print(
                f"| {name} | {method!r} | {nll / common[0]:.3f} | {nll:.4f} | {ece:.2f} | {accuracy - common[1]:+.2f} "
                f"| {seconds:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
