"""`poise fit`, `poise apply` and `poise evaluate`: learn on validation scores, apply to others, judge the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor

import poise
from poise._arrays import to_floating
from poise.calibrators import Calibrator
from poise.calibrators.criteria import NLL_FLOOR
from poise.cli.advice import refuse_options, show_advice, told
from poise.cli.measure import Measured, measure, plain_bins, top_label_bins
from poise.cli.methods import NOISES, calibrator, in_words, kept, learned
from poise.cli.options import Debug, Json, NumBins, check_outputs
from poise.cli.screen import Screen, legend, metrics_table, reliability, rows_table
from poise.io import Scores, load, read_scores, save, write_scores
from poise.io.scores import _format

_SCORES = "logits or probs, as .npz, .npy, .pt, .safetensors, .csv or .parquet"


def fit(
    val: Annotated[
        Path, typer.Argument(metavar="VAL", help=f"Validation scores with labels: {_SCORES}.", show_default=False)
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where the calibrator goes: a .safetensors file.", show_default=False
        ),
    ],
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="consistency (exact), temperature, sampled (random draws), paper (as published), auto (chosen by "
            "cross-validation), or a name that poise compare shows.",
        ),
    ] = "consistency",
    noise: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE",
            help=f"auto, {', '.join(NOISES)}; the last two take a number, as in log-gamma:4. "
            "Default: auto for consistency, gaussian for sampled.",
        ),
    ] = None,
    criterion: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What the fit minimizes: nll, brier, ece, adaptive_ece. Default: nll; ece for sampled and paper.",
        ),
    ] = None,
    scaling: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A map of the logits under the noise: none, vector, matrix, or auto. It may change predictions. "
            "Default: none.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws of sampled and paper, and of the folds of auto.")] = 0,
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Time that auto may take.")] = 120.0,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Learn a calibrator from a validation set that the network was not trained on."""
    screen = Screen(json)
    check_outputs({"the input": val}, {"--output": output, "--json": json})
    if output.suffix.lower() != ".safetensors":
        raise ValueError(f"a calibrator is kept as .safetensors, but --output {output} came; change its ending.")
    if method == "auto":
        refuse_options(noise, criterion, scaling)
        scores = read_scores(val)
        with screen.steps() as progress:
            advice = poise.recommend(scores, budget=budget, seed=seed, progress=progress)
        fitted, logits = advice.calibrator, network_logits(scores)
    else:
        advice, unfitted = None, calibrator(method, noise, criterion, scaling, seed)
        scores = read_scores(val)
        logits = network_logits(scores)
        with screen.working(f"fitting {type(unfitted).__name__} on {scores.num_samples:,} rows"):
            features = network_features(scores, unfitted, val)
            fitted = unfitted.fit(logits, scores.labels, features=features, classes=scores.classes)
    with screen.working("scoring"):
        labels = scores.labels
        assert labels is not None  # read_scores saw to it
        before = measure(network_probs(scores), labels)
        after = measure(fitted.predict_proba(logits, features=scores.features), labels)
    save(fitted, output)
    screen.write_json(
        {
            "poise": poise.__version__,
            "command": "fit",
            "input": str(val),
            "output": str(output),
            "method": method,
            "calibrator": type(fitted).__name__,
            "criterion": fitted.get_params().get("criterion"),
            "seed": seed,
            "num_samples": scores.num_samples,
            "num_classes": scores.num_classes,
            "learned": learned(fitted),
            "candidates": getattr(fitted, "candidates_", []),
            "recommendation": None if advice is None else told(advice),
            "nll_floor": NLL_FLOOR,
            "validation": {"before": plain_metrics(before), "after": plain_metrics(after)},
        }
    )
    screen.head(f"{type(fitted).__name__}, fitted on {sizes(scores)}")
    if scores.logits is None:
        screen.say("The file holds probabilities; their logarithms were taken for logits.")
    if advice is not None:
        show_advice(screen, advice)
    screen.say("Learned: " + ", ".join(f"{name} {in_words(value)}" for name, value in learned(fitted).items()))
    screen.show(*_candidates_table(fitted), metrics_table({"before": before, "after": after}))
    screen.say(
        "Both columns are of the validation set itself, which the fit has seen: judge on a test set.",
        f"Saved: {output}",
    )


