"""What the exact limit costs on this machine, as ratios to softmax and to the published loop, all timed in one run."""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from poise.calibrators import ConsistencyCalibration
from poise.link import Link
from poise.noise import Gaussian, GeneralizedNormal, Noise, Uniform

NOISES: tuple[Noise, ...] = (Gaussian(), GeneralizedNormal(4.0), Uniform())
DRAWS = 1000
"""Of the published loop."""

_TIMED_DRAWS = 20
_ROUNDS, _ROUNDS_OF_FITS = 9, 3
_LONG_ENOUGH = 0.01
"""Seconds; what takes less is repeated within a round."""


@dataclass(frozen=True)
class Costs:
    """Of one noise: medians over rounds in which everything was timed in turn."""

    noise: str
    strength: float
    predict_by_softmax: float
    """The calibrator's `predict_proba`, its judging of the input included."""
    link_by_softmax: float
    """`Link.prob` alone."""
    needed_by_softmax: float
    """`Link.prob_of`: the true classes' probabilities, which is what a fit takes at every step."""
    fit_by_softmax: float
    loop_by_predict: float
    extra_bytes: int | None
    """What a prediction needs at its peak beyond input and output; None where the system does not tell."""


@dataclass(frozen=True)
class Bench:
    """The costs of every noise on one device."""

    device: str
    threads: int
    torch: str
    rows: int
    classes: int
    softmax_seconds: float
    loop_seconds: float
    """Of 1000 draws: so many times the time of 20, divided by 20."""
    noises: tuple[Costs, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def run(
    device: str = "cpu",
    rows: int = 10_000,
    classes: int = 1000,
    noises: tuple[Noise, ...] = NOISES,
    progress: Callable[[str], None] = lambda what: None,
) -> Bench:
    """Time everything on logits like a network's: one leading class a row, right about nine times in ten."""
    logits, labels = network_like(rows, classes, device)
    progress("softmax and the published loop")
    loop = elapsed(lambda: published_loop(logits, _TIMED_DRAWS), device, repeats=1) * DRAWS / _TIMED_DRAWS
    costs, softmaxes = [], []
    for noise in noises:
        progress(f"{noise}: predicting")
        calibrator = ConsistencyCalibration(noise).fit(logits, labels)
        link, strength = Link(noise), calibrator.strength_
        softmax = functools.partial(torch.softmax, logits, dim=1)
        predicting: dict[str, Callable[[], object]] = {
            "softmax": softmax,
            "predict": functools.partial(calibrator.predict_proba, logits),
            "link": functools.partial(link.prob, logits, strength),
            "needed": functools.partial(link.prob_of, logits, labels, strength),
        }
        times = medians(predicting, device, _ROUNDS)
        progress(f"{noise}: fitting")
        fitting: dict[str, Callable[[], object]] = {
            "softmax": softmax,
            "fit": functools.partial(calibrator.fit, logits, labels),
        }
        fits = medians(fitting, device, _ROUNDS_OF_FITS)
        softmaxes.append(times["softmax"])
        costs.append(
            Costs(
                noise=str(noise),
                strength=strength,
                predict_by_softmax=times["predict"] / times["softmax"],
                link_by_softmax=times["link"] / times["softmax"],
                needed_by_softmax=times["needed"] / times["softmax"],
                fit_by_softmax=fits["fit"] / fits["softmax"],
                loop_by_predict=loop / times["predict"],
                extra_bytes=extra_bytes(calibrator, logits),
            )
        )
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    threads, seconds = torch.get_num_threads(), statistics.median(softmaxes)
    return Bench(name, threads, torch.__version__, rows, classes, seconds, loop, tuple(costs))


def network_like(rows: int, classes: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Logits with one leading class per row, right about nine times in ten, and the labels."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(rows, classes, generator=generator)
    labels = torch.randint(classes, (rows,), generator=generator)
    lift = 4 + torch.log(torch.tensor(float(classes))) + 3 * torch.randn(rows, generator=generator)
    logits[torch.arange(rows), labels] += lift
    return logits.to(device), labels.to(device)


def published_loop(logits: Tensor, draws: int, strength: float = 2.0) -> Tensor:
    """The vote as published: a pass over the logits for every draw."""
    votes = torch.zeros_like(logits)
    rows = torch.arange(len(logits), device=logits.device)
    for _ in range(draws):
        votes[rows, (logits + strength * torch.randn_like(logits)).argmax(1)] += 1
    return votes / draws


def medians(functions: Mapping[str, Callable[[], object]], device: str, rounds: int) -> dict[str, float]:
    """Median seconds of each, all in turn in each round, after one call that does not count."""
    for function in functions.values():
        function()
    once = {name: elapsed(function, device, repeats=1) for name, function in functions.items()}
    repeats = {name: max(1, round(_LONG_ENOUGH / seconds)) for name, seconds in once.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(elapsed(function, device, repeats=repeats[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def elapsed(function: Callable[[], object], device: str, *, repeats: int) -> float:
    """Seconds a call, from an idle device to an idle device."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    _wait(device)
    return (time.perf_counter() - start) / repeats


def extra_bytes(calibrator: ConsistencyCalibration, logits: Tensor) -> int | None:
    """The peak of one prediction beyond its input and its output."""
    if logits.device.type == "cuda":
        before = torch.cuda.memory_allocated(logits.device)
        torch.cuda.reset_peak_memory_stats(logits.device)
        output = calibrator.predict_proba(logits)
        size: int = torch.cuda.max_memory_allocated(logits.device) - before - output.nbytes
        return size
    if not Path("/proc/self/clear_refs").exists():
        return None
    # In a process of its own, whose arrays come from the system itself and not from what earlier ones left behind.
    shape = tuple(logits.shape)
    script = f"from poise.bench import *; from poise.noise import *; print_extra({calibrator.noise!r}, {shape!r})"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    return int(done.stdout)


def print_extra(noise: Noise, shape: tuple[int, int]) -> None:
    """By how much this process grew, at most, during one prediction, less its output."""
    logits, labels = network_like(*shape)
    calibrator = ConsistencyCalibration(noise).fit(logits[:300], labels[:300])
    # What is made once, tables and machine code, is not counted.
    calibrator.predict_proba(logits[:100])
    print(extra_of(lambda: calibrator.predict_proba(logits)))


def extra_of(function: Callable[[], Tensor]) -> int:
    """Bytes by which this process grows, at most, while the function runs, less its result's own; on Linux."""
    # Linux forgets the peak so far, which that of the imports would hide behind.
    Path("/proc/self/clear_refs").write_text("5")
    before = _in_use("VmRSS")
    output = function()
    return max(0, _in_use("VmHWM") - before - output.nbytes)


def _in_use(which: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(which)).split()[1])


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
