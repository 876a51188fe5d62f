"""The paper's toy experiment (§2.3): which neighbourhood tells the true uncertainty of a prediction?

Two Gaussians in the plane, N(μ₀, I) and N(μ₁, I) with μ₁ = −μ₀ on the line across the diagonal, so that the truth is
known: η(x) = p⁰(x) / (p⁰(x) + p¹(x)). A small network learns them. The probability that its prediction for a test point
is right is then estimated from three neighbourhoods: the correctness of test points of about the same confidence, that
of the k points with the nearest confidences, and the consistency of its answers to perturbed copies of the point.

Run it as ``python -m poise.paper.toy`` for the paper's size, 1,000,000 points of each class to learn and 50,000 to
test, in some minutes on a CPU. The paper states neither the means, the covariance nor the network; here they are I,
`distance` = ‖μ₁ − μ₀‖, and 2 – 32 – 32 – 2 with ReLU, Adam with batches of 4096 and a rate falling from .01 to 0.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from poise.io import atomic
from poise.neighbors import Additive
from poise.noise import Gaussian
from poise.progress import Bar, Progress
from poise.sampling import estimate_each

__all__ = ["Curve", "Toy", "run"]

WINDOWS = tuple(10 ** (i / 4) for i in range(-20, -1))
COUNTS = (1, 3, 5, 9, 15, 31, 63, 127, 255, 511, 1023, 2047, 4095, 8191)
STRENGTHS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 1.0, 1.5, 2.0)
_BATCH = 4096


@dataclass(frozen=True)
class Curve:
    """The mean error of one estimate of the truth, for every size of its neighbourhood."""

    sizes: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def best(self) -> tuple[float, float]:
        """The size with the smallest error, and that error."""
        at = min(range(len(self.errors)), key=self.errors.__getitem__)
        return self.sizes[at], self.errors[at]


@dataclass(frozen=True)
class Toy:
    """What came out: mean |estimate − P(the prediction is right)| over the test points, as fractions."""

    window: Curve
    """Average correctness of the points whose confidence differs by less than the size."""
    nearest: Curve
    """Average correctness of the k points with the nearest confidences, the point itself among them."""
    perturbed: Curve
    """Consistency of the answers to x + ε n, n Gaussian."""
    softmax: float
    """The error of the network's own confidence."""
    accuracy: float
    bayes_accuracy: float


