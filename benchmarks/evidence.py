"""The paper's first row from its own logits, and temperature scaling against the automatic shape on more sets.

Run it as ``python benchmarks/evidence.py FOLDER``, where FOLDER holds pairs ``NAME.val.npz`` and ``NAME.test.npz`` with
`logits` and `labels`. Calibrators are fitted on val and scored on test.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

import poise
from poise import metrics
from poise.noise import Gaussian, GeneralizedNormal, Uniform

PAPER = "cifar10-resnet50-ce"
SEEDS = range(5)


def read(folder: Path, name: str, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    scores = poise.read_scores(folder / f"{name}.{split}.npz")
    assert scores.labels is not None
    return scores.as_logits(), scores.labels


def figures(probs: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    return {
        "ECE": 100 * metrics.ece(probs, labels),
        "AdaECE": 100 * metrics.adaptive_ece(probs, labels),
        "CECE": 100 * metrics.classwise_ece(probs, labels),
        "NLL": metrics.nll(probs, labels),
        "accuracy": 100 * metrics.accuracy(probs, labels),
    }


def row(name: str, values: dict[str, float]) -> None:
    cells = " | ".join(f"{value:.4f}" if key == "NLL" else f"{value:.3f}" for key, value in values.items())
    print(f"| {name} | {cells} |", flush=True)


def paper_row(folder: Path) -> None:
    """The table of the paper's own network: as published, and exactly."""
    (logits, labels), (test, truth) = read(folder, PAPER, "val"), read(folder, PAPER, "test")
    print(f"\n{PAPER}: {len(labels)} validation and {len(truth)} test rows; percent, NLL in nats\n")
    print("| | ECE | AdaECE | CECE | NLL | accuracy |\n|---|---|---|---|---|---|")
    row("uncalibrated", figures(torch.softmax(test, 1), truth))
    ts = poise.TemperatureScaling().fit(logits, labels)
    row(f"TS, NLL (T = {ts.temperature_:.4f})", figures(ts.predict_proba(test), truth))
    runs = []
    for seed in SEEDS:
        sampled = poise.SampledConsistency(neighbors=poise.Additive(Uniform()), seed=1000 * seed).fit(logits, labels)
        runs.append(figures(sampled.predict_proba(test), truth))
    means = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
    spread = {key: statistics.pstdev([run[key] for run in runs]) for key in runs[0]}
    row(f"CC sampled, U(−ε, ε), T = 1000, ECE criterion, mean of {len(runs)} seeds", means)
    row("   standard deviation of one run", spread)
    exact = poise.Link(Uniform()).log_prob(test / 8.10).exp()
    row("CC exact, U, ε = 8.10", figures(exact, truth))
    for noise, criterion in ((Uniform(), "ece"), (Gaussian(), "nll"), (GeneralizedNormal(8.0), "nll")):
        cc = poise.ConsistencyCalibration(noise=noise, criterion=criterion, lapse=False).fit(logits, labels)
        name = f"CC exact, {noise}, fitted by {criterion} (ε = {cc.strength_:.3f})"
        row(name, figures(cc.predict_proba(test), truth))
    cc = poise.ConsistencyCalibration().fit(logits, labels)
    row(f'CC exact, noise="auto" ({cc.noise_}, ε = {cc.strength_:.3f})', figures(cc.predict_proba(test), truth))


def names(folder: Path) -> Iterator[str]:
    yield from sorted(path.name.removesuffix(".val.npz") for path in folder.glob("*.val.npz"))


def every_set(folder: Path) -> None:
    """The default against temperature scaling, set by set."""
    print("\n| set | K | TS NLL | CC NLL | ratio | TS ECE | CC ECE | shape |\n|---|---|---|---|---|---|---|---|")
    for name in names(folder):
        (logits, labels), (test, truth) = read(folder, name, "val"), read(folder, name, "test")
        ts = figures(poise.TemperatureScaling().fit(logits, labels).predict_proba(test), truth)
        calibrator = poise.ConsistencyCalibration().fit(logits, labels)
        cc = figures(calibrator.predict_proba(test), truth)
        print(
            f"| {name} | {test.shape[1]} | {ts['NLL']:.4f} | {cc['NLL']:.4f} | {cc['NLL'] / ts['NLL']:.4f} "
            f"| {ts['ECE']:.2f} | {cc['ECE']:.2f} | {calibrator.noise_} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--paper-only", action="store_true", help="only the network of the paper's first row")
    arguments = parser.parse_args()
    folder = arguments.folder
    if not any(names(folder)):
        parser.error(f"no NAME.val.npz in {folder}; pass the folder that holds the logits")
    if not arguments.paper_only:
        every_set(folder)
    if (folder / f"{PAPER}.val.npz").exists():
        paper_row(folder)


if __name__ == "__main__":
    main()
