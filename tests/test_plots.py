"""Diagrams show what the bins hold, leave matplotlib's global state alone, and are written whole or not at all."""

from __future__ import annotations

import doctest
import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy.stats import binomtest

from poise import metrics, plots
from poise.metrics import Bins
from poise.metrics.bins import top_label


@pytest.fixture(scope="module")
def scored():
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(3 * torch.randn(500, 4, generator=generator), dim=1)
    labels = torch.randint(0, 4, (500,), generator=generator)
    return probs, torch.where(torch.rand(500, generator=generator) < 0.6, probs.argmax(1), labels)


def bins_of(probs, labels, num_bins):
    confidence, correct, *_ = top_label(probs, labels)
    return Bins.equal_width(confidence, correct, num_bins)


def bars(container):
    return np.array([[patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height()] for patch in container]).T


@pytest.mark.parametrize("num_bins", [1, 10, 15])
def test_what_is_drawn_is_what_the_bins_hold(scored, num_bins):
    (axes,) = plots.reliability_diagram(*scored, num_bins=num_bins, title="mine").axes
    bins = bins_of(*scored, num_bins)
    filled = bins.count > 0
    accuracy, gap, points = axes.containers
    left, bottom, width, height = bars(accuracy)
    np.testing.assert_allclose(left, bins.edges[:-1][filled], atol=1e-7)
    np.testing.assert_allclose(width, 1 / num_bins, atol=1e-6)
    np.testing.assert_array_equal(bottom, 0)
    np.testing.assert_array_equal(height, bins.accuracy[filled])
    _, bottom, _, height = bars(gap)
    np.testing.assert_array_equal(bottom, bins.accuracy[filled])
    np.testing.assert_allclose(height, bins.gap[filled], rtol=1e-12)
    np.testing.assert_array_equal(
        points.lines[0].get_xydata(), torch.stack([bins.confidence, bins.accuracy], 1)[filled]
    )
    (share,) = axes.child_axes
    np.testing.assert_array_equal(bars(share.containers[0])[3], bins.mass[filled])
    assert axes.get_title() == "mine"
    assert axes.get_legend().get_title().get_text() == f"ECE {100 * metrics.ece(*scored, num_bins=num_bins):.2f} %"


def test_intervals_are_wilsons(scored):
    (axes,) = plots.reliability_diagram(*scored).axes
    bins = bins_of(*scored, 15)
    filled = bins.count > 0
    segments = axes.containers[2].lines[2][0].get_segments()
    drawn = np.array([[segment[0][1], segment[1][1]] for segment in segments])
    counts = bins.count[filled].long().tolist()
    hits = (bins.count * bins.accuracy)[filled].round().long().tolist()
    for found, count, right in zip(drawn, counts, hits, strict=True):
        expected = binomtest(right, count).proportion_ci(0.95, method="wilson")
        np.testing.assert_allclose(found, [expected.low, expected.high], atol=1e-7)


def test_halves_are_binned_as_by_ece():
    probs = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.4, 0.6]]).half()
    labels = torch.tensor([0, 1, 1])
    (axes,) = plots.reliability_diagram(probs, labels, num_bins=5).axes
    assert axes.get_legend().get_title().get_text() == f"ECE {100 * metrics.ece(probs, labels, num_bins=5):.2f} %"


def test_given_axes_are_drawn_into(scored):
    figure = Figure()
    axes = figure.subfigures(1, 2)[1].add_subplot()
    assert plots.reliability_diagram(*scored, axes=axes) is figure
    assert axes.containers


def test_pair_has_titles_and_one_scale(scored):
    probs, labels = scored
    figure = plots.reliability_pair(probs, probs.square() / probs.square().sum(1, keepdim=True), labels)
    assert [axes.get_title() for axes in figure.axes] == ["before", "after"]
    first, second = (axes.child_axes[0].get_ylim() for axes in figure.axes)
    assert first == second
    with pytest.raises(ValueError, match="two titles"):
        plots.reliability_pair(probs, probs, labels, titles=["one"])


def test_one_prediction_shows_what_each_method_says():
    answers = {"softmax": [0.9, 0.0, 0.06, 0.04], "train-time": torch.tensor([0.3, 0.0, 0.6, 0.1])}
    image = np.random.default_rng(0).random((3, 4, 5))
    figure = plots.single_prediction(answers, image=image, classes=["a", "b", "c", "d"], label=2, num_shown=3)
    picture, axes = figure.axes
    np.testing.assert_array_equal(picture.images[0].get_array(), image.transpose(1, 2, 0))
    widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
    np.testing.assert_allclose(widths, [[0.9, 0.3], [0.06, 0.6], [0.04, 0.1]], rtol=1e-6)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "c (true)", "d"]
    assert [text.get_text() for text in axes.get_yticklabels()] == list(answers)
    (alone,) = plots.single_prediction({"x": [0.5, 0.5]}).axes
    assert [bars.get_label() for bars in alone.containers] == ["0", "1"]
    for wrong in ({}, {"a": [0.5, 0.5], "b": [1.0, 0.0, 0.0]}):
        with pytest.raises(ValueError, match="probabilities of the same classes"):
            plots.single_prediction(wrong)
    with pytest.raises(ValueError, match="must sum to 1"):
        plots.single_prediction({"logits": [0.5, 0.9]})


