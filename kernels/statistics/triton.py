"""Token statistics on a GPU: what the kernels need around them.

Logits of a plain linear head stay in float32 and never leave the multiprocessor, where `torch`
rounds them to the dtype of the weight as the model itself would: the two may disagree on which of
two nearly equal half-precision logits is larger.  Heads that must be called are called, on some
rows at a time.

Top-p and top-k need the largest logits in order.  The pass lists the largest of every split; as
long as the nucleus lies above the smallest of every list, the lists hold all of it, and
`candidates` decides exactly.  The rows for which they do not, flat distributions, go to `torch`.
"""

from functools import lru_cache
from math import ceil

import torch
import triton

from . import torch as plain
from .candidates import Candidates, narrowed
from .heads import Head, full_logits, plain_linear, vocabulary
from .result import Inputs, Options, TokenStatistics, mended, stack
from .tiles import merge, partials

MOST_TOP = 32  # longer lists are better sorted than kept in registers
LISTED = 16  # candidates of each split where top-p or top-k filter
FILTER_SPLITS = 128
CHUNK_BYTES = 64 << 20  # logits of heads that must be called, held at once
BLOCK_V = 128
MOST_ROWS = 128  # in one program
MERGED_ROWS = 1


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


@lru_cache(maxsize=64)
def _ids(ids: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A list of ids on the device; the same few lists come back at every step."""
    return torch.tensor(ids or (0,), dtype=torch.int64, device=device)


class Pass:
    """One pass over some rows.  ``x`` (R, d) hidden rows with a ``weight``, or (R, V) logits.

    ``size`` ids are scored.
    """

    def __init__(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, size: int,
        options: Options, inputs: Inputs,
    ) -> None:  # fmt: skip
        self.x, self.weight, self.bias = _rows_together(x), weight, bias
        self.size, self.options = size, options
        device, banned, banned_rows = x.device, inputs.banned, inputs.banned_rows
        if isinstance(banned, torch.Tensor):
            self.count, self.banned = len(banned), banned.to(device, torch.int64)
        else:
            self.count, self.banned = len(banned or ()), _ids(tuple(banned or ()), device)
        self.banned_rows = None
        if banned_rows is not None and self.count:
            self.banned_rows = banned_rows.to(device, torch.uint8).contiguous()
        keys, select = inputs.noise_keys, inputs.select
        self.keys = None if keys is None else keys.to(device).contiguous()
        self.select = None if select is None else select.to(device, torch.int64).contiguous()

    @property
    def draws(self) -> bool:
        return self.options.temperature > 0 and not self.options.filtered

    @property
    def scale(self) -> float:
        """Statistics behind a filter come from the candidates; the pass serves the clean ones."""
        options = self.options
        return options.scale if not (options.filtered and options.tempered) else 1.0

    @property
    def warm(self) -> bool:
        """Whether top-p needs the sum at the temperature too."""
        return self.options.filtered and self.options.filters.top_p < 1

    @property
    def listed(self) -> int:
        """How many candidates a split keeps, a power of two or 0."""
        if self.options.filtered:
            return max(LISTED, _power(self.options.top))
        return _power(min(self.options.top, self.size)) if self.options.top else 0

    def partials(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(2, S, R) int64 and (6, S, R) float32 sums, (S, R, K) int64 candidates as keys."""
        rows, options, device = len(self.x), self.options, self.x.device
        block_r = min(MOST_ROWS, max(16, _power(rows)))
        tiles = ceil(self.size / BLOCK_V)
        wanted = ceil(2 * _processors(device) / ceil(rows / block_r))
        wanted = max(wanted, FILTER_SPLITS) if options.filtered else wanted
        per_split = ceil(tiles / min(tiles, wanted))
        splits = ceil(tiles / per_split)
        best = _empty(2, splits, rows, dtype=torch.int64, device=device)
        sums = _empty(6, splits, rows, dtype=torch.float32, device=device)
        top = _empty(splits, rows, self.listed, dtype=torch.int64, device=device)
        read = self.weight, self.bias, self.banned, self.banned_rows, self.keys, self.select
        partials[(ceil(rows / block_r), splits)](
            self.x, *(self.banned if one is None else one for one in read),  # any address will do
            best, sums, top,
            rows, self.size, self.x.shape[1], self.count, per_split,
            self.x.stride(0), self.weight.stride(0) if self.weight is not None else 0,
            self.scale, options.temperature or 1.0,
            FUSED=self.weight is not None, HAS_BIAS=self.bias is not None,
            BANNED_ROWS=self.banned_rows is not None, NOISE=self.draws,
            SELECT=self.select is not None, WARM=self.warm, TOP=self.listed, WIDE=interpreted(),
            BLOCK_R=block_r, BLOCK_V=BLOCK_V, BLOCK_D=64 if self.x.element_size() == 2 else 32,
            num_warps=8 if block_r >= 64 else 4, num_stages=4 if self.x.element_size() == 2 else 3,
        )  # fmt: skip
        return best, sums, top

    def merged(
        self, best: torch.Tensor, sums: torch.Tensor, top: torch.Tensor
    ) -> tuple[TokenStatistics, torch.Tensor, torch.Tensor]:
        """Statistics from the partial results of all splits; what top-p needs: the largest
        log-probability, and the sum at the temperature."""
        rows, options, device = len(self.x), self.options, self.x.device
        splits, listed = best.shape[1], top.shape[2] if not options.filtered else 0
        count = min(options.top, self.size) if listed else 0
        token = _empty(rows, dtype=torch.int64, device=device)
        numbers = _empty(7, rows, dtype=torch.float32, device=device)
        top_token = _empty(rows, count, dtype=torch.int64, device=device)
        top_logprob = _empty(rows, count, dtype=torch.float32, device=device)
        together = min(_power(rows), MERGED_ROWS if device.type == "cuda" else 1024)
        merge[(ceil(rows / together),)](
            best, sums, top, token, numbers, top_token, top_logprob,
            rows, splits, count, self.scale, options.temperature or 1.0,
            NOISE=self.draws, WARM=self.warm, TOP=listed, BLOCK_R=together,
            BLOCK_S=_power(splits), BLOCK_T=_power(splits * max(1, listed)),
        )  # fmt: skip
        logprob, margin, gap, entropy, most, selected, warm = numbers.unbind(0)
        needs = options.needs
        result = TokenStatistics(
            token, logprob,
            margin=margin if "margin" in needs else None,
            gap=gap if "gap" in needs else None,
            entropy=entropy if "entropy" in needs else None,
            max_logprob=most if "max_logprob" in needs else None,
            top_token=top_token if listed else None,
            top_logprob=top_logprob if listed else None,
            select_logprob=None if self.select is None else selected,
        )  # fmt: skip
        return result, most, warm

    def run(self) -> tuple[TokenStatistics, torch.Tensor | None]:
        """Statistics, and (R,) bool of the rows they are wrong for; None if there cannot be any."""
        # Triton launches on the present device
        with torch.cuda.device_of(self.x):  # type: ignore[no-untyped-call]
            best, sums, top = self.partials()
            result, most, warm = self.merged(best, sums, top)
        if not self.options.filtered:
            return result, None
        candidates = Candidates.of(top, self.size)
        return narrowed(result, most, warm, candidates, self.options, self.keys, self.select)


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def _rows_together(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def token_statistics(
    hidden: torch.Tensor, head: Head, options: Options, inputs: Inputs
) -> TokenStatistics:
    """As `dllm.kernels.statistics.token_statistics`."""
    linear = plain_linear(head)
    rows = len(hidden)
    if options.top > MOST_TOP or options.classes is not None or rows == 0:
        return plain.token_statistics(hidden, head, options, inputs)
    if linear is None:
        step = max(1, CHUNK_BYTES // (4 * vocabulary(head, hidden)))
        return stack([
            logits_statistics(full_logits(hidden[cut], head), options, inputs.take(cut))
            for cut in [slice(a, a + step) for a in range(0, rows, step)]
        ])  # fmt: skip
    weight, bias = linear
    weight = _rows_together(weight[: inputs.vocab_size])
    result, missed = Pass(hidden.to(weight.dtype), weight, bias, len(weight), options, inputs).run()
    return mended(
        result, missed, hidden, inputs,
        lambda x, some: plain.token_statistics(x, head, options, some),
    )  # fmt: skip


def logits_statistics(logits: torch.Tensor, options: Options, inputs: Inputs) -> TokenStatistics:
    """As `dllm.kernels.statistics.logits_statistics`."""
    logits = logits[:, : inputs.vocab_size]
    rows, size = logits.shape
    if options.top > MOST_TOP or options.classes is not None or rows == 0:
        return plain.logits_statistics(logits, options, inputs)
    result, missed = Pass(logits, None, None, size, options, inputs).run()
    return mended(
        result, missed, logits, inputs, lambda x, some: plain.logits_statistics(x, options, some)
    )
