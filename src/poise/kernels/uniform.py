"""The exact vote for U(-1, 1): one warp per row, and only the classes within reach.

    p_k = ½ ∫_0^{2 − d_k} Π_{j≠k} min(1, (v + d_j)/2) dv

Between two neighboring ends 2 − d_j the integrand is a polynomial of as many factors as there are classes within reach:
8 Gauss–Legendre nodes are exact for 16 of them, 32 for 64. Rows with more are left alone.
"""

import triton
import triton.language as tl

from poise.kernels import rows


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _votes(gap, exists, count, rule, NEAR: tl.constexpr):
    """p of the classes within reach, by integrals from the top down until what is left below adds nothing."""
    slot, place = tl.arange(0, NEAR), tl.arange(0, NEAR // 2)
    node, weight = tl.load(rule + place), tl.load(rule + NEAR // 2 + place)
    ends = tl.sort(gap)
    total = tl.zeros((NEAR,), tl.float32)
    high, left, rank = 2.0, 1.0, 1
    while (rank <= count) & (left > 1e-25):
        low = tl.where(rank < count, 2.0 - tl.sum(tl.where(slot == rank, ends, 0.0), axis=0), 0.0)
        v = low + (high - low) * node
        factor = tl.minimum((v[:, None] + gap[None, :]) * 0.5, 1.0)
        mass = tl.reduce(factor, 1, _times) * weight * (high - low)
        total += tl.sum(tl.where(factor < 1.0, mass[:, None] / factor, 0.0), axis=0)
        left = tl.reduce(tl.minimum((low + gap) * 0.5, 1.0), 0, _times)
        high = low
        rank += 1
    total = tl.where(exists, total, 0.0)
    probs = total / tl.sum(total, axis=0)
    first = tl.max(probs, axis=0)
    # Whatever is below the top, however little, gets less.
    return tl.where(gap > 0, tl.minimum(probs, first * (1 - 2.4e-7)), first), first


@triton.jit
def _finish(
    scores,
    out,
    of_top,
    labels,
    near,
    rule,
    row,
    top,
    count,
    num_classes,
    per_unit,
    lapse,
    IS_FULL: tl.constexpr,
    NEAR: tl.constexpr,
):
    slot = tl.arange(0, NEAR)
    exists = slot < count
    which = tl.load(near + slot, mask=exists, other=0)
    z = tl.load(scores + which, mask=exists, other=0.0).to(tl.float32)
    gap = tl.where(exists, (top - z) * per_unit, 2.0)
    probs, first = _votes(gap, exists, count, rule, NEAR)
    if IS_FULL:
        tl.store(out + row * num_classes + which, (1 - lapse) * probs + lapse / num_classes, mask=exists)
    else:
        label = tl.load(labels + row)
        tl.store(out + row, tl.sum(tl.where(exists & (which == label), probs, 0.0), axis=0))
        tl.store(of_top + row, first)


@triton.jit
def vote(
    scores,
    out,
    of_top,
    labels,
    near,
    within,
    rule,
    num_classes,
    per_unit,
    lapse,
    IS_FULL: tl.constexpr,
    FEW: tl.constexpr,
    MOST: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SIZE)
    scores += row * num_classes
    near += row * MOST
    top = rows.top(scores, num_classes, SIZE)

    # Which classes are within reach, one after the other.
    count = 0
    for start in range(0, num_classes, SIZE):
        inside = start + lane < num_classes
        z = tl.load(scores + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        is_near = ((top - z) * per_unit < 2.0).to(tl.int32)
        place = count + tl.cumsum(is_near, axis=0) - 1
        tl.store(near + place, start + lane, mask=(is_near > 0) & (place < MOST))
        count += tl.sum(is_near, axis=0)
        if IS_FULL:
            floor = tl.zeros((SIZE,), tl.float32) + lapse / num_classes
            tl.store(out + row * num_classes + start + lane, floor, mask=inside)
    tl.store(within + row, count)
    tl.debug_barrier()
    if count <= FEW:
        _finish(scores, out, of_top, labels, near, rule, row, top, count, num_classes, per_unit, lapse, IS_FULL, FEW)
    elif count <= MOST:
        rule += FEW
        _finish(scores, out, of_top, labels, near, rule, row, top, count, num_classes, per_unit, lapse, IS_FULL, MOST)
