"""The exact link: its identities, its order, its accuracy against slow quadrature, its gradients and its memory."""

from __future__ import annotations

import functools
import math
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import poise.link
import reference
from poise.link import Link, fused, quadrature, smooth
from poise.noise import Gaussian, GeneralizedNormal, Gumbel, Laplace, LogGamma, Uniform

NOISES = reference.NOISES
ANALYTIC = [noise for noise in reference.NOISES if not noise.knots]
POSITIVE = [noise for noise in reference.NOISES if not reference.is_bounded(noise)]
by_noise = pytest.mark.parametrize("noise", NOISES, ids=str)
by_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
f64 = torch.float64


def scores(n: int, k: int, seed: int = 0, spread: float = 1.5, dtype: torch.dtype = f64) -> torch.Tensor:
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=f64) * spread).to(dtype)


def probs(noise, scaled_logits) -> torch.Tensor:
    return Link(noise).log_prob(scaled_logits).exp()


def equal(ours, theirs, tolerance: float) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


# ---- identities --------------------------------------------------------------------------------------------------


def test_gumbel_is_temperature_scaling():
    logits = scores(50, 7)
    equal(Link(Gumbel()).log_prob(logits / 1.7), torch.log_softmax(logits / 1.7, dim=1), 1e-12)


def test_log_gamma_of_shape_one_is_a_temperature():
    logits = scores(50, 7)
    temperature = math.sqrt(6) / math.pi
    equal(Link(LogGamma(1)).log_prob(logits), torch.log_softmax(logits / temperature, dim=1), 1e-12)


@pytest.mark.parametrize(
    ("noise", "same"),
    [
        (GeneralizedNormal(2), Gaussian()),
        (GeneralizedNormal(1), Laplace()),
        (GeneralizedNormal(2.0 + 1e-9), Gaussian()),
        (GeneralizedNormal(1.0 + 1e-9), Laplace()),
        (LogGamma(1.0 + 1e-9), LogGamma(1.0)),
    ],
    ids=str,
)
def test_neighboring_members_of_a_family_agree(noise, same):
    """The special cases take other paths through the code than the members next to them."""
    logits = scores(20, 6)
    equal(probs(noise, logits), probs(same, logits), 3e-7)


def test_uniform_is_the_steepest_generalized_normal():
    logits = scores(20, 6)
    equal(probs(GeneralizedNormal(math.inf), logits), probs(Uniform(), logits / math.sqrt(3)), 1e-14)
    equal(probs(GeneralizedNormal(2000.0), logits[:3]), probs(GeneralizedNormal(math.inf), logits[:3]), 1e-3)


def test_two_classes_under_gaussian_noise_are_a_probit_into_the_far_tail():
    gap = torch.linspace(0, 31, 400, dtype=f64)[:, None]
    log_prob = Link(Gaussian()).log_prob(torch.cat([torch.zeros_like(gap), -gap], dim=1))
    expected = torch.special.log_ndtr(torch.cat([gap, -gap], dim=1) / math.sqrt(2))
    assert expected.min() < -240
    equal(log_prob, expected, 1e-3)
    equal(log_prob.exp(), expected.exp(), 1e-7)


def test_two_classes_under_uniform_noise_are_a_parabola():
    gap = torch.tensor([0.0, 1e-9, 0.3, 1.0, 1.9, 1.999999, 2.0, 2.1, 50.0], dtype=f64)[:, None]
    second = (1 - gap / 2).clamp_min(0).square() / 2
    log_prob = Link(Uniform()).log_prob(torch.cat([gap, torch.zeros_like(gap)], dim=1))
    torch.testing.assert_close(log_prob, torch.cat([torch.log1p(-second), second.log()], dim=1), rtol=1e-9, atol=1e-15)


