"""A run is its recipe; killed and resumed it is the run that was never killed; what is wrong is said before it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import poise
from poise import losses, zoo
from poise.cli.app import app
from poise.cli.bar import bar
from poise.cli.screen import Screen
from poise.zoo import NETWORKS, NORMALIZATIONS, RECIPES, Dataset, Pixels, load_run, runs
from poise.zoo.training import _seed_of

RUN_FILES = {runs.CONFIG, runs.LOG, runs.CHECKPOINT, runs.WEIGHTS, "curves.png"}
CLASSES = ("red", "green", "blue")
PAPER = RECIPES["paper"]
FEW = replace(PAPER.of_length(4), batch_size=16, peak_rate=0.05)


class Tiny(nn.Module):
    """The smallest network with everything that a run must keep: weights, running statistics, features."""

    feature_layer = "pool"

    def __init__(self, num_classes):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8)
        self.pool, self.drop, self.fc = nn.AdaptiveAvgPool2d(1), nn.Dropout(0.2), nn.Linear(8, num_classes)
        self.idle = nn.Parameter(torch.zeros(1))

    def forward(self, images):
        features = self.pool(F.relu(self.norm(self.conv(images)))).flatten(1)
        return self.fc(self.drop(features))


@pytest.fixture(autouse=True)
def tiny_network(monkeypatch):
    monkeypatch.setitem(NETWORKS, "tiny", Tiny)


def tiles(num, seed):
    """Noise, brighter in the color of the class; one in eight labels is another class's."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=num)
    pixels = rng.integers(0, 160, size=(num, 3, 32, 32))
    pixels[np.arange(num), labels] += 40
    labels[::8] = (labels[::8] + 1) % 3
    return pixels.astype(np.uint8), labels


def images(num, seed):
    pixels, labels = tiles(num, seed)
    return Pixels(torch.from_numpy(pixels), labels, CLASSES)


@pytest.fixture(scope="module")
def data():
    return Dataset("cifar10", images(90, 0), images(40, 1), images(50, 2), NORMALIZATIONS["cifar"])


def weights(folder):
    return load_file(Path(folder) / "network.safetensors")


def assert_same_run(one, other):
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    logs = [[{**row, "seconds": 0} for row in runs.read_log(Path(folder))] for folder in (one, other)]
    assert logs[0] == logs[1]


class Stop(Exception):
    pass


@pytest.mark.parametrize("loss", ["flsd53", "adafocal"])
@pytest.mark.parametrize("stopped_at", [0.5, 2.5, 3.9])
def test_resumed_is_uninterrupted(tmp_path, data, loss, stopped_at):
    def stop(done, row):
        if done >= stopped_at:
            raise Stop

    options = {"recipe": FEW, "checkpoint_every": 2, "device": "cpu"}
    zoo.train(data, "tiny", loss, tmp_path / "whole", **options)
    with pytest.raises(Stop):
        zoo.train(data, "tiny", loss, tmp_path / "stopped", **options, progress=stop)
    assert not (tmp_path / "stopped" / "network.safetensors").exists()
    with pytest.raises(FileNotFoundError, match=r"is not finished \(\d of 4 epochs\)"):
        load_run(tmp_path / "stopped")
    net = zoo.train(data, "tiny", loss, tmp_path / "stopped", **options, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    # Resuming what is finished changes nothing.
    zoo.train(data, "tiny", loss, tmp_path / "stopped", **options, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    loaded, config = load_run(tmp_path / "stopped")
    assert config["loss"] == loss
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_seeds_differ_and_the_global_generator_stays(tmp_path, data):
    before = torch.get_rng_state()
    for seed in (1, 2):
        zoo.train(data, "tiny", "focal", tmp_path / str(seed), recipe=FEW.of_length(1), seed=seed)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(weights(tmp_path / "1")["fc.weight"], weights(tmp_path / "2")["fc.weight"])


def plainly_augmented(pixels):
    """One image after the other: padded by four black pixels, cut anywhere, mirrored half the time; then scaled."""
    tops, keeps, lefts = (torch.randint(below, (len(pixels), 1)) for below in (9, 2, 9))
    mean, std = (np.array(value)[:, None, None] for value in ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)))
    made = []
    for image, top, keep, left in zip(pixels.numpy(), tops, keeps, lefts, strict=True):
        padded = np.zeros((3, 40, 40))
        padded[:, 4:36, 4:36] = image
        cut = padded[:, int(top) : int(top) + 32, int(left) : int(left) + 32]
        made.append(((cut if keep else cut[:, :, ::-1]) / 255 - mean) / std)
    return torch.from_numpy(np.stack(made)).float()


