"""The paper's train-time rows on networks of one's own: all runs by one command, their table by another.

    python benchmarks/train_time.py train IMAGES RUNS    trains and extracts, most important first; goes on if stopped
    python benchmarks/train_time.py table [RUNS]         the table, from the logits that are there; or that ship
    python benchmarks/train_time.py ship RUNS FOLDER     what the package keeps of the runs: all but weights, features

IMAGES holds CIFAR-10 as `poise train` takes it. RUNS/NETWORK.LOSS is a run, its folder scores has logits and features.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import poise
from poise import metrics

RUNS = [
    *(("resnet50", loss) for loss in ("cross-entropy", "flsd53", "brier", "label-smoothing", "mmce", "focal")),
    ("resnet50", "dual-focal"),
    *((network, "cross-entropy") for network in ("wide-resnet-26-10", "densenet121", "resnet110")),
]
"""In the order of their importance."""

METRICS: dict[str, tuple[Callable[..., float], float]] = {
    "ECE": (metrics.ece, 100),
    "AdaECE": (metrics.adaptive_ece, 100),
    "CECE": (metrics.classwise_ece, 100),
    "NLL": (metrics.nll, 100),
    "accuracy": (metrics.accuracy, 100),
}

SHIPPED = Path(poise.__file__).parent / "data" / "cifar10"

PAPER_LOSSES = ("cross-entropy", "brier", "mmce", "label-smoothing", "flsd53", "focal")
PAPER: dict[str, dict[str, str]] = {
    "resnet50": {
        "ECE": "4.34 0.78 1.80 1.07 4.56 0.83 2.97 1.24 1.55 0.49 1.48 0.66",
        "AdaECE": "4.33 0.64 1.75 0.99 4.55 1.06 3.88 1.74 1.56 0.36 1.95 0.71",
        "CECE": "0.91 0.39 0.46 0.35 0.94 0.47 0.71 0.53 0.42 0.35 0.43 0.39",
        "NLL": "41.2 20.4 18.7 22.3 44.8 20.9 27.7 29.3 17.6 22.7 18.4 24.2",
        "accuracy": "95.05 95.06 94.99 95.01 95.01 94.99 94.71 94.68 95.02 94.95 94.75 94.75",
    },
    "resnet110": {
        "ECE": "4.41 0.98 2.57 0.48 5.08 1.17 2.09 2.30 1.88 0.67 1.54 0.48",
        "AdaECE": "4.40 0.96 2.60 0.30 5.07 1.80 4.48 2.43 2.08 0.73 1.64 0.38",
        "CECE": "0.92 0.41 0.59 0.41 1.04 0.50 0.66 0.67 0.48 0.39 0.43 0.37",
        "NLL": "47.5 25.5 20.4 22.5 55.7 25.5 29.9 29.4 18.5 21.9 17.8 23.1",
        "accuracy": "95.11 95.16 94.52 94.48 94.60 94.63 94.48 94.49 94.57 94.63 94.92 94.94",
    },
    "densenet121": {
        "ECE": "4.51 1.07 1.52 0.78 5.10 1.18 1.87 1.39 1.23 0.68 1.31 0.98",
        "AdaECE": "4.49 1.20 2.02 0.64 5.10 1.76 4.40 1.94 1.38 0.53 1.23 0.69",
        "CECE": "0.92 0.43 0.46 0.37 1.04 0.59 0.60 0.48 0.41 0.35 0.42 0.35",
        "NLL": "42.9 24.0 19.1 21.2 52.1 31.2 28.7 28.5 18.4 27.2 18.0 28.3",
        "accuracy": "95.02 95.01 94.90 94.86 94.59 94.60 94.91 94.91 94.58 94.51 94.66 94.66",
    },
    "wide-resnet-26-10": {
        "ECE": "3.24 0.36 1.24 0.58 3.29 0.39 4.25 1.15 1.58 0.49 1.68 0.53",
        "AdaECE": "3.24 0.40 1.70 0.57 3.29 0.63 4.27 1.54 1.52 0.42 1.84 0.42",
        "CECE": "0.68 0.32 0.44 0.32 0.70 0.38 0.79 0.41 0.41 0.28 0.44 0.30",
        "NLL": "26.8 17.1 15.9 16.2 28.5 18.2 21.7 24.5 14.6 17.6 15.2 19.9",
        "accuracy": "96.13 96.12 95.92 95.90 96.09 96.05 95.80 95.83 95.99 96.01 95.87 95.87",
    },
}
"""CIFAR-10 in the paper's Table 2 and its twins in the appendix: base and ours of each of `PAPER_LOSSES`."""


