"""How the cost of exact probabilities grows with rows and classes, each time with softmax beside it; as a picture.

python benchmarks/growth.py PICTURE.png [--json FILE] [--device cpu]
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

from poise import bench
from poise.io import atomic
from poise.link import Link
from poise.noise import Gaussian, GeneralizedNormal, Noise, Uniform

NOISES: tuple[Noise, ...] = (Gaussian(), GeneralizedNormal(4.0), Uniform())
ROWS = (1_000, 10_000, 100_000, 1_000_000)
CLASSES = (2, 10, 100, 1_000, 10_000, 32_000)
FIXED_CLASSES, NUMBERS = 100, 10_000_000
"""Of the growth with rows; and as many numbers, rows times classes, of the growth with classes."""

ROUNDS = 5


def measure(rows: int, classes: int, device: str) -> dict[str, Any]:
    """Nanoseconds per logit of softmax and of every noise at a strength of 1."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(rows, classes, device=device)
    logits[:, 0] += 8
    functions = {"softmax": functools.partial(torch.softmax, logits, dim=1)}
    functions |= {str(noise): functools.partial(Link(noise).prob, logits) for noise in NOISES}
    seconds = bench.medians(functions, device, ROUNDS)
    found = {"rows": rows, "classes": classes, **{name: 1e9 * one / logits.numel() for name, one in seconds.items()}}
    print("  ".join(f"{name} {value:,.3g}" for name, value in found.items()), flush=True)
    return found


def draw(by_rows: list[dict[str, Any]], by_classes: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, found, key, title in (
        (axes[0], by_rows, "rows", f"rows of {FIXED_CLASSES} classes"),
        (axes[1], by_classes, "classes", f"classes, {NUMBERS:,} logits in all"),
    ):
        for name in ("softmax", *map(str, NOISES)):
            style = {"color": "0.5", "linestyle": "--"} if name == "softmax" else {"marker": "o"}
            axis.loglog([one[key] for one in found], [one[name] for one in found], label=name, **style)
        axis.set_xlabel(title)
        axis.set_ylabel("ns per logit")
        axis.grid(alpha=0.3)
    axes[1].legend()
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    by_rows = [measure(rows, FIXED_CLASSES, arguments.device) for rows in ROWS]
    by_classes = [measure(max(100, NUMBERS // classes), classes, arguments.device) for classes in CLASSES]
    draw(by_rows, by_classes, arguments.picture)
    if arguments.json:
        content = {"device": arguments.device, "rows": by_rows, "classes": by_classes}
        with atomic(arguments.json) as temporary:
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
