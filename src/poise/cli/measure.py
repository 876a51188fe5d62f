"""The numbers that are printed for probabilities: metrics, their intervals, the noise floor and the bins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from poise import metrics
from poise._types import Labels, Probs
from poise.metrics import Bins
from poise.metrics.bins import top_label
from poise.metrics.uncertainty import Interval, NoiseFloor, interval, noise_floor

_FLOOR_DRAWS = 100


@dataclass(frozen=True)
class Measured:
    """A metric of a set of probabilities; without an interval where none was asked for, or none says anything."""

    name: str
    title: str
    value: float
    in_percent: bool
    interval: Interval | None = None
    floor: NoiseFloor | None = None

    def plain(self) -> dict[str, Any]:
        """Full precision, in fractions."""
        found: dict[str, Any] = {"value": self.value}
        if self.interval is not None:
            found |= {name: value for name, value in asdict(self.interval).items() if name != "value"}
        if self.floor is not None:
            found["noise_floor"] = asdict(self.floor)
        return found


@dataclass(frozen=True)
class _Metric:
    name: str
    title: str
    in_percent: bool = True
    is_binned: bool = False
    has_interval: bool = True


_METRICS = (
    _Metric("accuracy", "accuracy"),
    _Metric("ece", "ECE", is_binned=True),
    _Metric("adaptive_ece", "AdaECE", is_binned=True),
    _Metric("classwise_ece", "CECE", is_binned=True),
    # It rests on nearly empty bins, and neither an interval nor a floor makes it say more.
    _Metric("mce", "MCE", is_binned=True, has_interval=False),
    _Metric("nll", "NLL", in_percent=False),
    _Metric("brier", "Brier", in_percent=False),
)


def measure(
    probs: Probs,
    labels: Labels,
    *,
    num_bins: int = 15,
    intervals: bool = False,
    floors: bool = False,
    only: tuple[str, ...] | None = None,
    announce: Callable[[str], None] = lambda title: None,
) -> list[Measured]:
    """Every metric; `announce` is told which one is next, for some take seconds."""
    found = []
    for metric in _METRICS:
        if only is not None and metric.name not in only:
            continue
        announce(metric.title)
        function = getattr(metrics, metric.name)
        if metric.is_binned:
            function = partial(function, num_bins=num_bins)
        found.append(
            Measured(
                metric.name,
                metric.title,
                function(probs, labels),
                metric.in_percent,
                interval(function, probs, labels) if intervals and metric.has_interval else None,
                noise_floor(probs, function, draws=_FLOOR_DRAWS)
                if floors and metric.is_binned and metric.has_interval
                else None,
            )
        )
    return found


def top_label_bins(probs: Probs, labels: Labels, num_bins: int = 15) -> Bins:
    """The bins of `ece`."""
    confidence, correct, _, dtype = top_label(probs, labels)
    # At the precision the probabilities came in, for that decides ties at the edges.
    return Bins.equal_width(confidence.to(dtype), correct, num_bins)


def plain_bins(bins: Bins) -> dict[str, Any]:
    """Bins as lists, edges first."""
    return {name: getattr(bins, name).tolist() for name in ("edges", "count", "confidence", "accuracy")}
