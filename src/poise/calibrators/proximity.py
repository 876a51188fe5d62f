"""Calibration that looks where a sample lies: among many others like it, or far from all that is known."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from poise import _check
from poise._types import Array, Labels, Logits
from poise.calibrators.affine import temperature_of
from poise.calibrators.base import Calibrator
from poise.calibrators.criteria import weighted_mean
from poise.calibrators.curves import IsotonicCalibration
from poise.calibrators.fitting import differentiated, minimize
from poise.calibrators.reduction import asked, binary_problems, with_confidence
from poise.metrics.neighborhoods import neighbor_distances, proximity

METHODS = ("density_ratio", "bin_mean_shift")

_LEAST = 0.01
"""Of a in a + b·d: however near the others are, the temperature stays above a hundredth."""

_ENTRIES_AT_A_TIME = 1 << 20

_NARROWEST = 1e-6
"""A kernel's width where all coordinates are one number, as with a proximity of exactly 1."""


class ProximityCalibration(Calibrator):
    """ProCal: what a confidence is worth among samples that are equally near to others.

    The proximity D of a sample is the mean of exp(−d²) over its `num_neighbors` nearest validation samples, d the
    distance of features scaled to length one. method="density_ratio": the top class's confidence c becomes
    f₁(c, D) / (f₁(c, D) + ρ f₀(c, D)), with f₁ and f₀ the kernel densities of right and wrong validation samples
    (normal kernels, widths by the normal rule) and ρ = wrong/right; the other classes share the rest as before.
    method="bin_mean_shift": multi-class isotonic calibration within each of `num_bins` quantiles of D.

    Order and accuracy are kept: a confidence below what the runner-up would get is raised to it. Needs features. A fit
    and a prediction cost n·m products of features and, for the ratio, n·m kernels, m the validation samples, whose
    features are kept. The densities spill over at confidence 1, where most samples lie, and few errors give a rough f₀.
    A weight counts in the densities, not as another neighbour.

    >>> angle = torch.linspace(0, 1, 40)[:, None] ** 4
    >>> features, logits = torch.cat([angle.cos(), angle.sin()], 1), torch.tensor([[2.0, 0.0]]).repeat(40, 1)
    >>> calibrator = ProximityCalibration(num_neighbors=2).fit(logits, [0] * 24 + [0, 1] * 8, features=features)
    >>> calibrator.predict_proba(logits[[0, -1]], features=features[[0, -1]])
    tensor([[0.9525, 0.0475],
            [0.5676, 0.4324]])

    Reference: Xiong et al., Proximity-Informed Calibration for Deep Neural Networks, 2023 (their code keeps the
    network's prediction, too; their edges of D are recomputed on the test data, ours are the validation's).
    """

    keeps_order = True
    needs_features = True

    reference_: Tensor
    right_: Tensor
    wrong_: Tensor
    odds_: float
    edges_: Tensor
    members_: tuple[IsotonicCalibration, ...]

    def __init__(self, method: str = "density_ratio", num_neighbors: int = 10, num_bins: int = 5) -> None:
        self.method = method
        self.num_neighbors = num_neighbors
        self.num_bins = num_bins

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.choice(self.method, METHODS, "method")
        _check.whole(self.num_neighbors, "num_neighbors")
        _check.whole(self.num_bins, "num_bins")
        logits, labels, weight, self.reference_ = _counted(logits, labels, weight, features)
        near = proximity(self.reference_, num_neighbors=self.num_neighbors).to(logits.device)
        if self.method == "bin_mean_shift":
            self._fit_bins(near, logits, labels, weight)
        else:
            self._fit_densities(near, logits, labels, weight)

    @torch.no_grad()
    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        near = proximity(_rows(features), self.reference_.double(), num_neighbors=self.num_neighbors).to(logits.device)
        if self.method == "bin_mean_shift":
            log_prob = torch.empty_like(logits)
            group = torch.searchsorted(self.edges_.to(near), near, right=True)
            for g, member in enumerate(self.members_):
                log_prob[group == g] = member._log_prob(logits[group == g], None)
            return log_prob
        points = torch.stack([asked(logits, "top_label")[0], near], dim=1)
        log_odds = _log_density(points, self.right_) - _log_density(points, self.wrong_) - math.log(self.odds_)
        return with_confidence(logits, torch.sigmoid(log_odds))

    def _fit_bins(self, near: Tensor, logits: Logits, labels: Labels, weight: Tensor | None) -> None:
        cuts = torch.linspace(0, 1, self.num_bins + 1, dtype=near.dtype)[1:-1].to(near.device)
        self.edges_ = torch.unique(torch.quantile(near, cuts))
        group = torch.searchsorted(self.edges_, near, right=True)
        members = []
        for g in range(len(self.edges_) + 1):
            # Between equal quantiles nobody lies: what is never asked may know everything.
            kept = group == g if bool((group == g).any()) else torch.ones_like(group, dtype=torch.bool)
            member = IsotonicCalibration("multiclass")
            member._fit(logits[kept], labels[kept], None if weight is None else weight[kept], None)
            members.append(member)
        self.members_ = tuple(members)

    def _fit_densities(self, near: Tensor, logits: Logits, labels: Labels, weight: Tensor | None) -> None:
        (confidence,), (hit,) = binary_problems(logits, labels, "top_label")
        weight = torch.ones_like(confidence) if weight is None else weight
        points = torch.stack([confidence, near, weight], dim=1)
        right, wrong = float(weight[hit].sum()), float(weight[~hit].sum())
        # Where nothing, or nothing but errors, was seen: one such sample, anywhere.
        self.odds_ = max(wrong, 1.0) / max(right, 1.0)
        self.right_ = points[hit] if right else points
        self.wrong_ = points[~hit] if wrong else points