def apply(
    calibrator_file: Annotated[
        Path, typer.Argument(metavar="CALIBRATOR", help="What `poise fit` wrote.", show_default=False)
    ],
    test: Annotated[
        Path, typer.Argument(metavar="TEST", help=f"Scores of the same classes: {_SCORES}.", show_default=False)
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="Where the probabilities go.", show_default=False),
    ],
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Turn a network's scores into calibrated probabilities; labels and class names go along."""
    screen = Screen(json)
    check_outputs(
        {"the calibrator": calibrator_file, "the input": test},
        {"--output": output, "--json": json},
    )
    _format(output)
    fitted = _load(calibrator_file, test)
    scores = read_scores(test, need_labels=False)
    if scores.num_samples == 0:
        raise ValueError(f"{test} holds 0 rows, so there is nothing to apply the calibrator to; check how it was made.")
    names = _class_names(fitted, scores, calibrator_file, test)
    logits, features = network_logits(scores), network_features(scores, fitted, test)
    with screen.working(f"{type(fitted).__name__} on {scores.num_samples:,} rows"):
        probs = fitted.predict_proba(logits, features=features)
    before = network_probs(scores)
    changed = int((probs.argmax(1) != before.argmax(1)).sum())
    sure = {"before": _mean_confidence(before), "after": _mean_confidence(probs)}
    write_scores(output, probs=probs, labels=scores.labels, classes=names)
    screen.write_json(
        {
            "poise": poise.__version__,
            "command": "apply",
            "input": str(test),
            "output": str(output),
            "calibrator": type(fitted).__name__,
            "num_samples": scores.num_samples,
            "num_classes": scores.num_classes,
            "has_labels": scores.labels is not None,
            "mean_confidence": sure,
            "changed_predictions": changed,
        }
    )
    screen.head(f"{type(fitted).__name__} applied to {sizes(scores)}")
    screen.say(
        f"Mean confidence {100 * sure['before']:.2f} % before, {100 * sure['after']:.2f} % after; "
        f"{changed:,} predictions changed.",
        f"Saved: {output}" + ("" if scores.labels is not None else " (without labels, for the input has none)"),
    )


