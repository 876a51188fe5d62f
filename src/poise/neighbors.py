"""How a neighbour of x is drawn: the ⊕ ε z of p = E[g(h(x ⊕ ε z))].

The random part z is drawn apart from the strength ε, so that the same draws serve every strength.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from poise._types import Inputs
from poise.noise import Gaussian, Noise


class Neighbors(ABC):
    """A random neighbourhood of any input."""

    @abstractmethod
    def draw(self, inputs: Inputs, num_samples: int, generator: torch.Generator) -> Any:
        """The random part z of `num_samples` neighbours of each input."""

    @abstractmethod
    def place(self, inputs: Inputs, z: Any, strength: float) -> Tensor:
        """The neighbours x ⊕ ε z, (num_samples, n, ...)."""


@dataclass(frozen=True)
class Additive(Neighbors):
    """x + ε z, with independent draws z of a noise: at the logits, at features, at any activation."""

    noise: Noise = field(default_factory=Gaussian)

    def draw(self, inputs: Inputs, num_samples: int, generator: torch.Generator) -> Tensor:
        shape = (num_samples, *inputs.shape)
        return self.noise.sample(shape, generator=generator, dtype=inputs.dtype, device=inputs.device)

    def place(self, inputs: Inputs, z: Tensor, strength: float) -> Tensor:
        return torch.add(inputs, z, alpha=strength)


@dataclass(frozen=True)
class Augmented(Neighbors):
    """transform(images, ε), any callable that draws from torch's generator: the same draws at every strength."""

    transform: Callable[[Tensor, float], Tensor]

    def draw(self, inputs: Inputs, num_samples: int, generator: torch.Generator) -> list[int]:
        seeds = torch.randint(2**62, (num_samples,), generator=generator, device=inputs.device)
        return [int(seed) for seed in seeds]

    def place(self, inputs: Inputs, z: list[int], strength: float) -> Tensor:
        devices = [inputs.device] if inputs.device.type == "cuda" else []
        neighbors = []
        with torch.random.fork_rng(devices):
            for seed in z:
                torch.manual_seed(seed)
                neighbors.append(self.transform(inputs, strength))
        return torch.stack(neighbors)
