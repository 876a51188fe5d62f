"""The commands do what the library does, say what is wrong in one sentence, and then have written nothing."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from typer.testing import CliRunner

import poise
from poise import metrics, zoo
from poise.cli.app import app
from poise.cli.methods import NOISES, calibrator, noise_word, parse_noise
from poise.cli.screen import Screen, number, reliability
from poise.compare import Comparison
from poise.metrics import Bins
from poise.noise import Gaussian, GeneralizedNormal, Gumbel, LogGamma


@dataclass
class Folder:
    """A folder of small files, and what a command changed in it."""

    path: Path
    before: dict[str, bytes] = field(default_factory=dict)

    def tree(self) -> dict[str, bytes]:
        files = (file for file in self.path.rglob("*") if file.is_file())
        return {str(file.relative_to(self.path)): file.read_bytes() for file in files}

    def new(self) -> set[str]:
        after = self.tree()
        assert after | self.before == after, "a file that was there has changed"
        return set(after) - set(self.before)


@pytest.fixture(scope="module")
def shipped():
    return zoo.shipped_scores()


@pytest.fixture
def folder(tmp_path, shipped, monkeypatch):
    val, test = shipped
    few, classes = slice(0, 400), np.array(val.classes)
    logits, labels = val.logits[few].numpy(), val.labels[few].numpy()
    np.savez(tmp_path / "val.npz", logits=logits, labels=labels, classes=classes)
    np.savez(tmp_path / "test.npz", logits=test.logits[few].numpy(), labels=test.labels[few].numpy(), classes=classes)
    np.savez(tmp_path / "unlabelled.npz", logits=test.logits[few].numpy())
    np.savez(tmp_path / "reordered.npz", logits=logits, labels=labels, classes=classes[::-1])
    np.savez(tmp_path / "narrow.npz", logits=logits[:, :3], labels=labels % 3)
    broken = logits.copy()
    broken[3, 2] = math.nan
    np.savez(tmp_path / "nan.npz", logits=broken, labels=labels)
    probs = torch.softmax(val.logits[few].float(), 1).numpy()
    np.savez(tmp_path / "probs.npz", probs=probs, labels=labels)
    np.savez(tmp_path / "probs_as_logits.npz", logits=probs, labels=labels)
    np.savez(tmp_path / "logits_as_probs.npz", probs=logits, labels=labels)
    np.savez(tmp_path / "empty.npz", logits=logits[:0], labels=labels[:0])
    np.savez(tmp_path / "percent.npz", probs=100 * probs, labels=labels)
    np.savez(tmp_path / "one_class.npz", logits=logits, labels=0 * labels)
    (tmp_path / "truncated.npz").write_bytes((tmp_path / "val.npz").read_bytes()[:500])
    save_file({"weight": logits}, tmp_path / "network.safetensors")
    poise.save(poise.TemperatureScaling().fit(logits, labels, classes=classes), tmp_path / "cal.safetensors")
    monkeypatch.chdir(tmp_path)
    made = Folder(tmp_path)
    made.before = made.tree()
    return made


def run(*command: str, code: int = 0, **env: str):
    result = CliRunner().invoke(app, list(command), env={"COLUMNS": "100", "NO_COLOR": "1", **env})
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def as_json(text: str):
    def refuse(word: str):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_fit_apply_evaluate_are_the_library(folder):
    run("fit", "val.npz", "-o", "c.safetensors", "--noise", "gaussian", "--json", "fit.json")
    run("apply", "c.safetensors", "test.npz", "-o", "p.npz", "--json", "apply.json")
    shown = run("evaluate", "p.npz", "--num-bins", "10", "--json", "evaluate.json", "--plot", "p.png").stdout
    assert folder.new() == {"c.safetensors", "p.npz", "p.png", "fit.json", "apply.json", "evaluate.json"}

    val, test = poise.read_scores("val.npz"), poise.read_scores("test.npz")
    own = poise.ConsistencyCalibration(Gaussian()).fit(val.logits.float(), val.labels, classes=val.classes)
    probs = own.predict_proba(test.logits.float())
    written = poise.read_scores("p.npz")
    assert torch.equal(written.probs, probs)
    assert torch.equal(written.labels, test.labels)
    assert written.classes == test.classes

    fit = as_json(Path("fit.json").read_text())
    assert fit["learned"]["noise"] == "gaussian"
    assert fit["learned"]["strength"] == own.strength_
    assert fit["learned"]["lapse"] == own.lapse_
    assert fit["candidates"][0]["nll"] == own.candidates_[0]["nll"]
    raw = torch.softmax(val.logits.float(), 1)
    assert fit["validation"]["before"]["ece"]["value"] == metrics.ece(raw, val.labels)
    after = own.predict_proba(val.logits.float())
    assert fit["validation"]["after"]["nll"]["value"] == metrics.nll(after, val.labels)

    assert as_json(Path("apply.json").read_text())["changed_predictions"] == 0

    measured = as_json(Path("evaluate.json").read_text())
    binned = ("ece", "adaptive_ece", "classwise_ece", "mce")
    for name in ("accuracy", "nll", "brier", *binned):
        options = {"num_bins": 10} if name in binned else {}
        expected = getattr(metrics, name)(probs, test.labels, **options)
        assert measured["metrics"][name]["value"] == expected
        title = {"ece": "ECE %", "adaptive_ece": "AdaECE %", "nll": "NLL", "brier": "Brier"}.get(name)
        if title:
            assert any(line.startswith(title) and number(expected, "%" in title) in line for line in shown.splitlines())
    assert measured["metrics"]["ece"]["low"] <= measured["metrics"]["ece"]["high"]
    assert measured["metrics"]["ece"]["noise_floor"]["mean"] > 0
    assert sum(measured["bins"]["count"]) == 400
    empty = [count == 0 for count in measured["bins"]["count"]]
    assert any(empty)
    assert [value is None for value in measured["bins"]["accuracy"]] == empty


@pytest.mark.parametrize(
    "command",
    [
        ("fit", "val.npz", "-o", "c.safetensors", "--method", "temperature"),
        ("apply", "cal.safetensors", "test.npz", "-o", "p.npz"),
        ("evaluate", "val.npz", "--no-intervals"),
    ],
)
def test_json_on_standard_output_is_alone_there(folder, command):
    result = run(*command, "--json", "-")
    content = as_json(result.stdout)
    assert content["command"] == command[0]
    assert content["num_samples"] == 400
    assert "classes" in result.stderr
    plain = run(*command)
    assert plain.stdout == result.stderr


def test_auto_shows_every_candidate(folder):
    shown = run("fit", "val.npz", "-o", "c.safetensors").stdout
    kept = noise_word(poise.load("c.safetensors").noise_)
    for shape in ("log-gamma:0.25", "gumbel", "gaussian", "generalized-normal:8"):
        (line,) = (line for line in shown.splitlines() if line.startswith(f"{shape} "))
        assert line.rstrip().endswith("kept") == (shape == kept)


def test_a_map_under_the_noise(folder):
    shown = run("fit", "val.npz", "-o", "c.safetensors", "--noise", "gumbel", "--scaling", "vector", "--json", "f.json")
    assert poise.load("c.safetensors").scaling_ == "vector"
    assert "bias (10 numbers)" in " ".join(shown.stdout.split())
    assert len(as_json(Path("f.json").read_text())["learned"]["bias"]) == 10


def test_sampled_methods_take_seed_and_noise(folder):
    few = poise.read_scores("val.npz")
    poise.write_scores("few.npz", logits=few.logits[:40], labels=few.labels[:40], classes=few.classes)
    run("fit", "few.npz", "-o", "c.safetensors", "--method", "sampled", "--noise", "uniform", "--seed", "3")
    fitted = poise.load("c.safetensors")
    assert (fitted.seed, fitted.criterion, noise_word(fitted.neighbors_.noise)) == (3, "ece", "uniform")


def test_paper_method_is_the_librarys():
    ours, theirs = calibrator("paper", seed=2).get_params(), poise.paper_consistency().get_params()
    assert ours == theirs | {"seed": 2}


@pytest.mark.parametrize("word", ["histogram-binning", "group", "density-aware", "proximity", "feature-clipping"])
def test_features_of_the_file_are_the_methods(folder, word):
    """They are seen at the fit and after; a file that has none is refused where they are needed."""
    val, test = (poise.read_scores(f"{split}.npz") for split in ("val", "test"))
    mixing = (torch.eye(10) + torch.linspace(-1, 1, 100).view(10, 10).sin()).to(val.logits)
    features = [scores.logits @ mixing for scores in (val, test)]
    poise.write_scores("val+.npz", logits=val.logits, labels=val.labels, features=features[0])
    poise.write_scores("test+.npz", logits=test.logits, labels=test.labels, features=features[1])
    shown = run("fit", "val+.npz", "-o", "c.safetensors", "--method", word, "--json", "fit.json").stdout
    assert len(shown) < 3000
    assert len(Path("fit.json").read_text()) < 50_000
    run("apply", "c.safetensors", "test+.npz", "-o", "p.npz")
    own = calibrator(word).fit(val.logits.float(), val.labels, features=features[0])
    expected = own.predict_proba(test.logits.float(), features=features[1])
    torch.testing.assert_close(poise.read_scores("p.npz").probs, expected, rtol=0, atol=1e-6)
    if word != "histogram-binning":
        error = run("apply", "c.safetensors", "test.npz", "-o", "q.npz", code=2).stderr
        assert "features" in error
        assert not Path("q.npz").exists()
    if own.needs_features:
        assert "val.npz has none" in run("fit", "val.npz", "-o", "d.safetensors", "--method", word, code=2).stderr


def test_files_without_labels_are_applied(folder):
    shown = run("apply", "cal.safetensors", "unlabelled.npz", "-o", "p.csv").stdout
    assert "without labels" in shown
    written = poise.read_scores("p.csv", need_labels=False)
    assert written.labels is None
    # The names were learned with the calibrator.
    assert written.classes == poise.read_scores("val.npz").classes


def test_probabilities_are_fitted_by_their_logarithms(folder):
    assert "their logarithms" in run("fit", "probs.npz", "-o", "c.safetensors", "--method", "temperature").stdout
    scores = poise.read_scores("probs.npz")
    own = poise.TemperatureScaling().fit(scores.as_logits(), scores.labels)
    assert poise.load("c.safetensors").temperature_ == own.temperature_


REFUSED = {
    "missing file": ("fit vall.npz -o c.safetensors", "did you mean 'val.npz'?"),
    "missing folder": ("fit val.npz -o no/c.safetensors", "make it first"),
    "other ending": ("fit val.npz -o c.npz", "a calibrator is kept as .safetensors"),
    "method": ("fit val.npz -o c.safetensors --method temprature", "did you mean 'Temperature'?"),
    "noise": ("fit val.npz -o c.safetensors --noise gausian", "did you mean 'gaussian'?"),
    "number": ("fit val.npz -o c.safetensors --noise log-gamma:x", "takes a number, as in log-gamma:8"),
    "no number": ("fit val.npz -o c.safetensors --noise gumbel:2", "takes no number"),
    "shape": ("fit val.npz -o c.safetensors --noise generalized-normal:0.5", "beta must be a number of 1 or more"),
    "noise of TS": ("fit val.npz -o c.safetensors --method temperature --noise gumbel", "leave --noise out"),
    "auto of sampled": ("fit val.npz -o c.safetensors --method sampled --noise auto", "name one noise"),
    "criterion": ("fit val.npz -o c.safetensors --criterion nl", "did you mean 'nll'?"),
    "scaling": ("fit val.npz -o c.safetensors --scaling vectr", "did you mean 'vector'?"),
    "scaling of TS": ("fit val.npz -o c.safetensors --method temperature --scaling auto", "leave --scaling out"),
    "noise of others": ("fit val.npz -o c.safetensors --method isotonic --noise gumbel", "write options in brackets"),
    "criterion of others": ("fit val.npz -o c.safetensors --method beta --criterion ece", "write options in brackets"),
    "features": ("fit val.npz -o c.safetensors --method proximity", "add an array `features`"),
    "seed": ("fit val.npz -o c.safetensors --method sampled --seed -1", "seed must be a whole number"),
    "NaN": ("fit nan.npz -o c.safetensors", "row 3 holds NaN"),
    "no labels": ("fit unlabelled.npz -o c.safetensors", "holds no labels"),
    "no rows to fit": ("fit empty.npz -o c.safetensors", "nothing to fit on: 0 samples came"),
    "no rows to apply to": ("apply cal.safetensors empty.npz -o p.npz", "holds 0 rows, so there is nothing to apply"),
    "no rows to score": ("evaluate empty.npz", "nothing to score: 0 rows came"),
    "percent": ("evaluate percent.npz", "these look like percentages; divide them by 100"),
    "one class": ("fit one_class.npz -o c.safetensors", "only one class"),
    "probs as logits": ("fit probs_as_logits.npz -o c.safetensors", "look like probabilities"),
    "truncated": ("fit truncated.npz -o c.safetensors", "truncated or of another kind"),
    "input as output": ("apply cal.safetensors test.npz -o ./test.npz", "would overwrite the input"),
    "calibrator as output": ("apply cal.safetensors test.npz -o cal.safetensors", "would overwrite the calibrator"),
    "output twice": ("fit val.npz -o c.safetensors --json c.safetensors", "would overwrite --output"),
    "json folder": ("evaluate val.npz --json no/e.json", "make it first"),
    "folder as file": ("evaluate val.npz --json .", "is a folder"),
    "swapped": ("apply test.npz cal.safetensors -o p.npz", "write: poise apply cal.safetensors test.npz"),
    "no calibrator": ("apply network.safetensors test.npz -o p.npz", "holds no calibrator"),
    "other width": ("apply cal.safetensors narrow.npz -o p.npz", "fitted with 10"),
    "other order": ("apply cal.safetensors reordered.npz -o p.npz", "in the same order"),
    "other format": ("apply cal.safetensors test.npz -o p.nzp", "did you mean '.npz'?"),
    "logits as probs": ("evaluate logits_as_probs.npz", "probs must lie between 0 and 1"),
    "no truth": ("evaluate unlabelled.npz", "holds no labels"),
    "not scores": ("evaluate cal.safetensors", "holds a calibrator"),
    "bins": ("evaluate val.npz --num-bins 0", "num_bins must be a whole number"),
    "picture": ("evaluate val.npz --no-intervals --plot p.nonsense", "not supported"),
    "demo into a file": ("demo --out val.npz", "--out must be a folder"),
    "demo too deep": ("demo --out a/b", "make it first"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_sentence_and_write_nothing(folder, name):
    command, expected = REFUSED[name]
    result = run(*command.split(), code=2)
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert expected in line
    assert not result.stdout
    assert not folder.new()


def test_read_only_folder_is_refused(folder):
    (folder.path / "locked").mkdir()
    (folder.path / "locked").chmod(0o555)
    if os.access(folder.path / "locked", os.W_OK):
        pytest.skip("this user may write anywhere.")
    assert "read-only" in run("fit", "val.npz", "-o", "locked/c.safetensors", code=2).stderr


def test_debug_shows_where(folder):
    shown = run("fit", "nan.npz", "-o", "c.safetensors", "--debug", code=2).stderr
    assert "Traceback" in shown
    assert shown.splitlines()[-1].startswith("Error: ")


@pytest.mark.parametrize("command", ["evalute val.npz", "evaluate val.npz --num-bin 3", "fit val.npz"])
def test_usage_errors_help(folder, command):
    shown = run(*command.split(), code=2).stderr
    assert any(word in shown for word in ("evaluate", "--num-bins", "--output"))
    assert "Traceback" not in shown


def test_interruption_is_130_and_leaves_nothing(folder, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(poise.TemperatureScaling, "_fit", interrupted)
    result = run("fit", "val.npz", "-o", "c.safetensors", "--method", "temperature", "--json", "f.json", code=130)
    assert result.stderr == "Interrupted: no file is left half-written.\n"
    assert not folder.new()


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_ctrl_c_in_a_terminal(folder):
    code = """if True:
        import signal, sys, time, poise
        from poise.cli import main
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
        poise.TemperatureScaling._fit = lambda *args: print("fitting", flush=True) or time.sleep(60)
        sys.argv[1:] = "fit val.npz -o c.safetensors --method temperature".split()
        main()
    """
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "fitting\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "Interrupted: no file is left half-written.\n"
    assert not out
    assert not folder.new()


def test_warnings_are_sentences(folder, monkeypatch):
    own = poise.TemperatureScaling._fit

    def warning(self, *args):
        warnings.warn("the end of the searched range.", poise.BoundWarning, stacklevel=1)
        own(self, *args)

    monkeypatch.setattr(poise.TemperatureScaling, "_fit", warning)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = run("fit", "val.npz", "-o", "c.safetensors", "--method", "temperature")
    assert result.stderr == "Note: the end of the searched range.\n"


def test_demo_tells_the_truth(folder, shipped):
    result = run("demo", "--json", "demo/demo.json", COLUMNS="80")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b" not in result.stdout
    assert not result.stderr
    files = {f"demo/{name}" for name in ("reliability.png", "calibrator.safetensors", "probs.npz", "demo.json")}
    assert folder.new() == files
    assert (folder.path / "demo/reliability.png").stat().st_size > 20_000

    val, test = shipped
    told = as_json((folder.path / "demo/demo.json").read_text())
    own = poise.ConsistencyCalibration().fit(val.logits.float(), val.labels)
    probs = own.predict_proba(test.logits.float())
    assert torch.equal(poise.read_scores("demo/probs.npz").probs, probs)
    assert told["test"]["consistency"]["ece"]["value"] == metrics.ece(probs, test.labels)
    assert told["learned"]["consistency"]["strength"] == own.strength_
    # What the text claims beyond the figures.
    raw = torch.softmax(test.logits.float(), 1)
    assert told["test"]["uncalibrated"]["ece"]["low"] > told["test"]["consistency"]["ece"]["high"]
    assert "it is overconfident" in " ".join(result.stdout.split())
    assert raw.amax(1).mean() > metrics.accuracy(raw, test.labels)
    assert (own.noise_ == Gumbel()) == ("Gumbel noise won" in result.stdout)
    (winner,) = re.findall(r"^(.*)kept *$", result.stdout, re.MULTILINE)
    assert f"{winner.split()[0].split(':')[0].capitalize()} noise won" in result.stdout
    baseline = poise.TemperatureScaling().fit(val.logits.float(), val.labels).predict_proba(test.logits.float())
    gain = metrics.nll(baseline, test.labels) - metrics.nll(probs, test.labels)
    assert f"{abs(gain):.4f} {'lower' if gain > 0 else 'higher'} than that of temp" in " ".join(result.stdout.split())
    told_gain = told["nll_difference"]
    assert told_gain["value"] == pytest.approx(-gain)
    beyond = told_gain["low"] * told_gain["high"] > 0
    assert ("which is beyond chance" in " ".join(result.stdout.split())) == beyond
    assert "No predictions were changed" in " ".join(result.stdout.split())
    for name, value in (("uncalibrated", raw), ("consistency", probs)):
        (line,) = (line for line in result.stdout.splitlines() if line.startswith(f"{name} "))
        assert number(metrics.ece(value, test.labels), True) in line


def test_demo_without_matplotlib_says_so(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "poise.plots", raising=False)
    monkeypatch.delattr(poise, "plots", raising=False)
    shown = run("demo", "--out", "here").stdout
    assert 'pip install "poise[plots]"' in shown
    assert folder.new() == {"here/calibrator.safetensors", "here/probs.npz"}
    result = run("evaluate", "val.npz", "--plot", "p.png", code=2)
    assert result.stderr == 'Error: drawing needs matplotlib: pip install "poise[plots]".\n'


def test_bars_show_the_bins():
    bins = Bins.equal_width([0.1, 0.1, 0.9, 0.9, 0.9, 0.9], [True, True, True, True, False, False], num_bins=5)
    screen = Screen()
    screen.out.width = 100
    table = reliability(screen, {"": bins})
    low, *empty, high = list(table.columns[1].cells)
    assert [str(cell) for cell in empty] == ["", "", ""]
    assert str(low) == "#" * 4 + "+" * 36 or str(low) == "█" * 4 + "▓" * 36
    assert str(high) in ("#" * 20 + "-" * 16, "█" * 20 + "░" * 16)
    assert [str(cell) for cell in table.columns[4].cells] == ["-90.0", "", "", "", "+40.0"]


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_any_width(folder, columns):
    shown = run("evaluate", "val.npz", "--no-intervals", COLUMNS=columns).stdout
    assert max(map(len, shown.splitlines())) <= min(100, int(columns) + 15)


def test_noise_words_go_both_ways():
    for name in NOISES:
        assert parse_noise(noise_word(parse_noise(name))) == parse_noise(name)
    assert parse_noise("generalized-normal:4") == GeneralizedNormal(4.0)
    assert parse_noise("log-gamma:0.25") == LogGamma(0.25)


def test_version_and_help():
    assert run("--version").stdout == f"poise {poise.__version__}\n"
    for command in ("demo", "fit", "apply", "evaluate"):
        assert f"Example: poise {command}" in run(command, "--help").stdout


def test_without_typer_the_extra_is_named():
    code = "import sys; sys.modules['typer'] = None; from poise.cli import main; main()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr == 'Error: the command line needs typer: pip install "poise[cli]".\n'


def test_output_survives_an_old_terminal(folder):
    env = os.environ | {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "poise.cli", "evaluate", "val.npz", "--no-intervals"]
    ran = subprocess.run(command, capture_output=True, env=env, check=True)
    assert b"##" in ran.stdout
    assert ran.stdout.isascii()


# ---- compare, and the method that is chosen


def test_compare_is_the_library(folder):
    options = ["--methods", "TS,Matrix(reg='odir', strength=1.0)", "--metrics", "ece,nll", "--bootstrap", "100"]
    files = ["--json", "c.json", "--csv", "c.csv", "--latex", "c.tex"]
    shown = run("compare", "--val", "val.npz", "--test", "test.npz", *options, *files).stdout
    assert folder.new() == {"c.json", "c.csv", "c.tex"}
    own = poise.compare(
        "val.npz", "test.npz", ["TS", "MatrixScaling(reg='odir', strength=1.0)"], ["ece", "nll"], bootstrap=100
    )
    read = Comparison.from_json("c.json")
    assert [row.cells for row in read.rows] == [row.cells for row in own.rows]
    assert as_json(Path("c.json").read_text())["command"] == "compare"
    assert Path("c.csv").read_text() == read.to_csv()
    assert Path("c.tex").read_text() == read.to_latex()
    value = own["TemperatureScaling"].cells["nll"].value
    assert re.search(rf"^Temperature +[\d.]+\* .* {value:.4f}", shown, re.MULTILINE)
    for said in (
        "3 methods, fitted on 400 rows of 10 classes",
        "noise floor",
        "not told from it by the paired bootstrap",
    ):
        assert said in " ".join(shown.split())


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_compare_fits_the_screen(folder, columns):
    """No cell is cut, whatever the width."""
    options = ["--methods", "TS,PTS,IOP,VS", "--seeds", "2", "--bootstrap", "60"]
    shown = run("compare", "--val", "val.npz", "--test", "test.npz", *options, COLUMNS=str(columns)).stdout
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= columns
    tables = re.findall(r"^uncalibrated .*", shown, re.MULTILINE)
    assert len(tables) == {60: 6, 80: 3, 120: 2}[columns]
    assert "IntraOrderPreserving: means of 2 seeds; standard deviations ECE" in " ".join(shown.split())


def test_compare_says_what_went_wrong(folder):
    shown = run("compare", "--val", "val.npz", "--test", "val.npz", "--methods", "TS", "--bootstrap", "50").stdout
    assert "400 of the 400 test rows stand in the validation set too" in " ".join(shown.split())
    result = run("compare", "--val", "val.npz", "--test", "test.npz", "--methods", "TS,vectr", code=2)
    assert "did you mean 'Vector'?" in result.stderr
    result = run("compare", "--val", "val.npz", "--test", "narrow.npz", "--methods", "TS", code=2)
    assert "val has 10 classes but test has 3" in result.stderr
    result = run("compare", "--val", "val.npz", "--test", "test.npz", "--csv", "val.npz", code=2)
    assert "would overwrite" in result.stderr
    assert folder.new() == set()


def test_compare_interrupted_writes_what_is_finished(folder, monkeypatch):
    def interrupted(self, *data):
        raise KeyboardInterrupt

    monkeypatch.setattr(poise.VectorScaling, "_fit", interrupted)
    options = ["--methods", "TS,VS", "--bootstrap", "50", "--json", "c.json"]
    result = run("compare", "--val", "val.npz", "--test", "test.npz", *options, code=130)
    assert "Interrupted: only what was finished is shown." in result.stdout
    found = Comparison.from_json("c.json")
    assert not found.is_complete
    assert [row.method for row in found.rows] == ["uncalibrated", "TemperatureScaling"]


def test_fit_auto_is_recommend(folder, monkeypatch):
    few = {"SVS": poise.StructuredVectorScaling()}
    monkeypatch.setattr(sys.modules["poise.compare.recommend"], "chosen", lambda wanted, with_features: few)
    shown = run("fit", "val.npz", "-o", "c.safetensors", "--method", "auto", "--json", "f.json").stdout
    advice = as_json(Path("f.json").read_text())["recommendation"]
    own = poise.recommend("val.npz")
    assert (advice["method"], advice["reason"]) == (own.method, own.reason)
    assert " ".join(own.reason.split()) in " ".join(shown.split())
    val = poise.read_scores("val.npz")
    assert torch.equal(poise.load("c.safetensors").predict_proba(val.logits), own.calibrator.predict_proba(val.logits))
    assert (
        "chooses by itself"
        in run("fit", "val.npz", "-o", "d.safetensors", "--method", "auto", "--noise", "gumbel", code=2).stderr
    )


def test_fit_takes_the_names_of_compare(folder):
    run("fit", "val.npz", "-o", "c.safetensors", "--method", "VectorScaling", "--json", "f.json")
    assert type(poise.load("c.safetensors")) is poise.VectorScaling
    assert as_json(Path("f.json").read_text())["criterion"] is None
    result = run("fit", "val.npz", "-o", "d.safetensors", "--method", "vectr", code=2)
    assert "did you mean 'Vector'?" in result.stderr
    result = run("fit", "val.npz", "-o", "d.safetensors", "--method", "VS", "--criterion", "ece", code=2)
    assert "write options in brackets" in result.stderr
