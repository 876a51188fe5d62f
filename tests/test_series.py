"""The exact vote by short series: its errors, its order, and its forms for the CPU and for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import poise
from conftest import ROOT
from poise import bench
from poise.link import Link, has_series, series, smooth
from poise.noise import Gaussian, GeneralizedNormal, Gumbel, Laplace, LogGamma, Logistic, Uniform

series_cpu = pytest.importorskip("poise.link.series_cpu", reason="numba is not here")

SHORT = (Gaussian(), GeneralizedNormal(4.0), LogGamma(0.25), LogGamma(4.0))
"""Noises that have a series and that noise="auto" chooses among."""

FINE = smooth.Grade(faintest=-300.0, node_step=0.1, gaps_per_unit=100)


def rows(num_classes: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Kinds of rows: spread out, flat, of a network, and many classes that crowd just within reach of two."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(20, num_classes, generator=generator)
    kinds = {"spread": 3 * normal, "flat": 0.3 * normal, "network": bench.network_like(20, num_classes)[0]}
    if num_classes > 2:
        crowd = 0.1 * normal - 2 - 4 * torch.rand(20, 1, generator=generator)
        crowd[:, :2] = torch.randn(20, 2, generator=generator)
        kinds["crowd"] = crowd
    return kinds


def exact(scores: torch.Tensor, noise) -> torch.Tensor:
    """By the tables of `smooth`, three times as fine as usual, in float64."""
    gaps = scores.double().amax(1, keepdim=True) - scores.double()
    table = smooth.tables(noise, FINE)
    usual = smooth.tables
    smooth.tables = lambda *_: table
    try:
        return torch.softmax(smooth.log_prob(gaps, noise, gaps), dim=1)
    finally:
        smooth.tables = usual


@pytest.mark.parametrize("num_classes", [2, 10, 100, 1000])
@pytest.mark.parametrize("noise", SHORT, ids=str)
def test_errors(noise, num_classes):
    for kind, scores in rows(num_classes).items():
        true = exact(scores, noise)
        for form, probs in (("cpu", series_cpu.prob(scores, noise)), ("readable", series.prob(scores, noise))):
            error = (probs.double() - true).abs()
            assert error.max() < 2e-6, (kind, form)
            assert (error / true)[true > 1e-12].max() < 1e-3, (kind, form)
            assert (probs.double().sum(1) - 1).abs().max() < 1e-6, (kind, form)


@pytest.mark.parametrize("noise", SHORT, ids=str)
def test_true_classes_alone(noise):
    for scores in rows(50).values():
        labels = torch.arange(len(scores)) % 50
        of_label, of_top = series_cpu.prob_of(scores / 2, noise, labels, 0.5)
        probs = exact(scores, noise)
        torch.testing.assert_close(of_label.double(), probs.gather(1, labels[:, None])[:, 0], atol=2e-6, rtol=1e-3)
        torch.testing.assert_close(of_top.double(), probs.amax(1), atol=2e-6, rtol=0)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from([2, 3, 40]), st.sampled_from([1e-6, 1e-3, 1.0, 30.0]))
def test_no_two_classes_are_reversed(seed, num_classes, spread):
    """Whatever is apart keeps its order or gets the same; equal logits get the same; and the top is alone on top."""
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(5, num_classes, generator=generator)
    scores[0, 1] = scores[0, 0]
    for noise in (Gaussian(), GeneralizedNormal(4.0)):
        probs = series_cpu.prob(scores, noise)
        order = scores.argsort(1)
        assert (probs.gather(1, order).diff(dim=1) >= 0).all()
        assert torch.equal(probs.argmax(1), scores.argmax(1))
        assert probs[0, 0] == probs[0, 1]


def test_far_classes_are_positive_and_ordered():
    scores = -torch.arange(0.0, 26.0)[None]
    probs = series_cpu.prob(scores, Gaussian())[0]
    assert (probs > 0).all()
    assert (probs.diff() < 0).all()


def test_strength_and_lapse():
    scores = rows(10)["network"]
    plain = series_cpu.prob(scores / 1.7, Gaussian())
    mixed = series_cpu.prob(scores, Gaussian(), 1.7, 0.03)
    torch.testing.assert_close(mixed, 0.97 * plain + 0.003, atol=1e-6, rtol=0)


def test_which_noises_have_one():
    assert all(has_series(noise) for noise in SHORT)
    assert not any(has_series(noise) for noise in (GeneralizedNormal(8.0), GeneralizedNormal(20.0)))


def test_rounding():
    """To a part of 1 + d, and never out of order."""
    gap = torch.linspace(0, 40, 9999, dtype=torch.float64)
    rounded = series.rounded(gap)
    error = (rounded - gap).abs() / (1 + gap)
    assert 0 < error.max() <= 1.01 * series.ROUNDING
    assert (rounded.diff() >= 0).all()
    assert series.rounded(torch.tensor([1.0, 1.0 + 1e-7], dtype=torch.float64)).diff() == 0


@pytest.mark.parametrize(
    "noise", [*SHORT, GeneralizedNormal(8.0), Gumbel(), LogGamma(1.0), Logistic(), Laplace(), Uniform()], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_link_prob_is_exp_log_prob(noise, dtype):
    """Of every noise and type, whichever form it takes."""
    scores = rows(30)["network"].to(dtype)
    labels = torch.arange(len(scores)) % 30
    link = Link(noise)
    expected = 0.98 * link.log_prob(scores.double() / 1.3).exp() + 0.02 / 30
    probs = link.prob(scores, 1.3, 0.02)
    assert probs.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(probs.double(), expected, atol=tolerance, rtol=0)
    true = link.log_prob_of(scores.double() / 1.3, labels).exp()
    torch.testing.assert_close(link.prob_of(scores, labels, 1.3).double(), true, atol=max(2e-6, tolerance), rtol=0)


def test_gradients_take_the_readable_form():
    scores = rows(10)["network"][:3].double().requires_grad_()
    (expected,) = torch.autograd.grad(Link(Gaussian()).log_prob(scores / 2).exp()[:, 0].sum(), scores)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        own = scores.detach().to(dtype).requires_grad_()
        (gradient,) = torch.autograd.grad(Link(Gaussian()).prob(own, 2.0, 0.01)[:, 0].sum(), own)
        torch.testing.assert_close(gradient.double(), 0.99 * expected, atol=tolerance, rtol=0)
    assert expected.abs().max() > 1e-3


def test_without_numba(monkeypatch):
    scores = rows(10)["network"]
    fast = Link(Gaussian()).prob(scores, 2.0)
    monkeypatch.setattr(poise.link, "_has", lambda module: False)
    torch.testing.assert_close(Link(Gaussian()).prob(scores, 2.0), fast, atol=2e-6, rtol=0)


def test_a_fit_in_single_precision_is_the_fit_in_double():
    logits, labels = bench.network_like(600, 20)
    for noise in (Gaussian(), GeneralizedNormal(4.0)):
        single = poise.ConsistencyCalibration(noise).fit(logits, labels)
        double = poise.ConsistencyCalibration(noise).fit(logits.double(), labels)
        assert single.strength_ == pytest.approx(double.strength_, rel=2e-5)
        assert single.candidates_[0]["nll"] == pytest.approx(double.candidates_[0]["nll"], rel=1e-6)


KERNELS = """
import json, torch
from poise.calibrators import lapse, lapse_gpu
from poise.link import Link, series_gpu, uniform_gpu
from poise.noise import Gaussian, GeneralizedNormal, Uniform
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
found = {}
for noise, form in ((Gaussian(), series_gpu), (GeneralizedNormal(4.0), series_gpu), (Uniform(), uniform_gpu)):
    for num_rows, num_classes in ((3, 2), (5, 10), (2, 300)):
        logits = 3 * torch.randn(num_rows, num_classes, generator=generator)
        labels = torch.randint(num_classes, (num_rows,), generator=generator)
        exact = Link(noise).log_prob(logits.double() / 1.5).exp()
        probs = form.prob(logits, noise, 1.5, 0.01).double()
        halves = form.prob(logits.half(), noise, 1.5, 0.01).double()
        of_label, of_top = form.prob_of(logits, noise, labels, 1.5)
        ranked = probs.gather(1, logits.argsort(1))
        found[f"{noise} {num_rows} x {num_classes}"] = {
            "prob": float((probs - (0.99 * exact + 0.01 / num_classes)).abs().max()),
            "half": float((halves - probs).abs().max()),
            "sum": float((probs.sum(1) - 1).abs().max()),
            "label": float((of_label - exact.gather(1, labels[:, None])[:, 0]).abs().max()),
            "top": float((of_top - exact.amax(1)).abs().max()),
            "reversed": int((ranked.diff(dim=1) < 0).sum() + (probs.argmax(1) != logits.argmax(1)).sum()),
        }