def test_two_classes_under_laplace_noise():
    """The difference of two Laplace draws is known: P = (1/2 + x/4) e^-x, x = d/scale."""
    gap = torch.linspace(0, 50, 101, dtype=f64)[:, None]
    x = gap * math.sqrt(2)
    log_prob = Link(Laplace()).log_prob(torch.cat([torch.zeros_like(gap), -gap], dim=1))[:, 1:]
    equal(log_prob, torch.log(0.5 + x / 4) - x, 1e-6)


@by_noise
@by_dtype
def test_limits_of_no_noise_and_of_nothing_but_noise(noise, dtype):
    logits = scores(20, 5, dtype=dtype)
    one_hot = torch.nn.functional.one_hot(logits.argmax(1), 5).to(dtype)
    sure = logits + 1.0 * one_hot
    equal(probs(noise, sure * 1e4), one_hot, 0.0)
    equal(probs(noise, logits * 1e-9), torch.full_like(logits, 0.2), 3e-7)
    equal(probs(noise, logits * 0), torch.full_like(logits, 0.2), torch.finfo(dtype).eps)


@by_noise
def test_shift_scale_and_permutation(noise):
    logits = scores(20, 6)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    equal(probs(noise, logits + 1000), probs(noise, logits), 1e-9)
    equal(probs(noise, (7 * logits) / (7 * 1.3)), probs(noise, logits / 1.3), 1e-12)
    equal(probs(noise, logits[:, order]), probs(noise, logits)[:, order], 1e-12)


@by_noise
@by_dtype
@pytest.mark.parametrize("k", [2, 10, 200])
def test_rows_sum_to_one(noise, dtype, k):
    for spread in (0.01, 1.0, 100.0):
        total = probs(noise, scores(3, k, spread=spread, dtype=dtype)).sum(1)
        equal(total, torch.ones_like(total), 1e-12 if dtype == f64 else 1e-6)


@by_noise
def test_exact_equals_random_draws(noise):
    logits, num_draws = scores(3, 5, seed=2), 200_000
    expected = probs(noise, logits)
    generator = torch.Generator().manual_seed(11)
    for row, p in zip(logits, expected, strict=True):
        winners = (row + noise.sample((num_draws, 5), generator=generator, dtype=f64)).argmax(1)
        share = torch.bincount(winners, minlength=5) / num_draws
        assert ((share - p).abs() <= 5 * torch.sqrt(p * (1 - p) / num_draws) + 2 / num_draws).all()


# ---- order -------------------------------------------------------------------------------------------------------


def assert_ordered(noise, logits: torch.Tensor) -> None:
    """In what is given out, and in the differentiable form."""
    value = Link(noise).log_prob(logits)
    differentiable = Link(noise).log_prob(logits.clone().requires_grad_()).detach()
    equal(value.exp(), differentiable.exp(), 1e-6)
    for log_prob in (value, differentiable):
        assert_rows_ordered(log_prob, logits)


def assert_rows_ordered(log_prob: torch.Tensor, logits: torch.Tensor) -> None:
    values, order = logits.sort(dim=1)
    ranked = log_prob.gather(1, order)
    assert not log_prob.isnan().any()
    assert (ranked[:, 1:] >= ranked[:, :-1]).all(), "two classes are reversed"
    tied = values[:, 1:] == values[:, :-1]
    assert (ranked[:, 1:] == ranked[:, :-1])[tied].all(), "equal logits are told apart"
    unique = (log_prob == log_prob.amax(1, keepdim=True)).sum(1) == 1
    assert torch.equal(log_prob.argmax(1)[unique], logits.argmax(1)[unique])


@by_noise
@by_dtype
def test_no_two_classes_are_reversed(noise, dtype):
    wide = scores(12, 20, dtype=dtype)
    near = wide[:, :1] + scores(12, 20, seed=1, spread=1e-7, dtype=dtype)
    ulps = wide[:, :1].repeat(1, 20)
    for j in range(1, 20):
        ulps[:, j] = torch.nextafter(ulps[:, j - 1], torch.tensor(math.inf, dtype=dtype))
    coarse = (wide * 2).round() / 2
    mixed = torch.cat([wide[:, :10], ulps[:, :10], coarse[:, :10]], dim=1)
    for logits in (wide, near, ulps, coarse, mixed, 40 * wide, 40 * coarse):
        assert_ordered(noise, logits)


