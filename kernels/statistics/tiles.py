"""Token statistics in Triton: one pass over tiles of the vocabulary, then a merge of the splits.

`partials` multiplies a tile of hidden rows with a tile of the head in registers (or loads a tile
of given logits) and folds it into running numbers, so that logits never reach memory.  The
vocabulary is split among programs, because few rows would leave most of a GPU idle; `merge`
combines the splits and finishes.  What the numbers mean is said in `reduce`; the sums leave out
the largest logit here as there.
"""

import triton
import triton.language as tl

from ..noise.triton import group_words, log1p, to_gumbel

_NONE = tl.constexpr(-(2**63))  # below every key
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_FLIP = tl.constexpr(0x7FFFFFFF)
_FLOOR = tl.constexpr(-1e4)  # exp is 0 here, and 0 * _FLOOR is no NaN
_INF = tl.constexpr(float("inf"))


@triton.jit
def to_key(x, token):
    """Logit and id as one int64 that orders by logit, then by lower id: ties cannot occur."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & _FLIP)  # floats order like integers once negatives are flipped
    return (ordered.to(tl.int64) << 32) | (token ^ _FLIP).to(tl.int64)


@triton.jit
def key_logit(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & _FLIP)).to(tl.float32, bitcast=True)


@triton.jit
def key_token(key):
    return (key & 0xFFFFFFFF) ^ _FLIP


@triton.jit
def product(x_ptr, w_ptr, bias_ptr, row, live, column, valid, depth, x_stride, w_stride,
            HAS_BIAS: tl.constexpr, WIDE: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """A tile of hidden @ weight.T + bias, accumulated and left in float32."""
    total = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    inner = tl.arange(0, BLOCK_D)
    x_at = x_ptr + row[:, None].to(tl.int64) * x_stride + inner[None, :]
    w_at = w_ptr + column[None, :].to(tl.int64) * w_stride + inner[:, None]
    for first in range(0, depth, BLOCK_D):
        inside = first + inner < depth
        x = tl.load(x_at + first, mask=live[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at + first, mask=inside[:, None] & valid[None, :], other=0.0)
        if WIDE:  # the interpreter multiplies bfloat16 wrongly
            x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=valid, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def listed(best, x, token, valid):
    """The running list ``best`` (R, K) of keys with a tile's largest in place of its smallest."""
    keys = tl.where(valid, to_key(x, token), _NONE)
    new, least = tl.max(keys, 1), tl.min(best, 1)
    while tl.max((new > least).to(tl.int32), 0) > 0:  # rarely entered once the list has filled up
        worst = (best == least[:, None]) & (new > least)[:, None]
        best = tl.where(worst, new[:, None], best)
        keys = tl.where(keys == new[:, None], _NONE, keys)
        new, least = tl.max(keys, 1), tl.min(best, 1)
    return best


@triton.jit
def banned(x, token, banned_ptr, where_ptr, count, row, live, BANNED_ROWS: tl.constexpr):
    """-inf for the ids of a list, in all rows or where ``where_ptr`` (R, count) says so."""
    for j in range(count):
        here = token == tl.load(banned_ptr + j)
        if BANNED_ROWS:
            asked = tl.load(where_ptr + row * count + j, mask=live, other=0) != 0
            here = here & asked[:, None]
        x = tl.where(here, -_INF, x)
    return x


