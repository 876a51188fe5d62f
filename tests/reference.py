"""The noises and the exact vote as slow, independent references, from their formulas, in scipy and mpmath."""

from __future__ import annotations

import itertools
import math
from functools import cache

import mpmath as mp
import numpy as np
from scipy import integrate, special

from poise import noise as noises

NOISES = [
    noises.Gaussian(),
    noises.Uniform(),
    noises.Gumbel(),
    noises.Logistic(),
    noises.Laplace(),
    *(noises.GeneralizedNormal(beta) for beta in (1.5, 3.0, 4.0, 8.0, 16.0, math.inf)),
    *(noises.LogGamma(shape) for shape in (0.25, 1.0, 4.0, 100.0)),
]


def is_bounded(noise) -> bool:
    return isinstance(noise, noises.Uniform) or getattr(noise, "beta", 0) == math.inf


@cache
def unit(noise) -> tuple[float, float]:
    """(scale, mean) of the textbook variable y = scale · t + mean of each standard noise t, by DESIGN section 4."""
    with mp.workdps(40):
        match noise:
            case noises.Logistic():
                scale, mean = mp.pi / mp.sqrt(3), 0
            case noises.Laplace():
                scale, mean = mp.sqrt(2), 0
            case noises.GeneralizedNormal(math.inf):
                scale, mean = 1 / mp.sqrt(3), 0
            case noises.GeneralizedNormal(beta):
                scale, mean = mp.sqrt(mp.gamma(3 / mp.mpf(beta)) / mp.gamma(1 / mp.mpf(beta))), 0
            case noises.LogGamma(shape):
                scale, mean = mp.sqrt(mp.psi(1, shape)), -mp.psi(0, shape)
            case _:
                scale, mean = 1, 0
        return mp.mpf(scale), mp.mpf(mean)


@cache
def exact_logs(noise, t: float) -> tuple[float, float]:
    """(log f, log F) at t, to all digits of a double however far in a tail."""
    with mp.workdps(60):
        scale, mean = unit(noise)
        y = scale * mp.mpf(float(t)) + mean
        match noise:
            case noises.Gaussian():
                log_pdf, left, right = -y * y / 2 - mp.log(2 * mp.pi) / 2, mp.erfc(-y / mp.sqrt(2)) / 2, None
                right = mp.erfc(y / mp.sqrt(2)) / 2
            case noises.Uniform() | noises.GeneralizedNormal(math.inf):
                log_pdf = -mp.log(2) if abs(y) <= 1 else -mp.inf
                left, right = min(max((1 + y) / 2, 0), 1), min(max((1 - y) / 2, 0), 1)
            case noises.Gumbel():
                log_pdf, left, right = -y - mp.exp(-y), mp.exp(-mp.exp(-y)), -mp.expm1(-mp.exp(-y))
            case noises.Logistic():
                log_pdf, left, right = -y - 2 * mp.log1p(mp.exp(-y)), 1 / (1 + mp.exp(-y)), 1 / (1 + mp.exp(y))
            case noises.Laplace():
                half = mp.exp(-abs(y)) / 2
                log_pdf, left, right = -abs(y) - mp.log(2), *((half, 1 - half) if y < 0 else (1 - half, half))
            case noises.GeneralizedNormal(beta):
                half = mp.gammainc(1 / mp.mpf(beta), abs(y) ** beta, regularized=True) / 2
                log_pdf = -(abs(y) ** beta) + mp.log(beta / (2 * mp.gamma(1 / mp.mpf(beta))))
                left, right = (half, 1 - half) if y < 0 else (1 - half, half)
            case noises.LogGamma(shape):
                x = mp.exp(-y)
                log_pdf = -shape * y - x - mp.loggamma(shape)
                left = mp.gammainc(shape, x, mp.inf, regularized=True)
                right = mp.gammainc(shape, 0, x, regularized=True)
        log_cdf = mp.log(left) if left < 0.5 else mp.log1p(-right)
        return float(log_pdf + mp.log(scale)), float(log_cdf)