def run(
    num_train: int = 1_000_000,
    num_test: int = 50_000,
    *,
    distance: float = 4.0,
    epochs: int = 3,
    num_samples: int = 100,
    windows: Sequence[float] = WINDOWS,
    counts: Sequence[int] = COUNTS,
    strengths: Sequence[float] = STRENGTHS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Toy:
    """The experiment with so many points of each class; the same seed gives the same figures.

    >>> found = run(2_000, 500, epochs=2, num_samples=20, strengths=[0.4], counts=[9], windows=[0.01])
    >>> found.perturbed.errors[0] < found.nearest.errors[0]
    True
    """
    generator = torch.Generator().manual_seed(seed)
    network = _trained(*_points(num_train, distance, generator), epochs=epochs, seed=seed)
    points, labels = _points(num_test, distance, generator)
    with torch.no_grad():
        probs = torch.softmax(network(points).double(), dim=1)
    confidence, predicted = probs.max(dim=1)
    truth = _truth(points, distance)
    right = torch.where(predicted == 0, truth, 1 - truth)
    correct = (predicted == labels).double()

    # Neighbours in confidence are neighbours in the sorted list.
    confidence, order = confidence.sort()
    correct_sums = torch.nn.functional.pad(correct[order].cumsum(0), (1, 0))
    right_sorted = right[order]

    def error(first: Tensor, end: Tensor) -> float:
        average = (correct_sums[end] - correct_sums[first]) / (end - first)
        return float((average - right_sorted).abs().mean())

    shares = estimate_each(
        points,
        neighbors=Additive(Gaussian()),
        strengths=strengths,
        head=network,
        num_samples=num_samples,
        seed=seed,
        progress=progress,
    )
    agreement = shares.gather(2, predicted.expand(len(strengths), -1)[..., None])[..., 0].double()
    counts = [count for count in counts if count <= len(points)]
    return Toy(
        Curve(tuple(windows), tuple(error(*_within(confidence, width)) for width in windows)),
        Curve(tuple(counts), tuple(error(*_closest(confidence, count)) for count in counts)),
        Curve(tuple(strengths), tuple((agreement - right).abs().mean(1).tolist())),
        float((probs.max(dim=1).values - right).abs().mean()),
        float(correct.mean()),
        float(torch.maximum(truth, 1 - truth).mean()),
    )


def _points(num_each: int, distance: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.arange(2).repeat_interleave(num_each)
    center = distance / 2 / math.sqrt(2)
    means = torch.tensor([[-center, center], [center, -center]])
    return means[labels] + torch.randn(2 * num_each, 2, generator=generator), labels


def _truth(points: Tensor, distance: float) -> Tensor:
    """η(x) = p⁰(x) / (p⁰(x) + p¹(x)) = σ((μ₀ − μ₁)·x), for means that are each other's negative and Σ = I."""
    across = (points[:, 1] - points[:, 0]).double() / math.sqrt(2)
    return torch.sigmoid(distance * across)


def _trained(points: Tensor, labels: Tensor, *, epochs: int, seed: int) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    num_steps = epochs * math.ceil(len(points) / _BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(points), generator=generator), _BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(points[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return network.eval()


def _within(confidence: Tensor, width: float) -> tuple[Tensor, Tensor]:
    """First and end of the sorted confidences that differ by less than `width`; the point itself always does."""
    at = torch.arange(len(confidence))
    first = torch.searchsorted(confidence, confidence - width, right=True)
    end = torch.searchsorted(confidence, confidence + width)
    return torch.minimum(first, at), torch.maximum(end, at + 1)


def _closest(confidence: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """First and end of the `count` sorted confidences nearest to each, by bisection over where they begin."""
    at = torch.arange(len(confidence))
    low, high = (at - count + 1).clamp(min=0), at.clamp(max=len(confidence) - count)
    for _ in range(math.ceil(math.log2(count)) + 1):
        middle = (low + high) // 2
        beyond = confidence[(middle + count).clamp(max=len(confidence) - 1)] - confidence
        # Where the next one is nearer than the first, the run begins further on.
        is_later = (low < high) & (beyond < confidence - confidence[middle])
        low = torch.where(is_later, middle + 1, low)
        high = torch.where(is_later, high, torch.maximum(middle, low))
    return low, low + count


def draw(found: Toy, path: str) -> None:
    """The error of each estimate against the size of its neighbourhood."""
    from poise import plots

    kinds = {
        "confidences within ±": found.window,
        "nearest confidences, k": found.nearest,
        "perturbed data, noise ε": found.perturbed,
    }
    panels = {name: {"estimate": (curve.sizes, curve.errors)} for name, curve in kinds.items()}
    figure = plots.sweeps(panels, ylabel="mean error of P(right)", references={"the softmax itself": found.softmax})
    plots.save(figure, path, dpi=110)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", type=int, default=1_000_000, help="points of each class to learn from")
    parser.add_argument("--test", type=int, default=50_000, help="points of each class to test on")
    parser.add_argument("--distance", type=float, default=4.0, help="between the means, in standard deviations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--picture", metavar="FILE", help="the three curves; needs matplotlib")
    arguments = parser.parse_args()
    start = time.perf_counter()
    found = run(
        arguments.train, arguments.test, distance=arguments.distance, seed=arguments.seed, progress=Bar("neighbors")
    )
    print(
        f"{arguments.train:,} points of each class to learn, {arguments.test:,} to test, distance "
        f"{arguments.distance:g}: accuracy {100 * found.accuracy:.3f} %, at best {100 * found.bayes_accuracy:.3f} %"
    )
    print("mean error of the estimated probability of being right, in percent:")
    for name, curve in (
        ("confidence window", found.window),
        ("nearest confidences, k", found.nearest),
        ("perturbed data, ε", found.perturbed),
    ):
        size, least = curve.best
        places = [str(one) if isinstance(one, int) else f"{one:.3g}" for one in (size, *curve.sizes)]
        print(f"  {name:<24} least {100 * least:.3f} at {places[0]}")
        print("      " + ", ".join(f"{a}: {100 * b:.3f}" for a, b in zip(places[1:], curve.errors, strict=True)))
    print(f"  {'the softmax itself':<24} {100 * found.softmax:.3f}")
    print(f"{time.perf_counter() - start:.0f} seconds")
    if arguments.json:
        with atomic(arguments.json) as temporary:
            temporary.write_text(json.dumps(asdict(found), indent=2), encoding="utf-8")
    if arguments.picture:
        draw(found, arguments.picture)


if __name__ == "__main__":
    main()
