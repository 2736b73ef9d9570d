"""From hidden rows and the head to a few numbers per row; logits live one tile at a time.

`token_statistics` starts from hidden rows and a head, `logits_statistics` from logits.  Both take
the same options and return `TokenStatistics`.  Numbers are computed in float32 whatever the dtype
of the model; the logits themselves have the precision the head gives them.
"""

from collections.abc import Callable as _Callable
from collections.abc import Iterable, Sequence
from dataclasses import replace as _replace
from functools import lru_cache as _lru_cache
from functools import wraps as _wraps
from importlib.util import find_spec as _find_spec
from types import ModuleType
from typing import Any as _Any
from typing import TypeVar as _TypeVar
from typing import cast as _cast

import torch as _torch

from ...core.errors import ConfigError, UnknownNameError
from . import naive as _naive
from . import torch as _fast
from .classes import TokenClasses
from .filters import PLAIN, Filters
from .heads import Biased, Head, Shaped, full_logits, logprobs_of
from .result import COLDEST, OPTIONAL, Inputs, Options, TokenStatistics, check_keys

__all__ = [
    "COLDEST", "PLAIN", "Biased", "Filters", "Head", "Shaped", "TokenClasses", "TokenStatistics",
    "full_logits", "logits_statistics", "logprobs_of", "token_statistics",
]  # fmt: skip

_BACKENDS: dict[str, ModuleType] = {"naive": _naive, "torch": _fast}
_Function = _TypeVar("_Function", bound=_Callable[..., _Any])


def _without_gradients(function: _Function) -> _Function:
    """As ``torch.no_grad``, but free where gradients are off already, as in every decoding step."""

    @_wraps(function)
    def call(*args: _Any, **kwargs: _Any) -> _Any:
        if not _torch.is_grad_enabled():
            return function(*args, **kwargs)
        with _torch.no_grad():
            return function(*args, **kwargs)

    return _cast(_Function, call)


@_without_gradients
def token_statistics(
    hidden: _torch.Tensor, head: Head | None, *,
    banned: Sequence[int] | _torch.Tensor | None = None, banned_rows: _torch.Tensor | None = None,
    filters: Filters = PLAIN, tempered: bool = False, noise_keys: _torch.Tensor | None = None,
    uniforms: _torch.Tensor | None = None,
    embeddings: _Callable[[int, int], _torch.Tensor] | None = None,
    lowered: tuple[_torch.Tensor, float] | None = None, floor: float = 0.0, top: int = 0,
    select: _torch.Tensor | None = None, needs: Iterable[str] | None = None,
    classes: TokenClasses | None = None, vocab_size: int | None = None, backend: str = "auto",
) -> TokenStatistics:  # fmt: skip
    """Statistics of the next-token distributions of ``hidden`` (R, d) under ``head``.

    ``head``: a weight (V, d), an ``nn.Linear``, or any callable from (r, d) to (r, V).  With
    None ``hidden`` are the logits.

    ``banned`` (n,) ids can be neither proposed nor counted; ``banned_rows`` (R, n) bool says in
    which rows (default: all).  A tensor on another device than the CPU costs a synchronisation.
    ``vocab_size`` bans all ids from it on, e.g. padding rows of an embedding.

    The proposal is the most likely token (ties: lowest id) at temperature 0, which any below 1e-6
    is taken for, otherwise a sample of what `Filters` leave: the argmax under Gumbel noise keyed by
    ``noise_keys`` (R, 4) int64 = (seed, stream, position, step), see `dllm.kernels.noise`.

    With ``uniforms`` (R,) in (0, 1) a sample is the first id, in their order, at which the
    cumulative probability exceeds that number: one number per row, and most logits are looked at
    once.  ``embeddings``: rows [low, high) of the embedding (V, d); the result's ``soft`` is then
    its expectation, and no row of probabilities is held for it.

    ``lowered``: an id per row (R,) whose logit is lowered by a number first.  ``floor``: draws by
    ``uniforms`` are from a mixture that is uniform by this share, over what bans and filters leave.

    Log-probabilities, margin, entropy and top describe the clean distribution: after bans, before
    temperature and filters.  With ``tempered`` they describe the one after temperature (if > 0)
    and filters (also at temperature 0).  ``gap`` is of clean logits always.

    ``top``: how many of the most likely tokens to list; at most the vocabulary.  ``select`` (R,)
    int64: ids whose log-probability is wanted; an id beyond the vocabulary has -inf.  ``needs``:
    which of margin, gap, entropy, max_logprob to compute (default: all; other names are ignored);
    token and logprob always are.  ``classes``: also say what is known of each of these classes of
    tokens; tokens that filters drop count 1,000 nats less there.  ``backend``: "triton" (a GPU;
    fused with the head, logits are never in memory), "torch" (any device, a tile of logits at a
    time), "naive" (the float64 oracle); "auto" takes "triton" on a GPU that has it, else "torch".

    Raises `ConfigError` for negative options, a temperature that is not finite, for noise keys
    that are missing or misshapen, and where the backend cannot run.
    """
    wanted = OPTIONAL if needs is None else frozenset(needs)
    inverse = uniforms is not None and filters.temperature >= COLDEST
    options = _options(filters, tempered, top, wanted, classes, inverse, floor)
    inputs = Inputs(
        banned, banned_rows, noise_keys, select, vocab_size, uniforms, embeddings, lowered
    )
    if options.temperature > 0:
        check_keys(options, noise_keys, hidden.shape[0])
    module = _backend(backend, hidden.device)
    if (inverse or embeddings is not None or lowered is not None) and module is not _naive:
        module = _fast  # what the fused kernels leave out
    result: TokenStatistics
    if head is None:
        result = module.logits_statistics(hidden, options, inputs)
    else:
        result = module.token_statistics(hidden, head, options, inputs)
    return result


def logits_statistics(logits: _torch.Tensor, **arguments: _Any) -> TokenStatistics:
    """As `token_statistics`, for ``logits`` (R, V) of any float dtype, which stay untouched."""
    return token_statistics(logits, None, **arguments)


@_lru_cache(maxsize=64)
def _options(
    filters: Filters, tempered: bool, top: int, needs: frozenset[str], classes: TokenClasses | None,
    inverse: bool, floor: float,
) -> Options:  # fmt: skip
    """The same few options come back at every step."""
    if 0 < filters.temperature < COLDEST:
        filters = filters._replace(temperature=0.0)
    # The sums that a draw by the cumulative sum needs are those of the described distribution
    # where that is at the temperature.
    options = Options(filters, tempered, top, needs, classes=classes)
    warm = inverse and options.scale != options.temperature
    return _replace(options, warm=warm, inverse=inverse, floor=floor)


@_lru_cache(maxsize=16)
def _backend(name: str, device: _torch.device) -> ModuleType:
    if name == "auto":
        name = "triton" if device.type == "cuda" and _find_spec("triton") else "torch"
    if name == "triton":
        if not _find_spec("triton"):
            raise ConfigError("backend='triton' needs the package triton; use backend='torch'")
        from . import triton as kernels  # only when it is first asked for

        if device.type != "cuda" and not kernels.interpreted():
            raise ConfigError(
                f"backend='triton' runs on a GPU, not on {device}: use backend='torch', or set "
                "TRITON_INTERPRET=1 before the first import to try it in Triton's interpreter"
            )
        return kernels
    try:
        return _BACKENDS[name]
    except KeyError:
        raise UnknownNameError("backend", name, ("auto", "triton", *_BACKENDS)) from None
