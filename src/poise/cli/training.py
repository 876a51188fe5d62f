"""`poise train` and `poise extract`: a network by the paper's recipe, and the logits that calibration works on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

import poise
from poise import metrics, zoo
from poise.cli.bar import bar
from poise.cli.commands import network_probs
from poise.cli.options import Debug, Json, check_outputs
from poise.cli.screen import Screen, number
from poise.io import Scores, write_scores
from poise.zoo.networks import LIBRARIES, named
from poise.zoo.runs import is_run, read_log

Device = Annotated[
    str | None, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, mps. Default: a GPU where there is one.")
]


def train(
    data: Annotated[Path, typer.Option("--data", metavar="FOLDER", help="Where the images are.", show_default=False)],
    out: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="The run's folder.", show_default=False)
    ],
    dataset: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(zoo.DATASETS)}.")] = "cifar10",
    network: Annotated[
        str, typer.Option(metavar="NAME", help=f"{', '.join(zoo.NETWORKS)}, timm/NAME or torchvision/NAME.")
    ] = "resnet50",
    loss: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(zoo.LOSSES)}.")] = "cross-entropy",
    recipe: Annotated[
        str, typer.Option(metavar="NAME", help="paper: 350 epochs as published; short: 60 epochs of large batches.")
    ] = "paper",
    epochs: Annotated[
        int | None, typer.Option(metavar="N", help="The recipe in N epochs, its schedule scaled along.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first weights, the order and the augmentation.")] = 1,
    device: Device = None,
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--no-bf16", help="Halves in the network. Default: on a GPU.")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Fuse the network's steps: slow to start, then faster.")
    ] = False,
    checkpoint_every: Annotated[int, typer.Option(metavar="N", help="Epochs between checkpoints.")] = 10,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was stopped; the rest of the command stays.")
    ] = False,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Train a network with a calibrating loss; poise extract then takes its logits."""
    screen = Screen(json)
    within = json is not None and json.parent == out
    check_outputs({}, {"--json": None if within else json})
    if recipe not in zoo.RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(zoo.RECIPES)}, but is {recipe!r}.")
    chosen = zoo.RECIPES[recipe] if epochs is None else zoo.RECIPES[recipe].of_length(epochs)
    # Wrong names are said before the images are read.
    named(network)
    zoo.loss_for(loss, dataset=dataset, network=network, reduction=chosen.reduction)
    with screen.working(f"reading {dataset}"):
        data_set = zoo.dataset(dataset, data)
    last: dict[str, Any] = {}
    # Said once the run has begun, so that a refusal stands alone.
    head = [f"{network} on {dataset}, {loss}, {chosen.epochs} epochs, seed {seed}"]
    with bar(screen, "training", chosen.epochs) as shown:

        def tell(done: float, row: dict[str, Any] | None) -> None:
            while head:
                shown.say(head.pop())
            shown.reach(done, f"epoch {min(int(done) + 1, chosen.epochs)}/{chosen.epochs}")
            if row is not None:
                last.update(row)
                shown.say(_in_words(row, chosen.epochs))

        zoo.train(
            data_set,
            network,
            loss,
            out,
            recipe=chosen,
            seed=seed,
            device=device,
            bf16=bf16,
            compile=compile,
            checkpoint_every=checkpoint_every,
            resume=resume,
            progress=tell,
        )
    picture = _draw(out)
    screen.write_json({"poise": poise.__version__, "command": "train", "output": str(out), "last_epoch": last})
    screen.say(f"Saved: {out}" + (", with curves.png" if picture else ""), f"Next: poise extract {out} -o scores")