@pytest.mark.parametrize("recipe", [FEW, replace(RECIPES["short"].of_length(3), batch_size=40)])
@pytest.mark.parametrize("loss", ["cross-entropy", "brier", "mmce"])
def test_steps_are_the_recipes(tmp_path, data, recipe, loss, monkeypatch):
    """Against SGD by hand: plain crops, clipped gradient, weight decay on everything, momentum, the moment's rate."""
    recipe = recipe.of_length(2)
    # Without dropout, whose draws a slow loop need not follow.
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, values: values)
    zoo.train(data, "tiny", loss, tmp_path / "run", recipe=recipe, seed=3)

    reduction = recipe.reduction
    objective = {
        "cross-entropy": lambda z, y: F.cross_entropy(z, y, reduction=reduction),
        "brier": lambda z, y: (torch.softmax(z, 1) - F.one_hot(y, 3)).square().sum(1).mean(),
        "mmce": lambda z, y: losses.weighted_mmce_loss(z, y, 2.0, normalization="published", reduction=reduction),
    }[loss]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = Tiny(3)
        parameters = [p for name, p in net.named_parameters() if name != "idle"]
        momentum, clipped = None, []
        for epoch in range(2):
            clipped.append(0)
            torch.manual_seed(_seed_of(3, epoch))
            order = torch.randperm(90)
            steps = -(-90 // recipe.batch_size)
            for step in range(steps):
                rows = order[step * recipe.batch_size : (step + 1) * recipe.batch_size]
                net.zero_grad()
                objective(net(plainly_augmented(data.train.pixels[rows])), data.train.labels[rows]).backward()
                norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
                clipped[-1] += bool(norm > 2) / steps
                slopes = [p.grad * min(1, 2 / (norm + 1e-6)) + 5e-4 * p.detach() for p in parameters]
                if momentum is None:
                    momentum = [slope.clone() for slope in slopes]
                else:
                    momentum = [0.9 * old + slope for old, slope in zip(momentum, slopes, strict=True)]
                rate = recipe.rate(epoch + step / steps)
                for p, slope, speed in zip(parameters, slopes, momentum, strict=True):
                    p.data -= rate * (slope + 0.9 * speed if recipe.nesterov else speed)
    for name, value in weights(tmp_path / "run").items():
        torch.testing.assert_close(value, net.state_dict()[name], rtol=1e-3, atol=1e-5)
    assert [row["clipped"] for row in runs.read_log(tmp_path / "run")] == pytest.approx(clipped)


def test_compiled_is_the_same_run(tmp_path, data, monkeypatch):
    """Full batches go through what torch.compile returns; the epoch's last, smaller one does not ask for another."""
    sizes = []

    def compiled(net, **options):
        def forward(pixels):
            sizes.append(len(pixels))
            return net(pixels)

        return forward

    monkeypatch.setattr(torch, "compile", compiled)
    for name in (False, True):
        zoo.train(data, "tiny", "focal", tmp_path / str(name), recipe=FEW.of_length(2), device="cpu", compile=name)
    assert sizes == [16] * 10
    assert_same_run(tmp_path / "False", tmp_path / "True")
    assert [runs.read_config(tmp_path / str(name))["compiled"] for name in (False, True)] == [False, True]


def test_the_papers_rates():
    rates = [PAPER.rate(epoch) for epoch in range(350)]
    assert [round(rate, 6) for rate in (rates[0], rates[148], rates[149], rates[248], rates[249], rates[349])] == [
        *[0.1] * 2,
        *[0.01] * 2,
        *[0.001] * 2,
    ]
    assert (PAPER.momentum, PAPER.weight_decay, PAPER.batch_size, PAPER.clip) == (0.9, 5e-4, 128, 2.0)
    assert (PAPER.nesterov, PAPER.reduction) == (False, "sum")
    scaled = PAPER.of_length(70)
    assert [epoch for epoch in range(1, 70) if scaled.rate(epoch) < 0.5 * scaled.rate(epoch - 1)] == [30, 50]


def test_the_short_recipes_rates():
    recipe = RECIPES["short"]
    rates = [recipe.rate(step / 10) for step in range(10 * recipe.epochs + 1)]
    top = rates.index(max(rates))
    assert (top / 10, max(rates)) == (recipe.warmup, recipe.peak_rate)
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(0, abs=1e-12)
    assert np.all(np.diff(rates[: top + 1]) > 0)
    assert np.all(np.diff(rates[top:]) < 0)
    assert recipe.rate((recipe.warmup + recipe.epochs) / 2) == pytest.approx(recipe.peak_rate / 2)


@pytest.mark.parametrize("name", zoo.LOSSES)
def test_every_loss_trains(tmp_path, data, name):
    """An epoch of each, in halves too, learns something and leaves the whole of a run."""
    for bf16 in (False, True):
        folder = tmp_path / f"{bf16}"
        zoo.train(data, "tiny", name, folder, recipe=FEW.of_length(3), bf16=bf16)
        log = runs.read_log(folder)
        assert [row["epoch"] for row in log] == [1, 2, 3]
        # A third is chance, seven eighths is all that the labels allow.
        assert log[-1]["val_accuracy"] > 0.5
        config = json.loads((folder / "config.json").read_text())
        assert (config["loss"], config["bf16"], config["num_train"]) == (name, bf16, 90)
        assert config["revision"] is None or re.fullmatch("[0-9a-f]{40}(-dirty)?", config["revision"])


def test_the_authors_parameters():
    def made(name, network="resnet50", dataset="cifar10", reduction="sum"):
        return zoo.loss_for(name, network=network, dataset=dataset, reduction=reduction).options

    assert made("dual-focal")["gamma"] == 5.0
    assert made("dual-focal", "wide-resnet-26-10")["gamma"] == 2.6
    assert made("dual-focal", "resnet110", "cifar100")["gamma"] == 6.1
    assert made("mmce") == {"weight": 2.0, "width": 0.4, "normalization": "published", "reduction": "sum"}
    assert made("label-smoothing") == {"alpha": 0.05, "spread": "others", "reduction": "sum"}
    assert made("focal", reduction="mean") == {"gamma": 3.0, "reduction": "mean"}
    assert made("brier")["reduction"] == "mean"


def test_log_says_what_was(tmp_path, data):
    seen = []
    net = zoo.train(
        data, "tiny", "cross-entropy", tmp_path / "run", recipe=FEW, progress=lambda *told: seen.append(told)
    )
    done = [epochs for epochs, _ in seen]
    assert done == sorted(done)
    assert done[-1] == 4
    rows = [row for _, row in seen if row is not None]
    assert rows == runs.read_log(tmp_path / "run")
    scores = zoo.extract(net, data.val, data.normalization)
    probs = scores.logits.double().softmax(1)
    assert rows[-1]["val_nll"] == poise.metrics.nll(probs, scores.labels)
    assert rows[-1]["val_accuracy"] == poise.metrics.accuracy(probs, scores.labels)
    assert rows[-1]["val_ece"] == poise.metrics.ece(probs, scores.labels)
    assert [row["rate"] for row in rows] == [FEW.rate(epoch) for epoch in range(4)]


def test_extraction_is_the_network(data):
    torch.manual_seed(0)
    net = Tiny(3).eval()
    told = []
    scores = zoo.extract(net, data.test, data.normalization, batch_size=16, progress=told.append)
    images = data.normalization(data.test.pixels)
    torch.testing.assert_close(scores.logits, net(images).detach())
    torch.testing.assert_close(net.fc(scores.features).detach(), scores.logits)
    assert torch.equal(scores.labels, data.test.labels)
    assert scores.classes == CLASSES
    assert told == [16, 32, 48, 50]
    assert zoo.extract(net, data.test, data.normalization, features=False).features is None
    assert not net.pool._forward_hooks


def test_diverged_runs_stop(tmp_path, data):
    recipe = replace(FEW, peak_rate=1e30)
    with pytest.raises(ValueError, match=r"the loss became (nan|inf) in epoch \d, so training has diverged"):
        zoo.train(data, "tiny", "cross-entropy", tmp_path / "run", recipe=recipe, checkpoint_every=1)
    assert not (tmp_path / "run" / "network.safetensors").exists()


def test_other_runs_are_not_overwritten(tmp_path, data):
    folder = tmp_path / "run"
    zoo.train(data, "tiny", "focal", folder, recipe=FEW.of_length(1))
    before = {file: file.read_bytes() for file in folder.iterdir()}
    for options, sentence in [
        ({}, "holds a run already; continue it with resume"),
        ({"resume": True, "seed": 5}, "has seed 1, but 5 came"),
        ({"resume": True, "loss": "brier"}, "has loss focal, but brier came"),
        ({"resume": True, "recipe": replace(FEW.of_length(1), clip=1.0)}, "has clip 2.0, but 1.0 came"),
        ({"resume": True, "recipe": FEW.of_length(2)}, "has epochs 1, but 2 came"),
    ]:
        with pytest.raises((FileExistsError, ValueError), match=sentence):
            zoo.train(
                data, **{"network": "tiny", "loss": "focal", "recipe": FEW.of_length(1), **options}, folder=folder
            )
        assert {file: file.read_bytes() for file in folder.iterdir()} == before
    with pytest.raises(FileExistsError, match="holds other things than a run"):
        zoo.train(data, "tiny", "focal", tmp_path)


def test_what_cannot_begin_writes_nothing(tmp_path, data, monkeypatch):
    for options, sentence in [
        ({"network": "tinny"}, "did you mean 'tiny'"),
        ({"loss": "flsd"}, "did you mean 'flsd53'"),
        ({"device": "gpu"}, "device 'gpu' cannot be used here"),
        ({"seed": -1}, "seed must be a whole number, 0 or more"),
        ({"checkpoint_every": 0}, "checkpoint_every must be 1 or more"),
        ({"folder": tmp_path / "no" / "run"}, "there is no folder .*; make it first"),
        ({"data": replace(data, train=None)}, "without images to train on"),
    ]:
        with pytest.raises((ValueError, FileNotFoundError), match=sentence):
            zoo.train(**{"data": data, "network": "tiny", "loss": "focal", "folder": tmp_path / "run", **options})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "total used free")(9, 0, 9))
    with pytest.raises(OSError, match=r"a run needs .* GB in .*, but only 0.00 GB are free there; make room"):
        zoo.train(data, "tiny", "focal", tmp_path / "run")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="epochs must be 1 or more"):
        PAPER.of_length(0)


