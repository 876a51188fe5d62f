"""One network perturbed at every level, from the image to the logits: error bars, cost, and curves over the strength.

    python benchmarks/levels.py DATA OUT [LEVEL ...] [--images 10000] [--draws 32 100] [--device cuda] [--seconds 150]

DATA holds `models/cifar10-resnet56.safetensors` and `cifar10`: the test images as `test_*.webp` mosaics of 2,500, or
decoded as `test.npy`, and `labels.npz`. Half of the images choose a strength by ECE, the other half is scored. All
levels get the fewer draws before any gets more, the most important levels first. OUT gets `levels.json` and `votes.npz`
anew after each; a level that fails, or would not end in time, is noted there while the others go on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import poise
from poise import metrics
from poise.model import Network
from poise.neighbors import Additive, Neighbors, moderate, strong, weak
from poise.noise import Gaussian
from poise.progress import Bar
from poise.sampling import estimate, estimate_each
from poise.zoo import load_weights, network

FIGURES = {"ECE": metrics.ece, "AdaECE": metrics.adaptive_ece, "NLL": metrics.nll, "accuracy": metrics.accuracy}

KEPT_ACCURACY = 0.95
"""Of a strength that may win, as in `SampledConsistency`."""

JITTERS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
LOW_LAYER = (0.3, 0.6, 1.0, 1.5, 3.0)
"""Strengths in standard deviations of what is perturbed."""
UPPER = tuple(0.1 * 10 ** (i / 8) for i in range(21))
"""From .1 to 32 of them."""

BATCH = {"cpu": 64, "cuda": 34 * 64}
"""Neighbours that pass the network at once; on a GPU 32 draws of 64 images are one batch, the other 68 two."""

TIMED_ROWS, TIMED_DRAWS = 256, 100

PASSED = 250
"""Images at once where nothing is perturbed: the same shape every time, for which cuDNN looks for a fast way once."""


class Normalized(nn.Module):
    """Images from 0 to 1 in, logits out: augmentation comes before normalization."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406])[:, None, None])
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225])[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        return self.net((images - self.mean) / self.std)


def decoded(folder: Path) -> np.ndarray:
    """All test images, (10000, 3, 32, 32) bytes."""
    if (folder / "test.npy").exists():
        return np.load(folder / "test.npy")
    from PIL import Image

    tiles = []
    for path in sorted(folder.glob("test_*.webp")):
        mosaic = np.asarray(Image.open(path).convert("RGB"))
        tiles.append(mosaic.reshape(50, 32, 50, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32))
    return np.concatenate(tiles)


def cifar10(folder: Path, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Some of the test images, drawn at random, in [0, 1], and their labels."""
    with np.load(folder / "labels.npz") as arrays:
        labels = torch.from_numpy(arrays["test"].astype(np.int64))
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:count]
    return torch.from_numpy(decoded(folder)[rows.numpy()]).float() / 255, labels[rows]


def resnet56(data: Path, device: str) -> nn.Module:
    """He's ResNet-56 with its normalizations folded into the convolutions, which on a CPU is three times as fast."""
    net = load_weights(network("resnet56"), data / "models" / "cifar10-resnet56.safetensors").eval()
    images = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = net(images)
        fold(net)
        print(f"normalizations folded: logits differ by {(net(images) - before).abs().max():.1e} at most")
    return Normalized(net.to(memory_format=torch.channels_last)).to(device)


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
    return torch.cat([module(some.to(device)) for some in torch.split(inputs, PASSED)])


@dataclass
class Report:
    """Rows of a table, printed as they come and kept for the file."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def head(self, title: str) -> None:
        print(f"\n{title}\n")
        print("| | " + " | ".join(FIGURES) + " | strength | ms per row |\n" + "|---" * (len(FIGURES) + 3) + "|")

    def row(
        self, name: str, probs: Tensor, labels: Tensor, strength: float | None = None, ms: float = 0.0, **more: Any
    ) -> None:
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
        self.rows.append({"name": name, "strength": strength, "ms": ms, "rows": len(labels)} | figures | more)

    def difference(self, name: str, probs: Tensor, plain: Tensor, labels: Tensor) -> None:
        found = metrics.paired_difference(metrics.ece, probs, plain, labels)
        print(
            f"ECE of {name} less the uncalibrated one: {100 * found.value:.2f} "
            f"({100 * found.low:.2f} – {100 * found.high:.2f}), p = {found.p_value:.3f}"
        )
        self.rows.append(
            {"name": f"{name} less uncalibrated", "ECE": [found.value, found.low, found.high], "p": found.p_value}
        )


class Lines:
    """A line of progress every few seconds, for logs."""

    def __init__(self, what: str, seconds: float = 5.0) -> None:
        self.bar, self.what, self.seconds = Bar(), what, seconds
        self.started = self.shown = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.shown >= self.seconds:
            self.shown = now
            print(f"    {self.what}: {self.bar.line(done, total, now - self.started)}", flush=True)


class LateError(Exception):
    """There is no time left for what would come next."""


Steps = Iterator[None]
"""A level's work, which pauses after every number of draws."""


class Levels:
    """The network, the images, and what is found out about them."""

    def __init__(
        self, data: Path, out: Path, images: int, draws: Sequence[int], device: str, seconds: float = float("inf")
    ) -> None:
        self.started = time.perf_counter()
        self.until = self.started + seconds
        self.out, self.draws, self.device = out, sorted(draws), device
        self.model = resnet56(data, device)
        images_, self.labels = cifar10(data / "cifar10", images)
        self.images = images_.to(device)
        self.logits = passed(self.model, self.images, device)
        self.plain = torch.softmax(self.logits, 1).cpu()
        self.fit, self.score = slice(None, None, 2), slice(1, None, 2)
        self.report = Report()
        self.curves: dict[str, list[dict[str, float]]] = {}
        self.seconds: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.votes: dict[str, np.ndarray] = {}

    def run(self, levels: Sequence[str]) -> None:
        kept = self.labels[self.score]
        self.report.head(f"{len(self.labels)} of the CIFAR-10 test images, {len(kept)} of them scored")
        running = {name: LEVELS[name](self) for name in levels}
        while running:
            for name, steps in list(running.items()):
                start = time.perf_counter()
                try:
                    next(steps)
                except StopIteration:
                    del running[name]
                    continue
                except LateError as error:
                    del running[name]
                    self.failed[name] = str(error)
                    print(f"<!-- {name}: left out, {error} -->")
                # A level that fails must not cost those that would come after it.
                except Exception as error:
                    del running[name]
                    self.failed[name] = repr(error)
                    traceback.print_exc()
                took = time.perf_counter() - start
                self.seconds[name] = self.seconds.get(name, 0.0) + took
                print(f"<!-- {name}: {took:.1f} s, at {time.perf_counter() - self.started:.0f} s -->", flush=True)
                self.save()

    def save(self) -> None:
        content = {
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "images": len(self.labels),
            "rows": self.report.rows,
            "curves": self.curves,
            "seconds": self.seconds,
            "total_seconds": time.perf_counter() - self.started,
            "failed": self.failed,
        }
        if self.device == "cuda":
            content["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        # Each is renamed when it is whole: who stops the process finds what there was.
        new = self.out / "new.json"
        new.write_text(json.dumps(content, indent=1), encoding="utf-8")
        new.replace(self.out / "levels.json")
        new = self.out / "new.npz"
        labels, logits = self.labels.numpy().astype(np.uint8), self.logits.cpu().numpy()
        np.savez_compressed(new, labels=labels, logits=logits, **self.votes)
        new.replace(self.out / "votes.npz")

    def baselines(self) -> Steps:
        logits = self.logits.cpu()
        self.report.row("uncalibrated", self.plain[self.score], self.labels[self.score])
        self.report.row(f"uncalibrated, all {len(self.labels)} rows", self.plain, self.labels)
        for name, calibrator in (
            ("temperature scaling", poise.TemperatureScaling()),
            ("`ConsistencyCalibration()`, exact", poise.ConsistencyCalibration()),
        ):
            calibrator.fit(logits[self.fit], self.labels[self.fit])
            probs = calibrator.predict_proba(logits[self.score])
            strength = getattr(calibrator, "strength_", getattr(calibrator, "temperature_", None))
            self.report.row(name, probs, self.labels[self.score], strength)
        yield

    def augmented(self) -> Steps:
        """weak() is moderate(0): the same draws serve all of them."""
        head = Network(self.model)
        ms = self.cost(self.images, moderate(), head, 0.1)
        for draws, each in self.scanned("image", self.images, moderate(), JITTERS, head, ms):
            for s, probs in zip(JITTERS, each, strict=True):
                self.row(f"image, moderate({s})" if s else "image, weak()", probs, draws, s or None, ms)
            self.chosen("image", each, draws, JITTERS, ms)
            name = f"weak(), T = {draws}, all {len(self.labels)} rows"
            self.report.row(f"image, {name}", each[0], self.labels, ms=ms * draws / TIMED_DRAWS, draws=draws)
            self.report.difference(name, each[0], self.plain, self.labels)
            yield

    def blurred(self) -> Steps:
        head = Network(self.model)
        ms = self.cost(self.images, strong(), head, 1.0)
        for draws, each in self.scanned("image, strong(0.1)", self.images, strong(), [1.0], head, ms):
            self.row("image, strong(0.1)", each[0], draws, 0.1, ms)
            yield

    def layer(self, name: str, module: str | None, multiples: Sequence[float]) -> Steps:
        """Gaussian noise on the output of that module, or on the logits."""
        inputs, head = self.logits, None
        if module is not None:
            body, head = poise.split(self.model, f"net.{module}")
            inputs = passed(body, self.images, self.device)
        unit = float(inputs[self.fit].std())
        strengths = [unit * one for one in multiples]
        ms = self.cost(inputs, Additive(Gaussian()), head, unit)
        for draws, each in self.scanned(name, inputs, Additive(Gaussian()), strengths, head, ms, unit):
            self.chosen(name, each, draws, strengths, ms, unit)
            yield

    def scanned(
        self,
        name: str,
        inputs: Tensor,
        neighbors: Neighbors,
        strengths: Sequence[float],
        head: nn.Module | None,
        ms: float,
        unit: float = 1.0,
    ) -> Iterator[tuple[int, Tensor]]:
        """(T, shares of votes at every strength) for every T; the draws of a smaller T are among those of a larger."""
        done, counts = 0, torch.zeros(())
        for seed, draws in enumerate(self.draws):
            seconds = ms / 1000 * len(inputs) * len(strengths) * (draws - done) / TIMED_DRAWS
            if time.perf_counter() + seconds > self.until:
                raise LateError(f"T = {draws} would take {seconds:.0f} s")
            more = estimate_each(
                inputs,
                neighbors=neighbors,
                strengths=strengths,
                head=head,
                num_samples=draws - done,
                seed=seed,
                batch_size=BATCH[self.device],
                progress=Lines(f"{name}, draws {done + 1} to {draws}"),
            )
            counts, done = counts + torch.round(more.cpu() * (draws - done)), draws
            each = counts / draws
            # Those of the upper levels are many, and soon drawn again.
            if len(strengths) < len(UPPER):
                self.votes[f"{name}, T = {draws}"] = counts.numpy().astype(np.uint8)
            self.curves[f"{name}, T = {draws}"] = [
                {"strength": strength, "deviations": strength / unit}
                | {key: metric(probs[self.score], self.labels[self.score]) for key, metric in FIGURES.items()}
                for strength, probs in zip(strengths, each, strict=True)
            ]
            yield draws, each

    def best(self, each: Tensor) -> int:
        """The strength with the smallest ECE on the first half among those that keep the accuracy."""
        labels = self.labels[self.fit]
        least = KEPT_ACCURACY * metrics.accuracy(self.plain[self.fit], labels)
        values = [
            metrics.ece(probs, labels) if metrics.accuracy(probs, labels) >= least else float("inf")
            for probs in each[:, self.fit]
        ]
        return min(range(len(values)), key=values.__getitem__)

    def chosen(
        self, name: str, each: Tensor, draws: int, strengths: Sequence[float], ms: float, unit: float = 1.0
    ) -> None:
        best = self.best(each)
        self.row(f"{name}, chosen", each[best], draws, strengths[best], ms, strengths[best] / unit)

    def row(
        self,
        name: str,
        probs: Tensor,
        draws: int,
        strength: float | None,
        ms: float,
        deviations: float | None = None,
    ) -> None:
        name = f"{name}, T = {draws}"
        # What T draws cost.
        ms *= draws / TIMED_DRAWS
        self.report.row(
            name, probs[self.score], self.labels[self.score], strength, ms, draws=draws, deviations=deviations
        )

    def cost(self, inputs: Tensor, neighbors: Neighbors, head: nn.Module | None, strength: float) -> float:
        """Milliseconds per row for 100 draws at one strength; the first run warms up."""
        few, draws = (TIMED_ROWS, TIMED_DRAWS) if self.device == "cuda" else (64, 4)

        def seconds(rows: int) -> float:
            start = time.perf_counter()
            estimate(
                inputs[:rows],
                neighbors=neighbors,
                strength=strength,
                head=head,
                num_samples=draws,
                batch_size=BATCH[self.device],
            )
            synchronize(self.device)
            return time.perf_counter() - start

        seconds(few)
        # A moment would measure how fast kernels are launched.
        rows = min(few if seconds(few) > 0.1 else TIMED_ROWS * 32, len(inputs))
        return 1000 * statistics.median(seconds(rows) for _ in range(3)) / rows * TIMED_DRAWS / draws

    def precisions(self) -> Steps:
        """Numbers and speed of float32, of bfloat16, and of TF32, in which torch convolves unless told otherwise."""
        if self.device != "cuda":
            print("<!-- on a CPU everything is float32 -->")
            return
        if time.perf_counter() + 15 > self.until:
            raise LateError("15 s would not do")
        usual = torch.backends.cudnn.allow_tf32
        images, labels = self.images[:1024], self.labels[:1024]
        exact = torch.empty(0)
        try:
            for name, allow_tf32, context in PRECISIONS:
                torch.backends.cudnn.allow_tf32 = allow_tf32
                with context():
                    shares, seconds = self.weakly_perturbed(images)
                exact = shares if name == "float32" else exact
                speed, changed = 32 * len(images) / seconds, float((shares - exact).abs().sum(1).mean() / 2)
                print(
                    f"<!-- {name}: {speed:,.0f} neighbours/s, {100 * changed:.4f} % of the votes differ from float32, "
                    f"ECE {100 * metrics.ece(shares, labels):.3f} -->",
                    flush=True,
                )
                self.report.rows.append({"name": f"precision {name}", "per_second": speed, "changed_votes": changed})
        finally:
            torch.backends.cudnn.allow_tf32 = usual
        yield

    def wrapped(self) -> Steps:
        """A CalibratedModel there: the same answers as on a CPU, after its state has moved, and when exported."""
        if time.perf_counter() + 15 > self.until:
            raise LateError("15 s would not do")
        images, labels, logits = self.images[:500], self.labels[:500], self.logits[:500].cpu()
        loader = list(zip(images.split(250), labels.split(250), strict=True))
        here = poise.CalibratedModel(self.model).fit(loader)
        found = {"from the CPU's": poise.ConsistencyCalibration().fit(logits, labels).predict_proba(logits)}
        moved = poise.CalibratedModel(self.model)
        moved.load_state_dict(here.state_dict())
        found["after its state has moved"] = moved(images)
        found["exported"] = torch.export.export(here, (images,)).module()(images)
        with torch.no_grad():
            answer = here(images)
        differences = {name: float((answer.cpu() - p.detach().cpu()).abs().max()) for name, p in found.items()}
        sampled = poise.SampledConsistency(num_samples=32, strengths=[1.0])
        at_a_layer = poise.CalibratedModel(self.model, sampled, at="net.layer3").fit(loader)(images)
        print(f"<!-- CalibratedModel on {answer.device} and {at_a_layer.device}: differs by {differences} -->")
        self.report.rows.append({"name": "CalibratedModel", "on": str(at_a_layer.device), "differs": differences})
        yield

    def weakly_perturbed(self, images: Tensor) -> tuple[Tensor, float]:
        """32 votes, and the seconds they take when all is warm."""
        shares, seconds = torch.empty(0), 0.0
        for _ in range(2):
            start = time.perf_counter()
            shares = estimate(
                images,
                neighbors=weak(),
                strength=1.0,
                head=Network(self.model),
                num_samples=32,
                batch_size=BATCH[self.device],
            ).cpu()
            seconds = time.perf_counter() - start
        return shares, seconds


def bfloat16() -> AbstractContextManager[Any]:
    return torch.autocast("cuda", dtype=torch.bfloat16)


PRECISIONS: tuple[tuple[str, bool, Callable[[], AbstractContextManager[Any]]], ...] = (
    ("float32", False, nullcontext),
    ("TF32", True, nullcontext),
    ("bfloat16", True, bfloat16),
)

LEVELS: dict[str, Callable[[Levels], Steps]] = {
    "baselines": Levels.baselines,
    "logits": lambda levels: levels.layer("logits", None, UPPER),
    "features": lambda levels: levels.layer("features", "pool", UPPER),
    "layer3": lambda levels: levels.layer("layer 3", "layer3", UPPER),
    "image": Levels.augmented,
    "strong": Levels.blurred,
    "layer2": lambda levels: levels.layer("layer 2", "layer2", LOW_LAYER),
    "layer1": lambda levels: levels.layer("layer 1", "layer1", LOW_LAYER),
    "precisions": Levels.precisions,
    "wrapped": Levels.wrapped,
}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("levels", nargs="*", metavar="LEVEL", help=f"of {', '.join(LEVELS)}; all by default")
    parser.add_argument("--images", type=int, default=10_000, help="how many of the test images")
    parser.add_argument("--draws", type=int, nargs="+", default=[32, 100], metavar="T")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=BATCH)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="what would end later is left out")
    arguments = parser.parse_args()
    if unknown := set(arguments.levels) - set(LEVELS):
        parser.error(f"no level {', '.join(unknown)}; there are {', '.join(LEVELS)}")
    torch.set_num_threads(arguments.threads)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 4
    arguments.out.mkdir(parents=True, exist_ok=True)
    levels = Levels(
        arguments.data, arguments.out, arguments.images, arguments.draws, arguments.device, arguments.seconds
    )
    levels.run(arguments.levels or list(LEVELS))
    seconds = time.perf_counter() - levels.started
    print(f"\n({seconds:.0f} s on {arguments.device}; failed: {', '.join(levels.failed) or 'none'})")


if __name__ == "__main__":
    main()