def in_paper(network: str, loss: str) -> list[dict[str, float]]:
    """The paper's base and its CC, where it has them."""
    if loss not in PAPER_LOSSES or network not in PAPER:
        return []
    first = 2 * PAPER_LOSSES.index(loss)
    return [
        {metric: float(figures.split()[first + column]) for metric, figures in PAPER[network].items()}
        for column in (0, 1)
    ]


def train(given: argparse.Namespace) -> None:
    """Every run that is not there yet, each a `poise train` and a `poise extract`, until the time is over."""
    end = time.monotonic() + 60 * given.minutes
    given.runs.mkdir(exist_ok=True)
    names = [".".join(one) for one in RUNS]
    for name in given.only or names:
        if name not in names:
            raise SystemExit(f"--only must name runs of {', '.join(names)}, but {name!r} came.")
        network, _, loss = name.partition(".")
        run = given.runs / name
        if not (run / "scores" / "test.npz").exists():
            options = ["--data", given.images, "--network", network, "--loss", loss, "--recipe", given.recipe]
            options += ["--checkpoint-every", 5, "-o", run]
            options += [] if given.epochs is None else ["--epochs", given.epochs]
            options += ["--compile"] if given.compile else []
            options += ["--resume"] if run.exists() else []
            features = "--features" if given.features else "--no-features"
            for command in (["train", *options], ["extract", run, "-o", run / "scores", features]):
                call([sys.executable, "-m", "poise.cli", *map(str, command)], end - time.monotonic())
        if given.ship is not None:
            ship(given.runs, given.ship)


def call(command: Sequence[str], seconds: float) -> None:
    try:
        subprocess.run(command, check=True, timeout=max(seconds, 0))
    except subprocess.TimeoutExpired:
        # A run that is killed loses what came after its last checkpoint, no more.
        raise SystemExit("the time is over; the same command goes on from the last checkpoint.") from None


def ship(runs: Path, folder: Path) -> None:
    """Configuration, log, logits, labels and class names of every finished run, in new folders of the same names.

    Prints the data card's line of each. What is in the folder already stays as it is.
    """
    for run in sorted(path.parent.parent for path in runs.glob("*/scores/test.npz")):
        kept = folder / run.name
        if (kept / "scores" / "test.npz").exists():
            continue
        (kept / "scores").mkdir(parents=True, exist_ok=True)
        config = json.loads((run / "config.json").read_text("utf-8"))
        (kept / "config.json").write_text(json.dumps(config | {"data": None}, indent=2) + "\n", encoding="utf-8")
        shutil.copy(run / "log.csv", kept)
        for split in ("val", "test"):
            one = poise.read_scores(run / "scores" / f"{split}.npz")
            assert one.labels is not None
            np.savez_compressed(
                kept / "scores" / f"{split}.npz",
                logits=one.as_logits().numpy(),
                labels=one.labels.numpy().astype(np.uint8),
                classes=np.array(one.classes),
            )
        print(card(run.name, kept))


def card(name: str, run: Path) -> str:
    """What a shipped run was, as a line of the data card's table."""
    config = json.loads((run / "config.json").read_text("utf-8"))
    with (run / "log.csv").open(encoding="utf-8", newline="") as log:
        seconds = statistics.median(float(row["seconds"]) for row in csv.DictReader(log))
    recipe = config["recipe"]
    cells = [name, recipe["epochs"], recipe["batch_size"], recipe["peak_rate"], config["seed"], f"{seconds:.1f}"]
    for split in ("val", "test"):
        one = poise.read_scores(run / "scores" / f"{split}.npz")
        assert one.labels is not None
        probs = torch.softmax(one.as_logits().double(), 1)
        cells += [
            f"{100 * metrics.accuracy(probs, one.labels):.2f}",
            f"{100 * metrics.ece(probs, one.labels):.2f}",
            f"{metrics.nll(probs, one.labels):.4f}",
        ]
    size = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
    return f"| {' | '.join(map(str, cells))} | {size:,} |"


def figures(probs: Tensor, labels: Tensor) -> dict[str, float]:
    return {name: scale * metric(probs, labels) for name, (metric, scale) in METRICS.items()}


def sampled(logits: Tensor, labels: Tensor, test: Tensor, num_seeds: int) -> Iterator[Tensor]:
    """CC as published, once per seed."""
    for seed in range(num_seeds):
        yield poise.paper_consistency().set_params(seed=1000 * seed).fit(logits, labels).predict_proba(test)


