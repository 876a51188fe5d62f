"""`poise demo`: the whole story on the answers of a real network, from its overconfidence to the cure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import poise
from poise import zoo
from poise.calibrators.criteria import NLL_FLOOR
from poise.cli.commands import network_logits, network_probs, plain_metrics
from poise.cli.measure import Measured, measure, plain_bins, top_label_bins
from poise.cli.methods import kept, learned, noise_word
from poise.cli.options import Debug, Json, check_outputs
from poise.cli.screen import Screen, legend, number, reliability, rows_table
from poise.io import save, write_scores
from poise.metrics import Difference
from poise.noise import Gumbel

RUN = "resnet50.cross-entropy"
"""Whose answers they are."""

_SHOWN = ("accuracy", "ece", "nll", "brier")

_PYTHON = (
    'val, test = poise.read_scores("val.npz"), poise.read_scores("test.npz")',
    "calibrator = poise.ConsistencyCalibration().fit(val.logits, val.labels)",
    "probs = calibrator.predict_proba(test.logits)",
)

_COMMANDS = (
    "poise fit val.npz -o calibrator.safetensors",
    "poise apply calibrator.safetensors test.npz -o probs.npz",
    "poise evaluate probs.npz",
)


def demo(
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where picture and files go.")] = Path("demo"),
    json: Json = None,
    debug: Debug = False,
) -> None:
    """See it work on a real network's answers, in seconds and without data of your own."""
    screen = Screen(json)
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"--out must be a folder, but {out} is a file; name another folder.")
    within = json is not None and json.parent == out
    check_outputs({}, {"--out": out / "probs.npz" if out.exists() else out, "--json": None if within else json})

    val, test = zoo.shipped_scores(RUN)
    assert val.labels is not None  # the shipped files hold them
    assert test.labels is not None
    raw = network_probs(test)
    screen.head("poise demo: making a classifier's confidence true")
    screen.say(
        f"Here is a ResNet-50, trained on CIFAR-10 with cross-entropy in {zoo.shipped_config(RUN)['recipe']['epochs']} "
        f"epochs by `poise train`. poise ships what it answered for {val.num_samples:,} validation and "
        f"{test.num_samples:,} test images that it had not seen. On the test images it is "
        f"{100 * float(raw.amax(1).mean()):.1f} % sure on average, but right only "
        f"{100 * poise.metrics.accuracy(raw, test.labels):.1f} % of the time: it is overconfident.",
        "",
    )

    with _one_thread(), screen.working("fitting on the validation images"):
        temperature = poise.TemperatureScaling().fit(network_logits(val), val.labels, classes=val.classes)
        consistency = poise.ConsistencyCalibration().fit(network_logits(val), val.labels, classes=val.classes)
    screen.head("1  Learn, on the validation images")
    _tell_fits(screen, temperature, consistency)

    with _one_thread(), screen.working("scoring the test images"):
        sets = {
            "uncalibrated": raw,
            "temperature": temperature.predict_proba(network_logits(test)),
            "consistency": consistency.predict_proba(network_logits(test)),
        }
        measured = {
            name: measure(probs, test.labels, intervals=True, floors=name == "consistency", only=_SHOWN)
            for name, probs in sets.items()
        }
        bins = {name: top_label_bins(probs, test.labels) for name, probs in sets.items()}
    screen.head("2  Score, on the test images, which no fit has seen")
    gain = poise.metrics.paired_difference(poise.metrics.nll, sets["consistency"], sets["temperature"], test.labels)
    _tell_scores(screen, measured, gain, int((sets["consistency"].argmax(1) != raw.argmax(1)).sum()))

    screen.head("3  Look: of the images the network is so sure about, how many are right?")
    screen.show(reliability(screen, {name: bins[name] for name in ("uncalibrated", "consistency")}))
    screen.out.print(legend(screen))
    screen.say("")

    out.mkdir(exist_ok=True)
    picture = _draw(out / "reliability.png", sets, test.labels)
    save(consistency, out / "calibrator.safetensors")
    write_scores(out / "probs.npz", probs=sets["consistency"], labels=test.labels, classes=test.classes)
    screen.head("4  Keep")
    missing = 'no picture, for it needs matplotlib: pip install "poise[plots]"'
    screen.say(
        f"{out / 'reliability.png'}: {'the diagram above as a picture' if picture else missing}",
        f"{out / 'calibrator.safetensors'}: the calibrator, which poise.load opens",
        f"{out / 'probs.npz'}: the calibrated test probabilities, with labels and class names",
        "",
    )
    screen.head("Your own network")
    screen.say('Keep its answers, np.savez("val.npz", logits=logits, labels=labels), and a test set likewise.')
    screen.say("Then three lines of Python (after import poise)", *(f"    {line}" for line in _PYTHON))
    screen.say("or three commands", *(f"    {line}" for line in _COMMANDS))
    screen.write_json(
        {
            "poise": poise.__version__,
            "command": "demo",
            "output": str(out),
            "picture": picture,
            "num_val": val.num_samples,
            "num_test": test.num_samples,
            "num_classes": test.num_classes,
            "nll_floor": NLL_FLOOR,
            "learned": {"temperature": learned(temperature), "consistency": learned(consistency)},
            "candidates": consistency.candidates_,
            "test": {name: plain_metrics(values) for name, values in measured.items()},
            "nll_difference": {"value": gain.value, "low": gain.low, "high": gain.high},
            "bins": {name: plain_bins(one) for name, one in bins.items()},
        }
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """On so few numbers, threads that wait for each other on a busy machine cost more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _tell_fits(
    screen: Screen, temperature: poise.TemperatureScaling, consistency: poise.ConsistencyCalibration
) -> None:
    screen.say(
        f"Temperature scaling divides the logits by one number: {temperature.temperature_:.3f}.",
        "Consistency calibration asks how often a class still wins when its logits are shaken by random noise, "
        "exactly, as if with infinitely many tries. It tried these shapes of noise:",
    )
    chosen = kept(consistency)
    rows = [
        (
            noise_word(one["noise"]),
            f"{one['strength']:.3f}",
            f"{100 * one['lapse']:.2f}",
            f"{one['nll']:.4f}",
            "kept" if index == chosen else "",
        )
        for index, one in enumerate(consistency.candidates_)
    ]
    titles = {"noise": "left", "strength": "right", "lapse %": "right", "validation NLL": "right", "": "left"}
    screen.show(rows_table(titles, rows, best=chosen))
    if isinstance(consistency.noise_, Gumbel):
        screen.say(
            "Gumbel noise won. Its vote is temperature scaling, plus a small lapse for plain guesses: for this network "
            "the two methods agree, and that was found, not assumed.",
            "",
        )
    else:
        screen.say(
            f"{noise_word(consistency.noise_).split(':')[0].capitalize()} noise won. Gumbel noise would have been "
            "temperature scaling, plus a small lapse for plain guesses: what shape a network's doubt has is found, not "
            "assumed.",
            "",
        )


def _tell_scores(screen: Screen, measured: dict[str, list[Measured]], gain: Difference, changed: int) -> None:
    rows = []
    for name, values in measured.items():
        by_name = {one.name: one for one in values}
        ece = by_name["ece"]
        assert ece.interval is not None  # asked for above
        rows.append(
            (
                name,
                number(by_name["accuracy"].value, True),
                number(ece.value, True),
                f"{number(ece.interval.low, True)} to {number(ece.interval.high, True)}",
                number(by_name["nll"].value, False),
                number(by_name["brier"].value, False),
            )
        )
    titles = {"": "left", "accuracy %": "right", "ECE %": "right", "95 % interval": "right", "NLL": "right"}
    screen.show(rows_table({**titles, "Brier": "right"}, rows))
    floor = next(one.floor for one in measured["consistency"] if one.floor is not None)
    screen.say(
        "ECE is the average distance between confidence and accuracy. Even a perfectly calibrated network would show "
        f"{number(floor.mean, True)} % on this test set, and up to {number(floor.high, True)} % in 95 of 100 such "
        "sets, by chance alone.",
        f"On the same images the NLL of consistency calibration is {abs(gain.value):.4f} "
        f"{'lower' if gain.value < 0 else 'higher'} than that of temperature scaling, which "
        f"{'is beyond chance' if gain.low * gain.high > 0 else 'may be chance'} (95 % interval of the difference: "
        f"{gain.low:.4f} to {gain.high:.4f}).",
        f"{changed or 'No'} predictions were changed: both methods keep the order of the classes.",
        "",
    )


def _draw(path: Path, sets: dict[str, Any], labels: torch.Tensor) -> bool:
    """Whether there is a picture now; without matplotlib there is none, and the list of files says so."""
    try:
        from poise import plots
    except ImportError:
        return False
    titles = ("uncalibrated", "consistency calibration")
    plots.save(plots.reliability_pair(sets["uncalibrated"], sets["consistency"], labels, titles=titles), path)
    return True
