"""What every verifier shares: the texts it writes, its lock, and what it shows of its layers.

Between rounds the keys and values of every committed token except the last, the anchor, are kept.
A round feeds the anchor and the draft; afterwards the entries of what was not accepted are dropped,
for a tree by gathering the accepted path.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel

from ...core.canvas import IntArray
from ...core.errors import ConfigError
from ...engine.prefixes import Prefixes, failures_are_logged, weights_of
from ...kernels.linear import check_packed
from ...kernels.quantised import QuantisedLinear
from ...models import DiffusionModel
from ...models.attention import attending
from ...models.forwards import Recorder
from ..base import Draft, clock_of

_LOCKS: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


class Scored(NamedTuple):
    """Of one text and draft of n nodes: raw logits (n + 1, V), after the last committed token and
    after every node; also the hidden states (fed, layers * D) behind the target layers, if any, at
    every token that was fed: what was committed since the last round, then the nodes."""

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


@dataclass(eq=False)
class Text:
    """One text being written: committed ids, prompt included.  It gets at most ``limit`` tokens
    long; ``cached`` of them have their keys and values kept, ``reused`` of these were those of
    another text.  ``forwards`` it took part in, and tokens ``computed`` for it.  ``shown``: the
    hidden states (n, layers * D) behind the target layers at the cached tokens, in pieces, and how
    many tokens of them a drafter has not seen yet; ``weights`` it is written with, and the
    ``salt`` of those who share its keys and values."""

    tokens: list[int]
    limit: int
    cached: int = 0
    forwards: int = 0
    computed: int = 0
    reused: int = 0
    shown: list[torch.Tensor] = field(default_factory=list, repr=False)
    unseen: int = 0
    weights: object = None
    salt: str | None = None

    @property
    def prefix(self) -> IntArray:
        """Committed tokens (n,) int64."""
        return np.asarray(self.tokens, np.int64)

    @property
    def fresh(self) -> list[int]:
        """Committed tokens that no forward has seen."""
        return self.tokens[self.cached :]


Work = Sequence[tuple[Text, Draft]]


class Verifier:
    """Scores drafts for the texts of one call.

    ``target_layer_ids`` are the layers whose hidden states drafters read.  ``exact``: in half
    precision on a CPU, score in a way that does not depend on how many tokens are scored at once.
    """

    trees = True  # whether it can score a tree
    whole_prefixes = False  # whether only whole kept texts can be gone on from

    def __init__(
        self, model: DiffusionModel, target_layer_ids: tuple[int, ...] = (), exact: bool = True
    ) -> None:
        self.model, self.hf, self.target_layer_ids = model, model.hf, target_layer_ids
        self.exact = exact and model.dtype != torch.float32 and model.device.type == "cpu"
        self.clock = clock_of(model.device)
        check_packed(model.hf)
        self.prefixes: Prefixes[Any] = Prefixes(self._release)

    def agree(self, ours: torch.Tensor, others: torch.Tensor) -> bool:
        """Whether logits (n, V) are what two orders of the same sums may give."""
        gaps, most = (ours.float() - others.float()).abs().amax(-1), others.float().abs().max()
        if any(type(module) is QuantisedLinear for module in self.hf.modules()):
            # Of rows in 8 bits a last bit that differs becomes a step, and single ones may differ
            # by a quarter.  Half of them do by 0.1 at most, and by 0.2 where a key is hidden.
            return bool(gaps.median() <= 0.15 * most)
        return bool(gaps.max() <= most * (1e-3 if self.model.dtype == torch.float32 else 0.1))

    def check_drafts(self, trees: bool) -> None:
        """Raise `ConfigError` where the network cannot verify drafts, or no ``trees``."""
        if trees and not self.trees:
            raise ConfigError(
                f"{self.model.name} cannot score a tree: use a search that returns a chain, or "
                "another model"
            )

    def open(self, prompt: IntArray, limit: int, salt: str | None = None) -> Text:
        """A new text of at most ``limit`` tokens, prompt (P,) included.  What it has in common with
        a kept text of the same ``salt`` (see `Prefixes`) is cached from the start."""
        text: Text = self._new(prompt, limit)
        text.salt = salt
        if not self.prefixes.budget:
            return text
        try:
            text.weights = weights_of(self.hf, salt)
            found = self.prefixes.find(prompt, text.weights, whole=self.whole_prefixes)
            if found is not None:
                other, n = found
                self._copy(other, text, n)
                text.cached = text.reused = n
                if self.target_layer_ids:
                    text.shown, text.unseen = [torch.cat(other.shown)[:n]], n
        except BaseException:
            self._release(text)
            raise
        return text

    def _new(self, prompt: IntArray, limit: int) -> Any:
        """A text of which nothing is cached."""
        raise NotImplementedError

    def _copy(self, kept: Any, text: Any, n: int) -> None:
        """Give ``text`` the keys and values of the first ``n`` tokens of a kept one."""
        raise NotImplementedError

    def _release(self, text: Any) -> None:
        """Give back what a text holds."""
        raise NotImplementedError

    def score(self, work: Work) -> list[Scored]:
        """Rows for each text and its draft."""
        raise NotImplementedError

    def commit(
        self, text: Text, draft: Draft, path: Sequence[int], emitted: Sequence[int],
        hidden: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Append ``emitted``; keep the entries of ``path`` before the last of them, drop others.
        ``hidden`` is what `score` gave, for texts that may be kept."""
        base = len(text.tokens)
        path = path[: len(emitted) - 1]
        self._keep(text, draft, path)
        if text.weights is not None and hidden is not None:
            fed = len(hidden) - len(draft)
            text.shown.append(hidden[[*range(fed), *(fed + node for node in path)]])
        text.cached = base + len(path)
        text.tokens += emitted
        assert text.cached < len(text.tokens), "the last committed token is never in the cache"

    def _keep(self, text: Text, draft: Draft, path: Sequence[int]) -> None:
        """Of the entries of a draft that was just scored keep those of ``path``."""
        raise NotImplementedError

    def close(self, text: Text) -> None:
        """The text is complete: keep it for those that begin like it, or give its memory back."""
        tokens, kept = text.prefix[: text.cached], False
        with failures_are_logged():
            whole = text.weights is not None and text.weights == weights_of(self.hf, text.salt)
            kept = whole and self.prefixes.keep(text, tokens, text.weights)
        if not kept:
            self._release(text)

    def seen(self, text: Text, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """``hidden`` of a text's forward, behind that of cached tokens a drafter has not seen."""
        if hidden is None or not text.unseen:
            return hidden
        text.unseen = 0
        return torch.cat([*text.shown, hidden])


def is_causal_model(model: DiffusionModel) -> bool:
    """Whether it is autoregressive and nothing else."""
    return model.facts.mask_token_id is None and model.facts.mask_kind == "causal"


def can_verify(model: DiffusionModel) -> bool:
    """Whether its network is an autoregressive model, among other things."""
    return is_causal_model(model) or model.facts.mask_kind == "decided_first"


def once_per_network(ask: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """``ask`` about a model or a verifier, once for its network ``hf``, however many threads do."""
    known: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
    lock = threading.Lock()

    @wraps(ask)
    def asked(about: Any) -> bool:
        with lock:
            if about.hf not in known:
                known[about.hf] = ask(about)
            return known[about.hf]

    return asked


@contextmanager
def running(hf: Any, attention: str | None) -> Iterator[None]:
    """Have the network for oneself, with another attention implementation unless that is None.

    Several threads may verify with one network: their forwards take turns, because the
    implementation and the hooks of target layers belong to the network and not to the call.
    """
    with _LOCKS_LOCK:
        lock = _LOCKS.setdefault(hf, threading.RLock())
    with lock, nullcontext() if attention is None else attending(hf, attention):
        yield


@contextmanager
def recorded(hf: Any, layer_ids: tuple[int, ...]) -> Iterator[dict[int, torch.Tensor]]:
    """Collects the outputs (1, Q, D) of layers ``layer_ids`` of the forwards inside."""
    outputs: dict[int, torch.Tensor] = {}
    handles = [layers_of(hf)[i].register_forward_hook(Recorder(outputs, i)) for i in layer_ids]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def layers_of(hf: Any) -> Any:
    """The decoder layers of a network of transformers."""
    decoder = hf.get_decoder() if hasattr(hf, "get_decoder") else hf.base_model
    for name in ("layers", "h", "blocks"):
        if hasattr(decoder, name):
            return getattr(decoder, name)
    raise ConfigError(
        f"{type(hf).__name__} keeps its layers in an unknown place: a drafter that reads its "
        "hidden states cannot be used with it"
    )


def joined(outputs: dict[int, torch.Tensor], layer_ids: tuple[int, ...]) -> torch.Tensor | None:
    """The collected outputs side by side, (Q, layers * D); None without layers."""
    return torch.cat([outputs[index][0] for index in layer_ids], -1) if layer_ids else None
