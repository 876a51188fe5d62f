"""Binned calibration errors: how far confidence is from accuracy, on average over bins."""

from __future__ import annotations

from poise._types import Array
from poise.metrics.bins import Bins, equal_mass_edges, equal_width_edges, tally, top_label


def ece(probs: Array, labels: Array, num_bins: int = 15, *, sample_weight: Array | None = None) -> float:
    """Expected calibration error of the predicted class, in equally wide bins of confidence.

    Σ_b n_b/n · |accuracy_b − confidence_b|, bins (lo, hi] with edges 0, 1/b, …, 1, confidence 1 in the last.

    Gaps of opposite sign within a bin cancel, and noise is counted as error: a perfect model with 95 % accuracy shows
    about .004 on 10,000 samples (see `noise_floor`). Not continuous in the probabilities.

    >>> round(ece([[0.75, 0.25], [0.75, 0.25], [0.25, 0.75], [0.25, 0.75]], [0, 0, 1, 1]), 6)
    0.25

    Reference: Naeini, Cooper, Hauskrecht, AAAI 2015; Guo et al., ICML 2017. Bins as in Mukhoti et al., NeurIPS 2020.
    """
    return float(_equal_width(probs, labels, num_bins, sample_weight).error)


def mce(probs: Array, labels: Array, num_bins: int = 15, *, sample_weight: Array | None = None) -> float:
    """Maximum calibration error: the largest gap of any bin that is not empty.

    max_b |accuracy_b − confidence_b| over the bins of `ece`.

    A bin that holds one sample counts like one that holds ten thousand, so the value is mostly noise.

    >>> round(mce([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4]], [0, 1, 0]), 6)
    0.4

    Reference: Naeini, Cooper, Hauskrecht, AAAI 2015.
    """
    return float(_equal_width(probs, labels, num_bins, sample_weight).gap.abs().nan_to_num().max())


def average_calibration_error(
    probs: Array, labels: Array, num_bins: int = 15, *, sample_weight: Array | None = None
) -> float:
    """Average calibration error (ACE): the mean gap of the bins that are not empty.

    mean_b |accuracy_b − confidence_b| over the bins of `ece`, each with the same weight.

    Like `mce` it is dominated by nearly empty bins.

    >>> round(average_calibration_error([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4]], [0, 1, 0]), 6)
    0.4

    Reference: Neumann, Zisserman, Vedaldi, NeurIPS workshops 2018.
    """
    return float(_equal_width(probs, labels, num_bins, sample_weight).gap.abs().nanmean())


def adaptive_ece(probs: Array, labels: Array, num_bins: int = 15, *, sample_weight: Array | None = None) -> float:
    """Expected calibration error in bins that hold equally many samples (AdaECE).

    As `ece`, with edges e_j at rank j·n/b of the sorted confidences, interpolated between neighbours.

    Equal confidences are never parted: with discrete confidences the bins are unequal and some are empty. The smallest
    confidence counts in the first bin, which the published code leaves out. Weights count as repetitions.

    >>> round(adaptive_ece([[0.75, 0.25], [0.75, 0.25], [0.25, 0.75], [0.25, 0.75]], [0, 0, 1, 1]), 6)
    0.25

    Reference: Nguyen, O'Connor, EMNLP 2015; edges as in Mukhoti et al., NeurIPS 2020.
    """
    return float(_equal_mass(probs, labels, num_bins, sample_weight).error)


def classwise_ece(probs: Array, labels: Array, num_bins: int = 15, *, sample_weight: Array | None = None) -> float:
    """Calibration error of every class probability, not only of the predicted one, averaged over the classes.

    (1/k) Σ_k Σ_b n_bk/n · |share of class k in bin − mean p_k in bin|, equally wide bins of p_k, no threshold.

    A p_k of exactly 0 falls in no bin, as in the published code, even where k is the true class. With many classes
    nearly everything lies in the lowest bin and the value says little. k is the number of columns.

    >>> round(classwise_ece([[0.75, 0.25], [0.75, 0.25], [0.25, 0.75], [0.25, 0.75]], [0, 0, 1, 1]), 6)
    0.25

    Reference: Kull et al., NeurIPS 2019; Nixon et al., CVPR workshops 2019 (there with a threshold).
    """
    return float(Bins.classwise(probs, labels, num_bins, sample_weight=sample_weight).error.mean())


def adaptive_classwise_ece(
    probs: Array, labels: Array, num_bins: int = 15, *, sample_weight: Array | None = None
) -> float:
    """Calibration error of every class probability in bins that hold equally many samples, averaged over the classes.

    As `classwise_ece`, with the edges of `adaptive_ece` for each class by itself; zeros are counted in the first bin.

    It sorts every class: about a second for 10,000 samples of 1,000 classes.

    >>> probs = [[0.75, 0.25], [0.75, 0.25], [0.25, 0.75], [0.25, 0.75]]
    >>> round(adaptive_classwise_ece(probs, [0, 0, 1, 1]), 6)
    0.25

    Reference: Mukhoti et al., NeurIPS 2020 (classwise AdaECE of the code).
    """
    return float(Bins.classwise(probs, labels, num_bins, equal_mass=True, sample_weight=sample_weight).error.mean())


def _equal_width(probs: Array, labels: Array, num_bins: int, sample_weight: Array | None) -> Bins:
    confidence, correct, weight, dtype = top_label(probs, labels, sample_weight)
    edges = equal_width_edges(num_bins, dtype).to(confidence)
    return tally(confidence[None], correct[None], edges[None], weight)[0]


def _equal_mass(probs: Array, labels: Array, num_bins: int, sample_weight: Array | None) -> Bins:
    confidence, correct, weight, dtype = top_label(probs, labels, sample_weight)
    edges = equal_mass_edges(confidence[None], num_bins, weight, dtype)
    return tally(confidence[None], correct[None], edges, weight)[0]
