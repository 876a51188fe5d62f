"""Temperature scaling: one number that all logits are divided by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poise import _check, search
from poise._types import Labels, Logits
from poise.calibrators.base import Calibrator
from poise.calibrators.criteria import CRITERIA, PROPER, criterion_value, weighted_mean


class TemperatureScaling(Calibrator):
    """softmax(z / T), with T > 0 chosen on validation data.

    Keeps the order of the classes, so accuracy never changes. The likelihood is convex in 1/T and its optimum exact;
    one parameter cannot mend an error whose size depends on the confidence. It is consistency calibration with Gumbel
    noise of strength T.

    >>> logits = torch.tensor([[4.0, 0.0], [3.0, 0.0], [0.0, 5.0], [4.0, 0.0]])
    >>> labels = torch.tensor([0, 0, 1, 1])
    >>> round(TemperatureScaling().fit(logits, labels).temperature_, 2)
    3.73

    Reference: Guo et al., On Calibration of Modern Neural Networks, 2017.
    """

    keeps_order = True

    temperature_: float

    def __init__(self, criterion: str = "nll") -> None:
        self.criterion = criterion

    def _fit(self, logits: Logits, labels: Labels, weight: Tensor | None, features: Tensor | None) -> None:
        _check.choice(self.criterion, CRITERIA, "criterion")
        scores = logits.double()

        def value(temperature: float) -> float:
            log_prob = torch.log_softmax(scores / temperature, dim=1)
            if self.criterion == "nll":
                # Without a floor, under which clipped scores could hide by a temperature near zero.
                return -float(weighted_mean(log_prob.gather(1, labels[:, None])[:, 0], weight))
            return criterion_value(self.criterion, log_prob.exp(), labels, weight)

        def objective(temperatures: Sequence[float]) -> list[float]:
            return [value(temperature) for temperature in temperatures]

        smooth = self.criterion in PROPER
        self.temperature_ = search.minimize(objective, search.margin_scale(scores, weight) / 4, smooth=smooth).argument

    def _log_prob(self, logits: Logits, features: Tensor | None) -> Logits:
        return torch.log_softmax(logits / self.temperature_, dim=1)