# More rows than go through at a time, and a row in which all classes are within reach.
series_gpu._SCRATCH_BYTES = uniform_gpu._SCRATCH_BYTES = 1
logits = torch.randn(70, 3, generator=generator)
portions = series_gpu.prob(logits, Gaussian()).double()
crowded = 0.01 * torch.randn(2, 100, generator=generator)
true = torch.rand(3000, generator=generator) ** 0.1
found["portions"] = float((portions - Link(Gaussian()).log_prob(logits.double()).exp()).abs().max())
expected = Link(Uniform()).log_prob(crowded.double()).exp()
found["crowded"] = float((uniform_gpu.prob(crowded, Uniform()).double() - expected).abs().max())
found["lapse"] = [lapse_gpu.fit(true, 10), lapse.lapse_and_nll(true, 10)]
print(json.dumps(found))
"""


def test_kernels_by_the_interpreter():
    """What runs on a GPU, run by Triton's interpreter on the CPU: the same arithmetic, slowly."""
    pytest.importorskip("triton", reason="Triton is not here")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(KERNELS)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    (lapse, nll), (usual_lapse, usual_nll) = found.pop("lapse")
    assert lapse == pytest.approx(usual_lapse, rel=1e-5)
    assert nll == pytest.approx(usual_nll, rel=1e-9)
    assert found.pop("portions") < 2e-6
    assert found.pop("crowded") < 2e-6
    assert len(found) == 9
    for case, errors in found.items():
        assert errors.pop("reversed") == 0, case
        assert errors.pop("half") < 2e-3, case
        assert errors.pop("sum") < 1e-6, case
        assert max(errors.values()) < 2e-6, (case, errors)


def test_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    for noise in (*SHORT, Uniform()):
        for scores in rows(100).values():
            for dtype in (torch.float32, torch.bfloat16):
                some = scores.to(dtype)
                expected = Link(noise).log_prob(some.double()).exp()
                probs = Link(noise).prob(some.cuda()).cpu().double()
                np.testing.assert_allclose(probs, expected, atol=2e-6 if dtype == torch.float32 else 4e-3)