def table(runs: Path, num_seeds: int, resamples: int) -> None:
    """base, TS, CC sampled and CC exact of every run that has its scores, beside the paper's figures."""
    kept = [name for name in RUNS if (runs / ".".join(name) / "scores" / "test.npz").exists()]
    found = {name: row(runs / ".".join(name), num_seeds, resamples) for name in kept}
    columns = ("base", "+TS", "+CC sampled", "+CC exact")
    print(
        "95 % intervals in brackets, of the test rows alone and less the upward bias of calibration errors; CC sampled "
        f'is the mean of {num_seeds} seeds ± the deviation of one. "paper" are its networks, base and +CC.'
    )
    for metric in METRICS:
        unit = "nats times 100, floor 1e-12" if metric == "NLL" else "percent"
        print(f"\n### {metric}, {unit}\n\n| network, loss | {' | '.join(columns)} | paper: base | paper: +CC |")
        print("|---|" + "---|" * (len(columns) + 2))
        for name in kept:
            theirs = [f"{one[metric]:.{1 if metric == 'NLL' else 2}f}" for one in in_paper(*name)] or ["", ""]
            ours = [found[name][column][metric] for column in columns]
            print("|", ", ".join(name), "|", " | ".join([*ours, *theirs]), "|")
    print("\n### +CC exact less +TS, on the same rows, and what was fitted\n")
    print("| network, loss | ECE | NLL | shape of the noise | temperature |\n|---|---|---|---|---|")
    for name in kept:
        print("|", ", ".join(name), "|", " | ".join(found[name]["difference"].values()), "|")


def row(run: Path, num_seeds: int, resamples: int) -> dict[str, dict[str, str]]:
    """Every cell of a run: by column, then by metric."""
    val, test = (poise.read_scores(run / "scores" / f"{split}.npz") for split in ("val", "test"))
    logits, labels, rows, truth = val.as_logits().float(), val.labels, test.as_logits().float(), test.labels
    assert labels is not None
    assert truth is not None
    exact = poise.ConsistencyCalibration().fit(logits, labels)
    tempered = poise.TemperatureScaling().fit(logits, labels)
    single = {
        "base": torch.softmax(rows, 1),
        "+TS": tempered.predict_proba(rows),
        "+CC exact": exact.predict_proba(rows),
    }
    cells = {
        column: {
            name: in_brackets(metrics.interval(metric, probs, truth, resamples=resamples), scale, "")
            for name, (metric, scale) in METRICS.items()
        }
        for column, probs in single.items()
    }
    seeds = [figures(probs, truth) for probs in sampled(logits, labels, rows, num_seeds)]
    cells["+CC sampled"] = {
        name: f"{statistics.mean(seed[name] for seed in seeds):.2f} ± "
        f"{statistics.pstdev(seed[name] for seed in seeds):.2f}"
        for name in METRICS
    }
    cells["difference"] = {
        name: in_brackets(
            metrics.paired_difference(METRICS[name][0], single["+CC exact"], single["+TS"], truth, resamples=resamples),
            100,
            "+",
        )
        for name in ("ECE", "NLL")
    } | {"shape": str(exact.noise_), "temperature": f"{tempered.temperature_:.2f}"}
    print(f"{run.name}: done", file=sys.stderr, flush=True)
    return cells


def in_brackets(found: Any, scale: float, sign: str) -> str:
    """A value and its interval."""
    value, low, high = (f"{scale * one:{sign}.2f}" for one in (found.value, found.low, found.high))
    return f"{value} [{low}, {high}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train", help="all runs that are not there yet")
    training.add_argument("images", type=Path)
    training.add_argument("runs", type=Path)
    training.add_argument("--recipe", default="short", help="short (default) or paper")
    training.add_argument("--epochs", type=int, help="the recipe in so many epochs")
    training.add_argument("--only", nargs="+", metavar="NETWORK.LOSS", help="these runs, in this order")
    training.add_argument("--minutes", type=float, default=math.inf, help="stop after so many; the rest another time")
    training.add_argument("--compile", action="store_true", help="as poise train has it: worth it on a GPU")
    training.add_argument("--no-features", dest="features", action="store_false", help="extract logits alone")
    training.add_argument("--ship", type=Path, metavar="FOLDER", help="ship there whatever is finished")
    training.set_defaults(do=train)
    tabling = commands.add_parser("table", help="the table, from the logits that are there")
    tabling.add_argument("runs", type=Path, nargs="?", default=SHIPPED, help="default: the runs that ship")
    tabling.add_argument("--seeds", type=int, default=5)
    tabling.add_argument("--resamples", type=int, default=1000)
    tabling.set_defaults(do=lambda given: table(given.runs, given.seeds, given.resamples))
    shipping = commands.add_parser("ship", help="what the package keeps of the runs")
    shipping.add_argument("runs", type=Path)
    shipping.add_argument("folder", type=Path)
    shipping.set_defaults(do=lambda given: ship(given.runs, given.folder))
    given = parser.parse_args()
    if not given.runs.is_dir() and "images" not in given:
        parser.error(f"there is no folder {given.runs}; train first")
    given.do(given)


if __name__ == "__main__":
    main()
