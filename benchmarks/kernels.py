"""The forms of the exact vote in single precision: their errors against float64, and on a GPU what their kernels cost.

    python benchmarks/kernels.py OUT [errors bench shapes growth] [--device cuda]

OUT/kernels.json is written anew after every part. On a CPU there are only the errors; the rest is for a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poise import bench
from poise.io import atomic
from poise.link import Link
from poise.noise import Gaussian, GeneralizedNormal, LogGamma, Noise, Uniform

NOISES: tuple[Noise, ...] = (Gaussian(), GeneralizedNormal(4.0), Uniform(), LogGamma(0.25), LogGamma(4.0))


def tables(num_classes: int) -> Iterator[tuple[str, Tensor]]:
    """Logits of several kinds, a hundred rows each, for a strength of 1."""
    generator = torch.Generator().manual_seed(num_classes)
    normal = torch.randn(100, num_classes, generator=generator)
    yield "spread", 3 * normal
    yield "flat", 0.3 * normal
    yield "network", bench.network_like(100, num_classes)[0]
    if num_classes > 2:
        crowd = 0.1 * normal - 2 - 4 * torch.rand(100, 1, generator=generator)
        crowd[:, :2] = torch.randn(100, 2, generator=generator)
        yield "crowd", crowd


def errors(device: str) -> list[dict[str, Any]]:
    """The worst of every noise, type, number of classes and kind of row."""
    found = []
    for noise in NOISES:
        link = Link(noise)
        for num_classes in (2, 10, 100, 1000):
            for kind, logits in tables(num_classes):
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    scores = logits.to(dtype)
                    exact = link.log_prob(scores.double()).exp()
                    probs = link.prob(scores.to(device))
                    labels = torch.randint(num_classes, (len(scores),), generator=torch.Generator().manual_seed(0))
                    of = link.prob_of(scores.to(device), labels.to(device)).cpu().double()
                    values = probs.cpu().double()
                    ranked = values.gather(1, scores.double().argsort(dim=1, stable=True))
                    found.append(
                        {
                            "noise": str(noise),
                            "classes": num_classes,
                            "rows": kind,
                            "dtype": str(dtype),
                            "absolute": float((values - exact).abs().max()),
                            "relative": float(((values - exact).abs() / exact)[exact > 1e-12].max()),
                            "sum": float((values.sum(1) - 1).abs().max()),
                            "reversed": int((ranked.diff(dim=1) < 0).sum()),
                            "other_class": int((values.argmax(1) != exact.argmax(1)).sum()),
                            "of_label": float((of - exact.gather(1, labels[:, None])[:, 0]).abs().max()),
                        }
                    )
    return found


def milliseconds(function: Callable[[], object]) -> float:
    import triton

    return float(triton.testing.do_bench(function, warmup=10, rep=60, return_mode="median"))


def shapes(logits: Tensor, labels: Tensor) -> list[dict[str, Any]]:
    """Time of prediction and of what a fit needs, for tiles of other sizes than the usual ones."""
    from poise.link import series_gpu, uniform_gpu

    found = []

    def timed(noise: Noise, module: Any, name: str, others: dict[str, Any]) -> None:
        usual = dict(getattr(module, name))
        getattr(module, name).update(others)
        try:
            link = Link(noise)
            ms = {
                "prob": milliseconds(lambda: link.prob(logits)),
                "prob_of": milliseconds(lambda: link.prob_of(logits, labels)),
            }
            found.append({"noise": str(noise), "what": name, **others, **ms})
            print(found[-1], flush=True)
        except Exception as error:
            found.append({"noise": str(noise), "what": name, **others, "failed": repr(error)[:300]})
            print(found[-1], flush=True)
        finally:
            getattr(module, name).clear()
            getattr(module, name).update(usual)

    found.append({"softmax": milliseconds(lambda: torch.softmax(logits, 1)), "copy": milliseconds(logits.clone)})
    print(found[-1], flush=True)
    for noise in (Gaussian(), GeneralizedNormal(4.0)):
        for rows, tile, precision, warps in (
            (16, 16, "ieee", 4),
            (16, 16, "ieee", 8),
            (16, 32, "tf32x3", 4),
            (16, 32, "tf32x3", 8),
            (32, 16, "ieee", 8),
        ):
            tiles = {"ROWS": rows, "TILE": tile, "PRECISION": precision, "num_warps": warps}
            timed(noise, series_gpu, "_OF_CURVES", tiles)
        for size in (32, 64, 128):
            timed(noise, series_gpu, "_OF_MOMENTS", {"SIZE": size})
        for size in (64, 128, 256):
            timed(noise, series_gpu, "_OF_PROBS", {"SIZE": size})
    for size in (64, 128, 256):
        timed(Uniform(), uniform_gpu, "_OF_VOTES", {"SIZE": size})
    return found


def growth() -> list[dict[str, Any]]:
    """Cost against n and K, each with softmax beside it."""
    found = []
    for rows, num_classes in (
        (1_000, 1000), (10_000, 1000), (100_000, 1000), (1_000_000, 100), (1_000_000, 10),
        (50_000, 2), (50_000, 10), (50_000, 100), (50_000, 10_000), (20_000, 32_000),
    ):  # fmt: skip
        logits = 2 * torch.randn(rows, num_classes, device="cuda")
        logits[:, 0] += 8
        labels = torch.zeros(rows, dtype=torch.long, device="cuda")
        row: dict[str, Any] = {"rows": rows, "classes": num_classes}
        row["softmax"] = milliseconds(lambda z=logits: torch.softmax(z, 1))
        for noise in (Gaussian(), GeneralizedNormal(4.0), Uniform()):
            link = Link(noise)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            output = link.prob(logits)
            extra = torch.cuda.max_memory_allocated() - before - output.nbytes
            del output
            row[str(noise)] = {
                "prob": milliseconds(lambda z=logits, one=link: one.prob(z)),
                "prob_of": milliseconds(lambda z=logits, one=link, y=labels: one.prob_of(z, y)),
                "extra_bytes": extra,
            }
        found.append(row)
        print(row, flush=True)
        del logits
        torch.cuda.empty_cache()
    return found


def worst(found: list[dict[str, Any]]) -> None:
    """A line per noise and type: the largest of every error."""
    for noise in map(str, NOISES):
        for dtype in ("torch.float32", "torch.bfloat16", "torch.float16"):
            some = [one for one in found if one["noise"] == noise and one["dtype"] == dtype]
            keys = ("absolute", "relative", "sum", "of_label")
            most = {key: f"{max(one[key] for one in some):.1e}" for key in keys}
            counts = {key: sum(one[key] for one in some) for key in ("reversed", "other_class")}
            print(noise, dtype, most | counts, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=1000)
    given = parser.parse_args()
    parts: dict[str, Callable[[], Any]] = {"errors": lambda: errors(given.device)}
    if given.device != "cpu":
        logits, labels = bench.network_like(given.rows, given.classes, given.device)
        parts |= {
            "shapes": lambda: shapes(logits, labels),
            "growth": growth,
            "bench": lambda: bench.run(given.device, given.rows, given.classes, progress=print).as_dict(),
        }
    if unknown := set(given.parts) - set(parts):
        parser.error(f"no part {', '.join(unknown)} on {given.device}; there are {', '.join(parts)}")
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"device": given.device, "torch": torch.__version__}
    for name in given.parts or parts:
        start = time.perf_counter()
        # A part that fails must not cost those after it.
        try:
            found[name] = parts[name]()
        except Exception:
            found[name] = {"failed": traceback.format_exc()}
            print(found[name]["failed"], flush=True)
        print(name, f"{time.perf_counter() - start:.1f} s", flush=True)
        with atomic(given.out / "kernels.json") as temporary:
            temporary.write_text(json.dumps(found, indent=1), encoding="utf-8")
        if name == "errors" and isinstance(found[name], list):
            worst(found[name])


if __name__ == "__main__":
    main()