def extract(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A run's folder; a checkpoint (--network); or timm/NAME or torchvision/NAME with their own weights.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER", help="Where val.npz and test.npz go.", show_default=False),
    ],
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FOLDER", help="Where the images are. Default: the run's.")
    ] = None,
    network: Annotated[str | None, typer.Option(metavar="NAME", help="The network of a checkpoint.")] = None,
    dataset: Annotated[str | None, typer.Option(metavar="NAME", help="The images, if not the run's.")] = None,
    normalization: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"{', '.join(zoo.NORMALIZATIONS)}. Default: the network's or the data's."),
    ] = None,
    features: Annotated[bool, typer.Option("--features/--no-features", help="Keep the features too.")] = True,
    device: Device = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Take a network's logits and features for the validation and test images, for poise fit and evaluate."""
    screen = Screen(json)
    outputs = {split: out / f"{split}.npz" for split in ("val", "test")}
    check_outputs({}, {"--output": outputs["val"] if out.exists() else out, "--json": json})
    if normalization is not None and normalization not in zoo.NORMALIZATIONS:
        raise ValueError(f"normalization must be one of {', '.join(zoo.NORMALIZATIONS)}, but is {normalization!r}.")
    with screen.working("reading"):
        net, data_set = _trained(source, data, network, dataset)
    own = getattr(net, "normalization", data_set.normalization)
    scale = own if normalization is None else zoo.NORMALIZATIONS[normalization]
    found: dict[str, Scores] = {}
    for split in outputs:
        images: zoo.Images = getattr(data_set, split)
        with bar(screen, f"{split} images", len(images)) as shown:
            found[split] = zoo.extract(net, images, scale, features=features, device=device, progress=shown.reach)
    out.mkdir(exist_ok=True)
    for split, path in outputs.items():
        one = found[split]
        write_scores(path, logits=one.logits, labels=one.labels, features=one.features, classes=one.classes)
    measured = {split: _measures(one) for split, one in found.items()}
    screen.write_json(
        {
            "poise": poise.__version__,
            "command": "extract",
            "input": str(source),
            "output": str(out),
            "normalization": scale._asdict(),
            "features": None if not features else getattr(found["val"].features, "shape", (0, 0))[1],
            "splits": {split: {"num_samples": found[split].num_samples, **measured[split]} for split in found},
        }
    )
    for split, path in outputs.items():
        told = ", ".join(f"{name} {number(value, name != 'nll')}" for name, value in measured[split].items())
        screen.say(f"Saved: {path}: {found[split].num_samples:,} images, {told}")


def _trained(
    source: Path, data: Path | None, network: str | None, dataset: str | None
) -> tuple[nn.Module, zoo.Dataset]:
    """The network, and the images as it was trained with them."""
    if is_run(source):
        if network is not None:
            raise ValueError(f"{source} is a run, which knows its network; leave --network out.")
        net, config = zoo.load_run(source)
        place = data or config["data"]
        if place is None:
            raise ValueError(f"the run in {source} does not say where its images are; name the folder by --data.")
        return net, zoo.dataset(dataset or config["dataset"], place, seed=config["split_seed"])
    if source.is_dir():
        raise ValueError(f"{source} holds no run of poise train; name a run's folder, or a checkpoint's file.")
    is_name = source.parts[0] in LIBRARIES and len(source.parts) == 2 and not source.exists()
    if dataset is None or data is None or (network is None and not is_name):
        raise ValueError(
            f"{source} is a {'network' if is_name else 'checkpoint'} and says nothing of images; name "
            f"{'' if is_name else '--network, '}--dataset and --data."
        )
    data_set = zoo.dataset(dataset, data)
    if network is None:
        return zoo.network(source.as_posix(), len(data_set.classes), pretrained=True), data_set
    return zoo.load_weights(zoo.network(network, len(data_set.classes)), source), data_set


def _draw(run: Path) -> bool:
    """Whether there is a picture of the run's curves now; without matplotlib there is none."""
    try:
        from poise import plots
    except ImportError:
        return False
    plots.save(plots.training_curves(read_log(run)), run / "curves.png")
    return True


def _measures(scores: Scores) -> dict[str, float]:
    probs, labels = network_probs(scores), scores.labels
    return {
        "accuracy": metrics.accuracy(probs, labels),
        "ece": metrics.ece(probs, labels),
        "nll": metrics.nll(probs, labels),
    }


def _in_words(row: dict[str, Any], epochs: int) -> str:
    return (
        f"epoch {row['epoch']}/{epochs}  loss {row['train_loss']:.4f}  val accuracy {number(row['val_accuracy'], True)}"
        f"  NLL {number(row['val_nll'], False)}  ECE {number(row['val_ece'], True)}  {row['seconds']:.1f} s"
    )