@pytest.mark.parametrize("noise", ANALYTIC, ids=str)
@by_dtype
def test_no_two_of_many_classes_are_reversed_however_faint(noise, dtype):
    """Also where probabilities underflow before the tables end."""
    for spread in (0.3, 1.0, 2.0, 3.0, 4.0, 6.0, 10.0, 30.0):
        logits = scores(200, 100, seed=3, spread=spread, dtype=dtype)
        assert_rows_ordered(Link(noise).log_prob(logits), logits)


LOGIT = st.one_of(
    st.floats(-50, 50), st.floats(-1e5, 1e5), st.integers(-3, 3).map(float), st.sampled_from([0.0, -0.0, 2.0, -2.0])
)


@by_noise
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(row=st.lists(LOGIT, min_size=2, max_size=8), ulps=st.integers(0, 3), single=st.booleans())
def test_order_holds_for_any_row(noise, row, ulps, single):
    row = np.array(row, dtype=np.float32 if single else np.float64)
    beside = row.copy()
    for _ in range(ulps):
        beside = np.nextafter(beside, np.inf, dtype=row.dtype)
    assert_ordered(noise, torch.from_numpy(np.concatenate([row, beside]))[None])


# ---- far classes and zeros ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", POSITIVE, ids=str)
@by_dtype
def test_log_prob_is_finite_and_falls_however_far_the_class(noise, dtype):
    gap = torch.tensor([0, 0.5, 3, 10, 30, 100, 1e3, 3e3], dtype=dtype)
    log_prob = Link(noise).log_prob(-gap[None])[0]
    assert torch.isfinite(log_prob).all()
    assert (log_prob.diff() < 0).all()


@pytest.mark.parametrize("noise", [noise for noise in ANALYTIC if noise != Gumbel()], ids=str)
def test_beyond_the_tables_the_two_class_tail_is_followed(noise, monkeypatch):
    widest = fused.tables(noise).widest
    gaps = torch.logspace(math.log10(widest / 10), math.log10(widest) + 3, 999, dtype=f64)
    tail = torch.from_numpy(fused._tail(gaps.numpy(), noise, widest))
    torch.testing.assert_close(tail, smooth.tail_beyond(gaps, noise, widest), rtol=1e-5, atol=1e-3)
    logits = -torch.stack([gaps, 2 * gaps, 5 * gaps]) * (torch.arange(999) > 0)
    together = Link(noise).log_prob(logits)
    monkeypatch.setattr(fused, "_FAR_NUMBERS", 1)
    equal(Link(noise).log_prob(logits), together, 0.0)


@by_dtype
@pytest.mark.parametrize(("noise", "reach"), [(Uniform(), 2.0), (GeneralizedNormal(math.inf), 2 * math.sqrt(3))])
def test_bounded_noise_gives_exact_zeros_beyond_its_reach_and_only_there(noise, reach, dtype):
    beyond, within = reach * (1 + 1e-6), reach * (1 - 1e-3)
    logits = torch.tensor([[0.0, -within, -beyond, -50.0]], dtype=dtype)
    log_prob = Link(noise).log_prob(logits)[0]
    assert (log_prob[2:] == -math.inf).all()
    assert torch.isfinite(log_prob[:2]).all()
    if noise == Uniform():
        assert probs(noise, torch.tensor([[0.0, -2.0]], dtype=dtype))[0].tolist() == [1.0, 0.0]


# ---- rows, dtypes, chunks ----------------------------------------------------------------------------------------


