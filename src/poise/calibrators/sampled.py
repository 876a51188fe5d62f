"""Consistency calibration as published: random neighbours vote, at any level of the network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from poise import _check, metrics, search
from poise._types import Array, Head, Inputs, Labels, Logits, Probs
from poise.calibrators.base import Calibrator
from poise.calibrators.criteria import CRITERIA, criterion_value
from poise.neighbors import Additive, Neighbors
from poise.noise import Gaussian, Uniform
from poise.progress import Bar
from poise.readout import READOUTS
from poise.sampling import Store, device_of, estimate_each

_ACCURACY_KEPT = 0.95
"""Of a strength that may win: where votes are mere guesses, confidence and accuracy agree at 1/k."""

_HELD_NUMBERS = 2**25
"""Probabilities of several strengths that a search holds at once: the draws they share are worth a little memory."""


class SampledConsistency(Calibrator):
    """The paper's method: the share of T random neighbours that vote for each class, at any level of the network.

    p_k(x) = 1/T Σ_t g_k(h(x ⊕ ε n_t)): `neighbors` says how x is perturbed, `head` is the rest of the network (None
    where x is a logit already; `poise.split` gives it for any layer), `readout` is "vote" or "soft", and ε is chosen on
    validation data by `criterion`, on common random numbers, among those that keep 95 % of the accuracy (where votes
    are mere guesses, confidence and accuracy agree at 1/k). Of several `neighbors` the better kind is kept, the last of
    equal ones. Neighbours without a strength, such as ``weak()``, leave nothing to choose: the fit draws nothing.

    Ties of the votes may change a prediction, and a class rarer than about 1/T gets probability zero: the exact
    ``ConsistencyCalibration`` has neither flaw at the logits. Costs T passes of `head` per strength tried, some 84 of
    them unless `strengths` are given: give a few where the head is most of a network. Memory is bounded by `batch_size`
    and depends neither on n nor on T. Low layers may find no useful strength at all. After the fit: ``neighbors_``,
    ``strength_``, and ``candidates_`` with the criterion on the draws searched and on fresh ones.

    Args:
        strengths: those to choose among; None searches from the data's own scale.
        batch_size: neighbours that pass the head at once; None is 64 on the CPU and 1024 on an accelerator.
        progress: shows a line on standard error while it draws.
        store: a `poise.io.Folder`, where an interrupted fit finds its finished parts again.

    Reference: Tao et al., Consistency Calibration, 2024.
    """

    neighbors_: Neighbors
    strength_: float
    candidates_: tuple[dict[str, Any], ...]

    def __init__(
        self,
        neighbors: Neighbors | Sequence[Neighbors] = Additive(Gaussian()),  # noqa: B008  (frozen)
        head: Head | None = None,
        readout: str = "vote",
        num_samples: int = 1000,
        seed: int = 0,
        criterion: str = "ece",
        strengths: Sequence[float] | None = None,
        batch_size: int | None = None,
        progress: bool = False,
        store: Store | None = None,
    ) -> None:
        self.neighbors = neighbors
        self.head = head
        self.readout = readout
        self.num_samples = num_samples
        self.seed = seed
        self.criterion = criterion
        self.strengths = strengths
        self.batch_size = batch_size
        self.progress = progress
        self.store = store

    def _fit(self, logits: Inputs, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.choice(self.criterion, CRITERIA, "criterion")
        _check.choice(self.readout, READOUTS, "readout")
        _check.whole(self.num_samples, "num_samples")
        _check.whole(self.seed, "seed", least=0)
        if self.batch_size is not None:
            _check.whole(self.batch_size, "batch_size")
        strengths = None if self.strengths is None else [_check.nonnegative(one, "strengths") for one in self.strengths]
        kinds = _check.one_or_more(self.neighbors, Neighbors, "neighbors", "Additive(Gaussian())")
        if len(kinds) == 1 and not kinds[0].has_strength:
            self.neighbors_, self.strength_ = kinds[0], 1.0
            self.candidates_ = ({"neighbors": kinds[0], "strength": 1.0},)
            return
        counted = logits if weight is None else logits[weight > 0]
        scale = search.margin_scale(logits, weight) / 4 if self.head is None else float(counted.double().std()) or 1.0
        unperturbed = self._estimates(logits, Additive(Gaussian()), [0.0], self.seed, num_samples=1)[0]
        least = _ACCURACY_KEPT * metrics.accuracy(unperturbed, labels, sample_weight=weight)
        at_once = max(1, _HELD_NUMBERS // unperturbed.numel())

        def candidate(neighbors: Neighbors) -> dict[str, Any]:
            def value(probs: Probs) -> float:
                kept = metrics.accuracy(probs, labels, sample_weight=weight) >= least
                return criterion_value(self.criterion, probs, labels, weight) if kept else math.inf

            def objective(strengths: Sequence[float]) -> list[float]:
                groups = [strengths[first : first + at_once] for first in range(0, len(strengths), at_once)]
                return [
                    value(probs) for some in groups for probs in self._estimates(logits, neighbors, some, self.seed)
                ]

            given = strengths if neighbors.has_strength else [1.0]
            strength, least_value = (
                _best(objective, given) if given else search.minimize(objective, scale, smooth=False)
            )
            # The smallest of many noisy values is too small: fresh draws tell what the strength is worth.
            fresh = self._estimates(logits, neighbors, [strength], self.seed + 1)[0]
            return {
                "neighbors": neighbors,
                "strength": strength,
                self.criterion: least_value,
                "on_fresh_draws": criterion_value(self.criterion, fresh, labels, weight),
            }

        self.candidates_ = tuple(candidate(neighbors) for neighbors in kinds)
        best = min(reversed(self.candidates_), key=lambda one: float(one[self.criterion]))
        self.neighbors_, self.strength_ = best["neighbors"], best["strength"]

    def _estimates(
        self,
        inputs: Inputs,
        neighbors: Neighbors,
        strengths: Sequence[float],
        seed: int,
        num_samples: int | None = None,
    ) -> Tensor:
        return estimate_each(
            inputs,
            neighbors=neighbors,
            strengths=strengths,
            head=self.head,
            readout=READOUTS[self.readout],
            num_samples=num_samples or self.num_samples,
            seed=seed,
            batch_size=self.batch_size,
            progress=Bar() if self.progress else None,
            store=self.store,
        )

    def _log_prob(self, logits: Inputs, features: Tensor | None) -> Logits:
        return torch.log(self._prob(logits, features))

    def _prob(self, logits: Inputs, features: Tensor | None) -> Probs:
        return self._estimates(logits, self.neighbors_, [self.strength_], self.seed)[0]

    def _check_inputs(self, logits: Array, num_classes: int | None = None) -> tuple[Inputs, int]:
        if self.head is None:
            return super()._check_inputs(logits, num_classes)
        inputs = _check.tensor(logits, "inputs")
        if num_classes is None:
            with torch.no_grad():
                first = inputs[:1].to(device_of(self.head, inputs))
                num_classes = _check.head_output(self.head(first), num_samples=1).shape[1]
        return inputs, num_classes


def _best(objective: search.Objective, strengths: Sequence[float]) -> search.Minimum:
    """The first of the smallest."""
    values = objective(strengths)
    at = min(range(len(values)), key=values.__getitem__)
    return search.Minimum(float(strengths[at]), float(values[at]))


def paper_consistency() -> SampledConsistency:
    """The paper's procedure: Gaussian and uniform noise at the logits, T = 1000 votes, ε by ECE, the better kind kept.

    As published but for three repairs: the range of ε comes from the data's margins instead of [0, 10], which misses
    the optimum of some networks; all ε are compared on the same draws; a seed makes the result repeatable.
    """
    return SampledConsistency(neighbors=(Additive(Gaussian()), Additive(Uniform())))
