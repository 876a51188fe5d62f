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


METRICS = {
    "ECE": metrics.ece,
    "AdaECE": metrics.adaptive_ece,
    "CECE": metrics.classwise_ece,
    "NLL": metrics.nll,
    "accuracy": metrics.accuracy,
}


def tables_of(page):
    """Title up to its comma, row, column: what the cells of a page's tables under ### hold."""
    found = {}
    for title, body in re.findall(r"^### ([^,\n]+).*\n\n((?:\|.*\n)+)", page, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in body.splitlines())
        found[title] = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}
    return found


def test_the_pages_table_is_that_of_the_shipped_logits():
    tables = tables_of((ROOT / "docs" / "train-time.md").read_text("utf-8"))
    for run in zoo.shipped():
        name = run.replace(".", ", ")
        val, test = zoo.shipped_scores(run)
        logits, rows = val.as_logits(), test.as_logits()
        shown = {
            "base": torch.softmax(rows, 1),
            "+TS": poise.TemperatureScaling().fit(logits, val.labels).predict_proba(rows),
            "+CC exact": poise.ConsistencyCalibration().fit(logits, val.labels).predict_proba(rows),
        }
        for title, metric in METRICS.items():
            for column, probs in shown.items():
                # The last digit may turn over on another machine.
                value = float(tables[title][name][column].split()[0])
                assert value == pytest.approx(100 * metric(probs, test.labels), abs=0.011), (run, title, column)


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
    tables = tables_of(shown)
    rows = {title: rows["resnet50, flsd53"] for title, rows in tables.items()}
    labels = test.labels[few]
    base = torch.softmax(test.logits[few].float(), 1)
    exact = poise.ConsistencyCalibration().fit(val.logits[few].float(), val.labels[few])
    probs = exact.predict_proba(test.logits[few].float())
    votes = [
        poise.SampledConsistency(num_samples=50, seed=seed)
        .fit(val.logits[few].float(), val.labels[few])
        .predict_proba(test.logits[few].float())
        for seed in (0, 1000)
    ]
    for name, metric in METRICS.items():
        row = rows[name]
        assert row["base"].split()[0] == f"{100 * metric(base, labels):.2f}"
        assert row["+CC exact"].split()[0] == f"{100 * metric(probs, labels):.2f}"
        found = metrics.interval(metric, probs, labels, resamples=50)
        assert row["+CC exact"].endswith(f"[{100 * found.low:.2f}, {100 * found.high:.2f}]")
        one, other = (100 * metric(vote, labels) for vote in votes)
        assert row["+CC sampled"] == f"{(one + other) / 2:.2f} ± {abs(one - other) / 2:.2f}"
    assert rows["accuracy"]["+TS"] == rows["accuracy"]["base"]
    assert [rows[name]["paper: +CC"] for name in METRICS] == ["0.49", "0.36", "0.35", "22.7", "94.95"]
    less = rows["+CC exact less +TS"]
    tempered = poise.TemperatureScaling().fit(val.logits[few].float(), val.labels[few])
    tempered = tempered.predict_proba(test.logits[few].float())
    gain = metrics.paired_difference(metrics.nll, probs, tempered, labels, resamples=50)
    assert less["NLL"] == f"{100 * gain.value:+.2f} [{100 * gain.low:+.2f}, {100 * gain.high:+.2f}]"
    assert less["shape of the noise"] == str(exact.noise_)


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
    monkeypatch.setattr(script.subprocess, "run", lambda command, check, timeout: ran.append(command[3:]))
    (tmp_path / "runs" / "resnet50.cross-entropy" / "scores").mkdir(parents=True)
    (tmp_path / "runs" / "resnet50.cross-entropy" / "scores" / "test.npz").touch()
    (tmp_path / "runs" / "resnet50.flsd53").mkdir()
    monkeypatch.setattr(sys, "argv", ["train_time.py", "train", "images", str(tmp_path / "runs"), "--epochs", "40"])
    script.main()
    assert len(ran) == 2 * (len(script.RUNS) - 1)
    run = str(tmp_path / "runs" / "resnet50.flsd53")
    assert ran[0][:2] == ["train", "--data"]
    assert ran[0][-1] == "--resume"
    assert ran[1] == ["extract", run, "-o", str(Path(run) / "scores"), "--features"]
    assert "--resume" not in ran[2]
    assert "--compile" not in ran[2]
    assert ran[2][ran[2].index("--loss") + 1] == "brier"
    assert ran[2][ran[2].index("--recipe") + 1] == "short"
    assert ran[2][ran[2].index("--epochs") + 1] == "40"

    ran.clear()
    few = ["--only", "densenet121.cross-entropy", "resnet50.focal", "--compile", "--no-features"]
    monkeypatch.setattr(sys, "argv", ["train_time.py", "train", "images", str(tmp_path / "runs"), *few])
    script.main()
    assert [one[one.index("--network") + 1] for one in ran[::2]] == ["densenet121", "resnet50"]
    assert [one[one.index("--loss") + 1] for one in ran[::2]] == ["cross-entropy", "focal"]
    assert all("--compile" in one for one in ran[::2])
    assert [one[-1] for one in ran[1::2]] == ["--no-features"] * 2
    monkeypatch.setattr(sys, "argv", ["train_time.py", "train", "images", str(tmp_path / "runs"), "--only", "resnet50"])
    with pytest.raises(SystemExit, match=r"--only must name runs of resnet50.cross-entropy, .*, but 'resnet50' came"):
        script.main()


def test_training_stops_in_time_and_ships_what_is_finished(script, tmp_path, monkeypatch, capsys):
    """The time is over in the third command: what was finished before is shipped, and left alone by the next call."""
    left = []

    def late(command, check, timeout):
        left.append(timeout)
        if len(left) == 3:
            raise script.subprocess.TimeoutExpired(command, timeout)
        if "train" in command:
            shutil.copytree(script.SHIPPED / "resnet50.brier", command[command.index("-o") + 1])

    monkeypatch.setattr(script.subprocess, "run", late)
    given = ["--minutes", "2", "--ship", str(tmp_path / "kept")]
    monkeypatch.setattr(sys, "argv", ["train_time.py", "train", "images", str(tmp_path / "runs"), *given])
    with pytest.raises(SystemExit, match="the time is over; the same command goes on from the last checkpoint"):
        script.main()
    assert 0 < left[2] <= left[1] <= left[0] <= 120
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["resnet50.cross-entropy"]
    first = capsys.readouterr().out
    assert len(first.splitlines()) == 1
    script.ship(tmp_path / "runs", tmp_path / "kept")
    assert not capsys.readouterr().out


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