@np.errstate(over="ignore")
def log_pdf(noise, t):
    """log f in double precision, quickly."""
    scale, mean = map(float, unit(noise))
    y = scale * np.asarray(t, dtype=float) + mean
    match noise:
        case noises.Gaussian():
            result = -y * y / 2 - math.log(2 * math.pi) / 2
        case noises.Uniform() | noises.GeneralizedNormal(math.inf):
            result = np.where(np.abs(y) <= 1, -math.log(2), -np.inf)
        case noises.Gumbel():
            result = -y - np.exp(-y)
        case noises.Logistic():
            result = special.log_expit(y) + special.log_expit(-y)
        case noises.Laplace():
            result = -np.abs(y) - math.log(2)
        case noises.GeneralizedNormal(beta):
            result = -(np.abs(y) ** beta) + math.log(beta / (2 * math.gamma(1 / beta)))
        case noises.LogGamma(shape):
            result = -shape * y - np.exp(-y) - math.lgamma(shape)
    return result + math.log(scale)


@np.errstate(over="ignore", divide="ignore")
def log_cdf(noise, t):
    """log F in double precision, quickly; -inf where F underflows."""
    scale, mean = map(float, unit(noise))
    y = scale * np.asarray(t, dtype=float) + mean
    match noise:
        case noises.Gaussian():
            return special.log_ndtr(y)
        case noises.Uniform() | noises.GeneralizedNormal(math.inf):
            return np.log1p(np.clip(y, -1, 1) / 2 - 0.5)
        case noises.Gumbel():
            return -np.exp(-y)
        case noises.Logistic():
            return special.log_expit(y)
        case noises.Laplace():
            return np.where(y < 0, -np.abs(y) - math.log(2), np.log1p(-np.exp(-np.abs(y)) / 2))
        case noises.GeneralizedNormal(beta):
            power = np.abs(y) ** beta
            # A steep power underflows; there the density is flat.
            flat = 1 - np.abs(y) / math.gamma(1 + 1 / beta)
            half = np.where(power < 1e-17, flat, special.gammaincc(1 / beta, power)) / 2
            return np.where(y < 0, np.log(half), np.log1p(-half))
        case noises.LogGamma(shape):
            x = np.exp(-y)
            left, right = special.gammaincc(shape, x), special.gammainc(shape, x)
            return np.where(left < 0.5, np.log(left), np.log1p(-np.where(left < 0.5, 0, right)))


def log_vote(noise, scaled_logits, k: int) -> float:
    """log ∫ f(u − s_k) Π_{j≠k} F(u − s_j) du of one row, adaptively, between all points where it is not smooth.

    Below e^-600, where scipy's F would underflow, -inf stands for "too faint for this reference".
    """
    s = np.asarray(scaled_logits, dtype=float)
    s = s - s.max()
    others = np.delete(s, k)

    def log_integrand(u):
        u = np.asarray(u, dtype=float)
        return log_pdf(noise, u - s[k]) + log_cdf(noise, u[..., None] - others).sum(-1)

    # The integrand is log-concave (every noise here is): climb to its top, then walk down on both sides.
    corner = 1 / float(unit(noise)[0])
    corners = [-corner, corner] if getattr(noise, "beta", 0) > 16 else []
    breaks = np.unique(np.add.outer(s, [0.0, *noise.knots, *corners]))
    low, high = min(s[k], -1) - 60.0, 60.0
    if is_bounded(noise):
        low, high = noise.knots[0], s[k] + noise.knots[1]
        if high <= low:
            return -math.inf
    for _ in range(12):
        grid = np.linspace(low, high, 161)
        value = log_integrand(grid)
        top = value.max()
        if top < -600:
            return -math.inf
        seen = np.flatnonzero(value > top - 45)
        first, last = max(seen[0] - 1, 0), min(seen[-1] + 1, 160)
        low, high, before = grid[first], grid[last], high - low
        if high - low > 0.5 * before:
            break
    points = np.concatenate([np.linspace(low, high, 9), breaks[(breaks > low) & (breaks < high)]])
    # Kinks closer than the eye can see are one.
    points = np.unique(points)
    points = points[np.diff(points, prepend=-np.inf) > 1e-7 * (high - low)]
    points[-1] = high
    total = math.fsum(
        integrate.quad(
            lambda u: math.exp(log_integrand(u) - top), a, b, epsabs=1e-12 * (high - low), epsrel=1e-10, limit=500
        )[0]
        for a, b in itertools.pairwise(points)
    )
    return top + math.log(total)


def vote(noise, scaled_logits, classes=None) -> np.ndarray:
    """log p of some classes (all of them by default) of each row, (n, classes)."""
    rows = np.asarray(scaled_logits, dtype=float)
    classes = range(rows.shape[1]) if classes is None else classes
    return np.array([[log_vote(noise, row, k) for k in classes] for row in rows])
