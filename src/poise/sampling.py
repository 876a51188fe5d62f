"""The equation by random draws, p_k(x) = 1/T Σ_t g_k(h(x ⊕ ε z_t)), for any neighbours, head and readout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from poise._types import Head, Inputs, Probs
from poise.neighbors import Neighbors
from poise.readout import Readout, vote

_TILE_ROWS = 64
_TILE_NUMBERS = 2**17
"""Random numbers of one tile: they stay in the cache, and memory depends neither on n nor on T."""


def estimate(
    inputs: Inputs,
    *,
    neighbors: Neighbors,
    strength: float,
    head: Head | None = None,
    readout: Readout = vote,
    num_samples: int = 1000,
    seed: int = 0,
) -> Probs:
    """The mean of the readout over `num_samples` neighbours of each input, (n, k).

    Draws are keyed by (seed, row, draw): the same at every strength, and in a longer run or a larger table.
    """
    return estimate_each(
        inputs,
        neighbors=neighbors,
        strengths=[strength],
        head=head,
        readout=readout,
        num_samples=num_samples,
        seed=seed,
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
) -> Tensor:
    """`estimate` at several strengths, (strengths, n, k), from one set of draws."""
    numbers_per_row = max(1, math.prod(inputs.shape[1:]))
    # A tile is drawn whole, whatever part of it is used: its shape depends on a row's shape alone.
    tile_draws = max(1, _TILE_NUMBERS // (_TILE_ROWS * numbers_per_row))
    # Halves cannot count to a thousand.
    counted = torch.promote_types(inputs.dtype, torch.float32)
    if len(inputs) == 0:
        logits = inputs if head is None else head(inputs)
        return logits.new_zeros(len(strengths), 0, logits.shape[1], dtype=counted)
    rows = []
    for row_tile, start in enumerate(range(0, len(inputs), _TILE_ROWS)):
        tile = inputs[start : start + _TILE_ROWS]
        whole = torch.cat([tile, tile[-1:].expand(_TILE_ROWS - len(tile), *tile.shape[1:])])
        totals: list[Tensor | float] = [0.0] * len(strengths)
        for draw_tile, first in enumerate(range(0, num_samples, tile_draws)):
            z = neighbors.draw(whole, tile_draws, _generator(inputs.device, seed, row_tile, draw_tile))
            z = z[: num_samples - first]
            for i, strength in enumerate(strengths):
                near = neighbors.place(whole, z, strength)[:, : len(tile)]
                logits = near if head is None else head(near.flatten(0, 1)).reshape(*near.shape[:2], -1)
                totals[i] = totals[i] + readout(logits).sum(0, dtype=counted)
        rows.append(torch.stack([torch.as_tensor(total) for total in totals]) / num_samples)
    return torch.cat(rows, dim=1)


def _generator(device: torch.device, *key: int) -> torch.Generator:
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(state >> np.uint64(1)))
