"""The losses are the papers', row by row; where a parameter says so they are cross-entropy; none breaks at the ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import reference_losses as reference
from poise import losses

GAMMAS, EDGES = torch.tensor([2.0, -0.7, 0.0, 4.0]), torch.tensor([0.1, 0.3, 0.6])


def rows(function: Callable, **options: Any) -> Callable:
    """A reference of one row, as one of the batch."""
    return lambda z, y: np.mean([function(row, label, **options) for row, label in zip(z, y, strict=True)])


def batch(function: Callable, **options: Any) -> Callable:
    return lambda z, y: function(z, y, **options)


@dataclass(frozen=True)
class Example:
    function: Callable
    module: type
    reference: Callable
    options: dict[str, Any] = field(default_factory=dict)
    is_batchwise: bool = False


EXAMPLES = {
    "cross-entropy": Example(losses.cross_entropy_loss, losses.CrossEntropyLoss, rows(reference.cross_entropy)),
    "brier": Example(losses.brier_loss, losses.BrierLoss, rows(reference.brier)),
    "smoothing": Example(
        losses.label_smoothing_loss, losses.LabelSmoothingLoss, rows(reference.smoothed, alpha=0.05, spread="others")
    ),
    "smoothing-all": Example(
        losses.label_smoothing_loss,
        losses.LabelSmoothingLoss,
        rows(reference.smoothed, alpha=0.2, spread="all"),
        {"alpha": 0.2, "spread": "all"},
    ),
    "focal": Example(losses.focal_loss, losses.FocalLoss, rows(reference.focal, gamma=3)),
    "focal-flat": Example(losses.focal_loss, losses.FocalLoss, rows(reference.focal, gamma=0.5), {"gamma": 0.5}),
    "flsd": Example(losses.flsd_loss, losses.FLSDLoss, rows(reference.flsd_53)),
    "adaptive-gamma": Example(
        losses.adaptive_gamma_loss,
        losses.AdaptiveGammaLoss,
        rows(reference.focal, gamma=losses.focal_gamma(0.1)),
        {"pivot": 0.1},
    ),
    "dual-focal": Example(losses.dual_focal_loss, losses.DualFocalLoss, rows(reference.dual_focal, gamma=5)),
    "dual-focal-flat": Example(
        losses.dual_focal_loss, losses.DualFocalLoss, rows(reference.dual_focal, gamma=0.5), {"gamma": 0.5}
    ),
    "adafocal": Example(
        losses.adafocal_loss,
        losses.AdaFocalLoss,
        rows(reference.adafocal, gammas=GAMMAS.tolist(), edges=EDGES.tolist()),
        {"gammas": GAMMAS, "edges": EDGES},
    ),
    "mmce": Example(losses.mmce_loss, losses.MMCELoss, batch(reference.mmce, weight=2.0, width=0.4), is_batchwise=True),
    "weighted-mmce": Example(
        losses.weighted_mmce_loss,
        losses.WeightedMMCELoss,
        batch(reference.weighted_mmce, weight=2.0, width=0.4, normalization="kumar"),
        is_batchwise=True,
    ),
    "weighted-mmce-published": Example(
        losses.weighted_mmce_loss,
        losses.WeightedMMCELoss,
        batch(reference.weighted_mmce, weight=3.0, width=0.2, normalization="published"),
        {"weight": 3.0, "width": 0.2, "normalization": "published"},
        is_batchwise=True,
    ),
    "soft-ece": Example(
        losses.soft_ece_loss,
        losses.SoftECELoss,
        batch(reference.soft_ece, weight=1.0, num_bins=15, temperature=0.01),
        is_batchwise=True,
    ),
    "soft-ece-wide": Example(
        losses.soft_ece_loss,
        losses.SoftECELoss,
        batch(reference.soft_ece, weight=0.5, num_bins=4, temperature=0.1),
        {"weight": 0.5, "num_bins": 4, "temperature": 0.1},
        is_batchwise=True,
    ),
}
each = pytest.mark.parametrize("name", EXAMPLES)
BATCHWISE = [name for name, example in EXAMPLES.items() if example.is_batchwise]
ROWWISE = [name for name in EXAMPLES if name not in BATCHWISE]


def a_batch(num_samples=24, num_classes=5, scale=2.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(num_samples, num_classes, generator=generator, dtype=torch.float64)
    # Labels at random among the two strongest classes and all: right, nearly right and wrong rows.
    labels = torch.where(
        torch.rand(num_samples, generator=generator) < 0.6,
        logits.argmax(1),
        torch.randint(num_classes, (num_samples,), generator=generator),
    )
    return logits.to(dtype), labels


def value_and_slope(function, logits, labels, **options):
    logits = logits.detach().clone().requires_grad_()
    value = function(logits, labels, **options)
    value.sum().backward()
    return value.detach(), logits.grad


def test_every_loss_is_in_the_table():
    public = {getattr(losses, name) for name in losses.__all__ if name.endswith(("_loss", "Loss"))} - {losses.Loss}
    assert public == {kind for example in EXAMPLES.values() for kind in (example.function, example.module)}


@each
@pytest.mark.parametrize("num_classes", [2, 5])
def test_values_are_the_papers(name, num_classes):
    example = EXAMPLES[name]
    logits, labels = a_batch(num_classes=num_classes)
    expected = example.reference(logits.numpy(), labels.numpy())
    assert float(example.function(logits, labels, **example.options)) == pytest.approx(expected, rel=1e-9)


@each
def test_gradients(name):
    example = EXAMPLES[name]
    logits, labels = a_batch(num_samples=8, seed=2)
    assert torch.autograd.gradcheck(
        lambda z: example.function(z, labels, **example.options), logits.requires_grad_(), atol=1e-7
    )


@pytest.mark.parametrize("name", ROWWISE)
def test_reductions_of_rows(name):
    example = EXAMPLES[name]
    logits, labels = a_batch()
    each_row = example.function(logits, labels, **example.options, reduction="none")
    assert each_row.shape == labels.shape
    torch.testing.assert_close(example.function(logits, labels, **example.options), each_row.mean())
    torch.testing.assert_close(example.function(logits, labels, **example.options, reduction="sum"), each_row.sum())
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))
    shuffled = example.function(logits[order], labels[order], **example.options, reduction="none")
    torch.testing.assert_close(shuffled, each_row[order])


@pytest.mark.parametrize("name", BATCHWISE)
def test_reductions_of_batches(name):
    example = EXAMPLES[name]
    logits, labels = a_batch()
    mean = example.function(logits, labels, **example.options)
    total = example.function(logits, labels, **example.options, reduction="sum")
    torch.testing.assert_close(total, len(labels) * mean)
    with pytest.raises(ValueError, match="compares the rows of a batch with each other; take 'mean', or 'sum'"):
        example.function(logits, labels, **example.options, reduction="none")


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (losses.label_smoothing_loss, {"alpha": 0.0}),
        (losses.label_smoothing_loss, {"alpha": 0.0, "spread": "all"}),
        (losses.focal_loss, {"gamma": 0.0}),
        (losses.flsd_loss, {"gammas": (0.0, 0.0)}),
        (losses.adaptive_gamma_loss, {"pivot": 0.5}),
        (losses.dual_focal_loss, {"gamma": 0.0}),
        (losses.adafocal_loss, {"gammas": torch.zeros(3), "edges": torch.tensor([0.2, 0.5])}),
        (losses.mmce_loss, {"weight": 0.0}),
        (losses.weighted_mmce_loss, {"weight": 0.0}),
        (losses.soft_ece_loss, {"weight": 0.0}),
        (losses.cross_entropy_loss, {}),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_where_it_is_cross_entropy(function, options, scale):
    logits, labels = a_batch(scale=scale)
    value, slope = value_and_slope(function, logits, labels, **options)
    expected, expected_slope = value_and_slope(F.cross_entropy, logits, labels)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(slope, expected_slope, rtol=1e-9, atol=1e-15)


@each
@pytest.mark.parametrize("margin", [0.0, 15.0, 60.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stable_at_both_ends(name, margin, dtype):
    """p of the true class next to 1, next to 0 and in a tie, all in one batch."""
    example = EXAMPLES[name]
    logits = margin * torch.tensor([[1.0, 0.0, -1.0], [1.0, 0.0, -1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0]], dtype=dtype)
    value, slope = value_and_slope(example.function, logits, torch.tensor([0, 2, 1, 0]), **example.options)
    assert value.dtype == torch.float32
    assert torch.isfinite(value)
    assert torch.isfinite(slope).all()
    # A surely wrong row is still pushed the right way: the true class up. The Brier score's slope vanishes there.
    if name != "brier" or margin == 0:
        assert slope[1, 2] < 0


@pytest.mark.parametrize("gamma", [0.3, 1.0, 3.0])
def test_focal_keeps_its_digits_when_sure(gamma):
    """In float32 1 − p is 0 at this margin; the loss and its slope are not."""
    logits = torch.tensor([[30.0, 0.0]])
    value, slope = value_and_slope(losses.focal_loss, logits, torch.tensor([0]), gamma=gamma)
    rest = math.exp(-30) / (1 + math.exp(-30))
    assert float(value) == pytest.approx(rest**gamma * math.log1p(math.exp(-30)), rel=1e-5)
    # d/dz of (1 − p)^γ · (1 − p), which the loss is when p is next to 1.
    assert float(slope[0, 0]) == pytest.approx(-(gamma + 1) * rest ** (gamma + 1), rel=1e-5)


@each
def test_under_autocast(name):
    example = EXAMPLES[name]
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 5)
    inputs, (_, labels) = torch.randn(24, 6), a_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = 4 * layer(inputs)
        value = example.function(logits, labels, **example.options)
    assert logits.dtype == torch.bfloat16
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, example.function(logits.float(), labels, **example.options), rtol=1e-6, atol=0)
    value.backward()
    assert torch.isfinite(layer.weight.grad).all()
    assert layer.weight.grad.abs().max() > 0


@each
def test_one_row_and_missing_classes(name):
    example = EXAMPLES[name]
    logits, labels = a_batch()
    for chosen in (slice(0, 1), labels != 3, labels == 1, logits.argmax(1) == labels, logits.argmax(1) != labels):
        z, y = logits[chosen], labels[chosen]
        value, slope = value_and_slope(example.function, z, y, **example.options)
        assert float(value) == pytest.approx(example.reference(z.numpy(), y.numpy()), rel=1e-9)
        assert torch.isfinite(slope).all()


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "adafocal"])
def test_modules_call_their_functions(name):
    example = EXAMPLES[name]
    logits, labels = a_batch()
    module = example.module(**example.options, reduction="sum")
    assert torch.equal(module(logits, labels), example.function(logits, labels, **example.options, reduction="sum"))
    assert torch.equal(example.module()(logits, labels), example.function(logits, labels))
    assert all(f"{option}={value!r}" in repr(module) for option, value in example.options.items())
    module.update(logits, labels)
    assert not module.state_dict()


@pytest.mark.parametrize("num_classes", [2, 7])
def test_smoothing_is_pytorchs(num_classes):
    logits, labels = a_batch(num_classes=num_classes)
    expected = F.cross_entropy(logits, labels, label_smoothing=0.1)
    torch.testing.assert_close(losses.label_smoothing_loss(logits, labels, 0.1, spread="all"), expected)
    same = 0.1 * (num_classes - 1) / num_classes
    torch.testing.assert_close(losses.label_smoothing_loss(logits, labels, same, spread="others"), expected)


@pytest.mark.parametrize(("pivot", "gamma"), [(0.1, 14.92), (0.2, 4.85), (0.25, 3.07), (0.3, 1.96), (0.5, 0.0)])
def test_focal_gamma(pivot, gamma):
    assert losses.focal_gamma(pivot) == pytest.approx(gamma, abs=0.005)


@pytest.mark.parametrize("pivot", [1e-6, 0.01, 0.1, 0.2, 0.3, 0.45, 0.499])
def test_focal_gamma_pushes_as_hard_as_cross_entropy(pivot):
    """At the pivot the slopes agree, below it the focal loss pushes harder, above it less."""
    factors = []
    for p in (0.9 * pivot, pivot, pivot + 0.1 * (1 - pivot)):
        logits = torch.tensor([[math.log(p / (1 - p)), 0.0]], dtype=torch.float64)
        _, focal = value_and_slope(losses.adaptive_gamma_loss, logits, torch.tensor([0]), pivot=pivot)
        _, plain = value_and_slope(losses.cross_entropy_loss, logits, torch.tensor([0]))
        factors.append(float(focal[0, 0] / plain[0, 0]))
    assert factors[0] > 1 > factors[2]
    assert factors[1] == pytest.approx(1, abs=1e-9)


def test_flsd_jumps_at_its_bound():
    def loss(p):
        return float(losses.flsd_loss(torch.tensor([[math.log(p / (1 - p)), 0.0]]).double(), torch.tensor([0])))

    assert loss(0.1999) == pytest.approx(-(0.8001**5) * math.log(0.1999), rel=1e-6)
    assert loss(0.2001) == pytest.approx(-(0.7999**3) * math.log(0.2001), rel=1e-6)


def test_dual_focal_skips_ties():
    """Equal to the true class is not below it; with nothing below, it is the focal loss."""
    logits, labels = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0]], dtype=torch.float64), torch.tensor([0, 0])
    p = torch.softmax(logits, 1)
    each_row = losses.dual_focal_loss(logits, labels, gamma=2.0, reduction="none")
    expected = [-((1 - p[0, 0] + p[0, 2]) ** 2) * p[0, 0].log(), -((1 - p[1, 0]) ** 2) * p[1, 0].log()]
    torch.testing.assert_close(each_row, torch.stack(expected))


def test_soft_bins_become_hard():
    """As the temperature falls the error is the root mean square gap of the hard bins."""
    logits, labels = a_batch(400)
    soft = losses.soft_ece_loss(logits, labels, temperature=1e-7) - losses.cross_entropy_loss(logits, labels)
    confidence, predicted = torch.softmax(logits, 1).max(1)
    correct = (predicted == labels).double()
    bins = (confidence * 15).floor()
    squares = [
        (bins == b).double().mean() * (confidence[bins == b].mean() - correct[bins == b].mean()) ** 2
        for b in bins.unique()
    ]
    assert float(soft) == pytest.approx(float(torch.stack(squares).sum().sqrt()), rel=1e-6)


def test_soft_temperature_is_the_share_of_the_next_bin():
    temperature = losses.soft_temperature(10, ratio=3.0)
    # A confidence of 0.45 is an anchor of ten bins, 0.55 the next.
    assert math.exp(-0.0 / temperature) / math.exp(-0.01 / temperature) == pytest.approx(3.0)
    with pytest.raises(ValueError, match="ratio must be above 1"):
        losses.soft_temperature(10, 0.5)


def test_adafocal_learns_as_published():
    """Twenty epochs against the slow loop, long enough for γ to change its sign in some bins."""
    loss, expected = losses.AdaFocalLoss(num_bins=6), [1.0] * 6
    signs = set()
    for epoch in range(20):
        logits, labels = a_batch(60, scale=0.5 + epoch % 3, seed=epoch)
        loss.update(logits.float(), labels)
        expected = reference.adafocal_update(expected, logits.numpy(), labels.numpy())
        np.testing.assert_allclose(loss.gammas, expected, rtol=1e-4)
        signs |= set(np.sign(expected))
    assert signs == {-1.0, 1.0}
    logits, labels = a_batch()
    assert torch.equal(loss(logits, labels), losses.adafocal_loss(logits, labels, loss.gammas, loss.edges))

    other = losses.AdaFocalLoss(num_bins=6)
    other.load_state_dict(loss.state_dict())
    assert torch.equal(other(logits, labels), loss(logits, labels))


def test_adafocal_goes_with_the_gap():
    """Overconfident: γ grows up to its limit; underconfident: it falls, and turns into the inverse focal loss."""
    sure, unsure = torch.tensor([[9.0, 0.0]]).repeat(30, 1), torch.tensor([[0.1, 0.0]]).repeat(30, 1)
    wrong, right = torch.ones(30, dtype=torch.int64), torch.zeros(30, dtype=torch.int64)
    over, under = losses.AdaFocalLoss(num_bins=1), losses.AdaFocalLoss(num_bins=1)
    for _ in range(8):
        over.update(sure, wrong)
        under.update(unsure, right)
    assert over.gammas.item() == 20
    assert under.gammas.item() < 0
    assert losses.AdaFocalLoss().edges.tolist() == pytest.approx([k / 15 for k in range(1, 15)])


GOOD = torch.zeros(3, 4), torch.tensor([0, 1, 2])
REFUSED = {
    "label": (lambda: losses.focal_loss(GOOD[0], torch.tensor([0, 1, 4])), "between 0 and 3 for 4 columns"),
    "negative label": (lambda: losses.mmce_loss(GOOD[0], torch.tensor([0, 1, -1])), "a label -1 came"),
    "one-hot": (lambda: losses.brier_loss(GOOD[0], torch.zeros(3, 4, dtype=int)), "pass labels.argmax"),
    "float labels": (lambda: losses.flsd_loss(GOOD[0], torch.zeros(3)), "dtype torch.float32"),
    "too few": (lambda: losses.flsd_loss(GOOD[0], torch.tensor([0, 1])), r"shape \(3,\), but they have shape \(2,\)"),
    "flat": (lambda: losses.focal_loss(torch.zeros(3), torch.tensor([0, 1, 0])), r"they have shape \(3,\)"),
    "one column": (lambda: losses.soft_ece_loss(torch.zeros(3, 1), torch.tensor([0, 0, 0])), "two classes"),
    "no rows": (lambda: losses.mmce_loss(torch.zeros(0, 2), torch.zeros(0, dtype=int)), "at least one row"),
    "reduction": (lambda: losses.focal_loss(*GOOD, reduction="avg"), "reduction must be one of 'mean'"),
    "batch reduction": (lambda: losses.mmce_loss(*GOOD, reduction="summ"), "did you mean 'sum'"),
    "gamma": (lambda: losses.FocalLoss(gamma=-1.0), "gamma must be a finite number, 0 or above"),
    "alpha": (lambda: losses.LabelSmoothingLoss(alpha=1.0), "alpha must be 0 or above and below 1"),
    "spread": (lambda: losses.LabelSmoothingLoss(spread="other"), "did you mean 'others'"),
    "pivot": (lambda: losses.AdaptiveGammaLoss(pivot=1.2), "pivot is a probability"),
    "bounds": (lambda: losses.FLSDLoss(bounds=(0.5, 0.2)), "bounds must rise"),
    "number of gammas": (lambda: losses.FLSDLoss(gammas=(5.0,)), "gammas be one more"),
    "normalization": (lambda: losses.WeightedMMCELoss(normalization="kumer"), "did you mean 'kumar'"),
    "bins": (lambda: losses.AdaFocalLoss(num_bins=0), "num_bins must be a whole number"),
    "width": (lambda: losses.MMCELoss(width=0.0), "width must be a finite number above 0"),
    "edges": (lambda: losses.adafocal_loss(*GOOD, GAMMAS, GAMMAS), "one fewer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    call, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        call()


def test_a_network_learns_from_each():
    """A few steps from the same start: every loss falls, and leads to the truth on separable data."""
    generator = torch.Generator().manual_seed(0)
    centers = 3 * torch.randn(3, 4, generator=generator)
    labels = torch.randint(3, (90,), generator=generator)
    inputs = centers[labels] + torch.randn(90, 4, generator=generator)
    for example in EXAMPLES.values():
        loss = example.module(**example.options) if example.module is not losses.AdaFocalLoss else example.module()
        weight = torch.zeros(4, 3, requires_grad=True)
        start = float(loss(inputs @ weight.detach(), labels))
        for step in range(100):
            (slope,) = torch.autograd.grad(loss(inputs @ weight, labels), weight)
            weight = (weight - 0.1 * (1 - step / 100) * slope).detach().requires_grad_()
        accuracy = ((inputs @ weight).argmax(1) == labels).float().mean()
        assert float(loss(inputs @ weight.detach(), labels)) < 0.75 * start, loss
        # In Kumar's normalization the few wrong rows have half the say, and the full weight on them costs accuracy.
        is_torn = "kumar" in repr(loss)
        assert accuracy > (0.75 if is_torn else 0.95), loss
