"""Reliability, single predictions and curves: computed first, then drawn, without any global state of matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from poise import _check
from poise._types import Array
from poise.io import atomic
from poise.io.files import FilePath
from poise.metrics import Bins, accuracy
from poise.metrics.bins import top_label

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter
except ImportError as error:
    raise ImportError('drawing needs matplotlib: pip install "poise[plots]".') from error

# Okabe and Ito's colours, which the colour-blind tell apart; here they differ in lightness and hatching too.
_ACCURACY, _GAP, _INK, _SHARE = "#9CC9E8", "#D55E00", "#1A1A1A", "#8C8C8C"

_CLASSES = ("#9CC9E8", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2")
"""Of the same palette, for classes side by side."""

_PANEL = (4.8, 5.9)
"""Inches of one diagram with its histogram."""


def reliability_diagram(
    probs: Array, labels: Array, *, num_bins: int = 15, axes: Axes | None = None, title: str | None = None
) -> Figure:
    """How often the network is right, for every height of its confidence; a true confidence lies on the diagonal.

    Bars are the accuracy of each bin of `ece`, the hatched part is its gap to the mean confidence, and the points, at
    that mean confidence, carry Wilson's 95 % intervals. Below is the share of the samples in each bin.

    A gap within its interval may be chance, and a bar without neighbours in the histogram stands on few samples. Draws
    into `axes` where they are given and leaves room for the histogram below them, else into a new figure; neither
    pyplot nor its backend is touched.

    >>> figure = reliability_diagram([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]], [0, 1, 1], num_bins=5)
    >>> len(figure.axes[0].patches) > 0
    True

    Reference: DeGroot, Fienberg, The Statistician 1983; Guo et al., ICML 2017; Wilson, JASA 1927.
    """
    bins = _bins(probs, labels, num_bins)
    if axes is None:
        figure = Figure(figsize=_PANEL, layout="constrained")
        axes = figure.add_subplot()
    _draw(axes, bins, accuracy(probs, labels), title)
    owner = axes.figure
    while not isinstance(owner, Figure):
        owner = owner.figure
    return owner


def reliability_pair(
    before: Array,
    after: Array,
    labels: Array,
    *,
    num_bins: int = 15,
    titles: Sequence[str] = ("before", "after"),
) -> Figure:
    """Two reliability diagrams side by side, of the same samples before and after calibration.

    >>> figure = reliability_pair([[0.9, 0.1], [0.2, 0.8]], [[0.7, 0.3], [0.4, 0.6]], [0, 0])
    >>> [axes.get_title() for axes in figure.axes]
    ['before', 'after']
    """
    if len(titles) != 2:
        raise ValueError(f"two titles were expected, one for before and one for after, but {len(titles)} came.")
    figure = Figure(figsize=(2 * _PANEL[0], _PANEL[1]), layout="constrained")
    columns = figure.subplots(1, 2)
    for axes, probs, title in zip(columns, (before, after), titles, strict=True):
        reliability_diagram(probs, labels, num_bins=num_bins, axes=axes, title=title)
    # One scale for both histograms, so that what moved is seen.
    shares = [axes.child_axes[0] for axes in columns]
    highest = max(share.get_ylim()[1] for share in shares)
    for share in shares:
        share.set_ylim(0, highest)
    return figure


def single_prediction(
    answers: Mapping[str, Array],
    *,
    image: Array | None = None,
    classes: Sequence[str] | None = None,
    label: int | None = None,
    num_shown: int = 4,
) -> Figure:
    """What several methods say of one input, beside it: a group of bars for each, the classes it thinks most of.

    `answers` maps a method's name to its k probabilities for one input: ``{"softmax": ..., "TS": ..., "CC": ...}``.
    The `image` is (channels, height, width) or (height, width), from 0 to 1; `label` marks the true class.

    >>> figure = single_prediction({"softmax": [0.99, 0.01], "train-time": [0.7, 0.3]}, label=1)
    >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
    ['softmax', 'train-time']

    Reference: Tao et al., Consistency Calibration, 2024, §2.5.
    """
    rows = {
        name: _check.probs(np.asarray(probs, dtype=float).reshape(1, -1)).numpy()[0] for name, probs in answers.items()
    }
    if not rows or len({len(row) for row in rows.values()}) != 1:
        raise ValueError(
            "answers must map names to probabilities of the same classes, but rows of "
            f"{', '.join(str(len(row)) for row in rows.values()) or 'no'} classes came; pass one row of each method."
        )
    table = np.stack(list(rows.values()))
    # The classes that some method thinks most of, in the order of the columns.
    shown = np.sort(np.argsort(-table.max(0), kind="stable")[:num_shown])
    figure = Figure(figsize=(6.2 + 2 * (image is not None), 0.9 + 0.55 * len(rows)), layout="constrained")
    axes = figure.add_subplot() if image is None else figure.subplots(1, 2, width_ratios=[2, 5])[1]
    if image is not None:
        picture = np.asarray(image, dtype=float)
        figure.axes[0].imshow(picture.transpose(1, 2, 0) if picture.ndim == 3 else picture, cmap="gray", vmin=0, vmax=1)
        figure.axes[0].set_axis_off()
    place, height = np.arange(len(rows)), 0.8 / len(shown)
    for index, column in enumerate(shown):
        name = str(column) if classes is None else str(classes[column])
        is_true = label is not None and column == label
        axes.barh(
            place - 0.4 + (index + 0.5) * height,
            table[:, column],
            height,
            color=_CLASSES[index % len(_CLASSES)],
            edgecolor=_INK,
            linewidth=0.6,
            hatch="////" if is_true else None,
            label=f"{name} (true)" if is_true else name,
        )
    axes.set(xlim=(0, 1), xlabel="probability", yticks=place, yticklabels=list(rows))
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def save(figure: Figure, path: FilePath, *, dpi: int = 200) -> None:
    """Writes the figure whole or not at all; the name's ending (.png, .pdf, .svg) says in which format.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(reliability_diagram([[0.9, 0.1], [0.2, 0.8]], [0, 1]), f"{folder}/reliability.png")
    """
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=dpi, facecolor="white")


def training_curves(log: Sequence[Mapping[str, float]]) -> Figure:
    """A training run epoch by epoch: its loss beside the validation NLL, both accuracies, the validation ECE.

    `log` is what ``poise.zoo`` writes, one mapping per epoch. Under a loss that is no NLL the two curves of the first
    panel have different units; a validation NLL that rises while the accuracy does is overconfidence growing.

    >>> names = ["epoch", "train_loss", "train_accuracy", "val_nll", "val_accuracy", "val_ece"]
    >>> figure = training_curves([dict(zip(names, [1, 2.0, 0.3, 1.9, 0.3, 0.1]))])
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['loss', 'accuracy', 'ECE']
    """
    if not log:
        raise ValueError("there is nothing to draw: the log has no epoch; train for one at least.")
    epochs = [row["epoch"] for row in log]
    figure = Figure(figsize=(3 * 3.6, 3.2), layout="constrained")
    panels = {
        "loss": {"training loss": "train_loss", "validation NLL": "val_nll"},
        "accuracy": {"training": "train_accuracy", "validation": "val_accuracy"},
        "ECE": {"validation": "val_ece"},
    }
    for axes, (title, curves) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for label, name in curves.items():
            color, style = (_SHARE, (0, (5, 2))) if name.startswith("train") else (_GAP, "solid")
            axes.plot(epochs, [row[name] for row in log], color=color, linestyle=style, linewidth=1.4, label=label)
        axes.set(xlabel="epoch", ylabel=title, ylim=(0, None))
        if title != "loss":
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.grid(color="0.9", linewidth=0.6)
        axes.legend(fontsize=8, frameon=False)
    return figure


def sweeps(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    *,
    ylabel: str,
    references: Mapping[str, float] | None = None,
) -> Figure:
    """What becomes of some fractions as a size or a strength grows: one panel for each kind, on one logarithmic scale.

    `panels` maps what grows to named curves, pairs of places and values; a place or a value of zero is left out where
    the scale is logarithmic, which that of the places is unless they begin at zero. The least value of each curve is
    marked. `references` are horizontal lines in every panel.

    >>> figure = sweeps({"noise ε": {"ECE": ([0.1, 1.0], [0.05, 0.01])}}, ylabel="error", references={"softmax": 0.04})
    >>> [axes.get_xlabel() for axes in figure.axes]
    ['noise ε']
    """
    if not panels:
        raise ValueError("there is nothing to draw: no panel came; pass at least one curve.")
    figure = Figure(figsize=(3.1 * min(len(panels), 3), 2.9 * -(-len(panels) // 3)), layout="constrained")
    grid = figure.subplots(-(-len(panels) // 3), min(len(panels), 3), sharey=True, squeeze=False).flat
    for (xlabel, named), axes in zip(panels.items(), grid, strict=False):
        for (label, (places, values)), color in zip(named.items(), (_GAP, *_CLASSES[5:], *_CLASSES), strict=False):
            axes.plot(places, values, color=color, linewidth=1.4, marker=".", markersize=4, label=label)
            least = int(np.argmin(values))
            axes.plot(places[least], values[least], color=color, marker="o", markersize=7, fillstyle="none")
        for (label, value), style in zip((references or {}).items(), ("--", ":", "-."), strict=False):
            axes.axhline(value, color=_SHARE, linestyle=style, linewidth=1.2, label=label)
        starts_at_zero = any(min(places) == 0 for places, _ in named.values())
        axes.set(xlabel=xlabel, xscale="linear" if starts_at_zero else "log", yscale="log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
        if not starts_at_zero:
            low, high = axes.get_xlim()
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if high < 100 * low else (1.0,), numticks=8))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(color="0.9", linewidth=0.6)
    for axes in list(grid):
        axes.set_visible(False)
    figure.axes[0].legend(fontsize=8, frameon=False)
    for axes in figure.axes[::3]:
        axes.set_ylabel(ylabel)
    return figure


def _bins(probs: Array, labels: Array, num_bins: int) -> Bins:
    confidence, correct, _, dtype = top_label(probs, labels)
    # At the precision the probabilities came in, for that decides ties at the edges.
    return Bins.equal_width(confidence.to(dtype), correct, num_bins)


def _wilson(share: np.ndarray, count: np.ndarray, z: float = 1.959964) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's interval of a binomial share at 95 %."""
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return np.clip(middle - half, 0, share), np.clip(middle + half, share, 1)


