"""Exact consistency calibration against the published loop, the published search and softmax: ratios within one run.

Run it as ``python benchmarks/exact.py [--rows 10000] [--json FILE]``. The loop of T = 1000 draws is timed at T = 20
and scaled by 50, and once in full at K = 10 to check that. Peak memory is that of one prediction in a process of its
own, beyond what input and output take.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import poise
from poise.noise import Gaussian, GeneralizedNormal, Noise, Uniform

CLASSES = (10, 100, 1000)
NOISES: tuple[Noise, ...] = (Gaussian(), GeneralizedNormal(4.0), GeneralizedNormal(8.0), Uniform())
PUBLISHED_EVALUATIONS = 80
TIMED_DRAWS, DRAWS = 20, 1000


def network_like(rows: int, num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with one leading class per row, right about nine times in ten, and the labels."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(rows, num_classes, generator=generator)
    labels = torch.randint(num_classes, (rows,), generator=generator)
    lift = 4 + torch.log(torch.tensor(float(num_classes))) + 3 * torch.randn(rows, generator=generator)
    logits[torch.arange(rows), labels] += lift
    return logits, labels


def published_loop(logits: torch.Tensor, strength: float, draws: int) -> torch.Tensor:
    """The vote as published: a pass over the logits for every draw."""
    votes = torch.zeros_like(logits)
    rows = torch.arange(len(logits))
    for _ in range(draws):
        votes[rows, (logits + strength * torch.randn_like(logits)).argmax(1)] += 1
    return votes / draws


def seconds(function: Callable[[], object], repeats: int) -> float:
    """Median of some runs after one that does not count."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak_memory(rows: int, num_classes: int, noise: Noise) -> float:
    """Megabytes that `predict_proba` needs beyond its input and its output."""
    here = os.path.dirname(os.path.abspath(__file__))
    script = (
        f"import sys; sys.path.insert(0, {here!r}); import exact; from poise.noise import *; "
        f"exact.print_peak({rows}, {num_classes}, {noise!r})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(done.stdout)


def print_peak(rows: int, num_classes: int, noise: Noise) -> None:
    """In a process of its own: the growth of the peak during one prediction, in megabytes."""
    logits, _ = network_like(rows, num_classes)
    link = poise.Link(noise)
    link.log_prob(logits[:1] / 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    link.log_prob(logits / 2)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(max(0.0, grown - logits.numel() * logits.element_size() / 2**20))


def measure(rows: int, num_classes: int) -> dict[str, object]:
    """All ratios for one number of classes."""
    logits, labels = network_like(rows, num_classes)
    softmax = seconds(lambda: torch.softmax(logits, dim=1), 15)
    loop = seconds(lambda: published_loop(logits, 2.0, TIMED_DRAWS), 3) * DRAWS / TIMED_DRAWS
    result: dict[str, object] = {"classes": num_classes, "rows": rows, "softmax_seconds": softmax, "noises": {}}
    if num_classes == 10:
        start = time.perf_counter()
        published_loop(logits, 2.0, DRAWS)
        result["loop_in_full_by_loop_scaled"] = (time.perf_counter() - start) / loop
    for noise in NOISES:
        calibrator = poise.ConsistencyCalibration(noise=noise)
        start = time.perf_counter()
        calibrator.fit(logits, labels)
        fit = time.perf_counter() - start
        exact = seconds(lambda c=calibrator: c.predict_proba(logits), 3 if num_classes < 1000 else 1)
        result["noises"][str(noise)] = {  # type: ignore[index]
            "strength": calibrator.strength_,
            "loop_by_exact": loop / exact,
            "published_search_by_fit": PUBLISHED_EVALUATIONS * loop / fit,
            "exact_by_softmax": exact / softmax,
            "fit_by_softmax": fit / softmax,
            "peak_megabytes": peak_memory(rows, num_classes, noise),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    print(
        f"{arguments.rows} rows, {torch.get_num_threads()} threads, torch {torch.__version__}; ratios within this run"
    )
    print("T = 1000 loop ÷ exact: how much faster than the published loop one exact prediction is;")
    print("search ÷ fit: the same for fitting one noise (80 evaluations of that loop against all that fit does)\n")
    header = f"{'K':>5}  {'noise':<28}{'loop÷exact':>11}{'search÷fit':>12}{'exact÷softmax':>15}{'extra MB':>10}"
    print(header)
    results = []
    for num_classes in CLASSES:
        result = measure(arguments.rows, num_classes)
        results.append(result)
        for noise, figures in result["noises"].items():  # type: ignore[attr-defined]
            print(
                f"{num_classes:>5}  {noise:<28}{figures['loop_by_exact']:>11.1f}"
                f"{figures['published_search_by_fit']:>12.0f}{figures['exact_by_softmax']:>15.1f}"
                f"{figures['peak_megabytes']:>10.0f}",
                flush=True,
            )
        if "loop_in_full_by_loop_scaled" in result:
            print(f"       (the loop in full took {result['loop_in_full_by_loop_scaled']:.2f} × the scaled one)")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
