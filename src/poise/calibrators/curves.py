"""Calibration by a curve through the probabilities: isotonic, spline and beta."""

from __future__ import annotations

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from poise import _check
from poise._types import Labels, Logits
from poise.calibrators.base import Calibrator
from poise.calibrators.reduction import (
    asked,
    binary_problems,
    in_order,
    padded,
    polygons,
    recombined,
    traced,
    with_confidence,
)

ISOTONIC_MODES = ("one_vs_rest", "multiclass")

_SPLINE_MESH = 1001
"""Points at which the cumulated residuals are fitted: enough for six knots, whatever the number of samples."""

_ENTRIES_AT_A_TIME = 1 << 20

_FARTHEST = 700.0
"""Log-odds beyond which a probability says no more to beta calibration: exp(700) is nearly the largest float64."""


class IsotonicCalibration(Calibrator):
    """p → m(p) with the increasing m of the least squared error, found by pooling adjacent violators; linear between.

    With mode="multiclass" one m serves all n·k pairs of a probability and whether it came true (IRM): m(p) + 1e-9·p is
    strictly increasing, so the order of the classes and the accuracy are kept exactly. With mode="one_vs_rest" every
    class has its own m (plus the same trace of p); neither is kept. Rows are divided by their sums.

    Needs no features; a fit costs a sort of n·k numbers. It has no shape to rely on: with few samples per class
    one-vs-rest overfits, and classes beneath the first hit get next to nothing, which the likelihood resents.

    >>> logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
    >>> IsotonicCalibration().fit(logits, [0, 1, 1, 1]).predict_proba(torch.tensor([[2.0, 0.0]]))
    tensor([[0.5000, 0.5000]])

    Reference: Zadrozny and Elkan, Transforming Classifier Scores into Accurate Multiclass Probability Estimates, 2002;
    Zhang, Kailkhura, Han, Mix-n-Match, 2020 (the multi-class form).
    """

    knots_: Tensor
    rates_: Tensor

    def __init__(self, mode: str = "one_vs_rest") -> None:
        self.mode = mode

    def _keeps_order(self) -> bool:
        return self.mode == "multiclass"

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.choice(self.mode, ISOTONIC_MODES, "mode")
        values, hits = binary_problems(logits, labels, "one_vs_rest")
        heavy = torch.ones_like(values) if weight is None else weight.expand_as(values)
        if self.mode == "multiclass":
            values, hits, heavy = values.reshape(1, -1), hits.reshape(1, -1), heavy.reshape(1, -1)
        knots, rates = [], []
        for p, hit, w in zip(values.cpu().numpy(), hits.cpu().numpy(), heavy.cpu().numpy(), strict=True):
            curve = IsotonicRegression(out_of_bounds="clip").fit(p, hit, sample_weight=w)
            knots.append(torch.as_tensor(curve.X_thresholds_))
            rates.append(torch.as_tensor(curve.y_thresholds_))
        self.knots_, self.rates_ = padded(knots).to(values), padded(rates).to(values)

    @torch.no_grad()
    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        probs = asked(logits, "one_vs_rest")
        if self.mode == "one_vs_rest":
            return recombined(logits, polygons(probs, self.knots_, self.rates_), self.mode)
        rates = polygons(probs.reshape(1, -1), self.knots_, self.rates_).view(probs.shape)
        return in_order(traced(rates.log().T, logits), logits)


