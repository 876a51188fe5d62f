"""Consistency calibration: a prediction is as certain as it is steady when its neighbourhood is perturbed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from poise import _check, search
from poise._types import Array, Head, Inputs, Labels, Logits, Probs
from poise.calibrators.base import Calibrator
from poise.calibrators.criteria import CRITERIA, NLL_FLOOR, PROPER, criterion_value, weighted_mean
from poise.link import Link
from poise.metrics import Bins
from poise.neighbors import Additive, Neighbors
from poise.noise import Gaussian, GeneralizedNormal, Gumbel, LogGamma, Noise, Uniform
from poise.readout import READOUTS
from poise.sampling import estimate, estimate_each

SHAPES: tuple[Noise, ...] = (
    LogGamma(0.25),
    Gumbel(),
    LogGamma(4.0),
    Gaussian(),
    GeneralizedNormal(4.0),
    GeneralizedNormal(8.0),
)
"""What noise="auto" chooses among, from the heaviest right tail (below Gumbel, which is softmax) to nearly bounded."""

_COARSE_ROWS = 1000


class ConsistencyCalibration(Calibrator):
    """The vote of infinitely many neighbours of the logits, exactly: p = (1 − l) · Link(noise)(z / ε) + l / k.

    p_k = P(argmax_j (z_j + ε n_j) = k) for independent draws n of the noise. The strength ε is chosen on validation
    data by `criterion` ("nll", "brier", "ece" or "adaptive_ece"), and with noise="auto" so is the noise's shape, by
    likelihood, among generalised normals and log-gammas with Gumbel (that is, temperature scaling) between them. The
    lapse l is a small share of predictions that are a guess: fitted by likelihood with one pseudo-count, it removes
    zeros and rescues clipped scores.

    Keeps the order of the classes, so accuracy never changes. Needs no features; a fit costs some dozens of softmaxes
    per shape. It cannot change which class is on top, and errs where the shift of the test data changes the scores.
    After the fit: ``noise_``, ``strength_``, ``lapse_``, and ``candidates_``, the shapes with their validation scores.

    >>> logits = torch.tensor([[4.0, 0.0], [3.0, 0.0], [0.0, 5.0], [4.0, 0.0]])
    >>> labels = torch.tensor([0, 0, 1, 1])
    >>> calibrator = ConsistencyCalibration(noise=Gaussian(), lapse=False).fit(logits, labels)
    >>> calibrator.predict_proba(torch.tensor([[2.0, 0.0]]))
    tensor([[0.6374, 0.3626]])

    Reference: Tao et al., Consistency Calibration, 2024; the limit and the shapes are poise's.
    """

    keeps_order = True

    noise_: Noise
    strength_: float
    lapse_: float
    candidates_: tuple[dict[str, Any], ...]

    def __init__(
        self, noise: Noise | str = "auto", criterion: str = "nll", scaling: str = "none", lapse: bool = True
    ) -> None:
        self.noise = noise
        self.criterion = criterion
        self.scaling = scaling
        self.lapse = lapse

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.choice(self.criterion, CRITERIA, "criterion")
        _check.choice(self.scaling, ("none",), "scaling")
        if not isinstance(self.noise, Noise):
            _check.choice(self.noise, ("auto",), "noise (a noise of poise.noise, or a word)")
        shapes = (self.noise,) if isinstance(self.noise, Noise) else SHAPES
        self.candidates_ = tuple(self._fit_shape(shape, logits, labels, weight) for shape in shapes)
        best = min(self.candidates_, key=lambda candidate: float(candidate["nll"]))
        self.noise_, self.strength_, self.lapse_ = best["noise"], best["strength"], best["lapse"]

    def _fit_shape(self, noise: Noise, logits: Logits, labels: Labels, weight: Tensor | None) -> dict[str, Any]:
        """The best strength of one shape, its lapse and its validation scores."""
        link, scores = Link(noise), logits.double()

        def on(rows: slice) -> search.Objective:
            z, y, w = scores[rows], labels[rows], None if weight is None else weight[rows]
            return lambda strengths: [self._value(link, z / strength, y, w) for strength in strengths]

        smooth = self.criterion in PROPER
        some = slice(None, None, max(1, len(scores) // _COARSE_ROWS))
        strength = search.minimize(
            on(slice(None)),
            search.margin_scale(scores, weight) / 4,
            smooth=smooth,
            coarse=on(some) if smooth and weight is None else None,
        ).argument
        scaled = scores / strength
        lapse, nll = self._lapse_and_nll(link, scaled, labels, weight)
        found = {"noise": noise, "strength": strength, "lapse": lapse, "nll": nll}
        return found if self.criterion == "nll" else found | {self.criterion: self._value(link, scaled, labels, weight)}

    def _lapse_and_nll(self, link: Link, scaled: Logits, labels: Labels, weight: Tensor | None) -> tuple[float, float]:
        """The lapse, and the mean −log p of the true classes with the pseudo-count's −log l."""
        true = torch.exp(link.log_prob_of(scaled, labels))
        lapse = fit_lapse(true, scaled.shape[1], weight) if self.lapse else 0.0
        log_losses = -torch.log((1 - lapse) * true + lapse / scaled.shape[1] + NLL_FLOOR)
        total = len(true) if weight is None else float(weight.sum())
        return lapse, float(weighted_mean(log_losses, weight)) - (math.log(lapse) / total if lapse else 0.0)

    def _value(self, link: Link, scaled: Logits, labels: Labels, weight: Tensor | None) -> float:
        """The criterion at one strength; a calibration error leaves the lapse out, for all lapse is its optimum."""
        if self.criterion in PROPER:
            lapse, nll = self._lapse_and_nll(link, scaled, labels, weight)
            if self.criterion == "nll":
                return nll
            return criterion_value("brier", with_lapse(link.log_prob(scaled), lapse).exp(), labels, weight)
        top = scaled.argmax(1)
        confidence = torch.exp(link.log_prob_of(scaled, top))
        bins = Bins.equal_width if self.criterion == "ece" else Bins.equal_mass
        # The quadrature's last digit must not push a confidence beyond the last bin.
        return float(bins(confidence.clamp(max=1), top == labels, sample_weight=weight).error)

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        return with_lapse(Link(self.noise_).log_prob(logits / self.strength_), self.lapse_)


