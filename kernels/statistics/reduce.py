"""One pass over a tile of logits, and how the results of neighbouring tiles combine.

The sums leave out the largest logit: what the others weigh in comparison to it is kept to full
relative precision, also where the largest has a probability that float32 cannot tell from one.
"""

from dataclasses import dataclass

import torch

from ..cpu import library
from ..noise import row_gumbel
from .classes import reduce_classes
from .filters import FAR, LOWEST, dropped
from .result import Options, TokenStatistics

# Differences to the largest logit end here: no 0 * inf for banned tokens, and exp stays a normal
# number (1.6e-38, nothing beside the 1 of the largest), where subnormal ones are many times slower.
FLOOR = -87.0


@dataclass(slots=True)
class Partial:
    """What is known of some rows after some of the vocabulary; columns are (R, 1), float32.

    ``best`` is the largest logit and ``index`` its id; ``rest`` = sum of exp((x - best) / T) and
    ``moment`` = sum of (x - best) / T * exp((x - best) / T) run over all other tokens.
    ``warm`` is ``rest`` at the temperature of the call, where candidates are asked for.
    ``noisy`` is the largest perturbed logit, ``drawn`` its id, ``drawn_logit`` its clean logit.

    Columns of classes are (R, C): ``class_best`` the largest logit of the class, or the largest
    perturbed one, ``class_token`` its id, ``class_logit`` its clean logit; ``class_total`` the
    logarithm of the sum of exp(x / T), ``class_warm`` that at the temperature of the call.
    """

    best: torch.Tensor
    index: torch.Tensor
    rest: torch.Tensor
    second: torch.Tensor | None = None
    moment: torch.Tensor | None = None
    clean_gap: torch.Tensor | None = None
    noisy: torch.Tensor | None = None
    drawn: torch.Tensor | None = None
    drawn_logit: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    top_value: torch.Tensor | None = None
    top_index: torch.Tensor | None = None
    warm: torch.Tensor | None = None
    class_best: torch.Tensor | None = None
    class_token: torch.Tensor | None = None
    class_logit: torch.Tensor | None = None
    class_total: torch.Tensor | None = None
    class_warm: torch.Tensor | None = None
    soft: torch.Tensor | None = None  # (R, d)


def reduce(
    x: torch.Tensor, low: int, options: Options, keys: torch.Tensor | None = None,
    select: torch.Tensor | None = None, room: torch.Tensor | None = None,
) -> Partial:  # fmt: skip
    """Statistics of ``x`` (R, n) float32, the logits of the ids from ``low`` on.

    Destroys ``x`` and what ``room``, of the same shape, holds.
    """
    needs = options.needs
    clean_gap = lost = None
    if options.filtered:
        lost = dropped(x, options.filters)
        if options.tempered:
            if "gap" in needs:
                clean_gap = _clean_gap(x)
            if options.classes is None:
                x.masked_fill_(lost, -torch.inf)
            else:
                x.add_(lost, alpha=-FAR * options.scale)
            lost = None
    known = compiled(x, options)
    best, index = largest(x) if known is None else (known.best, known.index)
    part = Partial(best, index, best) if known is None else known
    part.clean_gap = clean_gap
    noisy = None
    if options.temperature > 0 and keys is not None:
        noisy = row_gumbel(keys, low, low + x.shape[1]).add_(x / options.temperature)
        if lost is not None:
            noisy.add_(lost, alpha=-FAR)
        part.noisy, drawn = largest(noisy)
        part.drawn_logit, part.drawn = x.gather(1, drawn), drawn + low
    if options.classes is not None:
        columns = reduce_classes(
            x, low, options.classes, options.scale, options.temperature, noisy, lost
        )
        for name, column in columns.items():
            setattr(part, name, column)
    if select is not None:
        at = (select - low).view(-1, 1)
        outside = (at < 0) | (at >= x.shape[1])
        part.selected = x.gather(1, at.clamp(0, x.shape[1] - 1)).masked_fill_(outside, -torch.inf)
    if options.top == 1:
        part.top_value, part.top_index = best, index + low
    elif options.top:
        part.top_value, part.top_index = top(x, min(options.top, x.shape[1]))
        part.top_index += low
    if low:
        part.index = index + low
    if known is not None:
        return part
    x.scatter_(1, index, -torch.inf)
    if "margin" in needs or "gap" in needs:
        part.second = x.amax(1, keepdim=True)
    x.sub_(best.clamp(min=LOWEST))
    if options.warm:
        part.warm = (x / options.temperature).clamp_(min=FLOOR).exp_().sum(1, keepdim=True)
    if options.scale != 1:
        x.div_(options.scale)
    x.clamp_(min=FLOOR)
    if "entropy" in needs:
        weight = torch.exp(x, out=room)
        part.rest = weight.sum(1, keepdim=True)
        part.moment = x.mul_(weight).sum(1, keepdim=True)
    else:
        part.rest = x.exp_().sum(1, keepdim=True)
    return part


