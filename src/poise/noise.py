"""The noise that makes neighbours: standard distributions, accurate in both tails, on any device, differentiable.

``Gaussian`` is N(0, 1), ``Uniform`` is U(-1, 1) and ``Gumbel`` is Gumbel(0, 1), so that a strength is the paper's ε
and the temperature; the others have mean 0 and variance 1. A noise never holds its strength.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from scipy import special
from torch import Tensor

from poise import _check

__all__ = ["Gaussian", "GeneralizedNormal", "Gumbel", "Laplace", "LogGamma", "Logistic", "Noise", "Uniform"]


class Noise(ABC):
    """A standard distribution z ~ f with distribution function F."""

    @property
    def knots(self) -> tuple[float, ...]:
        """Where the density is not smooth; empty for an analytic one."""
        return ()

    @abstractmethod
    def log_pdf(self, t: Tensor) -> Tensor:
        """log f(t)."""

    @abstractmethod
    def log_cdf(self, t: Tensor) -> Tensor:
        """log F(t), with its relative accuracy kept far to the left and to the right."""

    def sample(
        self,
        shape: tuple[int, ...],
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Independent draws of z."""
        return self._sample(_Source(tuple(shape), generator, dtype, device))

    @abstractmethod
    def _sample(self, source: _Source) -> Tensor: ...


@dataclass(frozen=True)
class _Source:
    """Where draws come from: each call gives new ones, of one shape, from one generator."""

    size: tuple[int, ...]
    generator: torch.Generator | None
    dtype: torch.dtype | None
    device: torch.device | str | None

    def normal(self) -> Tensor:
        return torch.randn(self.size, generator=self.generator, dtype=self.dtype, device=self.device)

    def uniform(self) -> Tensor:
        """From the open interval (0, 1), so that a logarithm is finite."""
        u = torch.rand(self.size, generator=self.generator, dtype=self.dtype, device=self.device)
        return u.clamp_min(torch.finfo(u.dtype).tiny)

    def gamma(self, a: float) -> Tensor:
        u = torch.empty(self.size, dtype=self.dtype, device=self.device)
        return torch._standard_gamma(u.fill_(a), generator=self.generator)


@dataclass(frozen=True)
class Gaussian(Noise):
    """N(0, 1): the paper's Gaussian noise.

    >>> Gaussian().log_cdf(torch.tensor(-40.0)).item()
    -804.6084...
    """

    def log_pdf(self, t: Tensor) -> Tensor:
        return -0.5 * t * t - 0.5 * math.log(2 * math.pi)

    def log_cdf(self, t: Tensor) -> Tensor:
        return _with_hazard(t, self, torch.special.log_ndtr)

    def _sample(self, source: _Source) -> Tensor:
        return source.normal()


@dataclass(frozen=True)
class Uniform(Noise):
    """U(-1, 1): the paper's uniform noise; its votes give exact zeros to classes more than 2ε below the top."""

    @property
    def knots(self) -> tuple[float, ...]:
        return (-1.0, 1.0)

    def log_pdf(self, t: Tensor) -> Tensor:
        return torch.full_like(t, -math.log(2)).masked_fill(t.abs() > 1, -math.inf)

    def log_cdf(self, t: Tensor) -> Tensor:
        inside = t.clamp(-1, 1)
        # -inf to the left is meant; log1p keeps the last digits near the right end.
        return torch.where(inside < 0, torch.log((inside + 1) / 2), torch.log1p((inside - 1) / 2))

    def _sample(self, source: _Source) -> Tensor:
        return source.uniform() * 2 - 1


@dataclass(frozen=True)
class Gumbel(Noise):
    """Gumbel(0, 1), F = exp(-exp(-t)): the noise under which the vote is a softmax and the strength a temperature."""

    def log_pdf(self, t: Tensor) -> Tensor:
        return -t - torch.exp(-t)

    def log_cdf(self, t: Tensor) -> Tensor:
        return -torch.exp(-t)

    def _sample(self, source: _Source) -> Tensor:
        return -torch.log(-torch.log(source.uniform()))


