"""Consistency in the image, in every layer, in the features and at the logits, on real networks: error bars and cost.

Run it as ``python benchmarks/anywhere.py DATA [PART ...]``. DATA holds `models`, `cifar10` and `logits`; the parts are
`images` (every level of a ResNet-56 on CIFAR-10, with --images of the test images), `weak` (train-time augmentation
alone, which needs no labels, on as many), `cheap` (the upper levels on all of them), `features` (a linear head of 1000
classes, in logit and in feature space), `augmented` (real augmentations) and `local` (sure answers, wrong ones
and right ones apart). But for `weak` and `augmented`, half of the rows choose a strength and the other half is scored.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import poise
from poise import metrics, plots
from poise.neighbors import Additive, ThroughLinear, moderate, strong, weak
from poise.noise import Gaussian
from poise.progress import Bar
from poise.readout import vote
from poise.sampling import estimate, estimate_each
from poise.zoo import load_weights, network

KEPT_ACCURACY = 0.95
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
JITTERS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
LAYER_STRENGTHS = (0.03, 0.1, 0.3, 1.0, 3.0)
"""Times the standard deviation of the activations."""
TOP_STRENGTHS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0)
"""The same above layer3, whose activations are averaged over 64 places before they count."""
FIGURES = {"ECE": metrics.ece, "AdaECE": metrics.adaptive_ece, "NLL": metrics.nll, "accuracy": metrics.accuracy}


class Normalized(nn.Module):
    """Images from 0 to 1 in, logits out: augmentation comes before normalization."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406])[:, None, None])
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225])[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        return self.net((images - self.mean) / self.std)


@dataclass
class Report:
    """Rows of a table, printed as they come and kept for the file."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def head(self, title: str) -> None:
        print(f"\n{title}\n")
        print("| | " + " | ".join(FIGURES) + " | strength | ms per row |\n" + "|---" * (len(FIGURES) + 3) + "|")

    def row(self, name: str, probs: Tensor, labels: Tensor, strength: float | None = None, ms: float = 0.0) -> None:
        found = {key: metrics.interval(metric, probs, labels) for key, metric in FIGURES.items()}
        cells = [
            f"{i.value:.3f} ({i.low:.3f} – {i.high:.3f})"
            if key == "NLL"
            else f"{100 * i.value:.2f} ({100 * i.low:.1f} – {100 * i.high:.1f})"
            for key, i in found.items()
        ]
        at = "" if strength is None else f"{strength:.3g}"
        print(f"| {name} | {' | '.join(cells)} | {at} | {f'{ms:.3g}' if ms else ''} |", flush=True)
        figures = {key: [i.value, i.low, i.high] for key, i in found.items()}
        self.rows.append({"name": name, "strength": strength, "ms": ms, "rows": len(labels)} | figures)


def cifar10(folder: Path, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Some of the test images, drawn at random, in [0, 1], and their labels."""
    tiles = []
    for path in sorted(folder.glob("test_*.webp")):
        mosaic = np.asarray(Image.open(path).convert("RGB"))
        tiles.append(mosaic.reshape(50, 32, 50, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32))
    with np.load(folder / "labels.npz") as arrays:
        labels = torch.from_numpy(arrays["test"].astype(np.int64))
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:count]
    return torch.from_numpy(np.concatenate(tiles))[rows].float() / 255, labels[rows]


def resnet56(data: Path, device: str) -> nn.Module:
    """He's ResNet-56; on the CPU with its normalizations folded into the convolutions, which is three times as fast."""
    net = load_weights(network("resnet56"), data / "models" / "cifar10-resnet56.safetensors").eval()
    if device == "cpu":
        images = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            before = net(images)
            fold(net)
            print(f"normalizations folded: logits differ by {(net(images) - before).abs().max():.1e} at most")
        net = net.to(memory_format=torch.channels_last)
    return Normalized(net).to(device)


def fold(net: nn.Module) -> None:
    """Every conv1, bn1 and so on becomes one convolution; the layers keep their names."""
    for module in list(net.modules()):
        for number in "123":
            conv, norm = getattr(module, f"conv{number}", None), getattr(module, f"bn{number}", None)
            if conv is not None and norm is not None:
                setattr(module, f"conv{number}", fuse_conv_bn_eval(conv, norm))
                setattr(module, f"bn{number}", nn.Identity())