def compiled(x: torch.Tensor, options: Options, weigh: bool = False) -> Partial | None:
    """What is asked of each row ``x`` (R, n) alone, float32 or bfloat16, in one pass that leaves
    it as it is, or as weights, exp(x - best), with ``weigh``; None without a compiled kernel."""
    kernels = library()
    fits = x.dtype in (torch.float32, torch.bfloat16) and x.device.type == "cpu"
    if kernels is None or options.scale != 1 or options.warm or not fits or x.stride(1) != 1:
        return None
    best, second, rest, moment = x.new_empty((4, len(x), 1), dtype=torch.float32).unbind()
    index = x.new_empty((len(x), 1), dtype=torch.int64)
    entropy = "entropy" in options.needs
    kernels.dllm_reduce(
        x.data_ptr(), best.data_ptr(), index.data_ptr(), second.data_ptr(), rest.data_ptr(),
        moment.data_ptr() if entropy else None, *x.shape, x.stride(0), x.dtype == torch.bfloat16,
        weigh, torch.get_num_threads(),
    )  # fmt: skip
    return Partial(best, index, rest, second, moment if entropy else None)


def largest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of every row and its column, the lowest of equal ones: both (R, 1)."""
    if x.device.type != "cpu":
        best, index = x.max(1, keepdim=True)
        return best, index
    # NumPy finds an index as fast as a value; torch takes a CPU several times as long
    index = torch.from_numpy(x.numpy().argmax(1)).unsqueeze(1)
    return x.gather(1, index), index


def _clean_gap(x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] == 1:
        return torch.where(x == -torch.inf, 0.0, torch.inf)
    largest = x.topk(2, dim=1).values
    return (largest[:, :1] - largest[:, 1:]).nan_to_num_(nan=0.0, posinf=torch.inf)


def top(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of every row, descending, and their columns; ties to the lowest column."""
    # topk leaves the order of ties open.  One integer that holds the value above the column has
    # no ties: float32 bits order like integers once those of negative numbers are flipped.
    size = x.shape[1]
    ordered = (x + 0.0).view(torch.int32)  # + 0.0 turns -0.0, an equal of 0.0, into 0.0
    ordered = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    column = torch.arange(size - 1, -1, -1, device=x.device)
    key = ordered.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(column)
    index = size - 1 - (key.topk(k, dim=1).values & 0xFFFFFFFF)
    return x.gather(1, index), index