@dataclass(frozen=True)
class Logistic(Noise):
    """The logistic distribution of variance 1: tails that fall exponentially on both sides."""

    scale: ClassVar[float] = math.sqrt(3) / math.pi

    def log_pdf(self, t: Tensor) -> Tensor:
        y = t / self.scale
        return -y.abs() - 2 * torch.log1p(torch.exp(-y.abs())) - math.log(self.scale)

    def log_cdf(self, t: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(t / self.scale)

    def _sample(self, source: _Source) -> Tensor:
        return self.scale * torch.logit(source.uniform())


@dataclass(frozen=True)
class Laplace(Noise):
    """The Laplace distribution of variance 1, GeneralizedNormal(1): a peak at 0, exponential tails."""

    scale: ClassVar[float] = math.sqrt(0.5)

    @property
    def knots(self) -> tuple[float, ...]:
        return (0.0,)

    def log_pdf(self, t: Tensor) -> Tensor:
        return -t.abs() / self.scale - math.log(2 * self.scale)

    def log_cdf(self, t: Tensor) -> Tensor:
        return _with_hazard(t, self, self._log_cdf)

    def _log_cdf(self, t: Tensor) -> Tensor:
        tail = -t.abs() / self.scale - math.log(2)
        return torch.where(t < 0, tail, torch.log1p(-torch.exp(tail)))

    def _sample(self, source: _Source) -> Tensor:
        return self.scale * (torch.log(source.uniform()) - torch.log(source.uniform()))


@dataclass(frozen=True)
class GeneralizedNormal(Noise):
    """f ∝ exp(-|t/α|^β) with variance 1: β = 1 is Laplace, 2 Gaussian, and β → ∞ the uniform U(-√3, √3)."""

    beta: float = 8.0

    def __post_init__(self) -> None:
        if not (isinstance(self.beta, (int, float)) and self.beta >= 1):
            raise ValueError(f"beta must be a number of 1 or more (infinity is uniform), but is {self.beta!r}.")

    @property
    def knots(self) -> tuple[float, ...]:
        """|t|^β is analytic at 0 only for an even β; beyond 6 the kink is of too high an order to be seen."""
        if self.beta == math.inf:
            return (-self.scale, self.scale)
        return (0.0,) if self.beta < 6 and self.beta % 2 != 0 else ()

    @cached_property
    def scale(self) -> float:
        """α, such that the variance is 1."""
        if self.beta == math.inf:
            return math.sqrt(3)
        return math.exp((math.lgamma(1 / self.beta) - math.lgamma(3 / self.beta)) / 2)

    def log_pdf(self, t: Tensor) -> Tensor:
        if self.beta == math.inf:
            return Uniform().log_pdf(t / self.scale) - math.log(self.scale)
        # β / Γ(1/β) = 1 / Γ(1 + 1/β), which has a limit.
        log_constant = -math.log(2 * self.scale) - math.lgamma(1 + 1 / self.beta)
        return log_constant - (t.abs() / self.scale) ** self.beta

    def log_cdf(self, t: Tensor) -> Tensor:
        if self.beta == math.inf:
            return Uniform().log_cdf(t / self.scale)
        return _with_hazard(t, self, self._log_cdf)

    def _log_cdf(self, t: Tensor) -> Tensor:
        tail = _log_gammaincc(1 / self.beta, self.beta * torch.log(t.abs() / self.scale)) - math.log(2)
        return torch.where(t < 0, tail, torch.log1p(-torch.exp(tail)))

    def _sample(self, source: _Source) -> Tensor:
        # |t/α|^β is gamma distributed, and G(a) = G(a + 1) U^(1/a) spares the sampler its small shapes.
        radius = source.gamma(1 + 1 / self.beta) ** (1 / self.beta)
        return self.scale * radius * (source.uniform() * 2 - 1)


@dataclass(frozen=True)
class LogGamma(Noise):
    """-log G with G ~ Gamma(shape), centred, variance 1: a heavy right tail (the reverse of scipy's ``loggamma``).

    Shape 1 is Gumbel in another unit (so the vote is temperature scaling), smaller shapes are heavier to the right, and
    shape → ∞ is Gaussian.
    """

    shape: float = 1.0

    def __post_init__(self) -> None:
        _check.positive(self.shape, "shape")

    @cached_property
    def mean(self) -> float:
        """E[-log G] = -ψ(shape)."""
        return -float(special.digamma(self.shape))

    @cached_property
    def scale(self) -> float:
        """The standard deviation of log G, the square root of ψ′(shape)."""
        return math.sqrt(special.polygamma(1, self.shape))

    def log_pdf(self, t: Tensor) -> Tensor:
        y = self.scale * t + self.mean
        return math.log(self.scale) - math.lgamma(self.shape) - self.shape * y - torch.exp(-y)

    def log_cdf(self, t: Tensor) -> Tensor:
        return _with_hazard(t, self, self._log_cdf)

    def _log_cdf(self, t: Tensor) -> Tensor:
        return _log_gammaincc(self.shape, -(self.scale * t + self.mean))

    def _sample(self, source: _Source) -> Tensor:
        # log G(a) = log G(a + 1) + log(U) / a: no underflow at small shapes.
        log_gamma = torch.log(source.gamma(self.shape + 1)) + torch.log(source.uniform()) / self.shape
        return (-log_gamma - self.mean) / self.scale


class _LogCdf(torch.autograd.Function):
    """log F with its derivative f/F taken from the two logarithms, which neither overflows nor loses digits."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, noise: Noise, log_cdf: Any) -> Tensor:
        ctx.save_for_backward(t)
        ctx.noise = noise
        return log_cdf(t)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None, None]:
        (t,) = ctx.saved_tensors
        hazard = torch.exp(ctx.noise.log_pdf(t) - ctx.noise.log_cdf(t))
        # Where both logarithms are -inf; a zero gradient must stay zero.
        return grad[0] * hazard.nan_to_num(nan=torch.finfo(t.dtype).max), None, None


def _with_hazard(t: Tensor, noise: Noise, log_cdf: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _LogCdf.apply(t, noise, log_cdf)  # type: ignore[no-untyped-call]
    return result


def _log_gammaincc(a: float, log_x: Tensor) -> Tensor:
    """log Q(a, x), the upper regularised incomplete gamma function, where Q or x itself would underflow too."""
    x = torch.exp(log_x)
    shape = torch.full((), a, dtype=x.dtype, device=x.device)
    far = x > a + 6 * math.sqrt(a) + 10
    near = x.masked_fill(far, 1.0)
    lower = torch.special.gammainc(shape, near)
    # Each of P and Q is accurate where it is the smaller one.
    log_q = torch.where(lower < 0.5, torch.log1p(-lower), torch.log(torch.special.gammaincc(shape, near)))
    log_q = torch.where(far, _log_tail(a, x.masked_fill(~far, a + 6 * math.sqrt(a) + 11)), log_q)
    # P is x^a / Γ(a + 1) for a small x, and far from zero where a is small.
    log_q = torch.where(x < torch.finfo(x.dtype).eps, torch.log1p(-torch.exp(a * log_x - math.lgamma(a + 1))), log_q)
    return log_q.masked_fill(x == math.inf, -math.inf)


def _log_tail(a: float, x: Tensor, terms: int = 40) -> Tensor:
    """Legendre's continued fraction of Q(a, x) for x well above a, evaluated from its end."""
    value = x + (2 * terms + 1 - a)
    for i in range(terms, 0, -1):
        value = x + (2 * i - 1 - a) + i * (a - i) / value
    return a * torch.log(x) - x - math.lgamma(a) - torch.log(value)
