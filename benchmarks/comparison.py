"""Every method on every set of a folder, as `poise compare` prints it, and a summary over the sets.

Run it as ``python benchmarks/comparison.py FOLDER > docs/comparison.md``, where FOLDER holds pairs ``NAME.val.npz`` and
``NAME.test.npz``. What takes long is said on standard error. With ``--json`` every set that is finished is kept, so
that a run can be broken off and gone on with, and several runs can share the sets among them by ``--only``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import poise
from poise import Comparison
from poise.cli.compare import show
from poise.cli.screen import Screen
from poise.compare.methods import default_methods, short, variants

_COMMAND = "poise compare --val {name}.val.npz --test {name}.test.npz"

_OPENING = """# Every method on nine networks

This page is what `python benchmarks/comparison.py FOLDER` prints: first a summary, then for every set the table of

    {command}

on the folder's pairs NAME.val.npz and NAME.test.npz. Rows are sorted by NLL; how to read the marks, the small figures
and the noise floor stands under the first table and holds for all. "variants" are other published forms of a method.
"""


def printed(found: Comparison, *, with_legend: bool) -> str:
    """What the command shows on a screen of 120 columns."""
    os.environ |= {"COLUMNS": "120", "NO_COLOR": "1"}
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        show(Screen(widest=120), found, with_legend=with_legend)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).strip("\n")


def summary(comparisons: Sequence[Comparison]) -> str:
    """Of each method: geometric means of its NLL and ECE over those of temperature scaling, and how often it ties."""
    names = dict.fromkeys(row.method for found in comparisons for row in found.rows)
    lines = [
        "| method | NLL ÷ TS | worst | ECE ÷ TS | ties the best NLL | ties the best ECE | accuracy | fit s, longest |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    kept = []
    for name in names:
        ratios: dict[str, list[float]] = {"nll": [], "ece": []}
        ties, moved, times = {"nll": 0, "ece": 0}, [], []
        for found in comparisons:
            row = next((row for row in found.rows if row.method == name and row.error is None), None)
            if row is None:
                continue
            for metric, values in ratios.items():
                values.append(row.cells[metric].value / found["TemperatureScaling"].cells[metric].value)
                ties[metric] += bool(row.cells[metric].ties_best)
            moved.append(0.0 if row.accuracy_change is None else row.accuracy_change.value)
            times.append(row.fit_seconds or 0.0)
        if not moved:
            continue
        of = f"of {len(moved)}"
        nll, ece = (statistics.geometric_mean(ratios[metric]) for metric in ("nll", "ece"))
        tied = f"{ties['nll']} {of} | {ties['ece']} {of} | {100 * statistics.fmean(moved):+z.2f}"
        line = f"| {short(name)} | {nll:.3f} | {max(ratios['nll']):.3f} | {ece:.2f} | {tied} | {max(times):.1f} |"
        kept.append((nll, line))
    return "\n".join([*lines, *(line for _, line in sorted(kept))])


def needs_features(comparisons: Sequence[Comparison]) -> str:
    """Which methods are missing from most tables, and why."""
    known = default_methods(with_features=True) | variants(with_features=True)
    names = [short(name) for name, calibrator in known.items() if calibrator.needs_features]
    having = sum(any(short(row.method) in names for row in found.rows) for found in comparisons)
    return (
        f"With the network's features, which {having} of these sets have, and missing in the tables of the others:\n"
        f"{', '.join(names)}.\nTheir means are over other sets than the rest. `SampledConsistency`, the paper's own "
        "way by random\ndraws, is left out for its time: `--methods all` has it, and the README on the paper's network."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", default="default,variants", help="as for poise compare")
    parser.add_argument("--only", nargs="*", help="names of sets")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--json", type=Path, metavar="FOLDER", help="keep every comparison there, and take what is there"
    )
    arguments = parser.parse_args()
    names = sorted(path.name.removesuffix(".val.npz") for path in arguments.folder.glob("*.val.npz"))
    names = [name for name in names if arguments.only is None or name in arguments.only]
    if not names:
        parser.error(f"no NAME.val.npz in {arguments.folder}; pass the folder that holds the logits")
    comparisons = []
    for name in names:
        start = time.perf_counter()
        kept = arguments.json / f"{name}.json" if arguments.json else None
        if kept is not None and kept.exists():
            found = Comparison.from_json(kept)
        else:
            val, test = (arguments.folder / f"{name}.{split}.npz" for split in ("val", "test"))
            found = poise.compare(val, test, arguments.methods.split(","), seeds=arguments.seeds)
            if kept is not None:
                found.to_json(kept)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        comparisons.append(found)
        if not found.is_complete:
            break
    options = f" --methods {arguments.methods}" if arguments.methods != "default" else ""
    options += f" --seeds {arguments.seeds}"
    print(_OPENING.format(command=_COMMAND.format(name="NAME") + options))
    print(summary(comparisons))
    print(
        "\nNLL and ECE as measured, divided by those of temperature scaling, geometric means over the sets; accuracy: "
        "mean change in\npercentage points. The times are of one thread of a machine busy with other work."
    )
    print(f"\n{needs_features(comparisons)}")
    for index, (name, found) in enumerate(zip(names, comparisons, strict=False)):
        text = f"```text no-run\n{printed(found, with_legend=index == 0)}\n```"
        if index:
            text = f"<details><summary>the table</summary>\n\n{text}\n\n</details>"
        print(f"\n## {name}\n\n{text}")


if __name__ == "__main__":
    main()
