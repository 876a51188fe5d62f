"""The noises against mpmath in both tails, by their derivatives, moments and draws, and as families."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.autograd import gradcheck, gradgradcheck

import reference
from poise.noise import Gaussian, GeneralizedNormal, Gumbel, Laplace, LogGamma, Noise, Uniform

STEEP = [GeneralizedNormal(64), GeneralizedNormal(200)]
by_noise = pytest.mark.parametrize("noise", reference.NOISES, ids=str)
f64 = torch.float64


def line(low: float, high: float, num: int = 41) -> torch.Tensor:
    return torch.linspace(low, high, num, dtype=f64)


def inside(noise: Noise) -> torch.Tensor:
    """Points of the support, from far on the left to far on the right, none of them at a kink."""
    low, high = (noise.knots[0] + 0.01, noise.knots[1] - 0.01) if reference.is_bounded(noise) else (-3.013, 4.017)
    return line(low, high, 12)


# ---- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("noise", reference.NOISES + STEEP, ids=str)
def test_logarithms_are_right_far_into_both_tails(noise, dtype):
    size = 10.0 ** np.arange(-3, 2.1 if dtype == f64 else 1.6, 0.25)
    t = torch.from_numpy(np.concatenate([-size, [0.0, -1.7, -0.999, 0.999, 1.7], size])).float().to(dtype)
    exact = torch.tensor([reference.exact_logs(noise, x) for x in t.tolist()], dtype=f64)
    # A tail e^-x keeps x times fewer digits than x.
    rtol = 1e-12 if dtype == f64 else 2e-5
    if noise == LogGamma(100.0):
        # torch's incomplete gamma function has nine digits at these shapes; the log-density sums terms near 500.
        rtol = 5e-9 if dtype == f64 else 5e-5
    # A steep power of t keeps as many digits as t / α has, over the power.
    rtol *= max(1, getattr(noise, "beta", 1) / 16) if noise in STEEP else 1
    for ours, theirs in zip((noise.log_pdf(t), noise.log_cdf(t)), exact.T, strict=True):
        assert ours.dtype == dtype
        # A number beyond the dtype's range is infinite, one below it zero.
        torch.testing.assert_close(ours, theirs.to(dtype), rtol=rtol, atol=torch.finfo(dtype).tiny)


@by_noise
def test_the_quick_reference_agrees_with_the_exact_one(noise):
    t = np.linspace(-6, 8, 57) + 0.003
    exact = np.array([reference.exact_logs(noise, x) for x in t]).T
    np.testing.assert_allclose(reference.log_pdf(noise, t), exact[0], rtol=1e-12, atol=1e-300)
    log_cdf = reference.log_cdf(noise, t)
    seen = np.isfinite(log_cdf)
    assert (exact[1][~seen] < -600).all()
    np.testing.assert_allclose(log_cdf[seen], exact[1][seen], rtol=1e-11, atol=1e-300)


@by_noise
def test_log_cdf_rises_from_minus_infinity_to_zero(noise):
    log_cdf = noise.log_cdf(line(-30, 30, 4001))
    assert (log_cdf[1:] >= log_cdf[:-1]).all()
    assert log_cdf[0] < -20
    assert -1e-8 < log_cdf[-1] <= 0


# ---- derivatives -------------------------------------------------------------------------------------------------


@by_noise
def test_derivatives_agree_with_differences(noise):
    t = inside(noise).requires_grad_()
    assert gradcheck(noise.log_cdf, t, rtol=1e-4)
    assert gradgradcheck(noise.log_cdf, t, rtol=1e-4)
    if not reference.is_bounded(noise):
        assert gradcheck(noise.log_pdf, t, rtol=1e-4)


@by_noise
def test_slope_of_log_cdf_is_pdf_over_cdf_far_out_and_at_the_middle(noise):
    end = 0.999 * noise.knots[1] if reference.is_bounded(noise) else 20.0
    t = torch.cat([line(-end, end), torch.zeros(1, dtype=f64)]).requires_grad_()
    (slope,) = torch.autograd.grad(noise.log_cdf(t).sum(), t)
    log_pdf, log_cdf = torch.tensor([reference.exact_logs(noise, x) for x in t.tolist()], dtype=f64).T
    seen = log_cdf > -1e6
    torch.testing.assert_close(slope[seen], torch.exp(log_pdf - log_cdf)[seen], rtol=1e-7, atol=1e-300)


@pytest.mark.parametrize("noise", [LogGamma(0.25), LogGamma(100.0), GeneralizedNormal(1000)], ids=str)
def test_gradient_stays_a_number_where_the_logarithms_overflow(noise):
    t = torch.tensor([-1e4, -1e9], dtype=f64, requires_grad=True)
    assert (noise.log_cdf(t) == -math.inf).all()
    (slope,) = torch.autograd.grad((noise.log_cdf(t) * 0).nan_to_num(0.0).sum(), t)
    assert (slope == 0).all()


# ---- conventions -------------------------------------------------------------------------------------------------


@by_noise
def test_mass_mean_and_variance(noise):
    edges = np.unique([*np.linspace(-60, 100, 1601), *noise.knots])
    x, w = np.polynomial.legendre.leggauss(10)
    width = np.diff(edges)[:, None]
    t = torch.from_numpy(edges[:-1, None] + width * (x + 1) / 2)
    mass = torch.exp(noise.log_pdf(t)).numpy() * width * w / 2
    t = t.numpy()
    mean = (mass * t).sum()
    expected = {Uniform(): (0, 1 / 3), Gumbel(): (np.euler_gamma, math.pi**2 / 6)}.get(noise, (0, 1))
    assert mass.sum() == pytest.approx(1, abs=5e-9)
    assert (mean, (mass * (t - mean) ** 2).sum()) == pytest.approx(expected, abs=5e-9)


@pytest.mark.parametrize(
    ("noise", "other", "scale", "shift", "tolerance"),
    [
        (GeneralizedNormal(2), Gaussian(), 1, 0, 1e-12),
        (GeneralizedNormal(1), Laplace(), 1, 0, 1e-12),
        (GeneralizedNormal(math.inf), Uniform(), 1 / math.sqrt(3), 0, 1e-12),
        (LogGamma(1), Gumbel(), math.pi / math.sqrt(6), np.euler_gamma, 1e-12),
        (LogGamma(1e7), Gaussian(), 1, 0, 2e-3),
        (GeneralizedNormal(1e5), GeneralizedNormal(math.inf), 1, 0, 1e-4),
    ],
    ids=str,
)
def test_members_of_the_families(noise, other, scale, shift, tolerance):
    end = 1.7 if reference.is_bounded(other) else 3.0
    t = line(-end, end, 40)
    y = scale * t + shift
    close = {"rtol": 0, "atol": tolerance}
    torch.testing.assert_close(noise.log_pdf(t), other.log_pdf(y) + math.log(scale), **close)
    torch.testing.assert_close(noise.log_cdf(t), other.log_cdf(y), **close)


@by_noise
def test_noises_are_values(noise):
    names = {kind.__name__: kind for kind in map(type, reference.NOISES)}
    again = eval(repr(noise), {**names, "inf": math.inf})
    assert again == noise
    assert hash(again) == hash(noise)
    with pytest.raises(AttributeError):
        noise.beta = 3.0


# ---- draws -------------------------------------------------------------------------------------------------------


@by_noise
def test_draws_follow_the_distribution_function(noise):
    draws = noise.sample((200, 100), generator=torch.Generator().manual_seed(7), dtype=f64)
    assert draws.shape == (200, 100)
    test = stats.kstest(draws.flatten().numpy(), lambda t: np.exp(reference.log_cdf(noise, t)))
    assert test.pvalue > 1e-3
    rows = stats.spearmanr(draws[::2].flatten(), draws[1::2].flatten())
    assert abs(rows.statistic) < 4 / math.sqrt(10_000)


@by_noise
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_draws_are_seeded_finite_and_of_the_dtype_asked_for(noise, dtype):
    def draw(seed: int) -> torch.Tensor:
        return noise.sample((50_000,), generator=torch.Generator().manual_seed(seed), dtype=dtype, device="cpu")

    assert draw(3).dtype == dtype
    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))
    assert torch.isfinite(draw(3)).all()
    generator = torch.Generator().manual_seed(3)
    first, second = (noise.sample((100,), generator=generator, dtype=dtype) for _ in range(2))
    assert not torch.equal(first, second)
    if reference.is_bounded(noise):
        assert draw(3).abs().max() <= noise.knots[1] * (1 + torch.finfo(dtype).eps)


@by_noise
def test_draws_take_torchs_defaults(noise):
    torch.manual_seed(0)
    first = noise.sample((2, 3))
    torch.manual_seed(0)
    assert torch.equal(first, noise.sample((2, 3)))
    assert first.dtype == torch.get_default_dtype()
    assert noise.sample((0, 3)).shape == (0, 3)
    assert noise.sample(()).shape == ()


# ---- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(GeneralizedNormal, "beta", value) for value in (0.5, 0, -2.0, math.nan, -math.inf, "8", None)]
    + [(LogGamma, "shape", value) for value in (0, -1.0, math.nan, math.inf, "4", None)],
)
def test_bad_shapes_are_refused_in_one_sentence(kind, name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be [^\n]*\.$") as error:
        kind(value)
    assert repr(value) in str(error.value)
    assert ". " not in str(error.value)
