"""One packed forward for all texts of a round.

What the texts feed lies end to end as one sequence without padding; keys and values of all texts
lie in one pool, where each owns a range of slots in the order of its tokens.  Texts join and leave
between rounds.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ...canvas import IntArray
from ...engine.kv import KVBuffer
from ...models import DiffusionModel
from ...models.attention import PREFIX, Segment
from ..base import Draft, chain
from .base import Scored, Text, Verifier, Work, joined, running, tapped

BASES = ("sdpa", "eager")  # attention that the packed one stands for
CHUNK = 512  # queries of one text that are attended at once, which bounds the size of masks
LEAST = 4  # rows per forward in half precision: one row alone takes another path of the processor
SPARE = 64  # slots beyond the limit of a text, for the nodes of trees
GRAIN = 128  # the size of a text's range of slots is a multiple
WASTE = 192  # keys per text that may be attended for nothing to save a call: they take as long
ANY_LENGTH = ("default", "linear", "llama3", "yarn", "proportional")  # rotations
_PACKS: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
_PACKS_LOCK = threading.Lock()


@dataclass(eq=False)
class PackedText(Text):
    """A text with ``size`` slots from ``base`` on."""

    base: int = 0
    size: int = 0


class PackedVerifier(Verifier):
    """Scores drafts of all texts in one forward.

    Attention is that of the network (SDPA or eager), attended text by text; with ``exact`` always
    the eager one, over at least `LEAST` rows.
    """

    def __init__(
        self, model: DiffusionModel, taps: tuple[int, ...] = (), exact: bool = True
    ) -> None:
        super().__init__(model, taps, exact)
        base = self.hf.config._attn_implementation.removeprefix(PREFIX)
        self.attention = PREFIX + ("eager" if self.exact else base)
        self.least = LEAST if self.exact else 1
        config = self.hf.config.get_text_config()
        heads = config.num_attention_heads
        self.group = heads // (getattr(config, "num_key_value_heads", None) or heads)
        self.buffer = KVBuffer(config.num_hidden_layers, 0, most=2**62)
        self._common = 0  # slots of the last text
        self.unread = self._allocate(self.least)  # slots for rows that only fill a forward up
        # An attention mask that is 4-D already: transformers then builds none of its own.
        self._no_mask = torch.empty(1, 1, 1, 1, device=model.device)

    def open(self, prompt: IntArray, limit: int) -> PackedText:
        size = -(-(limit + SPARE) // GRAIN) * GRAIN
        if size <= self._common <= 2 * size:  # ranges of one size are attended together
            size = self._common
        self._common = size
        return PackedText(prompt.tolist(), limit, base=self._allocate(size), size=size)

    def close(self, text: Any) -> None:
        self.buffer.free(text.base, text.size)

    def _allocate(self, size: int) -> int:
        base = self.buffer.allocate(size)
        assert base is not None, "the pool grows"
        return base

    def _make_room(self, text: PackedText, size: int) -> None:
        """Move the text to a longer range of slots if it has fewer than ``size``."""
        if size <= text.size:
            return
        base = self._allocate(size)
        self.buffer.move(self._range(text.base, text.cached), self._range(base, text.cached))
        self.buffer.free(text.base, text.size)
        text.base, text.size = base, size

    def score(self, work: Work) -> list[Scored]:
        order = sorted(range(len(work)), key=lambda i: work[i][0].base)  # type: ignore[attr-defined]
        packed = _Packed(self.model.dtype, self.model.device, self.group)
        for text, draft in (work[i] for i in order):
            assert isinstance(text, PackedText)
            self._make_room(text, len(text.tokens) + len(draft))
            packed.add(text, draft)
            text.forwards += 1
            text.computed += len(text.fresh) + len(draft)
        packed.fill_up(self.least, self.unread)
        logits, hidden = self._forward(packed)
        scored: list[Scored] = [Scored(logits)] * len(work)
        for i, (rows, fed) in zip(order, packed.shares(), strict=True):
            scored[i] = Scored(logits[rows], None if hidden is None else hidden[fed])
        return scored

    def _forward(self, packed: _Packed) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of the scored rows, and what the tapped layers gave for all."""
        with (
            torch.inference_mode(),
            running(self.hf, self.attention),
            tapped(self.hf, self.taps) as outputs,
        ):
            self.buffer.slots = self._tensor(packed.slots)
            logits: torch.Tensor = self.hf(
                input_ids=self._tensor(packed.ids)[None],
                position_ids=self._tensor(packed.positions)[None],
                attention_mask=self._no_mask,
                past_key_values=self.buffer,
                use_cache=False,
                segments=packed.segments(),
                logits_to_keep=self._tensor(packed.scored),
            ).logits[0]
        return logits, joined(outputs, self.taps)

    def _keep(self, text: Any, draft: Draft, path: Sequence[int]) -> None:
        if draft.is_chain or list(path) == list(range(len(path))):
            return
        first = text.base + len(text.tokens)
        self.buffer.move(self._tensor(first + np.asarray(path)), self._range(first, len(path)))

    def _range(self, first: int, n: int) -> torch.Tensor:
        return torch.arange(first, first + n, device=self.model.device)

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(self.model.device)


