"""The folder of a training run: what it is, how far it is, its curves, its weights; each file whole or absent."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as serialized
from torch import Tensor, nn

import poise
from poise.io.files import FilePath, atomic, existing, reading
from poise.zoo.checkpoints import load_weights
from poise.zoo.networks import network

CONFIG, LOG, CHECKPOINT, WEIGHTS = "config.json", "log.csv", "checkpoint.safetensors", "network.safetensors"

DECISIVE = ("dataset", "split_seed", "network", "loss", "recipe", "seed", "bf16", "num_train")
"""What must be the same for a run to be the same run."""


def begin(folder: Path, config: dict[str, Any], *, resume: bool, num_bytes: int) -> None:
    """Makes the folder and writes what the run is, or finds that it is there and the same."""
    if (folder / CONFIG).exists():
        if not resume:
            raise FileExistsError(
                f"{folder} holds a run already; continue it with resume (--resume), or name another folder."
            )
        _must_be_the_same(folder, read_config(folder), config)
        # What a run that was killed while writing could not take away.
        for file in folder.iterdir():
            if re.fullmatch(r"\.[0-9a-f]{16}\.\w+", file.name):
                file.unlink()
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there and holds other things than a run; name a new folder.")
    if not folder.absolute().parent.is_dir():
        raise FileNotFoundError(f"{folder} cannot be made, for there is no folder {folder.parent}; make it first.")
    free = shutil.disk_usage(folder.absolute().parent).free
    if free < num_bytes:
        raise OSError(
            f"a run needs {num_bytes / 1e9:.2f} GB in {folder}, but only {free / 1e9:.2f} GB are free there; "
            "make room, or name a folder on another disk."
        )
    folder.mkdir(exist_ok=True)
    _write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def read_config(folder: FilePath) -> dict[str, Any]:
    """What the run in a folder is."""
    file = existing(Path(folder) / CONFIG)
    with reading(file, "the description of a run", "start the run again"):
        config: dict[str, Any] = json.loads(file.read_text("utf-8"))
        config["recipe"]["drops"] = tuple(config["recipe"]["drops"])
    return config


def load_run(folder: FilePath) -> tuple[nn.Module, dict[str, Any]]:
    """The trained network of a finished run, and what the run was."""
    config = read_config(folder)
    file = Path(folder) / WEIGHTS
    if not file.exists():
        raise FileNotFoundError(
            f"the run in {folder} is not finished ({len(read_log(Path(folder)))} of {config['recipe']['epochs']} "
            "epochs); finish it with the same `poise train` command and --resume."
        )
    return load_weights(network(config["network"], config["num_classes"]), file), config


def save_checkpoint(
    folder: Path, network: nn.Module, optimizer: torch.optim.Optimizer, loss: nn.Module, num_epochs: int
) -> None:
    """All that the next epoch depends on: weights, momentum, what the loss has learned, and the number of epochs."""
    tensors = {f"network.{name}": value for name, value in network.state_dict().items()}
    tensors |= {f"loss.{name}": value for name, value in loss.state_dict().items()}
    # A layer that never had a gradient has no momentum.
    for name, parameter in network.named_parameters():
        if "momentum_buffer" in optimizer.state[parameter]:
            tensors[f"momentum.{name}"] = optimizer.state[parameter]["momentum_buffer"]
    _write_tensors(folder / CHECKPOINT, tensors, {"epochs": str(num_epochs)})


def restore_checkpoint(folder: Path, network: nn.Module, optimizer: torch.optim.Optimizer, loss: nn.Module) -> int:
    """Everything as `save_checkpoint` found it, and the number of epochs done; 0 where none has been kept."""
    file = folder / CHECKPOINT
    if not file.exists():
        return 0
    with reading(file, "a checkpoint", "delete it to begin the run anew"), safe_open(file, "pt") as content:
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (not a dictionary)
        num_epochs = int(content.metadata()["epochs"])
        network.load_state_dict(_below("network.", tensors))
        loss.load_state_dict(_below("loss.", tensors))
        parameters = dict(network.named_parameters())
        for name, momentum in _below("momentum.", tensors).items():
            parameter = parameters[name]
            optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).copy_(momentum)
    return num_epochs


def write_weights(folder: Path, network: nn.Module) -> None:
    """The finished network."""
    _write_tensors(folder / WEIGHTS, network.state_dict(), {})


def write_log(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line per epoch, with all digits."""
    with atomic(folder / LOG) as temporary, temporary.open("w", encoding="utf-8", newline="") as content:
        writer = csv.DictWriter(content, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read_log(folder: Path) -> list[dict[str, float]]:
    """What was written of each epoch."""
    file = folder / LOG
    if not file.exists():
        return []
    with (
        reading(file, "the log of a run", "delete it to begin a new one"),
        file.open(encoding="utf-8", newline="") as content,
    ):
        return [
            {name: int(value) if name == "epoch" else float(value) for name, value in row.items()}
            for row in csv.DictReader(content)
        ]


def origin() -> dict[str, str | None]:
    """With what a run was made: versions, and the revision of poise's source where it is a git checkout."""
    return {"poise": poise.__version__, "torch": torch.__version__, "revision": _revision()}


def _revision() -> str | None:
    def git(*command: str) -> str | None:
        ran = subprocess.run(["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True)
        return ran.stdout.strip() if ran.returncode == 0 else None

    try:
        # An environment's folder may lie in somebody else's repository.
        return git("describe", "--always", "--dirty", "--abbrev=40") if git("ls-files", "runs.py") else None
    except OSError:
        return None


def _must_be_the_same(folder: Path, known: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in DECISIVE:
        if known.get(name) != wanted[name]:
            theirs, ours = known.get(name), wanted[name]
            if isinstance(theirs, dict):
                name, theirs, ours = _first_difference(theirs, ours)
            raise ValueError(
                f"the run in {folder} has {name} {theirs}, but {ours} came; continue it with what it was started with, "
                "or name another folder."
            )


def _first_difference(known: dict[str, Any], wanted: dict[str, Any]) -> tuple[str, Any, Any]:
    return next((name, known.get(name), value) for name, value in wanted.items() if known.get(name) != value)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    content = serialized({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, metadata)
    # safetensors' own writer does not say that a disk is full in a way that could be told from damage.
    with atomic(file) as temporary:
        temporary.write_bytes(content)


def _write_text(file: Path, text: str) -> None:
    with atomic(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def num_bytes_of(network: nn.Module) -> int:
    """Room for a checkpoint, the one that replaces it, and the weights."""
    tensors: Iterable[Tensor] = network.state_dict().values()
    return 5 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a run."""
    return (Path(path) / CONFIG).exists()