class DensityAwareCalibration(Calibrator):
    """softmax(z / T(f)) with T = T₀ · (a + b · d(f)): the farther from what is known, the less certain.

    d is the squared distance from the features f, scaled to length one, to the `num_neighbors`-th nearest of the
    `reference` (features of training samples; the validation samples themselves where it is None), in units of its
    validation mean. T₀ is the temperature, and a, b ≥ 0 minimize the mean −log p from (1, 0), temperature scaling, on;
    a is at least 0.01.

    Order and accuracy are kept. Needs features. A fit and a prediction cost n·m products of features, of which the m of
    the reference are kept. One layer's features are used, the authors take all layers'; their public code takes the
    first neighbour, not the k-th: that is num_neighbors=1. Without training features the reference is small, and d says
    less. A weight counts in the likelihood, not as another neighbour.

    >>> features = torch.tensor([[4.0, 0.0], [3.0, 0.1], [0.0, 2.0], [0.1, 3.0], [1.0, 0.9], [0.9, 1.0]])
    >>> calibrator = DensityAwareCalibration(num_neighbors=1).fit(features, [0, 0, 1, 1, 1, 0], features=features)
    >>> logits, known, unknown = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.1]]), torch.tensor([[-1.0, -0.5]])
    >>> near, far = (calibrator.predict_proba(logits, features=features) for features in (known, unknown))
    >>> bool(near[0, 0] > far[0, 0])
    True

    Reference: Tomani et al., Beyond In-Domain Scenarios: Robust Density-Aware Calibration, 2023.
    """

    keeps_order = True
    needs_features = True

    reference_: Tensor
    base_: float
    slope_: float

    def __init__(self, num_neighbors: int = 10, reference: Array | None = None) -> None:
        self.num_neighbors = num_neighbors
        self.reference = reference

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.whole(self.num_neighbors, "num_neighbors")
        logits, labels, weight, samples = _counted(logits, labels, weight, features)
        others = samples
        if self.reference is not None:
            others = _check.tensor(self.reference, "reference").detach().flatten(1).to(samples)
        self.reference_ = others
        far = self._distance(samples, None if others is samples else others).to(logits.device)
        unit = float(weighted_mean(far, weight)) or 1.0
        temperature = temperature_of(logits, labels, weight)
        scores = logits.double() / temperature

        def loss(roots: Tensor) -> Tensor:
            # Squares keep a and b from the far sides of their bounds.
            factor = _LEAST + roots[0].square() + roots[1].square() * far / unit
            log_prob = torch.log_softmax(scores / factor[:, None], dim=1)
            return -weighted_mean(log_prob.gather(1, labels[:, None])[:, 0], weight)

        # b = 0 has no slope: the search starts beside it.
        base, slope = minimize(differentiated(loss), torch.tensor([1.0, 0.1]).to(scores)).square().tolist()
        self.base_, self.slope_ = (_LEAST + base) * temperature, slope / unit * temperature

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        far = self._distance(_rows(features), self.reference_).to(logits.device)
        temperature = self.base_ + self.slope_ * far
        return torch.log_softmax(logits.double() / temperature[:, None], dim=1).to(logits.dtype)

    def _distance(self, samples: Tensor, reference: Tensor | None) -> Tensor:
        """(n,) squared distance to the k-th nearest of the reference; of the other samples where there is none."""
        return neighbor_distances(samples, reference, num_neighbors=self.num_neighbors)[:, -1]


def _rows(features: Tensor | None) -> Tensor:
    """(n, d), in a precision in which near ones can be told apart."""
    assert features is not None  # needs_features saw to it
    return features.detach().flatten(1).double()


def _counted(
    logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None
) -> tuple[Logits, Labels, Tensor | None, Tensor]:
    """The rows with a weight above zero: the others are nobody's neighbours."""
    rows = _rows(features)
    if weight is None:
        return logits, labels, None, rows
    kept = weight > 0
    return logits[kept], labels[kept], weight[kept], rows[kept.to(rows.device)]


def _log_density(points: Tensor, seen: Tensor) -> Tensor:
    """Log of the product kernel density at (n, 2) points, from (m, 3) rows of two coordinates and a weight."""
    seen = seen.to(points)
    places, share, total = seen[:, :2], seen[:, 2] / seen[:, 2].sum(), float(seen[:, 2].sum())
    spread = (share @ (places - share @ places).square()).sqrt()
    # The normal rule for two dimensions.
    width = (1.06 * spread * total ** (-1 / 6)).clamp(min=_NARROWEST)
    asked, scaled, log_share = points / width, places / width, share.log() - (2 * math.pi * width.prod()).log()
    # Kernels as wide as these reach most samples: a tree, as scikit-learn has it, only costs time.
    parts = asked.split(max(1, _ENTRIES_AT_A_TIME // len(seen)))
    return torch.cat([(log_share - _squared_distances(part, scaled) / 2).logsumexp(dim=1) for part in parts])


def _squared_distances(points: Tensor, others: Tensor) -> Tensor:
    # By differences: products of coordinates as large as these over narrow widths would cancel.
    return torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist").square()
