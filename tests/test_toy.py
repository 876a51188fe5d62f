"""The toy experiment: its neighbourhoods against loops over all points, and the order in which they come out."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from poise.paper import toy


@pytest.fixture(scope="module")
def found():
    return toy.run(20_000, 2_000, epochs=5, strengths=[0.05, 0.2, 0.4, 0.5, 1.0, 2.0])


@pytest.fixture(scope="module")
def confidence():
    values = torch.rand(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (values.round(decimals=2) * 0.5 + 0.5).sort().values, values.sort().values


@pytest.mark.parametrize("width", [1e-9, 0.013, 0.201, 2.0])
def test_windows_against_a_loop(confidence, width):
    for values in confidence:
        first, end = toy._within(values, width)
        for i, value in enumerate(values):
            near = ((values - value).abs() < width).nonzero()[:, 0]
            assert {int(first[i]), int(end[i]) - 1} == {int(near[0]), int(near[-1])}


@pytest.mark.parametrize("count", [1, 2, 9, 64, 299, 300])
def test_nearest_against_a_loop(confidence, count):
    """The distances are those of the nearest; among equally near ones any will do."""
    for values in confidence:
        first, end = toy._closest(values, count)
        assert torch.equal(end - first, torch.full_like(first, count))
        for i, value in enumerate(values):
            distances = (values[first[i] : end[i]] - value).abs().sort().values
            torch.testing.assert_close(distances, (values - value).abs().sort().values[:count])


def test_the_truth_is_bayes_rule():
    points = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)).double()
    mean = torch.tensor([-1.0, 1.0], dtype=torch.float64) * 3 / 2 / 2**0.5
    density = [torch.distributions.MultivariateNormal(m, torch.eye(2, dtype=torch.float64)) for m in (mean, -mean)]
    p0, p1 = (one.log_prob(points).exp() for one in density)
    torch.testing.assert_close(toy._truth(points, 3.0), p0 / (p0 + p1))
    drawn, labels = toy._points(4000, 3.0, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn[labels == 0].mean(0).double(), mean, rtol=0, atol=0.08)
    torch.testing.assert_close(torch.cov(drawn[labels == 1].T), torch.eye(2), rtol=0, atol=0.1)


def test_what_comes_out(found):
    """Of few points perturbed data tell most; a neighbourhood too small is noise, and one too large is none."""
    assert found.perturbed.best[1] < found.nearest.best[1]
    assert found.perturbed.best[1] < found.window.best[1]
    for curve in (found.window, found.nearest, found.perturbed):
        size, error = curve.best
        assert curve.sizes[0] < size < curve.sizes[-1]
        assert min(curve.errors[0], curve.errors[-1]) > 1.3 * error
    assert abs(found.accuracy - found.bayes_accuracy) < 0.01
    # Of one point alone, correctness is 0 or 1: its mean distance from p is 2 p (1 - p).
    assert found.nearest.sizes[0] == 1
    assert 0.015 < found.nearest.errors[0] < 0.05
    assert found.softmax < 0.02


def test_it_is_repeatable():
    how = {"epochs": 1, "num_samples": 10, "strengths": [0.4]}
    torch.manual_seed(0)
    first = toy.run(500, 200, **how)
    torch.manual_seed(1)
    assert toy.run(500, 200, **how) == first
    assert toy.run(500, 200, seed=1, **how) != first


def test_the_command_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    file = tmp_path / "toy.json"
    sizes = ["--train", "1000", "--test", "100"]
    monkeypatch.setattr(sys, "argv", ["toy", *sizes, "--json", str(file), "--picture", str(tmp_path / "toy.png")])
    toy.main()
    assert (tmp_path / "toy.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads(file.read_text("utf-8"))
    printed = capsys.readouterr().out
    assert f"{100 * min(written['perturbed']['errors']):.3f}" in printed
    assert len(written["nearest"]["sizes"]) == sum(count <= 200 for count in toy.COUNTS)
