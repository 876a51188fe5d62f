"""Exact consistency calibration against the published loop, the published search and softmax: ratios within one run.

Run it as ``python benchmarks/exact.py [--rows 10000] [--classes 10 100 1000] [--json FILE]``; OMP_NUM_THREADS=1 gives
all sides one thread. In each of some rounds everything is timed once, one thing after the other, and the medians over
the rounds are compared, so that other work on the machine meets all alike. The loop of T = 1000 draws is timed at
T = 20 and scaled by 50, and at K = 10 in full as well to check that. Peak memory is what one prediction needs beyond
its input and its output, in a process of its own that has predicted a row before; it is read from Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import poise
from poise.bench import extra_of, medians, network_like, published_loop
from poise.noise import Gaussian, GeneralizedNormal, LogGamma, Noise, Uniform

CLASSES = (10, 100, 1000)
NOISES: tuple[Noise, ...] = (
    LogGamma(0.25),
    LogGamma(4.0),
    Gaussian(),
    GeneralizedNormal(4.0),
    GeneralizedNormal(8.0),
    Uniform(),
)
PUBLISHED_EVALUATIONS = 80
TIMED_DRAWS, DRAWS = 20, 1000
ROUNDS, ROUNDS_OF_FITS = 7, 3


def calibrators() -> dict[str, poise.ConsistencyCalibration]:
    """One noise each, and the default, which fits several and keeps one."""
    return {str(noise): poise.ConsistencyCalibration(noise) for noise in NOISES} | {
        'noise="auto"': poise.ConsistencyCalibration()
    }


def measure(rows: int, num_classes: int) -> dict[str, Any]:
    """All ratios for one number of classes."""
    logits, labels = network_like(rows, num_classes)
    fitted = {name: calibrator.fit(logits, labels) for name, calibrator in calibrators().items()}
    predicting: dict[str, Callable[[], object]] = {
        "softmax": lambda: torch.softmax(logits, dim=1),
        "loop": lambda: published_loop(logits, TIMED_DRAWS),
    }
    fitting: dict[str, Callable[[], object]] = {}
    for name, calibrator in fitted.items():
        predicting[name] = lambda c=calibrator: c.predict_proba(logits)  # type: ignore[misc]
        fitting[name] = lambda c=calibrator: c.fit(logits, labels)  # type: ignore[misc]
    predict, fit = medians(predicting, "cpu", ROUNDS), medians(fitting, "cpu", ROUNDS_OF_FITS)
    loop = predict["loop"] * DRAWS / TIMED_DRAWS
    result: dict[str, Any] = {"classes": num_classes, "rows": rows, "softmax_seconds": predict["softmax"]}
    if num_classes == 10:
        both = {"scaled": predicting["loop"], "in full": lambda: published_loop(logits, DRAWS)}
        checked = medians(both, "cpu", ROUNDS)
        result["loop_in_full_by_loop_scaled"] = checked["in full"] / (checked["scaled"] * DRAWS / TIMED_DRAWS)
    result["loop_peak_megabytes"] = peak_memory(rows, num_classes, "loop")
    result["calibrators"] = {
        name: {
            "strength": calibrator.strength_,
            "loop_by_exact": loop / predict[name],
            "published_search_by_fit": PUBLISHED_EVALUATIONS * loop / fit[name],
            "exact_by_softmax": predict[name] / predict["softmax"],
            "fit_by_softmax": fit[name] / predict["softmax"],
            "peak_megabytes": peak_memory(rows, num_classes, name),
        }
        for name, calibrator in fitted.items()
    }
    return result


def peak_memory(rows: int, num_classes: int, name: str) -> float:
    """Megabytes that a prediction needs beyond its input and its output."""
    script = "import sys; sys.path.insert(0, sys.argv[1]); import exact; exact.print_peak(*sys.argv[2:])"
    here = str(Path(__file__).resolve().parent)
    done = subprocess.run(
        [sys.executable, "-c", script, here, str(rows), str(num_classes), name],
        capture_output=True,
        text=True,
        check=True,
        # Arrays come from the system itself, not from what earlier ones have left behind.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    return float(done.stdout)


def print_peak(rows: str, num_classes: str, name: str) -> None:
    """In a process of its own: by how much the memory in use grew, at most, during one prediction."""
    logits, labels = network_like(int(rows), int(num_classes))
    predict: Callable[[torch.Tensor], torch.Tensor] = lambda some: published_loop(some, TIMED_DRAWS)  # noqa: E731
    if name != "loop":
        predict = calibrators()[name].fit(logits[:300], labels[:300]).predict_proba
    # What is made once, tables and machine code, is not counted.
    predict(logits[:1])
    print(extra_of(lambda: predict(logits)) / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--classes", type=int, nargs="+", default=CLASSES, metavar="K")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    print(f"{arguments.rows} rows, {torch.get_num_threads()} thread(s), torch {torch.__version__}; medians in this run")
    print("loop ÷ exact: how much faster one exact prediction is than the published loop of T = 1000 draws;")
    print("search ÷ fit: the same of fitting, 80 evaluations of that loop against all that `fit` does;")
    print("MB: memory of a prediction beyond its input and output\n")
    print("| K | noise | loop ÷ exact | search ÷ fit | exact ÷ softmax | fit ÷ softmax | MB |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for num_classes in arguments.classes:
        result = measure(arguments.rows, num_classes)
        results.append(result)
        for name, figures in result["calibrators"].items():
            print(
                f"| {num_classes} | {name} | {figures['loop_by_exact']:.3g} "
                f"| {figures['published_search_by_fit']:.3g} | {figures['exact_by_softmax']:.3g} "
                f"| {figures['fit_by_softmax']:.3g} | {figures['peak_megabytes']:.0f} |",
                flush=True,
            )
        print(f"| {num_classes} | the published loop | 1 | | | | {result['loop_peak_megabytes']:.0f} |", flush=True)
    for result in results:
        if "loop_in_full_by_loop_scaled" in result:
            print(f"\nThe loop in full took {result['loop_in_full_by_loop_scaled']:.2f} × the scaled one.")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