@torch.no_grad()
def passed(module: nn.Module, inputs: Tensor, device: str) -> Tensor:
    return torch.cat([module(some.to(device)).cpu() for some in torch.split(inputs, 256)])


def chosen(each: Tensor, labels: Tensor, unperturbed: float) -> int:
    """The strength with the smallest ECE on these rows among those that keep the accuracy."""
    values = [
        metrics.ece(probs, labels) if metrics.accuracy(probs, labels) >= KEPT_ACCURACY * unperturbed else float("inf")
        for probs in each
    ]
    return min(range(len(values)), key=values.__getitem__)


class Levels:
    """One network and some images, half to fit and half to score."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor, device: str, report: Report) -> None:
        self.model, self.images, self.labels, self.device, self.report = model, images, labels, device, report
        self.logits = passed(model, images, device)
        self.fit, self.score = slice(None, None, 2), slice(1, None, 2)
        self.accuracy = metrics.accuracy(torch.softmax(self.logits, 1)[self.fit], labels[self.fit])

    def baselines(self) -> None:
        self.report.row("uncalibrated", torch.softmax(self.logits, 1)[self.score], self.labels[self.score])
        for name, calibrator in (
            ("temperature scaling", poise.TemperatureScaling()),
            ("`ConsistencyCalibration()`, exact", poise.ConsistencyCalibration()),
        ):
            calibrator.fit(self.logits[self.fit], self.labels[self.fit])
            probs = calibrator.predict_proba(self.logits[self.score])
            strength = getattr(calibrator, "strength_", getattr(calibrator, "temperature_", None))
            self.report.row(name, probs, self.labels[self.score], strength)

    def augmented(self, draws: int) -> None:
        head = poise.model.Network(self.model)
        how = {
            "head": head,
            "num_samples": draws,
            "progress": Bar(),
            "batch_size": 64 if self.device == "cpu" else 2048,
        }
        start = time.perf_counter()
        each = estimate_each(self.images, neighbors=moderate(), strengths=JITTERS, **how)
        ms = 1000 * (time.perf_counter() - start) / len(self.images) / len(JITTERS)
        for s, probs in zip(JITTERS, each, strict=True):
            name = f"image, moderate({s})" if s else "image, weak()"
            self.report.row(f"{name}, T = {draws}", probs[self.score], self.labels[self.score], s or None, ms)
        best = chosen(each[:, self.fit], self.labels[self.fit], self.accuracy)
        s = JITTERS[best]
        self.report.row(
            f"image, s by ECE, T = {draws}", each[best][self.score], self.labels[self.score], s, len(JITTERS) * ms
        )
        start = time.perf_counter()
        probs = estimate(self.images, neighbors=strong(), strength=1.0, **how)
        ms = 1000 * (time.perf_counter() - start) / len(self.images)
        self.report.row(f"image, strong(0.1), T = {draws}", probs[self.score], self.labels[self.score], 0.1, ms)

    def layer(self, name: str, draws: int, strengths: Sequence[float] | None) -> None:
        """Gaussian noise there; a few strengths, or the whole search."""
        inputs, head = self.logits, None
        if name != "logits":
            body, head = poise.split(self.model, f"net.{name}")
            inputs = passed(body, self.images, self.device)
        unit = float(inputs.std())
        calibrator = poise.SampledConsistency(
            Additive(Gaussian()),
            head,
            num_samples=draws,
            strengths=None if strengths is None else [unit * one for one in strengths],
            progress=True,
        )
        calibrator.fit(inputs[self.fit], self.labels[self.fit])
        start = time.perf_counter()
        probs = calibrator.predict_proba(inputs[self.score])
        ms = 1000 * (time.perf_counter() - start) / len(probs)
        note = f"{name}, T = {draws}"
        if strengths is not None:
            note += f" ({calibrator.strength_ / unit:.2g} of the activations' deviation)"
        self.report.row(note, probs, self.labels[self.score], calibrator.strength_, ms)
        if strengths is not None:
            self._curve(name, head, inputs[self.score], calibrator.strengths, draws, unit)

    def _curve(
        self, name: str, head: Any, inputs: Tensor, strengths: Sequence[float] | None, draws: int, unit: float
    ) -> None:
        """What the strengths that were not chosen would have done."""
        most = min(len(inputs), 200)
        each = estimate_each(
            inputs[:most],
            neighbors=Additive(Gaussian()),
            strengths=list(strengths or []),
            head=head,
            num_samples=min(draws, 16),
            progress=Bar(),
        )
        truth = self.labels[self.score][:most]
        cells = [
            f"{strength / unit:.2g}: {100 * metrics.ece(probs, truth):.0f} / {100 * metrics.accuracy(probs, truth):.0f}"
            for strength, probs in zip(strengths or [], each, strict=True)
        ]
        print(f"<!-- {name}, {most} rows, deviations: ECE / accuracy in percent: {'; '.join(cells)} -->", flush=True)


def images_part(data: Path, report: Report, arguments: argparse.Namespace) -> None:
    images, labels = cifar10(data / "cifar10", arguments.images)
    levels = Levels(resnet56(data, arguments.device), images, labels, arguments.device, report)
    report.head(f"Every level: {len(levels.labels)} of the CIFAR-10 test images, half of them scored")
    levels.baselines()
    for name in ("logits", "pool", "layer3"):
        levels.layer(name, arguments.draws, None)
    levels.augmented(arguments.draws)
    for name in ("layer2", "layer1"):
        levels.layer(name, arguments.draws, LAYER_STRENGTHS)


def weak_part(data: Path, report: Report, arguments: argparse.Namespace) -> None:
    """Nothing is fitted, so that every image is scored, with and without."""
    images, labels = cifar10(data / "cifar10", arguments.images)
    model = resnet56(data, arguments.device)
    plain = torch.softmax(passed(model, images, arguments.device), 1)
    head = poise.model.Network(model)
    start = time.perf_counter()
    probs = estimate(
        images, neighbors=weak(), strength=1.0, head=head, num_samples=arguments.draws, progress=Bar(), seed=1
    )
    ms = 1000 * (time.perf_counter() - start) / len(images)
    report.head(
        f"Train-time augmentation alone, without labels: {len(labels)} CIFAR-10 test images, all of them scored"
    )
    report.row("uncalibrated", plain, labels)
    report.row(f"image, weak(), T = {arguments.draws}", probs, labels, ms=ms)
    difference("weak()", probs, plain, labels)


def difference(name: str, probs: Tensor, plain: Tensor, labels: Tensor) -> None:
    found = metrics.paired_difference(metrics.ece, probs, plain, labels)
    print(
        f"ECE of {name} less the uncalibrated one: {100 * found.value:.2f} "
        f"({100 * found.low:.2f} – {100 * found.high:.2f}), p = {found.p_value:.3f}"
    )


def cheap_part(data: Path, report: Report, arguments: argparse.Namespace) -> None:
    images, labels = cifar10(data / "cifar10", 10_000)
    levels = Levels(resnet56(data, arguments.device), images, labels, arguments.device, report)
    report.head("The upper levels: all 10000 CIFAR-10 test images, half of them scored")
    levels.baselines()
    for draws in (arguments.draws, 100):
        levels.layer("logits", draws, None)
        levels.layer("pool", draws, None)
        levels.layer("layer3", draws, TOP_STRENGTHS)


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
    difference("the consistency of 8", votes, plain, labels)
    difference("the mean of 8", mean / mean.sum(1, keepdim=True), plain, labels)


def local_part(data: Path, report: Report, arguments: argparse.Namespace) -> None:
    """Answers surer than .99, wrong and right ones apart, and the wrong one nearest to the paper's .997."""
    images, labels = cifar10(data / "cifar10", arguments.images)
    model = resnet56(data, arguments.device)
    logits = passed(model, images, arguments.device)
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
    "images": images_part,
    "weak": weak_part,
    "cheap": cheap_part,
    "features": features_part,
    "augmented": augmented_part,
    "local": local_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--images", type=int, default=10_000, help="CIFAR-10 test images for every level")
    parser.add_argument("--draws", type=int, default=32)
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
