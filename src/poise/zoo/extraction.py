"""Logits and features of a network for a set of images: what calibration works on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from poise.io import Scores
from poise.zoo.datasets import Images, Normalization


def extract(
    network: nn.Module,
    images: Images,
    normalization: Normalization,
    *,
    features: bool = True,
    device: str | torch.device | None = None,
    batch_size: int = 250,
    progress: Callable[[int], None] | None = None,
) -> Scores:
    """The network's logits for images, in float32 and in their order, with labels, class names and features.

    The features are what `network.feature_layer` puts out; the logits are its last layer's map of them. `normalization`
    must be the one that the network was trained with: another one costs accuracy without a word. `progress` is told the
    number of images done.
    """
    place = device_for(device)
    logits, kept = predict(
        placed(network, place),
        images,
        normalization,
        device=place,
        features=features,
        batch_size=batch_size,
        progress=progress,
    )
    return Scores(logits=logits, labels=images.labels, features=kept, classes=images.classes)


@torch.no_grad()
def predict(
    network: nn.Module,
    images: Images,
    normalization: Normalization,
    *,
    device: torch.device,
    features: bool = False,
    batch_size: int = 250,
    progress: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Logits and, if asked for, features, of a network where it is."""
    network.eval()
    kept: list[Tensor] = []
    logits: list[Tensor] = []

    def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kept.append(output.flatten(1).float().cpu())

    hooks = [network.get_submodule(str(network.feature_layer)).register_forward_hook(keep)] if features else []
    try:
        for rows in torch.split(torch.arange(len(images)), batch_size):
            logits.append(network(normalization(images.batch(rows).to(device))).float().cpu())
            if progress is not None:
                progress(int(rows[-1]) + 1)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(logits), torch.cat(kept) if features else None


def device_for(wanted: str | torch.device | None) -> torch.device:
    """The device of that name, if it is there; without a name a GPU where there is one."""
    name = str(wanted) if wanted is not None else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    # What torch says depends on what it was built for.
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"device {name!r} cannot be used here ({str(error).splitlines()[0]}); take 'cpu', or the name of a GPU "
            "that this build of torch can use."
        ) from error
    return device


def placed(network: nn.Module, device: torch.device) -> nn.Module:
    """On the device, channels last in memory, which its convolutions are fastest with."""
    network.to(device)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network
