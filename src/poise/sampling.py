"""The equation by random draws, p_k(x) = 1/T Σ_t g_k(h(x ⊕ ε z_t)), for any neighbours, head and readout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from poise._types import Head, Inputs, Logits, Probs
from poise.neighbors import Neighbors
from poise.progress import Progress
from poise.readout import Readout, vote

_TILE_ROWS = 64
_TILE_NUMBERS = 2**17
"""Random numbers of one tile: they stay in the cache, and memory depends neither on n nor on T."""
_LARGEST_TILE = 2**20
"""Where rows are so large that one draw of so many holds more numbers than this, a tile has fewer rows."""

_ACCELERATOR_BATCH = 1024
"""Neighbours that fill a device; the CPU is fastest on what fits its cache."""

Store = MutableMapping[str, Tensor]
"""Where finished parts are kept, to go on after an interruption: a dictionary, or a `poise.io.Folder`."""


def estimate(
    inputs: Inputs,
    *,
    neighbors: Neighbors,
    strength: float,
    head: Head | None = None,
    readout: Readout = vote,
    num_samples: int = 1000,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | None = None,
    store: Store | None = None,
) -> Probs:
    """The mean of the readout over `num_samples` neighbours of each input, (n, k).

    Draws are keyed by (seed, row, draw): the same at every strength, in a longer run, in a larger table and for any
    batch size. A head that is a module with parameters is fed on their device.

    Args:
        batch_size: neighbours that pass the head at once; with the result it bounds the memory.
        progress: called with the number of neighbours done and to do, such as a `poise.progress.Bar()`.
        store: finished parts are put there, and not computed again when they are found there.
    """
    return estimate_each(
        inputs,
        neighbors=neighbors,
        strengths=[strength],
        head=head,
        readout=readout,
        num_samples=num_samples,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
        store=store,
    )[0]


@torch.no_grad()
def estimate_each(
    inputs: Inputs,
    *,
    neighbors: Neighbors,
    strengths: Sequence[float],
    head: Head | None = None,
    readout: Readout = vote,
    num_samples: int = 1000,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | None = None,
    store: Store | None = None,
) -> Tensor:
    """`estimate` at several strengths, (strengths, n, k), from one set of draws."""
    # Halves cannot count to a thousand.
    counted = torch.promote_types(inputs.dtype, torch.float32)
    if len(inputs) == 0:
        logits = inputs if head is None else head(inputs)
        return logits.new_zeros(len(strengths), 0, logits.shape[1], dtype=counted)
    work = _Work(neighbors, strengths, head, readout, num_samples, seed, batch_size, counted)
    total = len(inputs) * num_samples * len(strengths)
    done, result = 0, torch.empty(0)
    rows = work.tile_rows(inputs)
    fingerprint = None if store is None else work.fingerprint(inputs[:rows])
    for row_tile, start in enumerate(range(0, len(inputs), rows)):
        tile = inputs[start : start + rows]
        key = "" if fingerprint is None else _digest(f"{fingerprint} {row_tile}", tile)
        kept = None if store is None else store.get(key)
        sums = torch.zeros((), dtype=counted)
        for some, num_draws in work.votes(tile, row_tile) if kept is None else [(kept, num_samples)]:
            sums = sums.to(some.device) + some
            done += len(tile) * num_draws * len(strengths)
            if progress is not None:
                progress(done, total)
        if store is not None and kept is None:
            store[key] = sums.cpu()
        if start == 0:
            result = sums.new_empty((len(strengths), len(inputs), sums.shape[2]), device=inputs.device)
        result[:, start : start + rows] = sums / num_samples
    return result


@dataclass(frozen=True)
class _Work:
    """What is done to every tile of rows."""

    neighbors: Neighbors
    strengths: Sequence[float]
    head: Head | None
    readout: Readout
    num_samples: int
    seed: int
    batch_size: int | None
    counted: torch.dtype

    def tile_rows(self, inputs: Inputs) -> int:
        return min(_TILE_ROWS, max(1, _LARGEST_TILE // self._numbers_per_row(inputs)))

    def votes(self, tile: Inputs, row_tile: int) -> Iterator[tuple[Tensor, int]]:
        """Sums of the readout over some of the draws at every strength, (strengths, rows, k), and how many draws."""
        tile = tile.to(device_of(self.head, tile))
        for z in self._draws(tile, row_tile):
            yield torch.stack([self._sum(tile, z, strength) for strength in self.strengths]), len(z)

    def fingerprint(self, tile: Inputs) -> str:
        """Of everything but the rows: a changed network or neighbourhood shows in the first draw's logits."""
        on_device = tile.to(device_of(self.head, tile))
        z = next(self._draws(on_device, 0))[:1]
        first = [self._logits(on_device, z, strength) for strength in self.strengths]
        settings = (self.readout.__qualname__, self.num_samples, self.seed, tuple(self.strengths))
        return _digest(repr(settings), torch.cat(first))

    def _draws(self, tile: Inputs, row_tile: int) -> Iterator[Tensor]:
        """All draws of one tile, as many at a time as fill a batch of the head."""
        perturbed, _ = self._parts(tile)
        rows = self.tile_rows(tile)
        # A tile is drawn whole, whatever part of it is used: its shape depends on a row's shape alone.
        whole = perturbed[:1].expand(rows, *perturbed.shape[1:])
        tile_draws = max(1, _TILE_NUMBERS // (rows * self._numbers_per_row(tile)))
        at_once = 1
        if self.head is not None:
            fitting = self.batch_size or (_TILE_ROWS if tile.device.type == "cpu" else _ACCELERATOR_BATCH)
            at_once = max(1, fitting // (len(tile) * tile_draws))
        num_tiles = math.ceil(self.num_samples / tile_draws)
        for first in range(0, num_tiles, at_once):
            z = [
                self.neighbors.draw(whole, tile_draws, _generator(tile.device, self.seed, row_tile, draw_tile))
                for draw_tile in range(first, min(first + at_once, num_tiles))
            ]
            yield (z[0] if len(z) == 1 else torch.cat(z))[: self.num_samples - first * tile_draws]

    def _sum(self, tile: Inputs, z: Tensor, strength: float) -> Tensor:
        return self.readout(self._logits(tile, z, strength)).sum(0, dtype=self.counted)

    def _logits(self, tile: Inputs, z: Tensor, strength: float) -> Logits:
        perturbed, carried = self._parts(tile)
        near = self.neighbors.place(perturbed, z, strength)
        if self.head is None:
            return near
        if carried is not None:
            near = torch.cat([near, carried.expand(len(near), *carried.shape)], dim=-1)
        flat = near.flatten(0, 1)
        batches = [flat] if self.batch_size is None else torch.split(flat, self.batch_size)
        return torch.cat([self.head(batch) for batch in batches]).reshape(*near.shape[:2], -1)

    def _parts(self, tile: Inputs) -> tuple[Inputs, Tensor | None]:
        """What is perturbed, and what a head that reruns a network carries along."""
        number = getattr(self.head, "num_perturbed", None)
        return (tile, None) if number is None else (tile[:, :number], tile[:, number:])

    def _numbers_per_row(self, inputs: Inputs) -> int:
        return max(1, math.prod(self._parts(inputs[:1])[0].shape[1:]))


def device_of(head: Head | None, inputs: Tensor) -> torch.device:
    """Where the neighbours are drawn and passed through the head: at its parameters, else where the inputs are."""
    if isinstance(head, nn.Module):
        for parameter in head.parameters():
            return parameter.device
    return inputs.device


def _generator(device: torch.device, *key: int) -> torch.Generator:
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(state >> np.uint64(1)))


def _digest(name: str, values: Tensor) -> str:
    content = values.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(f"{name} {values.dtype} ".encode() + content.tobytes(), digest_size=16).hexdigest()