@triton.jit
def partials(
    x_ptr, w_ptr, bias_ptr, banned_ptr, banned_rows_ptr, keys_ptr, select_ptr,
    best_out, sums_out, top_out,
    rows, size, depth, n_banned, per_split, x_stride, w_stride, scale, temperature,
    FUSED: tl.constexpr, HAS_BIAS: tl.constexpr, BANNED_ROWS: tl.constexpr, NOISE: tl.constexpr,
    SELECT: tl.constexpr, WARM: tl.constexpr, TOP: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Numbers of a tile of rows over one split of the vocabulary.

    Writes best_out (2, S, R) int64 keys, sums_out (6, S, R) float32: rest, second, moment, drawn
    logit, selected logit, rest at the temperature, and top_out (S, R, TOP) int64 keys.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = row < rows
    best = tl.full([BLOCK_R], -_INF, tl.float32)
    index = tl.full([BLOCK_R], _FLIP, tl.int32)
    rest = tl.zeros([BLOCK_R], tl.float32)
    warm = tl.zeros([BLOCK_R], tl.float32)
    moment = tl.zeros([BLOCK_R], tl.float32)
    second = tl.full([BLOCK_R], -_INF, tl.float32)
    noisy = tl.full([BLOCK_R], -_INF, tl.float32)
    drawn = tl.full([BLOCK_R], _FLIP, tl.int32)
    drawn_logit = tl.full([BLOCK_R], -_INF, tl.float32)
    selected = tl.full([BLOCK_R], -_INF, tl.float32)
    if TOP > 0:
        top = tl.full([BLOCK_R, TOP], _NONE + 1, tl.int64) + tl.arange(0, TOP)[None, :]
    for tile in range(per_split):
        low = (tl.program_id(1) * per_split + tile) * BLOCK_V
        column = low + tl.arange(0, BLOCK_V)
        valid = column < size
        if FUSED:
            x = product(x_ptr, w_ptr, bias_ptr, row, live, column, valid, depth, x_stride,
                        w_stride, HAS_BIAS, WIDE, BLOCK_D)  # fmt: skip
        else:
            at = row[:, None].to(tl.int64) * x_stride + column[None, :]
            x = tl.load(x_ptr + at, mask=live[:, None] & valid[None, :], other=0.0).to(tl.float32)
        token = column[None, :]
        x = tl.where(valid[None, :], x, -_INF)
        x = banned(x, token, banned_ptr, banned_rows_ptr, n_banned, row, live, BANNED_ROWS)
        if NOISE:
            group = low // 4 + tl.arange(0, BLOCK_V // 4)
            group = group[None, :] + tl.zeros([BLOCK_R, 1], tl.int32)
            noise = to_gumbel(group_words(keys_ptr, row, live, group))
            perturbed = tl.where(valid[None, :], noise + x / temperature, -_INF)
            loudest = tl.max(perturbed, 1)
            hit = valid[None, :] & (perturbed == loudest[:, None])
            which = tl.min(tl.where(hit, token, _FLIP), 1)
            its_logit = tl.max(tl.where(token == which[:, None], x, -_INF), 1)
            ahead = (noisy > loudest) | ((noisy == loudest) & (drawn < which))
            drawn_logit = tl.where(ahead, drawn_logit, its_logit)
            drawn = tl.where(ahead, drawn, which)
            noisy = tl.maximum(noisy, loudest)
        if SELECT:
            asked = tl.load(select_ptr + row, mask=live, other=-1)
            its = tl.where(valid[None, :] & (token == asked[:, None]), x, -_INF)
            selected = tl.maximum(selected, tl.max(its, 1))
        if TOP > 0:
            top = listed(top, x, token, valid[None, :])
        # the tile on its own: largest, runner-up, sums over all but the largest
        largest = tl.max(x, 1)
        where = tl.min(tl.where(valid[None, :] & (x == largest[:, None]), token, _FLIP), 1)
        others = tl.where(token == where[:, None], -_INF, x)
        runner = tl.max(others, 1)
        distance = others - tl.maximum(largest, _LOWEST)[:, None]
        away = tl.maximum(distance / scale, _FLOOR)
        weight = tl.exp(away)
        tile_rest = tl.sum(weight, 1)
        tile_moment = tl.sum(away * weight, 1)
        # and joined with what came before, which has the lower ids
        ahead = (best >= largest) & (index < _FLIP)
        joined = tl.maximum(best, largest)
        safe = tl.maximum(joined, _LOWEST)
        before, now = best - safe, largest - safe
        da = tl.maximum(before / scale, _FLOOR)
        db = tl.maximum(now / scale, _FLOOR)
        fa, fb = tl.exp(da), tl.exp(db)
        moment = tl.where(
            ahead,
            moment + fb * (tile_moment + db * (1 + tile_rest)),
            tile_moment + fa * (moment + da * (1 + rest)),
        )
        rest = tl.where(ahead, rest + fb * (1 + tile_rest), tile_rest + fa * (1 + rest))
        if WARM:
            tile_warm = tl.sum(tl.exp(distance / temperature), 1)
            wa, wb = tl.exp(before / temperature), tl.exp(now / temperature)
            warm = tl.where(ahead, warm + wb * (1 + tile_warm), tile_warm + wa * (1 + warm))
        second = tl.maximum(tl.minimum(best, largest), tl.maximum(second, runner))
        index = tl.where(ahead, index, where)
        best = joined
    plane = tl.num_programs(1).to(tl.int64) * rows
    out = tl.program_id(1).to(tl.int64) * rows + row
    tl.store(best_out + out, to_key(best, index), mask=live)
    tl.store(best_out + plane + out, to_key(noisy, drawn), mask=live)
    tl.store(sums_out + out, rest, mask=live)
    tl.store(sums_out + plane + out, second, mask=live)
    tl.store(sums_out + 2 * plane + out, moment, mask=live)
    tl.store(sums_out + 3 * plane + out, drawn_logit, mask=live)
    tl.store(sums_out + 4 * plane + out, selected, mask=live)
    tl.store(sums_out + 5 * plane + out, warm, mask=live)
    if TOP > 0:
        at = out[:, None] * TOP + tl.arange(0, TOP)[None, :]
        tl.store(top_out + at, top, mask=live[:, None])


@triton.jit
def merge(
    best_ptr, sums_ptr, top_ptr, tokens_out, numbers_out, top_token_out, top_logprob_out,
    rows, splits, top, scale, temperature,
    NOISE: tl.constexpr, WARM: tl.constexpr, TOP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The splits of some rows joined and turned into statistics.

    Writes tokens_out (R,) int64, numbers_out (7, R) float32: logprob, margin, gap, entropy,
    max_logprob, select_logprob, rest at the temperature; top_token_out, top_logprob_out (R, top).
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < rows
    split = tl.arange(0, BLOCK_S)
    live = inside[:, None] & (split < splits)[None, :]
    plane = rows * splits
    at = split[None, :].to(tl.int64) * rows + row[:, None]
    keys = tl.load(best_ptr + at, mask=live, other=_NONE)
    winner = tl.max(keys, 1)
    best = key_logit(winner)
    safe = tl.maximum(best, _LOWEST)
    largest = tl.where(live, key_logit(keys), -_INF)
    other = live & (keys != winner[:, None])  # keys hold ids, so no two splits have the same
    own = other.to(tl.float32)
    apart = largest - safe[:, None]
    distance = tl.maximum(apart / scale, _FLOOR)
    weight = tl.exp(distance)
    rest_of = tl.load(sums_ptr + at, mask=live, other=0.0)
    rest = tl.sum(weight * (own + rest_of), 1)
    moment_of = tl.load(sums_ptr + 2 * plane + at, mask=live, other=0.0)
    moment = tl.sum(weight * (moment_of + distance * (own + rest_of)), 1)
    runner = tl.load(sums_ptr + plane + at, mask=live, other=-_INF)
    second = tl.max(tl.maximum(runner, tl.where(other, largest, -_INF)), 1)
    selected = tl.max(tl.load(sums_ptr + 4 * plane + at, mask=live, other=-_INF), 1)

    normaliser = log1p(rest)
    most = (best - safe) / scale - normaliser
    chosen, token = most, key_token(winner)
    if NOISE:
        noisy = tl.load(best_ptr + plane + at, mask=live, other=_NONE)
        loudest = tl.max(noisy, 1)
        heard = live & (noisy == loudest[:, None])
        logits = tl.load(sums_ptr + 3 * plane + at, mask=heard, other=-_INF)
        token = key_token(loudest)
        chosen = (tl.max(logits, 1) - safe) / scale - normaliser
    margin = tl.exp(most) - tl.exp((second - safe) / scale - normaliser)
    gap = best - tl.where(best == second, 0.0, second)
    gap = tl.where(best == second, 0.0, gap)
    entropy = tl.maximum(normaliser - moment / (1 + rest), 0.0)
    tl.store(tokens_out + row, token, mask=inside)
    tl.store(numbers_out + row, chosen, mask=inside)
    tl.store(numbers_out + rows + row, margin, mask=inside)
    tl.store(numbers_out + 2 * rows + row, gap, mask=inside)
    tl.store(numbers_out + 3 * rows + row, entropy, mask=inside)
    tl.store(numbers_out + 4 * rows + row, most, mask=inside)
    its = (selected - safe) / scale - normaliser
    tl.store(numbers_out + 5 * rows + row, its, mask=inside)
    if WARM:
        warm_of = tl.load(sums_ptr + 5 * plane + at, mask=live, other=0.0)
        warm = tl.sum(tl.exp(apart / temperature) * (own + warm_of), 1)
        tl.store(numbers_out + 6 * rows + row, warm, mask=inside)
    if TOP > 0:
        slot = tl.arange(0, BLOCK_T)
        held = inside[:, None] & (slot < splits * TOP)[None, :]
        place = ((slot // TOP)[None, :].to(tl.int64) * rows + row[:, None]) * TOP
        left = tl.load(top_ptr + place + (slot % TOP)[None, :], mask=held, other=_NONE)
        for j in range(top):
            first = tl.max(left, 1)
            logprob = (key_logit(first) - safe) / scale - normaliser
            tl.store(top_token_out + row * top + j, key_token(first), mask=inside)
            tl.store(top_logprob_out + row * top + j, logprob, mask=inside)
            left = tl.where(left == first[:, None], _NONE, left)
