"""The exact vote by short series (``poise.link.series``), for whole tables of logits.

moments     reads the logits             m_r = Σ_j y_j^16 Q_r(x_j), and the top logit; one warp per row
curves      puts in their place          G at the nodes, C at the points, c_r; matrix products for a tile of rows
prob        reads the logits again       p_k of every class; one warp per row
prob_of     reads one logit per row      p of the top and of the labeled class: all that a fit needs
"""

import triton
import triton.language as tl

from poise.kernels import rows

_TOP, _END, _FIRST = (tl.constexpr(column) for column in (24, 25, 26))
"""Columns behind a row's coefficients: its top logit, the gap at which its curve ends, and C(0)."""


@triton.jit
def _chebyshev(x, NUMBER: tl.constexpr):
    """T_0 to T_NUMBER."""
    values = (tl.full(x.shape, 1.0, tl.float32), x)
    for a in tl.static_range(2, NUMBER + 1):
        values = values + (2 * x * values[a - 1] - values[a - 2],)
    return values


@triton.jit
def moments(
    scores,
    out,
    num_classes,
    per_unit,
    reach,
    bend,
    STRIDE: tl.constexpr,
    MOMENTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SIZE)
    scores += row * num_classes
    out += row * STRIDE
    top = rows.top(scores, num_classes, SIZE)
    sums = ()
    for _ in tl.static_range(MOMENTS):
        sums = sums + (tl.zeros((SIZE,), tl.float32),)
    for start in range(0, num_classes, SIZE):
        inside = start + lane < num_classes
        z = tl.load(scores + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        gap = (top - z) * per_unit
        y = bend / (bend + tl.minimum(gap, reach))
        low = _chebyshev(2 * (1 - y) * ((bend + reach) / reach) - 1, 8)
        power = y * y
        power *= power
        power *= power
        # Beyond the reach a class is too far to matter to the others.
        power = tl.where(gap <= reach, power * power, 0.0)
        high = (power, low[8] * power)
        for b in tl.static_range(2, MOMENTS // 8):
            high = high + (2 * low[8] * high[b - 1] - high[b - 2],)
        added = ()
        for r in tl.static_range(MOMENTS):
            added = added + (sums[r] + high[r // 8] * low[r % 8],)
        sums = added
    for r in tl.static_range(MOMENTS):
        tl.store(out + r, tl.sum(sums[r], axis=0))
    tl.store(out + MOMENTS, top)


@triton.jit
def curves(
    curves,
    to_log_largest,
    ends,
    points,
    to_curve,
    scales,
    num_rows,
    enough,
    STRIDE: tl.constexpr,
    MOMENTS: tl.constexpr,
    SCALES: tl.constexpr,
    NODES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    curves += row[:, None] * STRIDE
    node, narrow, wide = tl.arange(0, TILE), tl.arange(0, 16), tl.arange(0, 32)
    moments = ()
    for r in tl.static_range(0, MOMENTS, 16):
        inside = exists[:, None] & (r + narrow < MOMENTS)[None, :]
        moments = moments + (tl.load(curves + (r + narrow)[None, :], mask=inside, other=0.0),)
    top = tl.load(curves + MOMENTS, mask=exists[:, None], other=0.0)

    # G at the nodes, a tile of them at a time; and C at d = 0 and at the end of every scale.
    largest = ()
    at_ends = tl.zeros((ROWS, 16), tl.float32)
    for start in tl.static_range(0, NODES, TILE):
        tile = tl.zeros((ROWS, TILE), tl.float32)
        for r in tl.static_range(0, MOMENTS, 16):
            columns = tl.load(to_log_largest + (r + narrow)[:, None] * NODES + (start + node)[None, :])
            tile += tl.dot(moments[r // 16], columns, input_precision=PRECISION)
        tile = tl.exp(tl.minimum(tile, 0.0))
        rows_of_ends = tl.load(ends + (start + node)[:, None] * 16 + narrow[None, :])
        at_ends += tl.dot(tile, rows_of_ends, input_precision=PRECISION)
        largest = largest + (tile,)
    # How far a row's curve reaches: the last scale at whose end next to nothing is left.
    first = tl.sum(tl.where((narrow == 0)[None, :], at_ends, 0.0), axis=1)
    is_end = (narrow >= 1) & (narrow <= SCALES)
    fits = is_end[None, :] & (at_ends <= enough * first[:, None])
    scale = tl.max(tl.where(fits, narrow[None, :] - 1, 0), axis=1)
    end = tl.sum(tl.where(narrow[None, :] == scale[:, None] + 1, tl.load(scales + narrow)[None, :], 0.0), axis=1)

    curve = tl.zeros((ROWS, 32), tl.float32)
    for s in range(tl.min(scale, axis=0), tl.max(scale, axis=0) + 1):
        is_own = (scale == s)[:, None]
        for t in tl.static_range(NODES // TILE):
            at_points = tl.load(points + (s * NODES + t * TILE + node)[:, None] * 32 + wide[None, :])
            curve += tl.dot(tl.where(is_own, largest[t], 0.0), at_points, input_precision=PRECISION)
    log_curve = tl.log(curve + 1.2e-38)
    log_first = tl.sum(tl.where((wide == 0)[None, :], log_curve, 0.0), axis=1)
    coefficients = tl.dot(
        log_curve - log_first[:, None],
        tl.load(to_curve + wide[:, None] * 32 + wide[None, :]),
        input_precision=PRECISION,
    )
    tl.store(curves + wide[None, :], coefficients, mask=exists[:, None] & (wide < _TOP)[None, :])
    tl.store(curves + _TOP, top, mask=exists[:, None])
    tl.store(curves + _END, end[:, None], mask=exists[:, None])
    tl.store(curves + _FIRST, first[:, None], mask=exists[:, None])


@triton.jit
def _coefficients(curve):
    values = ()
    for r in tl.static_range(24):
        values = values + (tl.load(curve + r),)
    return values


@triton.jit
def _log_share(gap, c, end, reach, bend):
    """log C(d)/C(0): the row's series, and beyond its end in proportion to the gap."""
    # To 19 binary places after the first of 1 + d.
    gap = (((1 + gap).to(tl.int32, bitcast=True) + 8) & -16).to(tl.float32, bitcast=True) - 1
    y = bend / (bend + tl.minimum(gap * (reach / end), reach))
    x = 2 * (1 - y) * ((bend + reach) / reach) - 1
    low = _chebyshev(x, 8)
    total, middle, outer = c[0], c[8], c[16]
    for a in tl.static_range(1, 8):
        total += c[a] * low[a]
        middle += c[8 + a] * low[a]
        outer += c[16 + a] * low[a]
    total += low[8] * middle + (2 * low[8] * low[8] - 1) * outer
    return (x + 1) * total * tl.maximum(gap / end, 1.0)


@triton.jit
def _shares(scores, top, c, end, per_unit, reach, bend, inside):
    gap = (top - tl.load(scores, mask=inside, other=0.0).to(tl.float32)) * per_unit
    share = tl.exp(_log_share(gap, c, end, reach, bend))
    # Whatever is below the top, however little, gets less.
    return tl.where(gap > 0, tl.minimum(share, 1 - 2.4e-7), 1.0)


@triton.jit
def prob(
    scores,
    out,
    curves,
    num_classes,
    per_unit,
    reach,
    bend,
    lapse,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SIZE)
    scores += row * num_classes
    out += row * num_classes
    curve = curves + row * STRIDE
    top, end = tl.load(curve + _TOP), tl.load(curve + _END)
    c = _coefficients(curve)
    total = tl.zeros((SIZE,), tl.float32)
    keeps: tl.constexpr = out.dtype.element_ty == tl.float32
    for start in range(0, num_classes, SIZE):
        inside = start + lane < num_classes
        share = _shares(scores + start + lane, top, c, end, per_unit, reach, bend, inside)
        total += tl.where(inside, share, 0.0)
        if keeps:
            tl.store(out + start + lane, share, mask=inside)
    unit, floor = (1 - lapse) / tl.sum(total, axis=0), lapse / num_classes
    for start in range(0, num_classes, SIZE):
        inside = start + lane < num_classes
        if keeps:
            share = tl.load(out + start + lane, mask=inside)
        else:
            share = _shares(scores + start + lane, top, c, end, per_unit, reach, bend, inside)
        tl.store(out + start + lane, share * unit + floor, mask=inside)


@triton.jit
def prob_of(
    scores,
    labels,
    of_label,
    of_top,
    curves,
    num_rows,
    num_classes,
    per_unit,
    reach,
    bend,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    row = tl.where(exists, row, 0)
    curve = curves + row * STRIDE
    label = tl.load(labels + row)
    z = tl.load(scores + row * num_classes + label).to(tl.float32)
    gap = (tl.load(curve + _TOP) - z) * per_unit
    first = tl.load(curve + _FIRST)
    share = tl.exp(_log_share(gap, _coefficients(curve), tl.load(curve + _END), reach, bend))
    tl.store(of_label + row, tl.minimum(first * share, 1.0), mask=exists)
    tl.store(of_top + row, tl.minimum(first, 1.0), mask=exists)
