"""The exact link: what the vote tends to when the number of random neighbours of the logits goes to infinity.

    p_k = ∫ f(u − s_k) Π_{j≠k} F(u − s_j) du,     s = z/ε

It stands where softmax stands. Gumbel noise makes it softmax itself, two classes under Gaussian noise a probit; it
keeps the order of the classes, and only differences of logits matter.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from poise._types import Labels, Logits, Probs
from poise.link import quadrature, smooth, uniform
from poise.link.series import has_series
from poise.noise import Gaussian, GeneralizedNormal, Gumbel, Laplace, LogGamma, Noise, Uniform

_CHUNK_BYTES = 32 * 2**20
"""Working memory of one chunk of rows; the whole table of logits needs no more."""

_TABULATED_BETA = 64
"""Generalised normals steeper than this would need tables of many megabytes."""


@dataclass(frozen=True)
class Link:
    """Logits to the probabilities of winning the vote, for infinitely many draws of a noise.

    log p_k = log P(argmax_j (s_j + z_j) = k), z_j independent draws of `noise`, s = z/ε the scaled logits.

    `prob` is for predictions and quick in single precision, `prob_of` for fits, and `log_prob` has every digit:
    absolute error of p below 1e-6; log p keeps four digits down to about e^-300 (e^-80 for noises with a kink),
    beyond which it follows the tail of two classes, finite and in order. Uniform noise gives exact zeros, log p =
    -inf, to classes 2 or more below the top. Differentiable once; in float64 and in chunks of rows, so that memory
    does not grow with their number. Analytic noises cost O(k) per row, the others (Laplace, generalised normals with
    1 < β < 6 not even) O(k · nodes), uniform O(m²) for m classes within reach.

    The forms are chosen without asking: the readable ones, in torch, for gradients, other devices and noises with a
    kink; where numba is installed, compiled ones for values on the CPU; and where Triton is, kernels for `prob` and
    `prob_of` on a GPU.

    >>> Link(Gumbel()).log_prob(torch.tensor([[2.0, 1.0, 0.0]])).exp()
    tensor([[0.6652, 0.2447, 0.0900]])
    """

    noise: Noise

    def prob(self, logits: Logits, strength: float = 1.0, lapse: float = 0.0) -> Probs:
        """(1 − l) p + l/k at s = z/ε, (n, k): what a calibrated network says.

        Of logits in single or half precision, analytic noises have it at a few softmaxes' cost: p good to 2e-6, and to
        one part in a thousand down to 1e-12, below which it keeps its order. All else is as exact as `log_prob`.
        """
        noise, unit = _simplest(self.noise)
        fast = _quick_form(noise, logits)
        if fast is None and isinstance(noise, Uniform) and _can_compile(noise, logits):
            fast = _compiled(noise)
        if fast is not None:
            quick: Probs = fast.prob(logits, noise, strength / unit, lapse)
            return quick.to(logits.dtype)
        scores = _floating(logits)
        if isinstance(noise, Gumbel):
            probs = torch.softmax(scores * (unit / strength), dim=1)
        else:
            # The top first: a quotient of large logits would lose the digits in which they differ.
            probs = torch.exp(self.log_prob((scores - scores.detach().amax(1, keepdim=True)) / strength))
        mixed = probs if lapse == 0 else (1 - lapse) * probs + lapse / logits.shape[1]
        return mixed.to(logits.dtype)

    def prob_of(self, logits: Logits, labels: Labels, strength: float = 1.0) -> Tensor:
        """p of one class per row, (n,): all that a fit needs. Not differentiable; as exact as `prob`."""
        noise, unit = _simplest(self.noise)
        scores = logits.detach()
        fast = _quick_form(noise, scores)
        if fast is not None:
            quick: Tensor = fast.prob_of(scores, noise, labels, strength / unit)[0]
            return quick
        return torch.exp(self.log_prob_of(_floating(scores) / strength, labels))

    def prepared(self, logits: Logits) -> Logits:
        """The logits as `prob_of` computes best with them at many strengths: doubled, unless a series serves them."""
        scores = logits.detach()
        return scores if _quick_form(_simplest(self.noise)[0], scores) is not None else scores.double()

    def log_prob(self, scaled_logits: Logits) -> Logits:
        """log p, (n, k)."""
        noise, unit = _simplest(self.noise)
        if isinstance(noise, Gumbel):
            return torch.log_softmax(scaled_logits * unit, dim=1)
        if _can_compile(noise, scaled_logits):
            log_prob: Tensor = _compiled(noise).log_prob(_floating(scaled_logits, unit), noise)
            return log_prob.to(scaled_logits.dtype)
        return self._in_chunks(lambda gaps: _ordered(_log_curve(gaps * unit, noise, gaps * unit), gaps), scaled_logits)

    def log_prob_of(self, scaled_logits: Logits, labels: Labels) -> Tensor:
        """log p of one class per row, (n,): all that a fit by likelihood needs."""
        noise, unit = _simplest(self.noise)
        if isinstance(noise, Gumbel):
            return torch.log_softmax(scaled_logits * unit, dim=1).gather(1, labels[:, None])[:, 0]
        if _can_compile(noise, scaled_logits):
            log_prob: Tensor = _compiled(noise).log_prob_of(_floating(scaled_logits, unit), noise, labels)
            return log_prob.to(scaled_logits.dtype)

        def of_label(gaps: Tensor, label: Tensor) -> Tensor:
            return _log_curve(gaps * unit, noise, (gaps * unit).gather(1, label))

        return self._in_chunks(of_label, scaled_logits, labels[:, None])[:, 0]

    def log_prob_and_slope(self, scaled_logits: Logits, labels: Labels) -> tuple[Tensor, Logits]:
        """log p of one class per row (n,) and its gradient in the scaled logits (n, k): what fits through a link need.

        Good to 1e-3 of p, at a tenth of the cost of `log_prob_of` and its backward pass.
        """
        noise, unit = _simplest(self.noise)
        if isinstance(noise, Gumbel):
            log_prob = torch.log_softmax(scaled_logits.detach() * unit, dim=1)
            slope = -torch.exp(log_prob).scatter_add(1, labels[:, None], -torch.ones_like(log_prob[:, :1]))
            return log_prob.gather(1, labels[:, None])[:, 0], unit * slope
        scores = scaled_logits.detach()
        if _can_compile(noise, scores):
            log_prob, slope = _compiled(noise).log_prob_and_slope(_floating(scores, unit), noise, labels)
            return log_prob.to(scores.dtype), (unit * slope).to(scores.dtype)
        if not _is_tabulated(noise):
            scores.requires_grad_()
            log_prob = self.log_prob_of(scores, labels)
            return log_prob.detach(), torch.autograd.grad(log_prob[torch.isfinite(log_prob)].sum(), scores)[0]
        scores = scores.double()
        gaps = scores.amax(1, keepdim=True) - scores
        rows = max(1, _CHUNK_BYTES // (16 * _numbers_per_row(noise, gaps.shape[1])))
        parts = [
            smooth.log_prob_and_slope(some, noise, label, smooth.QUICK)
            for some, label in zip(torch.split(gaps, rows), torch.split(labels, rows), strict=True)
        ]
        dtype = scaled_logits.dtype
        return torch.cat([part[0] for part in parts]).to(dtype), torch.cat([part[1] for part in parts]).to(dtype)

    def _in_chunks(self, function: Callable[..., Tensor], scaled_logits: Logits, *more: Tensor) -> Tensor:
        """The function of the gaps of a chunk of rows, put together; only the chunk at work holds its intermediates."""
        if torch.compiler.is_compiling():
            # An exported program serves any number of rows, and a loop over chunks would fix it.
            scores = scaled_logits.double()
            gaps = scores.detach().amax(1, keepdim=True) - scores
            return function(gaps, *more).to(scaled_logits.dtype)
        if not len(scaled_logits):
            return scaled_logits[:, :1] if more else scaled_logits
        rows = max(1, _CHUNK_BYTES // (8 * _numbers_per_row(_simplest(self.noise)[0], scaled_logits.shape[1])))
        results = []
        for chunk in zip(*(torch.split(values, rows) for values in (scaled_logits, *more)), strict=True):
            scores = chunk[0].double()
            # The noise does not care where the top is: its gradient is in the gaps.
            gaps = scores.detach().amax(1, keepdim=True) - scores
            if gaps.requires_grad:
                log_prob = checkpoint(function, gaps, *chunk[1:], use_reentrant=False)
            else:
                log_prob = function(gaps, *chunk[1:])
            results.append(log_prob.to(scaled_logits.dtype))
        return torch.cat(results)


def _numbers_per_row(noise: Noise, num_classes: int) -> int:
    """How many numbers are held at once for a row."""
    if isinstance(noise, Uniform):
        return uniform.numbers_per_row(num_classes)
    if _is_tabulated(noise):
        return smooth.numbers_per_row(noise, num_classes)
    return quadrature.numbers_per_row(noise, num_classes)


def _simplest(noise: Noise) -> tuple[Noise, float]:
    """A simpler noise of the same law but for its unit, and how many of its units one of the given noise is."""
    if noise == LogGamma(1.0):
        return Gumbel(), LogGamma(1.0).scale
    if isinstance(noise, GeneralizedNormal):
        special: dict[float, tuple[Noise, float]] = {
            1.0: (Laplace(), 1.0),
            2.0: (Gaussian(), 1.0),
            math.inf: (Uniform(), 1 / math.sqrt(3)),
        }
        return special.get(noise.beta, (noise, 1.0))
    return noise, 1.0


def _is_tabulated(noise: Noise) -> bool:
    steep = isinstance(noise, GeneralizedNormal) and noise.beta > _TABULATED_BETA
    return not noise.knots and not steep


def _log_curve(gaps: Tensor, noise: Noise, at: Tensor) -> Tensor:
    if isinstance(noise, Uniform):
        return uniform.log_prob(gaps, at)
    if _is_tabulated(noise):
        return smooth.log_prob(gaps, noise, at)
    return quadrature.log_prob(gaps, noise, at)


def _ordered(log_prob: Tensor, gaps: Tensor) -> Tensor:
    """Rows that sum to one and in which rounding reverses no two classes and tells no equal ones apart."""
    log_prob = log_prob - torch.logsumexp(log_prob, dim=1, keepdim=True)
    gaps, order = gaps.detach().sort(dim=1)
    ranked = log_prob.detach().gather(1, order)
    rank = torch.arange(ranked.shape[1], device=ranked.device)
    is_new = torch.ones_like(gaps, dtype=torch.bool)
    is_new[:, 1:] = gaps.diff(dim=1) > 0
    first_equal = torch.where(is_new, rank, 0).cummax(1).values
    ranked = ranked.cummin(1).values.gather(1, first_equal)
    fixed = torch.empty_like(ranked).scatter_(1, order, ranked)
    # A correction of rounding errors only: the gradient is that of the curve, and none where p is zero.
    return fixed + (log_prob - log_prob.detach()).masked_fill(log_prob.detach() == -math.inf, 0.0)


def _can_compile(noise: Noise, scores: Logits) -> bool:
    """Whether the compiled form serves: values on the CPU, of a noise that has one."""
    has_form = isinstance(noise, Uniform) or _is_tabulated(noise)
    return has_form and scores.device.type == "cpu" and _is_plain(scores) and _has("numba")


def _quick_form(noise: Noise, logits: Logits) -> Any:
    """The module that has p in single precision on the logits' device, if there is one for the noise."""
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16) or not _is_plain(logits):
        return None
    if isinstance(noise, Uniform):
        forms = {"cuda": ("uniform_gpu", "triton")}
    elif _is_tabulated(noise) and has_series(noise):
        forms = {"cpu": ("series_cpu", "numba"), "cuda": ("series_gpu", "triton")}
    else:
        return None
    form, needed = forms.get(logits.device.type, ("", ""))
    return importlib.import_module(f"poise.link.{form}") if form and _has(needed) else None


def _is_plain(logits: Logits) -> bool:
    """Whether values are all that is wanted of a real tensor."""
    wants_gradient = logits.requires_grad and torch.is_grad_enabled()
    is_traced = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
    is_real = type(logits) in (Tensor, torch.nn.Parameter) and len(logits) > 0
    return is_real and not (wants_gradient or is_traced)


@functools.cache
def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _compiled(noise: Noise) -> Any:
    """Imported where it is used: numba takes half a second, and may be missing."""
    return importlib.import_module("poise.link.fused_uniform" if isinstance(noise, Uniform) else "poise.link.fused")


def _floating(scores: Logits, unit: float = 1.0) -> Logits:
    """In another unit, or a type, only where they must be: single precision would round the product."""
    if unit != 1:
        return scores.double() * unit
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