class SampledConsistency(Calibrator):
    """The paper's method: the share of T random neighbours that vote for each class, at any level of the network.

    p_k(x) = 1/T Σ_t g_k(h(x ⊕ ε n_t)): `neighbors` says how x is perturbed, `head` is the rest of the network (None
    where x is a logit already), `readout` is "vote" or "soft", and ε is chosen on validation data by `criterion`, on
    common random numbers. Of several `neighbors` the better kind is kept, the last of equal ones.

    Ties of the votes may change a prediction, and a class rarer than about 1/T gets probability zero: the exact
    ``ConsistencyCalibration`` has neither flaw at the logits. Costs T passes of `head` per strength tried. After the
    fit: ``neighbors_``, ``strength_``, and ``candidates_`` with the criterion on the draws searched and on fresh ones.

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
    ) -> None:
        self.neighbors = neighbors
        self.head = head
        self.readout = readout
        self.num_samples = num_samples
        self.seed = seed
        self.criterion = criterion

    def _fit(self, logits: Inputs, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.choice(self.criterion, CRITERIA, "criterion")
        _check.choice(self.readout, READOUTS, "readout")
        _check.whole(self.num_samples, "num_samples")
        _check.whole(self.seed, "seed", least=0)
        kinds = (self.neighbors,) if isinstance(self.neighbors, Neighbors) else tuple(self.neighbors)
        scale = search.margin_scale(logits, weight) / 4 if self.head is None else float(logits.double().std()) or 1.0

        def candidate(neighbors: Neighbors) -> dict[str, Any]:
            def objective(strengths: Sequence[float]) -> list[float]:
                each = self._estimates(logits, neighbors, strengths, self.seed)
                return [criterion_value(self.criterion, probs, labels, weight) for probs in each]

            strength, value = search.minimize(objective, scale, smooth=False)
            # The smallest of many noisy values is too small: fresh draws tell what the strength is worth.
            fresh = self._estimates(logits, neighbors, [strength], self.seed + 1)[0]
            return {
                "neighbors": neighbors,
                "strength": strength,
                self.criterion: value,
                "on_fresh_draws": criterion_value(self.criterion, fresh, labels, weight),
            }

        self.candidates_ = tuple(candidate(neighbors) for neighbors in kinds)
        best = min(reversed(self.candidates_), key=lambda one: float(one[self.criterion]))
        self.neighbors_, self.strength_ = best["neighbors"], best["strength"]

    def _estimates(self, inputs: Inputs, neighbors: Neighbors, strengths: Sequence[float], seed: int) -> Tensor:
        return estimate_each(
            inputs,
            neighbors=neighbors,
            strengths=strengths,
            head=self.head,
            readout=READOUTS[self.readout],
            num_samples=self.num_samples,
            seed=seed,
        )

    def _log_prob(self, logits: Inputs, features: Tensor | None) -> Logits:
        probs: Probs = estimate(
            logits,
            neighbors=self.neighbors_,
            strength=self.strength_,
            head=self.head,
            readout=READOUTS[self.readout],
            num_samples=self.num_samples,
            seed=self.seed,
        )
        return torch.log(probs)

    def _check_inputs(self, logits: Array, num_classes: int | None = None) -> tuple[Inputs, int]:
        if self.head is None:
            return super()._check_inputs(logits, num_classes)
        inputs = _check.tensor(logits, "inputs")
        if num_classes is None:
            with torch.no_grad():
                num_classes = self.head(inputs[:1]).shape[1]
        return inputs, num_classes


def paper_consistency() -> SampledConsistency:
    """The paper's procedure: Gaussian and uniform noise at the logits, T = 1000 votes, ε by ECE, the better kind kept.

    As published but for three repairs: the range of ε comes from the data's margins instead of [0, 10], which misses
    the optimum of some networks; all ε are compared on the same draws; a seed makes the result repeatable.
    """
    return SampledConsistency(neighbors=(Additive(Gaussian()), Additive(Uniform())))


def fit_lapse(true: Tensor, num_classes: int, weight: Tensor | None = None) -> float:
    """The share of guesses in p ← (1 − l) p + l/k, by EM with one pseudo-count; `true` is p of the true classes."""
    weight = torch.ones_like(true) if weight is None else weight.to(true)
    total = weight.sum() + 1
    lapse = 1 / total
    # The other pseudo-count: something is known, or the order of the classes would be lost.
    most = 1 - 1 / (total + 1)
    for _ in range(500):
        guess = lapse / num_classes
        updated = (1 + torch.dot(weight, guess / ((1 - lapse) * true + guess))) / total
        updated = updated.clamp(max=most)
        done = bool((updated - lapse).abs() <= 1e-9 * lapse)
        lapse = updated
        if done:
            break
    return float(lapse)


def with_lapse(log_prob: Logits, lapse: float) -> Logits:
    """log((1 − l) p + l/k)."""
    if lapse == 0:
        return log_prob
    return torch.logaddexp(log_prob + math.log1p(-lapse), log_prob.new_tensor(math.log(lapse / log_prob.shape[1])))