# --- the command line ------------------------------------------------------------------------------------------------


def write_mosaics(folder):
    """A small CIFAR-10: 200 and 64 images of three of its classes, as mosaics."""
    folder.mkdir()
    labels = {}
    for split, rows, seed in (("train", 20, 3), ("test", 8, 4)):
        side = {"train": 10, "test": 8}[split]
        pixels, labels[split] = tiles(rows * side, seed)
        mosaic = pixels.reshape(rows, side, 3, 32, 32).transpose(0, 3, 1, 4, 2).reshape(rows * 32, side * 32, 3)
        Image.fromarray(mosaic).save(folder / f"{split}_00.webp", lossless=True)
    np.savez(folder / "labels.npz", **labels)


@pytest.fixture(scope="module")
def mosaics(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "cifar10"
    write_mosaics(folder)
    return folder


def run(*command: object, code: int = 0):
    result = CliRunner().invoke(app, [str(word) for word in command], env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_from_images_to_probabilities(tmp_path, mosaics, monkeypatch):
    """Train, be killed without warning, resume, extract, fit, apply, evaluate: with a real network, as a user would."""
    monkeypatch.chdir(tmp_path)
    options = ["--data", mosaics, "--network", "resnet20", "--loss", "flsd53", "--epochs", "2", "--device", "cpu"]
    command = ["train", *options, "--checkpoint-every", "1", "-o"]
    with subprocess.Popen(
        [sys.executable, "-m", "poise.cli", *map(str, command), "killed"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    ) as process:
        for line in process.stdout:
            if line.startswith("epoch 1/2"):
                process.send_signal(signal.SIGKILL)
                break
        process.wait(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not Path("killed/network.safetensors").exists()
    assert "is not finished (1 of 2 epochs)" in run("extract", "killed", "-o", "scores", code=2).stderr

    Path("killed/.0123456789abcdef.safetensors").write_bytes(b"half a checkpoint")
    shown = run(*command, "killed", "--resume", "--json", "killed.json").stdout
    assert {file.name for file in Path("killed").iterdir()} == RUN_FILES
    assert "epoch 2/2  loss" in shown
    assert "epoch 1/2" not in shown
    run(*command, "whole")
    assert_same_run("killed", "whole")
    assert json.loads(Path("killed.json").read_text())["last_epoch"] == runs.read_log(Path("killed"))[-1]

    told = json.loads(run("extract", "killed", "-o", "scores", "--json", "-").stdout)
    val, test = poise.read_scores("scores/val.npz"), poise.read_scores("scores/test.npz")
    assert (val.num_samples, test.num_samples, test.num_classes) == (20, 64, 10)
    assert test.features.shape == (64, 64)
    assert test.classes[0] == "airplane"
    net, config = load_run("killed")
    assert config["data"] == str(mosaics)
    last = net.linear
    torch.testing.assert_close(last(test.features).detach(), test.logits)
    probs = test.logits.softmax(1)
    assert told["splits"]["test"]["accuracy"] == poise.metrics.accuracy(probs, test.labels)
    assert told["splits"]["val"]["accuracy"] == runs.read_log(Path("killed"))[-1]["val_accuracy"]

    run("fit", "scores/val.npz", "-o", "calibrator.safetensors", "--method", "temperature")
    run("apply", "calibrator.safetensors", "scores/test.npz", "-o", "probs.npz")
    run("evaluate", "probs.npz", "--json", "evaluation.json")
    calibrated = poise.read_scores("probs.npz").probs
    assert torch.equal(calibrated.argmax(1), probs.argmax(1))
    assert json.loads(Path("evaluation.json").read_text())["metrics"]["nll"]["value"] == poise.metrics.nll(
        calibrated, test.labels
    )


def test_extraction_by_name(tmp_path, mosaics, monkeypatch):
    """timm's interface: its networks come with weights, and with what their pixels are to be scaled by."""
    monkeypatch.chdir(tmp_path)

    def create_model(name, pretrained, num_classes):
        torch.manual_seed(0)
        made = Tiny(num_classes)
        made.pretrained_cfg = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)} if pretrained else {}
        return made

    timm = ModuleType("timm")
    timm.list_models, timm.create_model = lambda: ["small"], create_model
    monkeypatch.setitem(sys.modules, "timm", timm)
    run("extract", "timm/small", "-o", "scores", "--dataset", "cifar10", "--data", mosaics)
    scores = poise.read_scores("scores/val.npz")
    val = zoo.dataset("cifar10", mosaics).val
    net = create_model("small", True, 10).eval()
    expected = net(zoo.Normalization((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))(val.pixels)).detach()
    torch.testing.assert_close(scores.logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.fc(scores.features).detach(), expected, rtol=1e-4, atol=1e-5)


def test_extraction_of_a_checkpoint(tmp_path, mosaics, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    net = zoo.network("resnet20").eval()
    torch.save({f"module.{name}": value for name, value in net.state_dict().items()}, "r20.model")
    command = ["extract", "r20.model", "-o", "scores", "--network", "resnet20", "--dataset", "cifar10"]
    run(*command, "--data", mosaics, "--normalization", "imagenet", "--no-features")
    scores = poise.read_scores("scores/test.npz")
    assert scores.features is None
    test = zoo.dataset("cifar10", mosaics).test
    with torch.no_grad():
        expected = net(NORMALIZATIONS["imagenet"](test.pixels))
    torch.testing.assert_close(scores.logits, expected, rtol=1e-4, atol=1e-4)


REFUSED = {
    "network": ("train --data DATA -o run --network resnet51", "did you mean 'resnet56' or 'resnet50'"),
    "loss": ("train --data DATA -o run --loss flsd-53", "did you mean 'flsd53'"),
    "dataset": ("train --data DATA -o run --dataset cifar", "did you mean 'cifar10' or 'cifar100'"),
    "recipe": ("train --data DATA -o run --recipe long", "recipe must be one of paper, short"),
    "epochs": ("train --data DATA -o run --epochs 0", "epochs must be 1 or more"),
    "device": ("train --data DATA -o run --device gpu", "device 'gpu' cannot be used here"),
    "no data": ("train --data nowhere -o run", "there is no folder nowhere"),
    "other data": ("train --data DATA -o run --dataset cifar100", "holds no CIFAR-100"),
    "no folder": ("train --data DATA -o no/run --network tiny --epochs 1", "make it first"),
    "not a run": ("train --data DATA -o . --network tiny --epochs 1", "holds other things than a run"),
    "extract nothing": ("extract nowhere -o s --network tiny --dataset cifar10 --data DATA", "no file nowhere"),
    "extract folder": ("extract . -o s", "holds no run of poise train"),
    "extract unnamed": ("extract wrong.pt -o s", "name --network, --dataset and --data"),
    "name alone": (
        "extract timm/resnet50 -o s",
        "timm/resnet50 is a network and says nothing of images; name --dataset",
    ),
    "no library": ("extract torchvision/resnet50 -o s --dataset cifar10 --data DATA", "pip install torchvision"),
    "other network": (
        "extract wrong.pt -o s --network resnet20 --dataset cifar10 --data DATA",
        "another network than this ResNet",
    ),
    "truncated": ("extract cut.pt -o s --network tiny --dataset cifar10 --data DATA", "truncated or of another kind"),
    "normalization": ("extract wrong.pt -o s --normalization mine", "normalization must be one of cifar, imagenet"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_sentence_and_write_nothing(tmp_path, mosaics, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    torch.save(Tiny(10).state_dict(), "wrong.pt")
    Path("cut.pt").write_bytes(Path("wrong.pt").read_bytes()[:300])
    before = sorted(tmp_path.rglob("*"))
    command, sentence = REFUSED[name]
    result = run(*command.replace("DATA", str(mosaics)).split(), code=2)
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert sentence in line
    assert not result.stdout
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("step", ["checkpoint", "weights"])
def test_a_full_disk_is_a_sentence(tmp_path, mosaics, monkeypatch, step):
    """The write fails where a full disk makes it fail; afterwards the same command finishes the run."""
    monkeypatch.chdir(tmp_path)
    write, calls = Path.write_bytes, []

    def full(self, content):
        calls.append(self)
        if len(calls) == {"checkpoint": 1, "weights": 2}[step]:
            write(self, content[:100])
            raise OSError(errno.ENOSPC, "No space left on device", str(self))
        return write(self, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    command = ["train", "--data", mosaics, "--network", "tiny", "--epochs", "1", "-o", "run"]
    (line,) = run(*command, code=2).stderr.splitlines()
    assert line == "Error: the disk is full; no file is left half-written: make room and try again (train --resume)."
    kept = {"checkpoint": set(), "weights": {"checkpoint.safetensors"}}[step]
    assert {file.name for file in Path("run").iterdir()} == {"config.json", "log.csv", *kept}
    run(*command, "--resume")
    load_run("run")


def test_interruption_keeps_the_run(tmp_path, mosaics, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step, calls = torch.optim.SGD.step, []

    def interrupted(self, *args, **kwargs):
        calls.append(self)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    command = ["train", "--data", mosaics, "--network", "tiny", "--epochs", "3", "--checkpoint-every", "1", "-o", "run"]
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", interrupted)
        assert "no file is left half-written" in run(*command, code=130).stderr
    run(*command, "--resume")
    run(*command[:-1], "whole")
    assert_same_run("run", "whole")


def test_the_bar_shows_only_to_someone(capsys):
    with bar(Screen(), "training", 4) as shown:
        shown.reach(2, "epoch 2/4")
        shown.say("epoch 1/4 [done]")
    printed = capsys.readouterr()
    assert printed.out == "epoch 1/4 [done]\n"
    assert not printed.err