@by_noise
def test_log_prob_of_is_a_column_of_log_prob(noise):
    for k, spread in ((2, 3.0), (9, 1.0), (9, 30.0), (100, 0.3)):
        logits = scores(8, k, seed=k, spread=spread)
        for labels in (torch.arange(8) % k, logits.argmin(1), logits.argmax(1)):
            column = Link(noise).log_prob(logits).gather(1, labels[:, None])[:, 0]
            of = Link(noise).log_prob_of(logits, labels)
            equal(of.exp(), column.exp(), 1e-6)
            torch.testing.assert_close(of, column, rtol=1e-9, atol=1e-6)


@by_noise
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtype_and_shape_are_kept(noise, dtype):
    logits, link = scores(4, 6, dtype=dtype), Link(noise)
    log_prob = link.log_prob(logits)
    assert log_prob.dtype == dtype
    equal(log_prob.exp().double(), probs(noise, logits.double()), 4 * torch.finfo(dtype).eps + 1e-12)
    of = link.log_prob_of(logits, torch.tensor([0, 5, 2, 2]))
    assert (of.dtype, of.shape) == (dtype, (4,))
    assert link.log_prob(logits[:0]).shape == (0, 6)
    assert link.log_prob(logits[:0]).dtype == dtype
    assert link.log_prob_of(logits[:0], torch.zeros(0, dtype=torch.long)).shape == (0,)
    equal(link.log_prob(logits[:1]), log_prob[:1], 0.01 if dtype.itemsize == 2 else 1e-6)
    equal(link.log_prob(logits.T.contiguous().T), log_prob, 0.0)


@by_noise
def test_rows_do_not_depend_on_their_chunk(noise, monkeypatch):
    logits, labels = scores(23, 9), torch.arange(23) % 9

    def everything() -> list[torch.Tensor]:
        s = logits.clone().requires_grad_()
        log_prob, of = Link(noise).log_prob(s), Link(noise).log_prob_of(s, labels)
        p = log_prob.exp()
        (grad,) = torch.autograd.grad((p * torch.linspace(-1, 1, 9, dtype=f64)).sum() + of.exp().sum(), s)
        return [p.detach(), of.exp().detach(), grad]

    together = everything()
    monkeypatch.setattr(poise.link, "_CHUNK_BYTES", 1)
    for one, other in zip(together, everything(), strict=True):
        equal(one, other, 1e-12)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors made inside, at their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


@pytest.mark.parametrize("noise", [Gaussian(), GeneralizedNormal(1.5), Uniform(), LogGamma(4.0)], ids=str)
@pytest.mark.parametrize("with_gradient", [False, True], ids=["values", "gradient"])
def test_working_memory_does_not_grow_with_the_rows(noise, with_gradient, monkeypatch):
    k, budget = 10, 2**20
    monkeypatch.setattr(poise.link, "_CHUNK_BYTES", budget)
    rows = budget // (8 * poise.link._numbers_per_row(noise, k))

    def peak(n: int) -> float:
        """Above what grows with the rows whatever is done: values and, with a gradient, the gaps and their like."""
        s = scores(n, k).requires_grad_(with_gradient)
        with LiveBytes() as live:
            log_prob = Link(noise).log_prob(s)
            if with_gradient:
                log_prob.sum().backward()
        return live.peak - (8 if with_gradient else 3) * 8 * n * k

    peak(2)  # tables
    few, many = peak(2 * rows), peak(10 * rows)
    assert many < 1.1 * few + 1e5
    assert few < 4 * budget


# ---- accuracy ----------------------------------------------------------------------------------------------------

SIZES = [(2, 3, (0, 1)), (10, 1, (0, 3, 6, 9)), (100, 1, (0, 50, 99)), (1000, 1, (0, 500))]
STRENGTHS = [0.01, 0.1, 1.0, 10.0, 100.0]


def cases(k: int, n: int) -> list[torch.Tensor]:
    """Scaled logits of strengths from a hundredth to a hundred times the median margin, exact in single precision."""
    logits = scores(n, k, seed=k, spread=3.0)
    top = logits.topk(2, dim=1).values
    margin = (top[:, 0] - top[:, 1]).median()
    return [(logits / (strength * margin)).float() for strength in STRENGTHS[:: 2 if k == 1000 else 1]]


