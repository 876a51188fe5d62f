"""Training by a recipe, on one device, in a folder that a run can be continued from."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from poise import metrics
from poise.io.files import FilePath
from poise.losses import Loss
from poise.zoo import networks, runs
from poise.zoo.augment import crop_and_flip
from poise.zoo.datasets import Dataset, Images, Normalization
from poise.zoo.extraction import device_for, placed, predict
from poise.zoo.recipes import PAPER, Recipe, loss_for

Progress: TypeAlias = Callable[[float, dict[str, Any] | None], None]
"""Told the number of epochs done, with fractions, and after each epoch what its line of the log says."""


def train(
    data: Dataset,
    network: str,
    loss: str,
    folder: FilePath,
    *,
    recipe: Recipe = PAPER,
    seed: int = 1,
    device: str | torch.device | None = None,
    bf16: bool | None = None,
    checkpoint_every: int = 10,
    resume: bool = False,
    progress: Progress | None = None,
) -> nn.Module:
    """Trains the network of that name with the loss of that name, and returns it; `folder` becomes the run's.

    The folder holds ``config.json``, ``log.csv`` with one line per epoch, ``checkpoint.safetensors``, and in the end
    ``network.safetensors``. An epoch's draws depend on `seed` and its number alone, so a run that was killed and is
    resumed is the run that was never killed: on the CPU to the last bit, on a GPU up to the order of its sums. At most
    `checkpoint_every` epochs are lost. The validation set is only looked at (adafocal excepted, which learns from it).

    `device` is a GPU where there is one; `bf16`, autocast of the network but not of the loss, is on there and off on
    the CPU. An epoch of ResNet-50 on CIFAR-10 takes 3.5e14 operations: this is work for a GPU.

    Reference: Mukhoti et al., Calibrating Deep Neural Networks using Focal Loss, NeurIPS 2020.
    """
    if data.train is None:
        raise ValueError(f"{data.name} came without pictures to train on; put its train folder beside the others.")
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every must be 1 or more, but is {checkpoint_every}.")
    place = device_for(device)
    halves = place.type == "cuda" if bf16 is None else bf16
    objective = loss_for(loss, dataset=data.name, network=network, reduction=recipe.reduction).to(place)
    with torch.random.fork_rng(_gpus(place)):
        torch.manual_seed(seed)
        net = networks.network(network, len(data.classes))
    net = placed(net, place)
    optimizer = torch.optim.SGD(
        net.parameters(),
        lr=recipe.peak_rate,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        weight_decay=recipe.weight_decay,
    )
    run = Path(folder)
    config = {
        "dataset": data.name,
        "data": None if data.folder is None else str(data.folder),
        "split_seed": data.split_seed,
        "network": network,
        "loss": loss,
        "loss_options": repr(objective),
        "recipe": dataclasses.asdict(recipe),
        "seed": seed,
        "bf16": halves,
        "num_classes": len(data.classes),
        "num_train": len(data.train),
        "num_val": len(data.val),
        "normalization": data.normalization._asdict(),
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
        **runs.origin(),
    }
    runs.begin(run, config, resume=resume, num_bytes=runs.num_bytes_of(net))
    first = runs.restore_checkpoint(run, net, optimizer, objective)
    log = runs.read_log(run)[:first]

    train_images, val_images = data.train.to(place), data.val.to(place)
    for epoch in range(first, recipe.epochs):
        start = time.perf_counter()
        with torch.random.fork_rng(_gpus(place)), torch.backends.cudnn.flags(enabled=True, benchmark=True):
            torch.manual_seed(_seed_of(seed, epoch))
            row = _one_epoch(
                net, objective, optimizer, recipe, epoch, train_images, data.normalization, place, halves, progress
            )
        if not math.isfinite(row["train_loss"]):
            raise ValueError(
                f"the loss became {row['train_loss']} in epoch {epoch + 1}, so training has diverged; take a smaller "
                "peak_rate in a new run. The last checkpoint is from before."
            )
        val_logits, _ = predict(net, val_images, data.normalization, device=place)
        objective.update(val_logits.to(place), val_images.labels.to(place))
        row = {"epoch": epoch + 1, **row, **_judged(val_logits, val_images.labels)}
        log.append({**row, "seconds": time.perf_counter() - start})
        runs.write_log(run, log)
        if (epoch + 1) % checkpoint_every == 0 or epoch + 1 == recipe.epochs:
            runs.save_checkpoint(run, net, optimizer, objective, epoch + 1)
        if progress is not None:
            progress(epoch + 1, log[-1])
    runs.write_weights(run, net)
    net.eval()
    return net


def _one_epoch(
    net: nn.Module,
    objective: Loss,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    epoch: int,
    images: Images,
    normalization: Normalization,
    device: torch.device,
    bf16: bool,
    progress: Progress | None,
) -> dict[str, float]:
    net.train()
    labels = images.labels.to(device)
    # Shuffled on the CPU, so that every device sees the same order.
    batches = torch.split(torch.randperm(len(images)), recipe.batch_size)
    total, num_right = torch.zeros((), device=device), torch.zeros((), device=device)
    for number, rows in enumerate(batches):
        rate = recipe.rate(epoch + number / len(batches))
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = rows.to(device)
        pixels = crop_and_flip(images.batch(rows).to(device, non_blocking=True))
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            logits = net(normalization(pixels))
        loss = objective(logits.float(), labels[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), recipe.clip)
        optimizer.step()
        total += loss.detach() * (1 if objective.options["reduction"] == "sum" else len(rows))
        num_right += (logits.argmax(1) == labels[rows]).sum()
        if progress is not None:
            progress(epoch + (number + 1) / len(batches), None)
    return {
        "rate": rate,
        "train_loss": float(total) / len(images),
        "train_accuracy": float(num_right) / len(images),
    }


def _judged(logits: Tensor, labels: Tensor) -> dict[str, float]:
    probs = torch.softmax(logits.double(), dim=1)
    return {
        "val_nll": metrics.nll(probs, labels),
        "val_accuracy": metrics.accuracy(probs, labels),
        "val_ece": metrics.ece(probs, labels),
    }


def _seed_of(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _gpus(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
