"""The table of the train-time rows is made of the logits that are there, and the paper's figures are the paper's."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import poise
from conftest import ROOT, SHARED
from poise import metrics, zoo
from poise.zoo.datasets.cifar import CIFAR10_CLASSES


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_time", ROOT / "benchmarks" / "train_time.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table(script, tmp_path, capsys, monkeypatch):
    val, test = zoo.shipped_scores()
    scores = tmp_path / "resnet50.flsd53" / "scores"
    scores.mkdir(parents=True)
    few = slice(0, 300)
    for name, one in (("val", val), ("test", test)):
        poise.write_scores(scores / f"{name}.npz", logits=one.logits[few], labels=one.labels[few], classes=one.classes)
    # The sampled method's own tests are elsewhere, and its thousand votes take their time.
    short = poise.SampledConsistency(num_samples=50)
    monkeypatch.setattr(poise, "paper_consistency", lambda: short)
    monkeypatch.setattr(sys, "argv", ["train_time.py", "table", str(tmp_path), "--seeds", "2", "--resamples", "50"])
    script.main()
    shown = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.splitlines() if "flsd53" in line]
    rows = {line[2]: line[3:] for line in lines}
    assert list(rows) == ["base", "TS", "CC exact", "CC sampled", "paper: base", "paper: CC"]
    probs, labels = torch.softmax(test.logits[few].float(), 1), test.labels[few]
    expected = [metrics.ece, metrics.adaptive_ece, metrics.classwise_ece, metrics.nll, metrics.accuracy]
    assert [cell.split()[0] for cell in rows["base"]] == [f"{100 * metric(probs, labels):.2f}" for metric in expected]
    assert rows["TS"][4].split()[0] == rows["base"][4].split()[0]
    assert rows["paper: CC"] == ["0.49", "0.36", "0.35", "22.7", "94.95"]


def test_the_papers_figures(script):
    """Out of the paper's source, where it is at hand."""
    source = SHARED.parents[1] / "paper.tex"
    if not source.exists():
        pytest.skip("the paper's source is not here.")
    text = source.read_text("utf-8")
    titles = {"resnet50": "ResNet-50", "resnet110": "ResNet-110", "densenet121": "DenseNet-121"}
    titles["wide-resnet-26-10"] = "Wide-ResNet"
    for metric in script.METRICS:
        end = text.index(f"\\label{{table:CC_{metric.lower()}_compare_with_training_time_methods}}")
        part = text[text.rindex("\\begin{table", 0, end) : end]
        part = part[: part.index("CIFAR-100")]
        for network, title in titles.items():
            (line,) = re.findall(rf"& {title} &(.*)", part)
            numbers = re.findall(r"\d+\.\d+", line)
            assert script.PAPER[network][metric].split() == numbers
    assert script.in_paper("resnet50", "cross-entropy")[1]["ECE"] == 0.78
    assert script.in_paper("resnet50", "dual-focal") == []


def test_training_goes_through_the_command_line(script, tmp_path, monkeypatch):
    """What is there is left alone, what was begun is resumed, and the rest follows in its order."""
    ran = []
    monkeypatch.setattr(script.subprocess, "run", lambda command, check: ran.append(command[3:]))
    (tmp_path / "runs" / "resnet50.cross-entropy" / "scores").mkdir(parents=True)
    (tmp_path / "runs" / "resnet50.cross-entropy" / "scores" / "test.npz").touch()
    (tmp_path / "runs" / "resnet50.flsd53").mkdir()
    monkeypatch.setattr(sys, "argv", ["train_time.py", "train", "images", str(tmp_path / "runs"), "--epochs", "40"])
    script.main()
    assert len(ran) == 2 * (len(script.RUNS) - 1)
    run = str(tmp_path / "runs" / "resnet50.flsd53")
    assert ran[0][:2] == ["train", "--data"]
    assert ran[0][-1] == "--resume"
    assert ran[1] == ["extract", run, "-o", str(Path(run) / "scores")]
    assert "--resume" not in ran[2]
    assert ran[2][ran[2].index("--loss") + 1] == "brier"
    assert ran[2][ran[2].index("--recipe") + 1] == "short"
    assert ran[2][ran[2].index("--epochs") + 1] == "40"


def test_what_ships_is_what_was_trained(script, tmp_path, monkeypatch, capsys):
    """All but weights and features, without the place of the images; and the same to the last bit."""
    run = tmp_path / "runs" / "resnet50.brier"
    shutil.copytree(script.SHIPPED / "resnet50.brier", run)
    config = json.loads((run / "config.json").read_text("utf-8"))
    (run / "config.json").write_text(json.dumps(config | {"data": "/home/me/images"}), "utf-8")
    for name in ("network.safetensors", "checkpoint.safetensors"):
        (run / name).touch()
    monkeypatch.setattr(sys, "argv", ["train_time.py", "ship", str(tmp_path / "runs"), str(tmp_path / "kept")])
    script.main()
    kept = tmp_path / "kept" / "resnet50.brier"
    files = {path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()}
    assert files == {"config.json", "log.csv", "scores/val.npz", "scores/test.npz"}
    assert json.loads((kept / "config.json").read_text("utf-8")) == config
    for split, one in zip(("val", "test"), zoo.shipped_scores("resnet50.brier"), strict=True):
        again = poise.read_scores(kept / "scores" / f"{split}.npz")
        assert torch.equal(again.logits, one.logits)
        assert torch.equal(again.labels, one.labels)
        assert again.classes == one.classes
    assert capsys.readouterr().out.startswith("| resnet50.brier | ")


def test_the_data_card_is_true(script):
    page = (script.SHIPPED.parent / "README.md").read_text("utf-8")
    for name in zoo.shipped():
        assert script.card(name, script.SHIPPED / name) in page
        val, test = zoo.shipped_scores(name)
        assert (val.num_samples, test.num_samples, test.classes) == (5000, 10000, CIFAR10_CLASSES)
        assert torch.equal(test.labels.bincount(), torch.full((10,), 1000))
        assert zoo.shipped_config(name)["num_train"] == 45000
    assert sum(path.stat().st_size for path in script.SHIPPED.rglob("*") if path.is_file()) < 6e6


def test_a_run_that_is_not_here(script):
    with pytest.raises(ValueError, match=r"run must be one of .*, but is 'resnet50.focl'; did you mean"):
        zoo.shipped_scores("resnet50.focl")