@functools.cache
def expected(noise, k: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(scaled logits, which classes, log p) by slow quadrature, of classes spread over the ranks."""
    _, n, ranks = next(size for size in SIZES if size[0] == k)
    found = []
    for logits in cases(k, n):
        classes = logits.argsort(dim=1, descending=True)[:, list(ranks)]
        log_vote = [
            [reference.log_vote(noise, row, j) for j in chosen]
            for row, chosen in zip(logits.numpy(), classes.tolist(), strict=True)
        ]
        found.append((logits, classes, torch.tensor(log_vote, dtype=f64)))
    return found


@by_dtype
@pytest.mark.parametrize("k", [size[0] for size in SIZES])
@by_noise
def test_accuracy_against_slow_quadrature(noise, k, dtype):
    for logits, classes, log_vote in expected(noise, k):
        log_prob = Link(noise).log_prob(logits.to(dtype)).gather(1, classes).double()
        equal(log_prob.exp(), log_vote.exp(), 1e-6 if dtype == f64 else 1e-5)
        likely = log_vote > math.log(1e-12)
        equal(log_prob[likely], log_vote[likely], 1e-3)
        # The tables reach to e^-300, the panels of noises with a kink to e^-80; scipy's F to e^-600.
        seen = log_vote > (-75 if noise.knots else -250)
        equal(log_prob[seen], log_vote[seen], 3e-3)


@pytest.mark.parametrize("noise", ANALYTIC, ids=str)
def test_log_prob_keeps_its_digits_far_down(noise):
    shapes = [(0.0,), (0.0, 0.0), (0.0, -1.0, -2.0), (0.0, -0.1, -5.0, -5.0, -6.0)]
    widest = smooth.widest_gap(noise, -250)
    for shape in shapes:
        for fraction in (0.3, 0.6, 0.9):
            row = [*shape, -fraction * widest]
            log_vote = reference.log_vote(noise, row, len(shape))
            log_prob = Link(noise).log_prob(torch.tensor([row], dtype=f64))[0, -1]
            assert log_vote > -300
            assert float(log_prob) == pytest.approx(log_vote, abs=3e-3)


def crowd(layout: str, k: int) -> torch.Tensor:
    """Gaps of k classes, all within the reach of uniform noise."""
    u = torch.rand(k, generator=torch.Generator().manual_seed(k), dtype=f64)
    first = torch.arange(k)
    gaps = {
        "even": torch.linspace(0, 1.99, k, dtype=f64),
        "random": 1.99 * u,
        "near ties": 1e-3 * u,
        "nearest ties": 1e-9 * u,
        "half tied": torch.where(first < k // 2, 0, 1.9 * u),
        "crowd at the end": torch.where(first < 2, 0, 1.9 + 0.05 * u),
        "crowd half-way": torch.where(first < 10, 0, 1.0 + 0.05 * u),
    }[layout]
    return gaps - gaps.min()


LAYOUTS = ["even", "random", "near ties", "nearest ties", "half tied", "crowd at the end", "crowd half-way"]


@pytest.mark.parametrize("k", [3, 40, 64, 65, 200, 1000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_uniform_with_many_classes_within_reach(k, layout, monkeypatch):
    gaps = crowd(layout, k)
    classes = gaps.argsort()[[0, 1, k // 2, -1]].tolist() if k <= 200 else gaps.argsort()[[0, 30]].tolist()
    slow = torch.tensor([reference.log_vote(Uniform(), (-gaps).numpy(), j) for j in classes], dtype=f64)
    compiled = Link(Uniform()).log_prob(-gaps[None])[0, classes]
    monkeypatch.setattr(poise.link, "_has", lambda module: False)
    readable = Link(Uniform()).log_prob(-gaps[None])[0, classes]
    # Each gives up below e^-600 (the reference), or keeps three digits only below e^-80 (the compiled form).
    for ours, faintest in ((compiled, -80), (readable, -600)):
        seen = slow > faintest
        equal(ours[seen], slow[seen], 1e-8)


@pytest.mark.parametrize("noise", ANALYTIC, ids=str)
def test_tables_agree_with_panels(noise):
    for k, spread in ((2, 5.0), (12, 1.0), (12, 6.0), (150, 0.5)):
        s = scores(15, k, seed=k, spread=spread)
        gaps = s.amax(1, keepdim=True) - s
        by_table, by_panel = (module.log_prob(gaps, noise, gaps) for module in (smooth, quadrature))
        equal(by_table.exp(), by_panel.exp(), 1e-7)
        seen = by_panel > -70
        equal(by_table[seen], by_panel[seen], 1e-4)


@by_noise
@by_dtype
def test_without_numba_nothing_is_lost_but_time(noise, dtype, monkeypatch):
    link = Link(noise)
    for k, spread in ((2, 4.0), (12, 0.01), (12, 2.0), (300, 0.5)):
        s, labels = scores(15, k, seed=k, spread=spread, dtype=dtype), torch.arange(15) % k
        monkeypatch.setattr(poise.link, "_has", lambda module: True)
        compiled = [link.log_prob(s), link.log_prob_of(s, labels)]
        monkeypatch.setattr(poise.link, "_has", lambda module: False)
        readable = [link.log_prob(s), link.log_prob_of(s, labels)]
        for one, other in zip(compiled, readable, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            equal(one.exp(), other.exp(), 1e-6)
            seen = other > -60
            equal(one[seen], other[seen], 1e-3)


# ---- gradients ---------------------------------------------------------------------------------------------------


@by_noise
def test_gradient_in_logits_and_strength(noise):
    logits, strength = scores(3, 5, seed=4, spread=0.8).requires_grad_(), torch.tensor(1.3, dtype=f64).requires_grad_()
    read = torch.exp if reference.is_bounded(noise) else torch.clone
    labels = torch.tensor([1, 4, 0])
    assert gradcheck(lambda z, e: read(Link(noise).log_prob(z / e)), (logits, strength), atol=1e-5, rtol=1e-3)
    assert gradcheck(
        lambda z, e: read(Link(noise).log_prob_of(z / e, labels)), (logits, strength), atol=1e-5, rtol=1e-3
    )


@by_noise
def test_gradient_is_that_of_the_slow_quadrature(noise):
    row, step = np.array([0.3, 0.0, -0.7, -1.6]), 1e-4
    s = torch.tensor(row[None], requires_grad=True)
    (grad,) = torch.autograd.grad(probs(noise, s)[0, 2], s)
    shifted = [[math.exp(reference.log_vote(noise, row + sign * e, 2)) for sign in (1, -1)] for e in step * np.eye(4)]
    slow = torch.tensor([[(up - down) / (2 * step) for up, down in shifted]], dtype=f64)
    equal(grad, slow, 3e-6)


@by_noise
def test_gradient_is_finite_and_sums_to_zero_for_far_classes_and_ties(noise):
    rows = [[0.0, -0.1, -1e4, -5e3], [0, 0, 0, 0], [0, 0, -2, -2], [1, 1, -1, -300], [5e3, 0, 0, -5e3], [0, -2, -2, -4]]
    for row in rows:
        for k in range(4):
            s = torch.tensor([row], dtype=f64, requires_grad=True)
            for log_prob in (Link(noise).log_prob(s)[0, k], Link(noise).log_prob_of(s, torch.tensor([k]))[0]):
                (grad,) = torch.autograd.grad(torch.exp(log_prob) if reference.is_bounded(noise) else log_prob, s)
                assert torch.isfinite(grad).all()
                # Where the tables end, log p and its slope have three digits left.
                slack = 5e-5 if log_prob > (-70 if noise.knots else -250) else 1e-2
                assert abs(float(grad.sum())) <= slack * max(1.0, float(grad.abs().max()))


@by_noise
def test_tied_classes_have_like_gradients(noise):
    s = torch.zeros(1, 4, dtype=f64, requires_grad=True)
    jacobian = torch.autograd.functional.jacobian(lambda z: probs(noise, z)[0], s)[:, 0]
    own, other = jacobian.diagonal(), jacobian[~torch.eye(4, dtype=torch.bool)]
    equal(own, own.mean().expand(4), 1e-7)
    equal(other, (-own.mean() / 3).expand(12), 1e-6)


def test_two_class_gradient_is_the_density_of_a_difference():
    s = torch.tensor([[0.4, -0.3]], dtype=f64, requires_grad=True)
    for noise, density in (
        (Gaussian(), math.exp(-(0.7**2) / 4) / math.sqrt(4 * math.pi)),
        (Uniform(), 0.5 * (1 - 0.35)),
        (Gumbel(), float(special.expit(0.7) * special.expit(-0.7))),
    ):
        (grad,) = torch.autograd.grad(probs(noise, s)[0, 0], s)
        equal(grad[0], torch.tensor([density, -density], dtype=f64), 1e-6)


FAR = [[0.0, -1.0, 0.3, -0.2], [0.1, 0.0, -1.9, -1.8], [9.0, 3.0, -2.0, -40.0], [500.0, 498.0, 0.0, -80.0]]


def differences(function, s: torch.Tensor, step: float = 1e-4) -> torch.Tensor:
    shifts = step * torch.eye(s.shape[1], dtype=s.dtype)
    return torch.stack([(function(s + shift) - function(s - shift)) / (2 * step) for shift in shifts], dim=1)


@pytest.mark.parametrize("noise", POSITIVE, ids=str)
@pytest.mark.parametrize("k", range(4))
@pytest.mark.parametrize("has_numba", [True, False], ids=["compiled", "readable"])
def test_slopes_are_those_of_the_values_near_and_far(noise, k, has_numba, monkeypatch):
    """Of what is given out and, to three digits, of what fits use; beyond the tables as within them."""
    monkeypatch.setattr(poise.link, "_has", lambda module: has_numba)
    s, labels, link = torch.tensor(FAR, dtype=f64), torch.full((4,), k), Link(noise)
    close = {"rtol": 1e-2, "atol": 2e-3}
    scores = s.clone().requires_grad_()
    exact = link.log_prob_of(scores, labels)
    (exact_slope,) = torch.autograd.grad(exact.sum(), scores)
    differentiable = differences(lambda z: link.log_prob_of(z.requires_grad_(), labels).detach(), s)
    torch.testing.assert_close(exact_slope, differentiable, **close)
    log_prob, slope = link.log_prob_and_slope(s, labels)
    torch.testing.assert_close(slope, differences(lambda z: link.log_prob_and_slope(z, labels)[0], s), **close)
    tabulated = exact.detach() > -55
    equal(log_prob[tabulated], exact.detach()[tabulated], 1e-3)
    torch.testing.assert_close(slope[tabulated], exact_slope[tabulated], **close)


def test_a_steep_noise_stays_finite_and_right():
    """The power of a large β under- and overflows; its tables would be too large, so panels serve it."""
    noise, row = GeneralizedNormal(200.0), [[0.3, 0.0, -1.1, -2.9, -50.0, -1e4]]
    s = torch.tensor(row, dtype=f64, requires_grad=True)
    log_prob = Link(noise).log_prob(s)
    assert torch.isfinite(log_prob).all()
    (grad,) = torch.autograd.grad(log_prob.sum(), s)
    assert torch.isfinite(grad).all()
    slow = torch.tensor(reference.vote(noise, row, range(4)), dtype=f64)
    equal(log_prob[:, :4].exp(), slow.exp(), 1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [5, 64, 66, 150, 1000])
def test_uniform_gradient_with_a_crowd_within_reach(k, layout):
    """With rows that hold many and few classes in reach side by side."""
    scaled = -torch.stack([crowd(layout, k), 6 * crowd("random", k)])[: 1 if k == 1000 else 2]
    # A difference across a kink of the slope is no derivative: ties are torn apart.
    scaled = scaled + 1e-3 * torch.arange(k, dtype=f64) / k
    inputs = (1.3 * scaled).requires_grad_(), torch.tensor(1.3, dtype=f64).requires_grad_()
    order = scaled.argsort(dim=1, descending=True)
    # In full for few inputs; else along random directions.
    check = functools.partial(gradcheck, inputs=inputs, atol=1e-6, rtol=1e-6, fast_mode=k > 5)
    for rank in (4,) if k == 1000 else (0, 1, min(4, k // 4)):
        assert check(lambda z, e, rank=rank: Link(Uniform()).log_prob_of(z / e, order[:, rank]))
    if k < 1000:
        assert check(lambda z, e: probs(Uniform(), z / e)[:, :: k // 4])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [2, 40, 200])
def test_compiled_slopes_of_uniform_are_the_gradient(k, layout):
    s = -torch.stack([crowd(layout, k), 1.02 * crowd(layout, k), 6 * crowd("random", k), torch.zeros(k, dtype=f64)])
    for labels in (s.argmax(1), s.argmin(1), s.argsort(1, descending=True)[:, k // 4]):
        for noise in (Uniform(), GeneralizedNormal(math.inf)):
            link, scores = Link(noise), s.clone().requires_grad_()
            expected = link.log_prob_of(scores, labels)
            finite = torch.isfinite(expected)
            (grad,) = torch.autograd.grad(expected[finite].sum(), scores)
            log_prob, slope = link.log_prob_and_slope(s, labels)
            assert torch.equal(torch.isfinite(log_prob), finite)
            # Beneath e^-80 the compiled form keeps three digits.
            seen = expected > -80
            torch.testing.assert_close(log_prob[seen], expected.detach()[seen], rtol=0, atol=1e-8)
            torch.testing.assert_close(slope[seen], grad[seen], rtol=1e-6, atol=1e-7)
            assert (slope[~finite] == 0).all()


@pytest.mark.parametrize("k", [2, 64, 65, 150])
def test_uniform_at_the_very_end_of_its_reach(k):
    last = -float(np.nextafter(2.0, 0.0))
    s = torch.linspace(0, -1.5, k, dtype=f64)[None].clone()
    s[0, -1] = last
    assert_ordered(Uniform(), s)
    assert_ordered(Uniform(), torch.cat([s, s - 1e-16, torch.full_like(s, last)], dim=1))
    s.requires_grad_()
    (grad,) = torch.autograd.grad(probs(Uniform(), s)[0, 0], s)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("form", ["compiled", "readable"])
@pytest.mark.parametrize("noise", [Gaussian(), GeneralizedNormal(4.0), GeneralizedNormal(8.0), LogGamma(4.0)], ids=str)
def test_a_crowd_just_within_reach(noise, form, monkeypatch):
    """A thousand classes whose tiny errors would add up, a little below two; the panels are cut three times as fine."""
    generator = torch.Generator().manual_seed(0)
    scores = 0.01 * torch.randn(3, 1000, generator=generator, dtype=torch.float64)
    scores -= torch.tensor([[3.0], [3.8], [4.5]])
    scores[:, :2] = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    gaps = scores.amax(1, keepdim=True) - scores
    monkeypatch.setattr(quadrature, "_PANEL_NODES", 24)
    expected = torch.softmax(quadrature.log_prob(gaps, noise, gaps), 1)
    if form == "readable":
        monkeypatch.setattr(poise.link, "_has", lambda module: False)
    torch.testing.assert_close(Link(noise).log_prob(scores).exp(), expected, atol=1e-6, rtol=0)
