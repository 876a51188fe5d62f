"""The contract of neighbours, and those of any tensor: added noise, noise behind a linear head, any transform."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from poise._types import Inputs, Logits
from poise.noise import Gaussian, Noise


class Neighbors(ABC):
    """A random neighbourhood of any input."""

    @property
    def has_strength(self) -> bool:
        """Whether there is a strength to choose; else a fit has nothing to learn and needs no labels."""
        return True

    @abstractmethod
    def draw(self, inputs: Inputs, num_samples: int, generator: torch.Generator) -> Tensor:
        """The random part z of `num_samples` neighbours of each of the n inputs, (num_samples, n, ...)."""

    @abstractmethod
    def place(self, inputs: Inputs, z: Tensor, strength: float) -> Tensor:
        """The neighbours x ⊕ ε z of the inputs, the first rows of those z was drawn for, (num_samples, n, ...)."""


@dataclass(frozen=True)
class Additive(Neighbors):
    """x + ε z, with independent draws z of a noise: at the logits, at features, at any activation."""

    noise: Noise = field(default_factory=Gaussian)

    def draw(self, inputs: Inputs, num_samples: int, generator: torch.Generator) -> Tensor:
        shape = (num_samples, *inputs.shape)
        return self.noise.sample(shape, generator=generator, dtype=inputs.dtype, device=inputs.device)

    def place(self, inputs: Inputs, z: Tensor, strength: float) -> Tensor:
        return torch.add(inputs, z[:, : len(inputs)], alpha=strength)


@dataclass(frozen=True, eq=False)
class ThroughLinear(Neighbors):
    """Gaussian noise on the features, seen at the logits: z ~ N(0, W Wᵀ) for a linear head with weight W (k, d).

    W (f + ε n) + b = (W f + b) + ε W n, and W n has the law of R v with Wᵀ = Q Rᵀ and min(k, d) standard normals v: the
    same vote as ``Additive(Gaussian())`` at the features under that head, and the same ε. The inputs are the logits;
    there is no head. Drawn once for all strengths, while the head would have to be run at each: a search costs about
    as many times less as it tries strengths, and each draw d/k times less besides. Only Gaussian noise has this form.

    >>> weight = torch.tensor([[3.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    >>> z = ThroughLinear(weight).draw(torch.zeros(1, 2), 100_000, torch.Generator().manual_seed(0))
    >>> torch.allclose(z[:, 0].T @ z[:, 0] / 100_000, weight @ weight.T, atol=0.1)
    True
    """

    weight: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.weight, Tensor) or self.weight.ndim != 2:
            came = f"shape {tuple(self.weight.shape)}" if isinstance(self.weight, Tensor) else repr(self.weight)
            raise ValueError(
                f"weight must be the (k, d) tensor of a linear head, but {came} came; pass model.fc.weight."
            )

    @cached_property
    def root(self) -> Tensor:
        """(min(k, d), k), whose square rootᵀ root is W Wᵀ."""
        root: Tensor = torch.linalg.qr(self.weight.detach().double().T, mode="r").R
        return root

    def draw(self, inputs: Logits, num_samples: int, generator: torch.Generator) -> Tensor:
        if inputs.ndim != 2 or inputs.shape[1] != len(self.weight):
            raise ValueError(
                f"noise behind a head of {len(self.weight)} classes is added to (n, {len(self.weight)}) logits, but "
                f"inputs of shape {tuple(inputs.shape)} came; pass logits, and no head."
            )
        root = self.root.to(inputs)
        shape = (num_samples, len(inputs), len(root))
        return Gaussian().sample(shape, generator=generator, dtype=inputs.dtype, device=inputs.device) @ root

    def place(self, inputs: Logits, z: Tensor, strength: float) -> Tensor:
        return torch.add(inputs, z[:, : len(inputs)], alpha=strength)


@dataclass(frozen=True)
class Augmented(Neighbors):
    """transform(images), or transform(images, ε): any callable that draws from torch's generator.

    A pipeline of kornia, transforms of torchvision v2, or a function; the draws are the same at every strength, and the
    global generator is left as it was. With two required arguments it has a strength, else there is none to choose.
    The transform gets a batch of different images for each draw: one that decides once per batch (torchvision's do)
    gives every image of a batch the same draw, which leaves each row's law as it is but ties the rows together.
    """

    transform: Callable[..., Tensor]

    @property
    def has_strength(self) -> bool:
        function = getattr(self.transform, "forward", self.transform)
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # written in C
            return False
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return sum(one.default is one.empty and one.kind in positional for one in parameters) == 2

    def draw(self, inputs: Inputs, num_samples: int, generator: torch.Generator) -> Tensor:
        seeds = torch.randint(2**62, (num_samples, 1), generator=generator, device=inputs.device)
        return seeds.expand(-1, len(inputs))

    def place(self, inputs: Inputs, z: Tensor, strength: float) -> Tensor:
        # One image more or less would change what the transform draws for the others.
        missing = z.shape[1] - len(inputs)
        whole = torch.cat([inputs, inputs[-1:].expand(missing, *inputs.shape[1:])]) if missing else inputs
        more: tuple[Any, ...] = (strength,) if self.has_strength else ()
        device = inputs.device
        neighbors = []
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for seed in z[:, 0].tolist():
                torch.default_generator.manual_seed(seed)
                if device.type == "cuda":
                    with torch.cuda.device(device):
                        torch.cuda.manual_seed(seed)
                neighbors.append(self.transform(whole, *more)[: len(inputs)])
        return torch.stack(neighbors)
