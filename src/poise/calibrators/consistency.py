"""Consistency calibration in the limit of infinitely many neighbours of the logits: map ∘ link ∘ lapse."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from poise import _check, search
from poise._types import Labels, Logits, Probs
from poise.calibrators import scaling as maps
from poise.calibrators.base import Calibrator
from poise.calibrators.criteria import CRITERIA, NLL_FLOOR, PROPER, criterion_value, weighted_mean
from poise.calibrators.fitting import unthreaded
from poise.calibrators.lapse import fit_lapse, lapse_and_nll, with_lapse
from poise.link import Link
from poise.metrics import Bins
from poise.noise import Gaussian, GeneralizedNormal, Gumbel, LogGamma, Noise

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

    With scaling="none" it keeps the order of the classes, so accuracy never changes. "vector" and "matrix" put a
    structured affine map under the link, shrunk towards none and fitted through its gradient; "auto" lets 5-fold
    cross-validated likelihood decide between the three. That is the strongest form, and it may move classes.

    Needs no features; a fit takes some dozens of passes over the rows per shape, and about a hundred more, with
    gradients, for a map. It errs where the test data are shifted. After the fit: ``noise_``, ``strength_``, ``lapse_``,
    ``scaling_``, and ``candidates_``, the shapes with their validation scores.

    >>> logits = torch.tensor([[4.0, 0.0], [3.0, 0.0], [0.0, 5.0], [4.0, 0.0]])
    >>> labels = torch.tensor([0, 0, 1, 1])
    >>> calibrator = ConsistencyCalibration(noise=Gaussian(), lapse=False).fit(logits, labels)
    >>> calibrator.predict_proba(torch.tensor([[2.0, 0.0]]))
    tensor([[0.6293, 0.3707]])

    Reference: Tao et al., Consistency Calibration, 2024; the limit and the shapes are poise's.
    """

    keeps_order = True

    noise_: Noise
    strength_: float
    lapse_: float
    candidates_: tuple[dict[str, Any], ...]
    scaling_: str
    temperature_: float | None
    """Of the first step of a map: x = log((1 − l₀) softmax(z/T) + l₀/k); None without a map."""
    first_lapse_: float | None
    diagonal_: Tensor | None
    bias_: Tensor | None
    off_diagonal_: Tensor | None

    def __init__(
        self, noise: Noise | str = "auto", criterion: str = "nll", scaling: str = "none", lapse: bool = True
    ) -> None:
        self.noise = noise
        self.criterion = criterion
        self.scaling = scaling
        self.lapse = lapse

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.choice(self.criterion, CRITERIA, "criterion")
        _check.choice(self.scaling, (*maps.MAPS, "auto"), "scaling")
        if not isinstance(self.noise, Noise):
            _check.choice(self.noise, ("auto",), "noise (a noise of poise.noise, or a word)")
        shapes = (self.noise,) if isinstance(self.noise, Noise) else SHAPES
        with unthreaded(logits):
            self._fit_shapes(shapes, logits, labels, weight)

    def _fit_shapes(self, shapes: tuple[Noise, ...], logits: Logits, labels: Labels, weight: Tensor | None) -> None:
        """Each of them, and what is chosen among them."""
        self.candidates_ = tuple(self._fit_shape(shape, logits, labels, weight) for shape in shapes)
        best = min(self.candidates_, key=lambda candidate: float(candidate["nll"]))
        self.noise_, self.strength_, self.lapse_ = best["noise"], best["strength"], best["lapse"]
        self.scaling_ = "none"
        self.temperature_ = self.first_lapse_ = None
        self.diagonal_ = self.bias_ = self.off_diagonal_ = None
        if self.scaling != "none":
            self._fit_scaled(shapes, best, logits.double(), labels, weight)

    def _fit_scaled(
        self, shapes: tuple[Noise, ...], plain: dict[str, Any], logits: Logits, labels: Labels, weight: Tensor | None
    ) -> None:
        """Map and link together: shapes are climbed from the best without a map, kinds of map compared out of fold."""
        if self.criterion != "nll":
            raise ValueError(
                f"a map is fitted by likelihood, but criterion is {self.criterion!r}; pass criterion='nll', or "
                "scaling='none'."
            )
        known = [candidate for candidate in self.candidates_ if candidate["noise"] == Gumbel()]
        first = known[0] if known else self._fit_shape(Gumbel(), logits, labels, weight)
        x = _first_step(logits, first["strength"], first["lapse"])
        rows = maps.Rows(x, labels, weight, fit_lapse if self.lapse else None)

        @functools.cache
        def strength(shape: Noise) -> float:
            return float(self._fit_shape(shape, x, labels, weight)["strength"])

        kinds = [kind for kind in maps.MAPS[1:] if self.scaling in (kind, "auto")]
        if self.scaling == "auto":
            kinds = [kind for kind in kinds if maps.is_worth_fitting(kind, x.shape[1])]
        units = {kind: maps.units(kind, rows) for kind in kinds}
        climbed = [maps.climbed(kind, rows, units[kind], shapes, plain["noise"], strength) for kind in kinds]
        best = climbed[0]
        if self.scaling == "auto":
            of_plain = torch.exp(Link(plain["noise"]).log_prob_of(logits / plain["strength"], labels))
            losses = [maps.held_out(lambda _: of_plain, rows)]
            losses += [maps.cross_validated(candidate, rows, units[candidate.kind]) for candidate in climbed]
            choice = maps.chosen(losses, rows.share)
            if choice == 0:
                return
            best = climbed[choice - 1]
        self.scaling_ = best.kind
        self.noise_, self.strength_ = best.link.noise, best.strength
        self.temperature_, self.first_lapse_ = first["strength"], first["lapse"]
        self.diagonal_, self.bias_, self.off_diagonal_ = best.map.diagonal, best.map.bias, best.map.off_diagonal
        self.lapse_ = self._lapse_and_nll(best.link, best.map(x), best.strength, labels, weight)[0]

    def _fit_shape(self, noise: Noise, logits: Logits, labels: Labels, weight: Tensor | None) -> dict[str, Any]:
        """The best strength of one shape, its lapse and its validation scores."""
        link = Link(noise)
        # Without a lapse, how faint a class is matters to its last digit.
        scores = link.prepared(logits) if self.lapse else logits.double()
        smooth = self.criterion in PROPER
        some = slice(None, None, max(1, len(scores) // _COARSE_ROWS)) if smooth and weight is None else slice(None)

        def on(rows: slice) -> search.Objective:
            z, y, w = scores[rows].contiguous(), labels[rows], None if weight is None else weight[rows]
            return lambda strengths: [self._value(link, z, strength, y, w) for strength in strengths]

        strength = search.minimize(
            on(slice(None)),
            search.margin_scale(scores[some], None if weight is None else weight[some]) / 4,
            smooth=smooth,
            coarse=on(some) if smooth and weight is None else None,
        ).argument
        if smooth and scores.device.type == "cpu" and scores.dtype != torch.float64:
            exact = scores.double()
            strength = search.polished(
                lambda some: [self._value(link, exact, s, labels, weight) for s in some], strength
            )
        lapse, nll = self._lapse_and_nll(link, scores, strength, labels, weight)
        found: dict[str, Any] = {"noise": noise, "strength": strength, "lapse": lapse, "nll": nll}
        if self.criterion != "nll":
            found[self.criterion] = self._value(link, scores, strength, labels, weight)
        return found

    def _lapse_and_nll(
        self, link: Link, scores: Logits, strength: float, labels: Labels, weight: Tensor | None
    ) -> tuple[float, float]:
        """The lapse, and the mean −log p of the true classes with the pseudo-count's −log l."""
        if self.lapse:
            return lapse_and_nll(link.prob_of(scores, labels, strength), scores.shape[1], weight)
        log_true = link.log_prob_of(scores / strength, labels)
        # A vote of exactly nothing costs what the published floor says; what is only faint, all it should.
        return 0.0, -float(weighted_mean(log_true.nan_to_num(neginf=math.log(NLL_FLOOR)), weight))

    def _value(self, link: Link, scores: Logits, strength: float, labels: Labels, weight: Tensor | None) -> float:
        """The criterion at one strength; a calibration error leaves the lapse out, for all lapse is its optimum."""
        if self.criterion in PROPER:
            lapse, nll = self._lapse_and_nll(link, scores, strength, labels, weight)
            if self.criterion == "nll":
                return nll
            return criterion_value("brier", link.prob(scores, strength, lapse), labels, weight)
        top = scores.argmax(1)
        confidence = link.prob_of(scores, top, strength)
        bins = Bins.equal_width if self.criterion == "ece" else Bins.equal_mass
        # The quadrature's last digit must not push a confidence beyond the last bin.
        return float(bins(confidence.clamp(max=1), top == labels, sample_weight=weight).error)

    def _prob(self, logits: Logits, features: Tensor | None) -> Probs:
        return Link(self.noise_).prob(self._mapped(logits), self.strength_, self.lapse_)

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        return with_lapse(Link(self.noise_).log_prob(self._mapped(logits) / self.strength_), self.lapse_)

    def _mapped(self, logits: Logits) -> Logits:
        if self.temperature_ is None or self.diagonal_ is None or self.bias_ is None:
            return logits
        affine = maps.AffineMap(self.diagonal_, self.bias_, self.off_diagonal_)
        return affine(_first_step(logits, self.temperature_, self.first_lapse_ or 0.0))

    def _keeps_order(self) -> bool:
        return self.scaling_ == "none"


def _first_step(logits: Logits, temperature: float, lapse: float) -> Logits:
    """Temperature scaling and its lapse: logarithms of probabilities, bounded below, that a map can act on."""
    return with_lapse(torch.log_softmax(logits / temperature, dim=1), lapse)