def evaluate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=f"Scores with labels: {_SCORES}.", show_default=False)],
    num_bins: NumBins = 15,
    intervals: Annotated[
        bool, typer.Option("--intervals/--no-intervals", help="95 % intervals and the noise floor.")
    ] = True,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the reliability diagram: .png, .pdf or .svg.")
    ] = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Measure how true the confidence is: calibration errors with intervals, and the reliability diagram."""
    screen = Screen(json)
    check_outputs({"the input": file}, {"--plot": plot, "--json": json})
    if plot is not None:
        from poise import plots
    scores = read_scores(file)
    labels = scores.labels
    assert labels is not None  # read_scores saw to it
    probs = network_probs(scores)
    with screen.working("measuring") as status:
        measured = measure(
            probs,
            labels,
            num_bins=num_bins,
            intervals=intervals,
            floors=intervals,
            announce=lambda title: status.update(f"measuring {title}") if status else None,
        )
    bins = top_label_bins(probs, labels, num_bins)
    if plot is not None:
        plots.save(plots.reliability_diagram(probs, labels, num_bins=num_bins, title=file.name), plot)
    screen.write_json(
        {
            "poise": poise.__version__,
            "command": "evaluate",
            "input": str(file),
            "scores": "probs" if scores.logits is None else "logits",
            "num_samples": scores.num_samples,
            "num_classes": scores.num_classes,
            "num_bins": num_bins,
            "mean_confidence": _mean_confidence(probs),
            "nll_floor": NLL_FLOOR,
            "metrics": plain_metrics(measured),
            "bins": plain_bins(bins),
        }
    )
    what = "probabilities" if scores.logits is None else "softmax of the logits"
    screen.head(f"{file.name}: {what}, {sizes(scores)}")
    screen.show(metrics_table({"value": measured}))
    if intervals:
        screen.say(
            "Noise floor: what a perfectly calibrated network would show on as many rows, by chance alone. Calibration "
            "errors are too large by it, so an interval of the true error may lie below the value.",
        )
    screen.say(
        f"NLL in nats with a floor of {NLL_FLOOR:g}; {num_bins} bins; mean confidence "
        f"{100 * _mean_confidence(probs):.2f} %.",
    )
    screen.show(reliability(screen, {"": bins}))
    screen.out.print(legend(screen))
    if plot is not None:
        screen.say(f"Saved: {plot}")


def network_logits(scores: Scores) -> Tensor:
    """The logits, halves widened so that probabilities keep their digits."""
    return to_floating(scores.as_logits())


def network_features(scores: Scores, calibrator: Calibrator, file: Path) -> Tensor | None:
    """What the last layer read, where the file tells it."""
    if scores.features is None and calibrator.needs_features:
        raise ValueError(
            f"{type(calibrator).__name__} needs the network's features, but {file} has none; add an array `features` "
            "with what the last layer reads, one row for every sample."
        )
    return scores.features


def network_probs(scores: Scores) -> Tensor:
    """What the network itself says: its probabilities, or the softmax of its logits."""
    return torch.softmax(network_logits(scores), dim=1) if scores.probs is None else scores.probs


def plain_metrics(measured: list[Measured]) -> dict[str, Any]:
    """By name, with all digits, in fractions."""
    return {one.name: one.plain() for one in measured}


def sizes(scores: Scores) -> str:
    """n and K in words."""
    return f"{scores.num_samples:,} rows of {scores.num_classes:,} classes"


def _candidates_table(fitted: Calibrator) -> list[Table]:
    """What was tried, where there was a choice."""
    candidates: Sequence[dict[str, Any]] = getattr(fitted, "candidates_", ())
    if len(candidates) < 2:
        return []
    chosen = kept(fitted)
    columns = {name.replace("_", " "): "left" if name in ("noise", "neighbors") else "right" for name in candidates[0]}
    rows = [
        [
            *(f"{value:.5f}" if isinstance(value, float) else in_words(value) for value in candidate.values()),
            "kept" if index == chosen else "",
        ]
        for index, candidate in enumerate(candidates)
    ]
    return [rows_table({**columns, "": "left"}, rows, best=chosen)]


def _mean_confidence(probs: Tensor) -> float:
    return float(probs.double().amax(1).mean())


def _load(file: Path, test: Path) -> Calibrator:
    try:
        found: Calibrator = load(file)
    except ValueError as error:
        try:
            load(test)
        except (OSError, ValueError):
            raise error from None
        raise ValueError(
            f"the calibrator comes first, but {test} is the calibrator; write: poise apply {test} {file} -o ..."
        ) from error
    return found


def _class_names(fitted: Calibrator, scores: Scores, calibrator_file: Path, test: Path) -> tuple[str, ...] | None:
    """The names of the columns, if anyone knows them; a calibrator must not be applied to classes in another order."""
    known: tuple[str, ...] | None = None
    if fitted.classes_.dtype.kind == "U":
        known = tuple(map(str, fitted.classes_.tolist()))
    if known and scores.classes and known != scores.classes and len(known) == len(scores.classes):
        at = next(index for index, pair in enumerate(zip(known, scores.classes, strict=True)) if pair[0] != pair[1])
        raise ValueError(
            f"column {at} is {known[at]!r} in {calibrator_file} but {scores.classes[at]!r} in {test}; "
            "a calibrator needs the classes it was fitted with, in the same order."
        )
    return scores.classes or known