def merge(a: Partial, b: Partial, options: Options) -> Partial:
    """The same rows over neighbouring parts of the vocabulary; ``a`` has the lower ids."""
    ahead = a.best >= b.best  # a tie goes to the lower id
    best = torch.maximum(a.best, b.best)
    safe = best.clamp(min=LOWEST)
    da = ((a.best - safe) / options.scale).clamp_(min=FLOOR)
    db = ((b.best - safe) / options.scale).clamp_(min=FLOOR)
    fa, fb = da.exp(), db.exp()
    out = Partial(
        best,
        torch.where(ahead, a.index, b.index),
        torch.where(ahead, a.rest + fb * (1 + b.rest), b.rest + fa * (1 + a.rest)),
    )
    if a.moment is not None and b.moment is not None:
        out.moment = torch.where(
            ahead,
            a.moment + fb * (b.moment + db * (1 + b.rest)),
            b.moment + fa * (a.moment + da * (1 + a.rest)),
        )
    if a.warm is not None and b.warm is not None:
        wa, wb = (
            ((part.best - safe) / options.temperature).clamp_(min=FLOOR).exp_() for part in (a, b)
        )
        out.warm = torch.where(ahead, a.warm + wb * (1 + b.warm), b.warm + wa * (1 + a.warm))
    if a.second is not None and b.second is not None:
        runner = torch.minimum(a.best, b.best)
        out.second = torch.maximum(runner, torch.maximum(a.second, b.second))
    if a.selected is not None and b.selected is not None:
        out.selected = torch.maximum(a.selected, b.selected)
    if a.top_value is not None and b.top_value is not None:
        assert a.top_index is not None and b.top_index is not None
        value = torch.cat([a.top_value, b.top_value], 1)
        tokens = torch.cat([a.top_index, b.top_index], 1)
        # both are sorted and a has the lower ids: a stable sort keeps ties in order
        value, order = value.sort(dim=1, descending=True, stable=True)
        out.top_value = value[:, : options.top]
        out.top_index = tokens.gather(1, order)[:, : options.top]
    _keep_larger(out, a, b, "noisy", ("drawn", "drawn_logit"))
    _keep_larger(out, a, b, "class_best", ("class_token", "class_logit"))
    for name in ("class_total", "class_warm"):
        if getattr(a, name) is not None:
            setattr(out, name, torch.logaddexp(getattr(a, name), getattr(b, name)))
    return out


def _keep_larger(out: Partial, a: Partial, b: Partial, what: str, beside: tuple[str, ...]) -> None:
    """The larger of each row, with what belongs to it; a tie goes to the lower id."""
    mine, other = getattr(a, what), getattr(b, what)
    if mine is None or other is None:
        return
    ahead = mine >= other
    setattr(out, what, torch.maximum(mine, other))
    for name in beside:
        setattr(out, name, torch.where(ahead, getattr(a, name), getattr(b, name)))


def finish(part: Partial, options: Options) -> TokenStatistics:
    """Turn the sums of a whole vocabulary into statistics."""
    needs, scale = options.needs, options.scale
    safe = part.best.clamp(min=LOWEST)  # where nothing is possible, best - safe is -inf
    normaliser = part.rest.log1p()

    def logprob(logit: torch.Tensor) -> torch.Tensor:
        distance = logit - safe
        return (distance if scale == 1 else distance.div_(scale)).sub_(normaliser)

    most = logprob(part.best)
    token, chosen = part.index, most
    if part.drawn is not None and part.drawn_logit is not None:
        token, chosen = part.drawn, logprob(part.drawn_logit)
    margin = gap = entropy = None
    if part.second is not None:
        if "margin" in needs:
            margin = most.exp() - logprob(part.second).exp_()
        if "gap" in needs and part.clean_gap is None:
            gap = (part.best - part.second).nan_to_num_(nan=0.0, posinf=torch.inf)
    if part.moment is not None:
        entropy = (normaliser - part.moment / (1 + part.rest)).clamp_(min=0.0)
    gap = part.clean_gap if part.clean_gap is not None else gap
    total = chosen_logprob = None
    if part.class_total is not None and part.class_logit is not None:
        total = part.class_total - (safe / scale).clamp_(min=LOWEST) - normaliser
        chosen_logprob = logprob(part.class_logit)
    return TokenStatistics(
        token=token.squeeze(1), logprob=chosen.squeeze(1),
        margin=None if margin is None else margin.squeeze(1),
        gap=None if gap is None else gap.squeeze(1),
        entropy=None if entropy is None else entropy.squeeze(1),
        max_logprob=most.squeeze(1) if "max_logprob" in needs else None, top_token=part.top_index,
        top_logprob=None if part.top_value is None else logprob(part.top_value),
        select_logprob=None if part.selected is None else logprob(part.selected).squeeze(1),
        class_token=part.class_token, class_token_logprob=chosen_logprob, class_logprob=total,
        class_weight=part.class_warm, soft=part.soft,
    )  # fmt: skip