@dataclass(frozen=True, eq=False)
class _Piece:
    """``seen`` (n, n) bool queries from ``first`` on, of a text whose slots begin at ``base`` and
    that see ``before`` keys there, too; ``whole``: all that the text feeds, so that pieces of
    different texts can be attended together."""

    first: int
    base: int
    before: int
    seen: npt.NDArray[np.bool_]
    whole: bool

    @property
    def keys(self) -> int:
        return self.before + len(self.seen)


@dataclass(eq=False)
class _Run:
    """Pieces that one call attends: ``longest`` and ``total`` of their numbers of keys."""

    pieces: list[_Piece]
    longest: int
    total: int
    stride: int = 0

    def join(self, piece: _Piece) -> bool:
        """Take ``piece`` in if it can be attended in the same call, and that saves time."""
        last, rows, n = self.pieces[-1], len(self.pieces) + 1, len(piece.seen)
        stride, longest = piece.base - last.base, max(self.longest, piece.keys)
        fits = (
            last.whole
            and piece.whole
            and len(last.seen) == n
            and last.first + n == piece.first
            and stride >= longest
            and self.stride in (0, stride)
        )
        if not fits or rows * longest - self.total - piece.keys > WASTE * rows:
            return False
        self.pieces.append(piece)
        self.longest, self.stride, self.total = longest, stride, self.total + piece.keys
        return True


class _Packed:
    """The tokens of a forward, and which of them are scored; ``group`` heads share keys."""

    def __init__(self, dtype: torch.dtype, device: torch.device, group: int) -> None:
        self.dtype, self.device, self.group = dtype, device, group
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.scored: list[int] = []
        self.pieces: list[_Piece] = []
        self._fed, self._rows = [0], [0]  # where each text's share ends

    def add(self, text: PackedText, draft: Draft) -> None:
        """What ``text`` has not fed yet, then its draft.  In the order of ``base``."""
        fresh, at, first, nodes = text.fresh, len(self.ids), len(text.tokens), len(draft)
        self.ids += [*fresh, *draft.tokens.tolist()]
        self.positions += range(text.cached, first)
        self.positions += [first + draft.depth(node) for node in range(nodes)]
        slots = text.base + text.cached
        self.slots += range(slots, slots + len(fresh) + nodes)
        causal = len(fresh) + (nodes if draft.is_chain else 0)
        for a, b in pairwise([*range(0, causal, CHUNK), causal]):
            seen = np.tri(b - a, dtype=np.bool_)
            if b == causal and not draft.is_chain:
                seen = _below(seen, draft.ancestry())
            self.pieces.append(
                _Piece(at + a, text.base, text.cached + a, seen, whole=causal <= CHUNK)
            )
        self.scored += range(at + len(fresh) - 1, len(self.ids))
        self._fed.append(len(self.ids))
        self._rows.append(len(self.scored))

    def segments(self) -> list[Segment]:
        """The pieces; neighbours of equal size at equal distances are attended in one call."""
        runs: list[_Run] = []
        for piece in self.pieces:
            if not runs or not runs[-1].join(piece):
                runs.append(_Run([piece], piece.keys, piece.keys))
        return [self._segment(run) for run in runs]

    def _segment(self, run: _Run) -> Segment:
        pieces, longest = run.pieces, run.longest
        first, n = pieces[0], len(pieces[0].seen)
        mask = None
        if n > 1 or run.total < longest * len(pieces):
            hidden = np.ones((len(pieces), n, longest), np.bool_)
            for row, piece in enumerate(pieces):
                hidden[row, :, : piece.before] = False
                hidden[row, :, piece.before : piece.keys] = ~piece.seen
            here = torch.from_numpy(hidden).to(self.device).repeat(1, self.group, 1)
            mask = torch.zeros(here.shape, dtype=self.dtype, device=self.device)
            mask.masked_fill_(here, torch.finfo(self.dtype).min)
        queries = slice(first.first, first.first + n * len(pieces))
        keys = slice(first.base, first.base + longest)
        return Segment(queries, keys, len(pieces), run.stride, mask, grouped=True)

    def fill_up(self, least: int, unread: int) -> None:
        """At least ``least`` rows; those that fill up are attended by none and read by none."""
        missing = max(0, least - len(self.ids))
        self.ids += [0] * missing
        self.positions += [0] * missing
        self.slots += range(unread, unread + missing)

    def shares(self) -> Iterator[tuple[slice, slice]]:
        """Scored and fed rows of every text."""
        for rows, fed in zip(pairwise(self._rows), pairwise(self._fed), strict=True):
            yield slice(*rows), slice(*fed)