class SplineCalibration(Calibrator):
    """The top class's p → p + h′(t): a spline through the cumulated residuals, whose slope is what confidence lacks.

    h(t) = Σ (hit − confidence)/n over the share t of samples with the lowest confidence; a natural cubic spline with
    `num_knots` equally spaced knots is fitted to it by least squares, and its slope is linear between the validation
    confidences and constant outside. The result is kept a sample's worth, 1/(n + 1), away from 0 and 1, which the
    spline oversteps. The other classes share the rest as before.

    Order and accuracy are kept, a confidence below the runner-up's being raised to it. Needs no features; a fit costs a
    sort. It says nothing new about the other classes, the map need not increase, and with fewer than some hundred
    samples six knots follow the noise.

    >>> logits = torch.tensor([[float(z), 0.0] for z in range(1, 9)])
    >>> calibrator = SplineCalibration(num_knots=2).fit(logits, [0, 1, 0, 0, 1, 0, 1, 0])
    >>> bool(calibrator.predict_proba(logits)[0, 0] < torch.softmax(logits, 1)[0, 0])
    True

    Reference: Gupta et al., Calibration of Neural Networks using Splines, 2021 (with the weights of their
    interpolation, which are swapped, put right).
    """

    keeps_order = True

    knots_: Tensor
    confidences_: Tensor

    def __init__(self, num_knots: int = 6) -> None:
        self.num_knots = num_knots

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.whole(self.num_knots, "num_knots", least=2)
        if weight is not None:
            logits, labels, weight = logits[weight > 0], labels[weight > 0], weight[weight > 0]
        (confidence,), (hit,) = binary_problems(logits, labels, "top_label")
        heavy = torch.ones_like(confidence) if weight is None else weight
        # Equal confidences are one step: in which order they came must not matter.
        knots, place = torch.unique(confidence, return_inverse=True)
        mass = torch.zeros_like(knots).index_add_(0, place, heavy)
        residual = torch.zeros_like(knots).index_add_(0, place, heavy * (hit.to(knots) - confidence))
        total = mass.sum()
        reached = np.concatenate([[0.0], (mass.cumsum(0) / total).cpu().numpy()])
        cumulated = np.concatenate([[0.0], (residual.cumsum(0) / total).cpu().numpy()])
        mesh = np.linspace(0, 1, _SPLINE_MESH)
        basis = CubicSpline(np.linspace(0, 1, self.num_knots), np.eye(self.num_knots), bc_type="natural")
        heights = np.linalg.lstsq(basis(mesh), np.interp(mesh, reached, cumulated), rcond=None)[0]
        slope = basis.derivative()((reached[1:] + reached[:-1]) / 2) @ heights
        self.knots_ = knots
        least = 1 / (1 + float(total))
        self.confidences_ = (knots + torch.as_tensor(slope).to(knots)).clamp(least, 1 - least)

    @torch.no_grad()
    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        knots, levels = (padded([row])[0][None] for row in (self.knots_, self.confidences_))
        return with_confidence(logits, polygons(asked(logits, "top_label"), knots, levels)[0])


