"""Trained weights into a network: safetensors, or what torch.save wrote, of which only tensors are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from poise.io.files import existing, listed, reading

_WRAPPERS = ("state_dict", "model_state_dict", "model", "net")
"""Under these keys some training scripts put the weights among other things."""


def load_weights(network: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Fills the network with the weights in a file, all of them or none, and returns it.

    ``.safetensors``, or any file of torch.save (``.pt``, ``.pth``, ``.model``), of which nothing but tensors is ever
    read. Names may begin with ``module.``, as torch's DataParallel writes them. Every name and shape must fit.

    >>> import tempfile, torch
    >>> from poise.zoo import network
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"module." + k: v for k, v in network("resnet20").state_dict().items()}, f"{folder}/r20.model")
    ...     net = load_weights(network("resnet20"), f"{folder}/r20.model")
    """
    file = existing(path)
    weights = _read(file)
    wanted = network.state_dict()
    # Old files lack the counters of batch normalization, which nothing here uses.
    missing = [name for name in wanted if name not in weights and not name.endswith("num_batches_tracked")]
    unknown = [name for name in weights if name not in wanted]
    kind = type(network).__name__
    if missing or unknown:
        raise ValueError(
            f"{file} holds the weights of another network than this {kind}: "
            + "; ".join(
                f"{what} {listed(names)}"
                for what, names in (("it lacks", missing), ("it has besides", unknown))
                if names
            )
            + "; name the network that the file was written from."
        )
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(
                f"{file} does not fit this {kind}: {name} has shape {tuple(tensor.shape)} where "
                f"{tuple(wanted[name].shape)} is wanted; check the network's name and its number of classes."
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{file} holds NaN or infinity in {name}; its training diverged: take another checkpoint.")
    network.load_state_dict(weights, strict=False)
    return network


def _read(file: Path) -> dict[str, Tensor]:
    with reading(file, "a checkpoint", "name a .safetensors file or one that torch.save wrote of a state_dict"):
        if file.suffix.lower() == ".safetensors":
            content: Any = load_file(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True)
    if isinstance(content, Mapping):
        wrapper = next((key for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        content = content if wrapper is None else content[wrapper]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(
            f"{file} must hold a network's tensors by name, but holds something else; write network.state_dict()."
        )
    return {str(name).removeprefix("module."): value for name, value in content.items()}
