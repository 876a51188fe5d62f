"""Consistency where a network's answers are known already, on real networks: error bars and cost.

Run it as ``python benchmarks/anywhere.py DATA [PART ...]``. DATA holds `models`, `cifar10` and `logits`; the parts are
`upper` (the logits, features and third layer of a ResNet-56, by the calibrator's own search), `features` (a linear head
of 1000 classes, in logit and in feature space), `augmented` (real augmentations) and `local` (sure answers, wrong ones
and right ones apart); `upper` and `local` take --images of the CIFAR-10 test images. But for `augmented`, half of the
rows choose a strength and the other half is scored. Every level of that network on a GPU is in `levels.py`.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np
import torch
from levels import Report, cifar10, passed, resnet56
from torch import Tensor, nn

import poise
from poise import plots
from poise.neighbors import Additive, ThroughLinear, moderate, weak
from poise.noise import Gaussian
from poise.readout import vote
from poise.sampling import estimate_each

LAYER_STRENGTHS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0)
"""In standard deviations of the activations above layer3, which are averaged over 64 places before they count."""
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def upper_part(data: Path, report: Report, arguments: argparse.Namespace) -> None:
    """What `SampledConsistency` finds: a few strengths at the layer, the whole search elsewhere."""
    images, labels = cifar10(data / "cifar10", arguments.images)
    model = resnet56(data, arguments.device)
    logits = passed(model, images, arguments.device)
    fit, score = slice(None, None, 2), slice(1, None, 2)
    report.head(f"{len(labels)} of the CIFAR-10 test images, half of them scored")
    for draws in (32, 100):
        for name, module, strengths in (
            ("logits", None, None),
            ("features", "pool", None),
            ("layer 3", "layer3", LAYER_STRENGTHS),
        ):
            inputs, head = logits, None
            if module is not None:
                body, head = poise.split(model, f"net.{module}")
                inputs = passed(body, images, arguments.device)
            given = None if strengths is None else [float(inputs.std()) * one for one in strengths]
            calibrator = poise.SampledConsistency(
                Additive(Gaussian()), head, num_samples=draws, strengths=given, progress=True
            )
            probs = calibrator.fit(inputs[fit], labels[fit]).predict_proba(inputs[score])
            report.row(f"{name}, T = {draws}", probs, labels[score], calibrator.strength_)


def features_part(data: Path, report: Report, arguments: argparse.Namespace) -> None:
    """Noise on 1280 features before 1000 classes: fitted in logit space, and compared with feature space."""
    scores = {}
    for split in ("val", "test"):
        with np.load(data / "logits" / f"imagenet-efficientnet-lite0.{split}.npz") as arrays:
            scores[split] = {name: torch.from_numpy(arrays[name]) for name in arrays}
    val, test = scores["val"], scores["test"]
    weight, bias = val["head_weight"].float(), val["head_bias"].float()
    report.head(f"Features of imagenet-efficientnet-lite0: {len(val['labels'])} rows to fit, as many scored, K = 1000")
    report.row("uncalibrated", torch.softmax(test["logits"], 1), test["labels"])
    for name, calibrator in (
        ("temperature scaling", poise.TemperatureScaling()),
        ("`ConsistencyCalibration()`, exact", poise.ConsistencyCalibration()),
        ("logits, Gaussian, T = 100", poise.SampledConsistency(num_samples=100, progress=True)),
        (
            "features, Gaussian, T = 100",
            poise.SampledConsistency(ThroughLinear(weight), num_samples=100, progress=True),
        ),
    ):
        start = time.perf_counter()
        calibrator.fit(val["logits"], val["labels"])
        print(f"<!-- fitted in {time.perf_counter() - start:.0f} s -->")
        start = time.perf_counter()
        probs = calibrator.predict_proba(test["logits"])
        ms = 1000 * (time.perf_counter() - start) / len(probs)
        strength = getattr(calibrator, "strength_", getattr(calibrator, "temperature_", None))
        report.row(name, probs, test["labels"], strength, ms)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"\nPeak memory of the process: {peak:.0f} MB; the draws of one strength would be "
        f"{2500 * 100 * 1280 * 4 / 2**20:.0f} MB of features."
    )
    compared("K = 1000, D = 1280", test["features"][:256].float(), weight, bias, strength)
    with np.load(data / "logits" / "cifar10-resnet56-ce.test.npz") as arrays:
        small = {name: torch.from_numpy(arrays[name]).float() for name in ("features", "head_weight", "head_bias")}
    compared("K = 10, D = 64", small["features"], small["head_weight"], small["head_bias"], 1.0)
    generator = torch.Generator().manual_seed(0)
    wide, weight = (torch.randn(n, 2048, generator=generator) for n in (2000, 10))
    compared("K = 10, D = 2048, as a ResNet-50's, of random numbers", wide, weight / 45, torch.zeros(10), 1.0)


def compared(name: str, features: Tensor, weight: Tensor, bias: Tensor, strength: float) -> None:
    """Noise before a linear head and behind it: the same law, and the cost of both."""
    head = nn.Linear(*weight.T.shape)
    head.weight.data, head.bias.data = weight, bias
    for strengths in ([strength], [strength * 2.0 ** (i / 4 - 4) for i in range(33)]):
        found, seconds = [], []
        for inputs, neighbors, top in (
            (features, Additive(Gaussian()), head),
            (features @ weight.T + bias, ThroughLinear(weight), None),
        ):
            start = time.perf_counter()
            found.append(
                estimate_each(inputs, neighbors=neighbors, strengths=strengths, head=top, num_samples=100, seed=1)
            )
            seconds.append(time.perf_counter() - start)
        a, b = found
        mean = (a + b) / 2
        common = mean * (1 - mean) > 0.05
        squared = ((a - b) ** 2 / (2 * mean * (1 - mean) / 100))[common].mean()
        print(
            f"{name}, {len(features)} rows, T = 100, {len(strengths)} strength(s): {seconds[0]:.2f} s at the features, "
            f"{seconds[1]:.2f} s at the logits, ratio {seconds[0] / seconds[1]:.1f}; mean squared difference "
            f"{squared:.3f} in units of its standard error squared, {int(common.sum())} shares",
            flush=True,
        )


def augmented_part(data: Path, report: Report, arguments: argparse.Namespace) -> None:
    """The answers to eight flips and rotations of each image, without labels, against the plain confidence and TS."""
    scores = {}
    for split in ("val", "test"):
        with np.load(data / "logits" / f"retinopathy-augmented.{split}.npz") as arrays:
            scores[split] = {name: torch.from_numpy(arrays[name]) for name in arrays}
    val, test = scores["val"], scores["test"]
    plain, labels = torch.softmax(test["logits"], 1), test["labels"]
    votes, mean = vote(test["aug_probs"]).float().mean(0), test["aug_probs"].float().mean(0)
    report.head(f"retinopathy-augmented: {len(labels)} rows scored")
    report.row("uncalibrated", plain, labels)
    report.row("consistency of 8 answers, no labels", votes, labels)
    report.row("mean of 8 softmaxes, no labels", mean / mean.sum(1, keepdim=True), labels)
    calibrator = poise.TemperatureScaling().fit(val["logits"], val["labels"])
    report.row("temperature scaling", calibrator.predict_proba(test["logits"]), labels, calibrator.temperature_)
    calibrator = poise.ConsistencyCalibration().fit(val["logits"], val["labels"])
    report.row("`ConsistencyCalibration()`, exact", calibrator.predict_proba(test["logits"]), labels)
    report.difference("the consistency of 8", votes, plain, labels)
    report.difference("the mean of 8", mean / mean.sum(1, keepdim=True), plain, labels)


def local_part(data: Path, report: Report, arguments: argparse.Namespace) -> None:
    """Answers surer than .99, wrong and right ones apart, and the wrong one nearest to the paper's .997."""
    images, labels = cifar10(data / "cifar10", arguments.images)
    model = resnet56(data, arguments.device)
    logits = passed(model, images, arguments.device).cpu()
    fit, rest = slice(None, None, 2), slice(1, None, 2)
    ts = poise.TemperatureScaling().fit(logits[fit], labels[fit])
    cc = poise.SampledConsistency().fit(logits[fit], labels[fit])
    images, labels, logits = images[rest], labels[rest], logits[rest]
    sure, said = torch.softmax(logits, 1).max(1)
    wrong = ((said != labels) & (sure > 0.99)).nonzero()[:, 0]
    wrong = wrong[(sure[wrong] - 0.997).abs().argsort()]
    rows = torch.cat([wrong, ((said == labels) & (sure > 0.99)).nonzero()[: max(100, len(wrong)), 0]])
    answers = {
        "softmax": torch.softmax(logits[rows], 1),
        "temperature scaling": ts.predict_proba(logits[rows]),
        "CC (logits)": cc.predict_proba(logits[rows]),
    }
    for name, neighbors in (("CC (train aug)", weak()), ("CC (train aug + jitter 0.1)", moderate(0.1))):
        answers[name] = poise.local_uncertainty(model, images[rows], neighbors, 100).consistency
    at = slice(len(wrong)), slice(len(wrong), None)
    print(
        f"\n| mean confidence | {len(wrong)} wrong | {len(rows) - len(wrong)} right | wrong below .9 | right below .9 |"
    )
    print("|---|---|---|---|---|")
    for name, probs in answers.items():
        confidence = probs.gather(1, said[rows, None])[:, 0]
        means = [f"{float(confidence[one].mean()):.3f}" for one in at]
        shares = [f"{100 * float((confidence[one] < 0.9).double().mean()):.0f} %" for one in at]
        print(f"| {name} | {' | '.join(means + shares)} |")
    if arguments.picture:
        first = {name: probs[0] for name, probs in answers.items()}
        figure = plots.single_prediction(first, classes=CLASSES, label=int(labels[wrong[0]]))
        plots.save(figure, arguments.picture, dpi=110)


PARTS = {
    "upper": upper_part,
    "features": features_part,
    "augmented": augmented_part,
    "local": local_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--images", type=int, default=10_000, help="CIFAR-10 test images of `upper` and `local`")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--picture", metavar="FILE", help="what `local` draws of the first image")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    torch.set_num_threads(arguments.threads)
    report = Report()
    for name in arguments.parts or PARTS:
        start = time.perf_counter()
        PARTS[name](arguments.data, report, arguments)
        print(f"\n({name}: {(time.perf_counter() - start) / 60:.1f} minutes on {arguments.device})", flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report.rows, file, indent=2)


if __name__ == "__main__":
    main()