class BetaCalibration(Calibrator):
    """p → sigmoid(a log p − b log(1 − p) + c) for every class against the rest, a, b ≥ 0, divided by the row's sum.

    What the likelihood ratio of two beta densities leads to: a bends the curve near 0, b near 1, c moves it; the
    identity is a = b = 1, c = 0. A logistic regression with bounds, by Newton steps for all classes at once. A prior
    N(identity, 1) on (a, b, c), worth about one sample, gives a class without hits or misses an optimum too.

    Each class's curve increases, but order and accuracy are not kept. Needs no features; a fit costs some tens of
    passes over n·k numbers. Three parameters per class want some tens of hits per class.

    >>> logits = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
    >>> BetaCalibration().fit(logits, [0, 0, 1, 1, 1]).predict_proba(torch.tensor([[2.0, 0.0]]))
    tensor([[0.7185, 0.2815]])

    Reference: Kull, Silva Filho, Flach, Beyond Sigmoids: How to Obtain Well-Calibrated Probabilities from Binary
    Classifiers with Beta Calibration, 2017.
    """

    coefficients_: Tensor

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        columns = _beta_design(logits.double()).permute(2, 0, 1)
        hits = labels == torch.arange(logits.shape[1], device=labels.device)[:, None]
        heavy = torch.ones_like(columns[0, 0]) if weight is None else weight
        some = max(1, _ENTRIES_AT_A_TIME // len(labels))
        parts = zip(torch.split(columns, some), torch.split(hits, some), strict=True)
        found = [_bounded_logistic(part.contiguous(), hit.to(part), heavy) for part, hit in parts]
        self.coefficients_ = torch.cat(found)

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        scores = torch.einsum("jnk,kj->nk", _beta_design(logits.double()), self.coefficients_.to(logits.device))
        return torch.log_softmax(torch.nn.functional.logsigmoid(scores), dim=1).to(logits.dtype)


def _beta_design(logits: Logits) -> Tensor:
    """(3, n, k): log p, −log(1 − p) and 1."""
    log_prob = torch.log_softmax(logits, dim=1)
    top = logits.detach().argmax(dim=1, keepdim=True)
    # Where p is near 1, the others say what is missing; 1 − p itself would be all rounding.
    others = logits.scatter(1, top, -torch.inf).logsumexp(dim=1, keepdim=True) - logits.logsumexp(dim=1, keepdim=True)
    missing = torch.log1p(-log_prob.scatter(1, top, -torch.inf).exp()).scatter(1, top, others)
    return torch.stack([log_prob.clamp(min=-_FARTHEST), -missing.clamp(min=-_FARTHEST), torch.ones_like(log_prob)])


def _bounded_logistic(design: Tensor, hits: Tensor, weight: Tensor, max_steps: int = 100) -> Tensor:
    """(k, 3) coefficients a, b ≥ 0 and c of k logistic regressions on (k, 3, n) columns, by Newton steps in bounds."""
    identity = design.new_tensor([1.0, 1.0, 0.0])
    found = identity.repeat(len(design), 1)
    rows = torch.arange(len(design), device=design.device)
    for _ in range(max_steps):
        theta, columns, hit = found[rows], design[rows], hits[rows]
        scores = (theta[:, None] @ columns)[:, 0]
        rate = torch.sigmoid(scores)
        gradient = (columns @ ((rate - hit) * weight)[:, :, None])[:, :, 0] + theta - identity
        spread = (rate * (1 - rate) * weight)[:, None]
        curvature = (columns * spread) @ columns.transpose(1, 2) + torch.eye(3).to(design)
        step = _step_in_bounds(theta, gradient, curvature)
        promised = -(gradient * step).sum(1)
        going = promised > 1e-12 * weight.sum()
        rows, theta, step, promised = rows[going], theta[going], step[going], promised[going]
        if len(rows) == 0:
            break

        def loss(theta: Tensor, columns: Tensor = columns[going], hit: Tensor = hit[going]) -> Tensor:
            scores = (theta[:, None] @ columns)[:, 0]
            misfit = (torch.nn.functional.softplus(scores) - hit * scores) @ weight
            return misfit + (theta - identity).square().sum(1) / 2

        value, length = loss(theta), torch.ones_like(promised)
        for _ in range(40):
            worse = loss(theta + length[:, None] * step) > value - 1e-4 * length * promised + 1e-13 * value
            if not bool(worse.any()):
                break
            length = torch.where(worse, length / 2, length)
        found[rows] = theta + length[:, None] * step
    return found


def _step_in_bounds(theta: Tensor, gradient: Tensor, curvature: Tensor) -> Tensor:
    """The step to the minimum of each quadratic model under a, b ≥ 0: the best of the four ways to sit on bounds."""
    best, lowest = torch.zeros_like(theta), torch.full_like(theta[:, 0], torch.inf)
    for at_bound in ((False, False), (True, False), (False, True), (True, True)):
        fixed = torch.tensor([*at_bound, False], device=theta.device)
        free = ~fixed
        held = torch.where(fixed, -theta, 0.0)
        slope = gradient + (curvature @ held[:, :, None])[:, :, 0]
        system = torch.where(free[:, None] & free, curvature, torch.eye(3).to(theta))
        step = held - torch.linalg.solve(system, torch.where(free, slope, 0.0))
        model = (gradient * step).sum(1) + (step * (curvature @ step[:, :, None])[:, :, 0]).sum(1) / 2
        better = ((theta + step)[:, :2] >= 0).all(1) & (model < lowest)
        best, lowest = torch.where(better[:, None], step, best), torch.where(better, model, lowest)
    return best