@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg"])
def test_save(scored, tmp_path, suffix):
    path = tmp_path / f"diagram{suffix}"
    plots.save(plots.reliability_diagram(*scored), path)
    assert path.stat().st_size > 5_000
    assert list(tmp_path.iterdir()) == [path]


def test_png_shows_something(scored, tmp_path):
    from matplotlib.image import imread

    plots.save(plots.reliability_diagram(*scored), tmp_path / "diagram.png", dpi=50)
    image = imread(tmp_path / "diagram.png")[..., :3]
    assert image.shape == (295, 240, 3)
    assert 0.3 < image.mean() < 0.97
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 50


def test_nothing_is_left_of_a_failed_save(scored, tmp_path):
    with pytest.raises(ValueError, match="not supported"):
        plots.save(plots.reliability_diagram(*scored), tmp_path / "diagram.nonsense")
    with pytest.raises(FileNotFoundError, match="make it first"):
        plots.save(plots.reliability_diagram(*scored), tmp_path / "no" / "diagram.png")
    assert not list(tmp_path.iterdir())


def test_wrong_input_is_refused(scored):
    probs, labels = scored
    with pytest.raises(ValueError, match="probs must lie between 0 and 1"):
        plots.reliability_diagram(torch.log(probs), labels)
    with pytest.raises(ValueError, match="num_bins"):
        plots.reliability_diagram(probs, labels, num_bins=0)


def test_pyplot_is_never_loaded():
    code = (
        "import sys; from poise import plots; "
        "plots.reliability_diagram([[0.9, 0.1], [0.2, 0.8]], [0, 0]); print('matplotlib.pyplot' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_without_matplotlib_the_extra_is_named():
    code = "import sys; sys.modules['matplotlib'] = None; import poise.plots"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'pip install "poise[plots]"' in ran.stderr.splitlines()[-1]


def test_examples_run():
    found = doctest.testmod(plots)
    assert found.attempted
    assert not found.failed


def test_curves_are_the_log():
    names = ("train_loss", "train_accuracy", "val_nll", "val_accuracy", "val_ece")
    rng = np.random.default_rng(0)
    log = [{"epoch": epoch, **dict(zip(names, rng.random(5), strict=True))} for epoch in range(1, 7)]
    figure = plots.training_curves(log)
    drawn = {(axes.get_ylabel(), line.get_label()): line for axes in figure.axes for line in axes.get_lines()}
    for (panel, label), name in {
        ("loss", "training loss"): "train_loss",
        ("loss", "validation NLL"): "val_nll",
        ("accuracy", "training"): "train_accuracy",
        ("accuracy", "validation"): "val_accuracy",
        ("ECE", "validation"): "val_ece",
    }.items():
        line = drawn.pop((panel, label))
        assert line.get_xdata().tolist() == [1, 2, 3, 4, 5, 6]
        assert line.get_ydata().tolist() == [row[name] for row in log]
    assert not drawn
    with pytest.raises(ValueError, match="the log has no epoch"):
        plots.training_curves([])


def test_sweeps_are_what_was_swept():
    panels = {
        "jitter s": {"ECE": ([0.0, 0.1, 0.2], [0.04, 0.01, 0.03]), "errors": ([0.0, 0.1, 0.2], [0.06, 0.07, 0.09])},
        "noise ε": {"ECE": ([0.1, 1.0], [0.05, 0.02])},
        **{f"layer {number}": {"ECE": ([1.0, 2.0], [0.1, 0.2])} for number in (1, 2)},
    }
    figure = plots.sweeps(panels, ylabel="fraction", references={"temperature scaling": 0.0125})
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_xlabel() for axes in shown] == list(panels)
    assert [axes.get_xscale() for axes in shown] == ["linear", "log", "log", "log"]
    assert [axes.get_ylabel() for axes in shown] == ["fraction", "", "", "fraction"]
    for axes, named in zip(shown, panels.values(), strict=True):
        lines = {line.get_label(): line for line in axes.get_lines()}
        for name, (places, values) in named.items():
            assert list(lines[name].get_xdata()) == places
            assert list(lines[name].get_ydata()) == values
        assert list(lines["temperature scaling"].get_ydata()) == [0.0125, 0.0125]
    marked = [line for line in shown[0].get_lines() if line.get_marker() == "o"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in marked] == [(0.1, 0.01), (0.0, 0.06)]
    with pytest.raises(ValueError, match="no panel came"):
        plots.sweeps({}, ylabel="fraction")
