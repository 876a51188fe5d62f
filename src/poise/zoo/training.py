"""Training by a recipe, on one device, in a folder that a run can be continued from."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
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
    compile: bool = False,
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
    the CPU. An epoch of ResNet-50 on CIFAR-10 takes 3.5e14 operations: this is work for a GPU. `compile` lets
    torch.compile fuse the network's steps, which costs the first minute and changes the last digits.

    Reference: Mukhoti et al., Calibrating Deep Neural Networks using Focal Loss, NeurIPS 2020.
    """
    if data.train is None:
        raise ValueError(f"{data.name} came without images to train on; put its train folder beside the others.")
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every must be 1 or more, but is {checkpoint_every}.")
    if seed < 0:
        raise ValueError(f"seed must be a whole number, 0 or more, but is {seed}.")
    place = device_for(device)
    objective = loss_for(loss, dataset=data.name, network=network, reduction=recipe.reduction).to(place)
    with torch.random.fork_rng(_gpus(place)):
        torch.manual_seed(seed)
        net = placed(networks.network(network, len(data.classes)), place)
    optimizer = torch.optim.SGD(
        net.parameters(),
        lr=recipe.peak_rate,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        weight_decay=recipe.weight_decay,
    )
    halves = place.type == "cuda" if bf16 is None else bf16
    run, config = Path(folder), _description(data, network, loss, objective, recipe, seed, halves, place)
    config |= {"compiled": compile}
    runs.begin(run, config, resume=resume, num_bytes=runs.num_bytes_of(net))
    first = runs.restore_checkpoint(run, net, optimizer, objective)
    log = runs.read_log(run)[:first]

    work = _Work(
        net=net,
        # CUDA graphs: the CPU could not start so many small steps fast enough.
        forward=torch.compile(net, mode="reduce-overhead") if compile else net,
        objective=objective,
        optimizer=optimizer,
        recipe=recipe,
        images=data.train.to(place),
        normalization=data.normalization,
        device=place,
        bf16=halves,
        seed=seed,
        progress=progress,
    )
    val_images = data.val.to(place)
    for epoch in range(first, recipe.epochs):
        start = time.perf_counter()
        row = {"epoch": epoch + 1, **work.epoch(epoch)}
        if not math.isfinite(row["train_loss"]):
            raise ValueError(
                f"the loss became {row['train_loss']} in epoch {epoch + 1}, so training has diverged; take a smaller "
                "peak_rate in a new run. The last checkpoint is from before."
            )
        val_logits, _ = predict(net, val_images, data.normalization, device=place)
        objective.update(val_logits.to(place), val_images.labels.to(place))
        row |= _judged(val_logits, val_images.labels)
        log.append({**row, "seconds": time.perf_counter() - start})
        runs.write_log(run, log)
        if (epoch + 1) % checkpoint_every == 0 or epoch + 1 == recipe.epochs:
            runs.save_checkpoint(run, net, optimizer, objective, epoch + 1)
        if progress is not None:
            progress(epoch + 1, log[-1])
    runs.write_weights(run, net)
    net.eval()
    return net


@dataclass
class _Work:
    """What an epoch of training needs, on its device."""

    net: nn.Module
    forward: Callable[[Tensor], Tensor]
    objective: Loss
    optimizer: torch.optim.Optimizer
    recipe: Recipe
    images: Images
    normalization: Normalization
    device: torch.device
    bf16: bool
    seed: int
    progress: Progress | None

    def epoch(self, number: int) -> dict[str, float]:
        """Every image once, in the order and with the crops of this epoch."""
        self.net.train()
        labels = self.images.labels.to(self.device)
        total, num_right, num_clipped = (torch.zeros((), device=self.device) for _ in range(3))
        rate = 0.0
        with torch.random.fork_rng(_gpus(self.device)), torch.backends.cudnn.flags(enabled=True, benchmark=True):
            torch.manual_seed(_seed_of(self.seed, number))
            # Shuffled on the CPU, so that every device sees the same order.
            batches = torch.split(torch.randperm(len(self.images)), self.recipe.batch_size)
            for index, rows in enumerate(batches):
                rate = self.recipe.rate(number + index / len(batches))
                loss, right, clipped = self._step(rows.to(self.device), labels, rate)
                total += loss * (1 if self.objective.options["reduction"] == "sum" else len(rows))
                num_right += right
                num_clipped += clipped
                if self.progress is not None:
                    self.progress(number + (index + 1) / len(batches), None)
        num = len(self.images)
        return {
            "rate": rate,
            "train_loss": float(total) / num,
            "train_accuracy": float(num_right) / num,
            "clipped": float(num_clipped) / len(batches),
        }

    def _step(self, rows: Tensor, labels: Tensor, rate: float) -> tuple[Tensor, Tensor, Tensor]:
        """One step of SGD; its loss, how many were right before it, and whether its gradient was clipped."""
        self.optimizer.zero_grad(set_to_none=True)
        pixels = crop_and_flip(self.images.batch(rows).to(self.device))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            # An epoch's last, smaller batch is not worth another compilation.
            forward = self.forward if len(rows) == self.recipe.batch_size else self.net
            logits = forward(self.normalization(pixels))
        loss = self.objective(logits.float(), labels[rows])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), self.recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return loss.detach(), (logits.argmax(1) == labels[rows]).sum(), norm > self.recipe.clip


def _description(
    data: Dataset,
    network: str,
    loss: str,
    objective: Loss,
    recipe: Recipe,
    seed: int,
    bf16: bool,
    device: torch.device,
) -> dict[str, Any]:
    """What the run is, in words and numbers that JSON has."""
    return {
        "dataset": data.name,
        "data": None if data.folder is None else str(data.folder),
        "split_seed": data.split_seed,
        "network": network,
        "loss": loss,
        "loss_options": repr(objective),
        "recipe": dataclasses.asdict(recipe),
        "seed": seed,
        "bf16": bf16,
        "num_classes": len(data.classes),
        "num_train": 0 if data.train is None else len(data.train),
        "num_val": len(data.val),
        "normalization": data.normalization._asdict(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        **runs.origin(),
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
