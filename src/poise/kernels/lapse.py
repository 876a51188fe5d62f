"""The lapse of most likelihood, by Newton's steps within a bracket, in one program."""

import triton
import triton.language as tl


@triton.jit
def fit(true, out, num_rows, guess, MOST_STEPS: tl.constexpr, SIZE: tl.constexpr):
    """The lapse and the penalized mean −log p of ``calibrators.lapse``, of the true classes' probabilities."""
    lane = tl.arange(0, SIZE)
    total = num_rows.to(tl.float64)
    # The pseudo-counts: there is always some lapse, and always something known.
    low, high = 1 / (total + 1), 1 - 1 / (total + 2)
    lapse, change, step = low, low, 0
    while (step < MOST_STEPS) & (tl.abs(change) > 1e-9 * lapse):
        first = tl.zeros((SIZE,), tl.float32)
        second = tl.zeros((SIZE,), tl.float32)
        for start in range(0, num_rows, SIZE):
            inside = start + lane < num_rows
            p = tl.load(true + start + lane, mask=inside, other=0.0)
            less_sure = guess - p
            ratio = tl.where(inside, less_sure / (p + lapse.to(tl.float32) * less_sure), 0.0)
            first += ratio
            second += ratio * ratio
        slope = tl.sum(first.to(tl.float64), axis=0) + 1 / lapse
        low = tl.where(slope > 0, lapse, low)
        high = tl.where(slope > 0, high, lapse)
        newton = lapse + slope / (tl.sum(second.to(tl.float64), axis=0) + 1 / (lapse * lapse))
        better = tl.where((newton > low) & (newton < high), newton, (low + high) / 2)
        change = better - lapse
        lapse = better
        step += 1
    log_prob = tl.zeros((SIZE,), tl.float64)
    for start in range(0, num_rows, SIZE):
        inside = start + lane < num_rows
        p = tl.load(true + start + lane, mask=inside, other=1.0)
        mixed = (1 - lapse) * p.to(tl.float64) + lapse * guess
        log_prob += tl.where(inside, tl.log(mixed), 0.0)
    tl.store(out, lapse)
    tl.store(out + 1, -(tl.sum(log_prob, axis=0) + tl.log(lapse)) / total)