def _draw(axes: Axes, bins: Bins, overall: float, title: str | None) -> None:
    edges, count = bins.edges.double().numpy(), bins.count.numpy()
    filled = count > 0
    left, width = edges[:-1][filled], np.diff(edges)[filled]
    confidence, right = bins.confidence.numpy()[filled], bins.accuracy.numpy()[filled]
    low, high = _wilson(right, count[filled])

    axes.bar(left, right, width, align="edge", color=_ACCURACY, edgecolor=_INK, linewidth=0.6, label="accuracy")
    axes.bar(
        left,
        confidence - right,
        width,
        bottom=right,
        align="edge",
        facecolor="none",
        edgecolor=_GAP,
        hatch="//////",
        linewidth=0.6,
        label="gap",
    )
    axes.plot([0, 1], [0, 1], color=_INK, linewidth=1, linestyle=(0, (5, 3)))
    axes.errorbar(
        confidence,
        right,
        yerr=np.stack([right - low, high - right]),
        fmt="o",
        markersize=3.5,
        color=_INK,
        elinewidth=1.1,
        capsize=2.5,
    )
    axes.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy", title=title or "")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.tick_params(labelbottom=False)
    axes.set_axisbelow(True)
    axes.grid(color="0.9", linewidth=0.6)
    mean_confidence = float((bins.count * bins.confidence).nansum() / bins.total)
    axes.legend(
        handles=[
            Patch(facecolor=_ACCURACY, edgecolor=_INK, linewidth=0.6, label="accuracy in the bin"),
            Patch(facecolor="none", edgecolor=_GAP, hatch="//////", label="gap to the confidence"),
            Line2D([], [], color=_INK, marker="o", markersize=3.5, linewidth=1.1, label="95 % interval"),
        ],
        title=f"ECE {100 * float(bins.error):.2f} %",
        title_fontproperties={"weight": "bold", "size": 12},
        alignment="left",
        loc="upper left",
        fontsize=8,
        framealpha=0.9,
    )

    share = axes.inset_axes((0, -0.27, 1, 0.22))
    share.bar(left, bins.mass.numpy()[filled], width, align="edge", color=_SHARE, edgecolor=_INK, linewidth=0.6)
    share.axvline(overall, color=_INK, linewidth=1.3)
    share.axvline(mean_confidence, color=_GAP, linewidth=1.6, linestyle=(0, (2, 1.2)))
    share.legend(
        handles=[
            Line2D([], [], color=_INK, linewidth=1.3, label=f"accuracy {100 * overall:.1f} %"),
            Line2D(
                [],
                [],
                color=_GAP,
                linewidth=1.6,
                linestyle=(0, (2, 1.2)),
                label=f"mean confidence {100 * mean_confidence:.1f} %",
            ),
        ],
        title=f"{bins.total:,.0f} samples",
        title_fontsize=8,
        alignment="left",
        loc="upper left",
        fontsize=8,
        frameon=False,
    )
    share.set(xlim=(0, 1), ylim=(0, None), xlabel="confidence", ylabel="samples")
    share.xaxis.set_major_formatter(PercentFormatter(1))
    share.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    for side in ("top", "right"):
        share.spines[side].set_visible(False)