def _below(chain: npt.NDArray[np.bool_], tree: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """What the tokens of a chain and the nodes of a tree behind it see of each other."""
    n = len(chain)
    seen = np.zeros((n + len(tree), n + len(tree)), np.bool_)
    seen[:n, :n], seen[n:, :n], seen[n:, n:] = chain, True, tree
    return seen


def open_verifier(
    model: DiffusionModel, taps: tuple[int, ...] = (), exact: bool = True
) -> Verifier:
    """A packed verifier where the network's attention can be packed, else one row by row."""
    from .rowwise import RowVerifier

    return (PackedVerifier if packs(model) else RowVerifier)(model, taps, exact)


def packs(model: DiffusionModel) -> bool:
    """Whether packed forwards give this network's own logits; tried once per network."""
    with _PACKS_LOCK:
        if model.hf not in _PACKS:
            _PACKS[model.hf] = _may_pack(model.hf) and _agrees(model)
        return _PACKS[model.hf]


def _may_pack(hf: Any) -> bool:
    """What a trial on short texts would not show: windows, and rotations that depend on how long
    the longest text is."""
    config = hf.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    windowed = getattr(config, "sliding_window", None) is not None
    if getattr(config, "layer_types", None) is not None:
        windowed = kinds != {"full_attention"}
    return (
        getattr(hf, "_supports_attention_backend", False)
        and hf.config._attn_implementation.removeprefix(PREFIX) in BASES
        and "logits_to_keep" in inspect.signature(hf.forward).parameters
        and not windowed
        and rope.get("rope_type", "default") in ANY_LENGTH
    )


def _agrees(model: DiffusionModel) -> bool:
    """Two texts of different lengths, each in two pieces, against the network alone."""
    texts = [np.arange(2, 2 + n) * 7 % model.facts.vocab_size for n in (5, 9)]
    try:
        with torch.inference_mode(), running(model.hf, None):
            alone = [
                model.hf(torch.from_numpy(ids)[None].to(model.device)).logits[0] for ids in texts
            ]
        verifier = PackedVerifier(model)
        work = [(verifier.open(ids[:3], len(ids)), chain(ids[3:])) for ids in texts]
        rows = verifier.score(work)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError):
        return False  # it does not hand things on as the packed forward needs it
    error = max(
        float((a[2:].float() - b.logits.float()).abs().max())
        for a, b in zip(alone, rows, strict=True)
    )
    scale = max(float(a.float().abs().max()) for a in alone)
    return error <= (1e-3 if model.dtype == torch.float32 else 0.1) * scale
