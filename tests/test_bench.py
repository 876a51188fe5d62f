"""What `poise bench` measures and prints, on a table small enough for a test."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from poise import bench
from poise.cli.app import app
from poise.noise import Gaussian


def test_figures_are_ratios_of_what_was_timed():
    found = bench.run(rows=400, classes=12, noises=(Gaussian(),))
    (cost,) = found.noises
    assert (found.rows, found.classes) == (400, 12)
    assert found.loop_seconds == pytest.approx(cost.loop_by_predict * cost.predict_by_softmax * found.softmax_seconds)
    assert cost.link_by_softmax > 0
    assert cost.strength > 0
    assert cost.extra_bytes is None or cost.extra_bytes >= 0


def test_medians_take_turns():
    calls = []
    functions = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    times = bench.medians(functions, "cpu", rounds=3)
    assert set(times) == {"a", "b"}
    assert all(seconds > 0 for seconds in times.values())
    # Once each to warm up, once each to see how long it takes, and then in turn.
    assert calls[:4] == ["a", "b", "a", "b"]


def test_published_loop_counts_votes():
    torch.manual_seed(0)
    shares = bench.published_loop(torch.tensor([[5.0, 0.0], [0.0, 0.0]]), 200, 1.0)
    assert shares.sum(1).tolist() == [1, 1]
    assert shares[0, 0] > 0.99
    assert 0.3 < shares[1, 0] < 0.7


def test_command(tmp_path):
    file = tmp_path / "bench.json"
    done = CliRunner().invoke(
        app, ["bench", "--device", "cpu", "--rows", "400", "--classes", "12", "--json", str(file)]
    )
    assert done.exit_code == 0, done.output
    content = json.loads(file.read_text("utf-8"))
    assert [one["noise"] for one in content["noises"]] == ["Gaussian()", "GeneralizedNormal(beta=4.0)", "Uniform()"]
    assert "400 x 12" in done.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "tpu"], "--device must be one of"),
        (["--rows", "10"], "--rows must be"),
        (["--classes", "1"], "--classes must be"),
    ],
)
def test_bad_options(arguments, sentence):
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    assert sentence in done.output
