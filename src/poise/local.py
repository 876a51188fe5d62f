"""The certainty of one prediction, without labels or validation data: from perturbed inputs, or from answers alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from poise import _check
from poise._types import Array, Labels, Probs
from poise.model import Network
from poise.neighbors import Neighbors, weak
from poise.progress import Progress
from poise.sampling import device_of, estimate

__all__ = ["Answers", "LocalUncertainty", "consistency", "local_uncertainty"]


@dataclass(frozen=True, eq=False)
class LocalUncertainty:
    """How steady each of n predictions is among T neighbours: shares of votes c_k, whose sampling error is known."""

    consistency: Probs
    """(n, k): the share of neighbours that are put into each class, c_k(x)."""
    predicted: Labels
    """(n,): what the network says to the unperturbed input."""
    num_samples: int

    @property
    def confidence(self) -> Tensor:
        """(n,): the share that agrees with the prediction."""
        return self.consistency.gather(1, self.predicted[:, None])[:, 0]

    @property
    def entropy(self) -> Tensor:
        """(n,): −Σ c log c in nats, 0 where all agree."""
        entropy: Tensor = torch.special.entr(self.consistency).sum(1)
        return entropy

    @property
    def runner_up(self) -> Labels:
        """(n,): the class with the most votes besides the prediction; it means nothing where its share is zero."""
        return self.consistency.scatter(1, self.predicted[:, None], -1.0).argmax(1)

    @property
    def standard_error(self) -> Tensor:
        """(n, k): √(c (1 − c) / T), as if of (1 + Tc)/(2 + T), so that it is not zero where all draws agree."""
        share = (1 + self.num_samples * self.consistency) / (2 + self.num_samples)
        return torch.sqrt(share * (1 - share) / self.num_samples)

    def samples_for(self, error: float = 0.01) -> Tensor:
        """(n,): how many draws give the confidence a standard error of `error`."""
        _check.positive(error, "error")
        variance = self.num_samples * self.standard_error.gather(1, self.predicted[:, None])[:, 0] ** 2
        return torch.ceil(variance / error**2).long()

    def __str__(self) -> str:
        lines = [
            f"class {own}: {float(sure):.1%} ± {float(error[own]):.1%} of {self.num_samples} neighbors agree, "
            f"next class {second}: {float(shares[second]):.1%}"
            for own, sure, error, second, shares in zip(
                self.predicted.tolist(),
                self.confidence,
                self.standard_error,
                self.runner_up.tolist(),
                self.consistency,
                strict=True,
            )
        ]
        return "\n".join(lines)


def local_uncertainty(
    model: nn.Module | Callable[[Tensor], Any],
    images: Array,
    neighbors: Neighbors = weak(),  # noqa: B008  (frozen)
    num_samples: int = 100,
    *,
    strength: float | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> LocalUncertainty:
    """How sure a network may be of single predictions: the share of each input's neighbours that get the same answer.

    c_k(x) = 1/T Σ_t 1(ŷ(x̃_t) = k). Neighbours are those of training (`weak()`) unless others are given; they keep the
    image recognisable, so that neither labels nor validation data are needed. Stronger ones need a strength and, to
    know that it is right, validation data: then use `SampledConsistency`. Nothing is fitted here, so nothing promises
    that 80 % are right 80 times in 100; a network that was trained on these very images is steadier than it is right.

    `images` are (n, channels, height, width) with values from 0 to 1, or any inputs where `neighbors` take them. Costs
    `num_samples` passes for each.

    >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 4))
    >>> found = local_uncertainty(network, torch.rand(2, 3, 8, 8), num_samples=50)
    >>> found.consistency.shape, found.confidence.shape, bool((found.standard_error > 0).all())
    (torch.Size([2, 4]), torch.Size([2]), True)

    Reference: Tao et al., Consistency Calibration, 2024, §2.5.
    """
    _check.one_or_more(neighbors, Neighbors, "neighbors", "weak()")
    _check.whole(num_samples, "num_samples")
    if neighbors.has_strength and strength is None:
        raise ValueError(
            f"{neighbors} has a strength, but none came; pass strength=..., or neighbors without one, such as weak()."
        )
    inputs = _check.tensor(images, "images").detach()
    head = Network(model) if isinstance(model, nn.Module) else model
    with torch.no_grad():
        batches = torch.split(inputs, batch_size or 256)
        answers = [head(some.to(device_of(head, some))).argmax(1).to(inputs.device) for some in batches]
    shares = estimate(
        inputs,
        neighbors=neighbors,
        strength=1.0 if strength is None else _check.nonnegative(strength, "strength"),
        head=head,
        num_samples=num_samples,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
    )
    return LocalUncertainty(shares, torch.cat(answers), num_samples)


@dataclass(frozen=True)
class Answers:
    """Different answers to one question, the most frequent first, and their shares."""

    answers: tuple[Any, ...]
    shares: tuple[float, ...]
    num_samples: int

    @property
    def answer(self) -> Any:
        """The most frequent one; of equally frequent ones the first given."""
        return self.answers[0]

    @property
    def confidence(self) -> float:
        """Its share."""
        return self.shares[0]

    @property
    def runner_up(self) -> Any:
        """The next one, or None where all agree."""
        return self.answers[1] if len(self.answers) > 1 else None

    @property
    def entropy(self) -> float:
        """−Σ c log c in nats."""
        return -sum(share * math.log(share) for share in self.shares)

    @property
    def standard_error(self) -> float:
        """Of the confidence, √(c (1 − c) / T), as if of (1 + Tc)/(2 + T), so that it is not zero where all agree."""
        share = (1 + self.num_samples * self.confidence) / (2 + self.num_samples)
        return math.sqrt(share * (1 - share) / self.num_samples)


def consistency(votes: Iterable[Any], same: Callable[[Any, Any], bool] | None = None) -> Answers:
    """The certainty of a black box, such as a language model, from its answers to one question asked T times.

    `same(a, b)` says whether two answers mean the same; without it they must be equal. Each answer joins the first
    group whose first answer it is the same as, and the group goes by its most frequent wording: for a relation that is
    not transitive the order of the votes matters. Costs at most one comparison per answer and group.

    >>> said = ["Paris", "Paris.", "Lyon", "paris"]
    >>> consistency(said, same=lambda a, b: a.strip(".").lower() == b.strip(".").lower())
    Answers(answers=('Paris', 'Lyon'), shares=(0.75, 0.25), num_samples=4)
    """
    if isinstance(votes, (str, bytes)):
        raise TypeError(f"several answers were expected, but one string came: {votes!r:.40}; pass a list of answers.")
    said = [vote.item() if isinstance(vote, Tensor) and vote.ndim == 0 else vote for vote in votes]
    if not said:
        raise ValueError("there is nothing to count: no answers came; ask at least once, better ten times.")
    groups: list[list[Any]] = []
    for answer in said:
        alike = (group for group in groups if (group[0] == answer if same is None else same(group[0], answer)))
        group = next(alike, None)
        if group is None:
            groups.append([answer])
        else:
            group.append(answer)
    groups.sort(key=len, reverse=True)
    return Answers(
        tuple(max(group, key=group.count) for group in groups),
        tuple(len(group) / len(said) for group in groups),
        len(said),
    )
