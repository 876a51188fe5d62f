"""The tables and the picture of `docs/anywhere.md` from what `benchmarks/levels.py` has found.

    python benchmarks/levels_page.py OUT [--picture FILE]

OUT holds `levels.json` and `votes.npz`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import poise
from poise import metrics, plots

LEVELS = {"image": "jitter s"} | {
    name: f"noise at {name}, deviations" for name in ("logits", "features", "layer 3", "layer 2", "layer 1")
}


def percent(interval: list[float]) -> str:
    value, low, high = (100 * one for one in interval)
    return f"{value:.2f} ({low:.1f} – {high:.1f})"


def nats(interval: list[float]) -> str:
    return "{:.3f} ({:.3f} – {:.3f})".format(*interval).replace("0.", ".")


def table(rows: list[dict[str, Any]], draws: int | None) -> None:
    """Rows of one number of draws, and what they cost in units of noise at the logits."""
    print("\n| perturbed | ECE | AdaECE | NLL | accuracy | strength | deviations | ms per row | × logits |")
    print("|---|---|---|---|---|---|---|---|---|")
    unit = next((row["ms"] for row in rows if row["name"].startswith("logits") and row.get("draws") == draws), None)
    for row in rows:
        if "accuracy" not in row or row.get("draws") != draws:
            continue
        cells = [
            row["name"],
            percent(row["ECE"]),
            percent(row["AdaECE"]),
            nats(row["NLL"]),
            percent(row["accuracy"]),
            "" if row["strength"] is None else f"{row['strength']:.3g}",
            "" if row.get("deviations") is None else f"{row['deviations']:.2g}",
            f"{row['ms']:.3g}" if row["ms"] else "",
            f"{row['ms'] / unit:,.0f}" if row["ms"] and unit else "",
        ]
        print(f"| {' | '.join(cells)} |")


def differences(votes: dict[str, Tensor], draws: int) -> None:
    """Of each perturbation of the image from the softmax and from temperature scaling, on the scored half."""
    logits, labels = votes["logits"], votes["labels"].long()
    fit, score = slice(None, None, 2), slice(1, None, 2)
    scaled = poise.TemperatureScaling().fit(logits[fit], labels[fit]).predict_proba(logits)
    others = {"the softmax": torch.softmax(logits, 1), "temperature scaling": scaled}
    print(f"\n| T = {draws}, ECE less that of | {' | '.join(others)} |\n|---|---|---|")
    for name, counts in votes.items():
        if not name.endswith(f"T = {draws}"):
            continue
        for index, shares in enumerate(counts.double() / draws):
            found = [
                metrics.paired_difference(metrics.ece, shares[score], other[score], labels[score])
                for other in others.values()
            ]
            cells = [
                f"{100 * d.value:+.2f} ({100 * d.low:.2f} – {100 * d.high:.2f}), p = {d.p_value:.3f}" for d in found
            ]
            print(f"| {name}, strength {index} | {' | '.join(cells)} |")


def picture(content: dict[str, Any], draws: int, path: Path) -> None:
    panels = {}
    for name, xlabel in LEVELS.items():
        curve = content["curves"].get(f"{name}, T = {draws}")
        if curve:
            # A jitter is a number as it is, a strength counts in deviations of what it perturbs.
            places = [one["deviations"] for one in curve]
            panels[xlabel] = {
                "ECE": (places, [one["ECE"] for one in curve]),
                "wrong": (places, [1 - one["accuracy"] for one in curve]),
            }
    references = {
        row["name"]: row["ECE"][0] for row in content["rows"] if row["name"] in ("uncalibrated", "temperature scaling")
    }
    plots.save(
        plots.sweeps(
            panels, ylabel="share of images", references={f"ECE, {name}": ece for name, ece in references.items()}
        ),
        path,
        dpi=110,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    content = json.loads((arguments.out / "levels.json").read_text("utf-8"))
    with np.load(arguments.out / "votes.npz") as arrays:
        votes = {name: torch.from_numpy(arrays[name]) for name in arrays}
    rows = content["rows"]
    many = sorted({row["draws"] for row in rows if row.get("draws")})
    print(
        f"{content['device']}, torch {content['torch']}, {content['images']} images, {content['total_seconds']:.0f} s"
    )
    print("left out or failed:", content["failed"] or "nothing")
    for draws in (None, *many):
        table(rows, draws)
    for draws in many:
        differences(votes, draws)
    for row in rows:
        if "per_second" in row:
            print(
                f"{row['name']}: {row['per_second']:,.0f} neighbors/s, "
                f"{100 * row['changed_votes']:.3f} % of the votes differ"
            )
        if "differs" in row:
            print(f"{row['name']} on {row['on']} differs by {row['differs']}")
        if "p" in row:
            print(f"{row['name']}: ECE {percent(row['ECE'])}, p = {row['p']:.3f}")
    if arguments.picture:
        picture(content, many[-1], arguments.picture)


if __name__ == "__main__":
    main()
