"""One packed forward for all texts of a round.

What the texts feed lies end to end as one sequence without padding; keys and values of all texts
lie in one pool, where each owns a range of slots in the order of its tokens.  Texts join and leave
between rounds.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ...core.canvas import IntArray
from ...engine.kv import KVBuffer
from ...engine.packing import Packing
from ...engine.visibility import Visibility
from ...models import DiffusionModel
from ...models.attention import PREFIX
from ...models.decoder import computes_all
from ..base import Draft, chain
from .base import Scored, Text, Verifier, Work, joined, once_per_network, recorded, running

BASES = ("sdpa", "eager")  # attention that the packed one stands for
CAUSAL = Visibility(causal=True)
LEAST = 4  # rows of a forward in half precision by PyTorch: one alone takes another path there
SPARE = 64  # slots beyond the limit of a text, for the nodes of trees
GRAIN = 128  # the size of a text's range of slots is a multiple
WASTE = 192  # keys per text that may be attended for nothing to save a call: they take as long
ANY_LENGTH = ("default", "linear", "llama3", "yarn", "proportional")  # rotations


@dataclass(eq=False)
class PackedText(Text):
    """A text in ``size`` slots from ``base`` on; ``broken``: they may hold what is not finite."""

    base: int = 0
    size: int = 0
    broken: bool = False


class PackedVerifier(Verifier):
    """Scores drafts of all texts in one forward.

    Attention is that of the network (SDPA or eager), attended text by text; with ``exact`` always
    the eager one, over at least `LEAST` rows where PyTorch multiplies them.
    """

    def __init__(
        self, model: DiffusionModel, target_layer_ids: tuple[int, ...] = (), exact: bool = True
    ) -> None:
        super().__init__(model, target_layer_ids, exact)
        base = self.hf.config._attn_implementation.removeprefix(PREFIX)
        self.attention = PREFIX + ("eager" if self.exact else base)
        self.least = LEAST if self.exact and not computes_all(self.hf) else 1
        config = self.hf.config.get_text_config()
        self.buffer = KVBuffer(config.num_hidden_layers, 0, most=2**62)
        self._common = 0  # slots of the last text
        self.unread = self._allocate(self.least)  # slots for rows that only fill a forward up

    def _new(self, prompt: IntArray, limit: int) -> PackedText:
        size = -(-(limit + SPARE) // GRAIN) * GRAIN
        if size <= self._common <= 2 * size:  # ranges of one size are attended together
            size = self._common
        self._common = size
        return PackedText(prompt.tolist(), limit, base=self._allocate(size), size=size)

    def _release(self, text: Any) -> None:
        if text.broken:
            self.buffer.clear(text.base, text.size)
        self.buffer.free(text.base, text.size)

    def close(self, text: Any) -> None:
        if text.broken:
            text.weights = None  # not to be kept
        super().close(text)
        spare = text.size - max(1, text.cached)
        if any(one.text is text for one in self.prefixes.kept) and spare > 0:
            self.buffer.free(text.base + text.size - spare, spare)
            text.size -= spare

    def _copy(self, kept: Any, text: Any, n: int) -> None:
        at = torch.arange(n, device=self.model.device)
        self.buffer.move(kept.base + at, text.base + at)

    def _allocate(self, size: int) -> int:
        base = self.prefixes.make_room(partial(self.buffer.allocate, size))
        assert base is not None, "the pool grows"
        return base

    def score(self, work: Work) -> list[Scored]:
        """Texts attended together read, with weight 0, beyond their own keys; where that was not
        finite, each is scored alone, so that only texts fail that are not finite themselves."""
        scored = self._score(work)
        whole = torch.stack([one.logits[:, 0].isfinite().all() for one in scored]).tolist()
        if len(work) > 1 and not all(whole):
            scored = [self._score([one], waste=0)[0] for one in work]
            whole = [bool(one.logits[:, 0].isfinite().all()) for one in scored]
        for (text, draft), finite in zip(work, whole, strict=True):
            assert isinstance(text, PackedText)
            text.broken |= not finite
            text.forwards += 1
            text.computed += len(text.fresh) + len(draft)
        return scored

    def _score(self, work: Work, waste: int = WASTE) -> list[Scored]:
        order = sorted(range(len(work)), key=lambda i: work[i][0].base)  # type: ignore[attr-defined]
        packing, shares = Packing(), []
        for text, draft in (work[i] for i in order):
            assert isinstance(text, PackedText)
            size = len(text.tokens) + len(draft)
            if size > text.size:  # a longer range of slots
                base = self.buffer.enlarge(text.base, text.size, size)
                assert base is not None, "the pool grows"
                text.base, text.size = base, size
            shares.append(self.feed(packing, text, draft))
        logits, hidden = self._forward(packing, waste)
        scored: list[Scored] = [Scored(logits)] * len(work)
        at = 0
        for i, fed in zip(order, shares, strict=True):
            rows, at = slice(at, at + len(work[i][1]) + 1), at + len(work[i][1]) + 1
            scored[i] = Scored(logits[rows], None if hidden is None else hidden[fed])
        return scored

    def feed(self, packing: Packing, text: PackedText, draft: Draft) -> slice:
        """What ``text`` has not fed yet, then its draft, each with the keys it sees; where they
        stand on the packed axis.  Texts follow one another in the order of ``base``."""
        first, nodes = len(text.tokens), len(draft)
        slots = np.arange(text.cached, first + nodes)
        positions, tree = slots, None
        if not draft.is_chain:
            depths = [first + draft.depth(node) for node in range(nodes)]
            positions = np.concatenate([slots[: first - text.cached], depths])
            tree = draft.ancestry()
        ids = np.concatenate([text.fresh, draft.tokens]).astype(np.int64)
        at = packing.feed(ids, positions, slots + text.base)
        packing.pieces += CAUSAL.pieces(slots, None, at, text.base, first + nodes, tree=tree)
        packing.scored.append(np.arange(packing.size - nodes - 1, packing.size))
        return slice(at, packing.size)

    def _forward(
        self, packing: Packing, waste: int = WASTE
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of the scored rows, and the hidden states behind the target layers of all."""
        missing = self.least - packing.size
        if missing > 0:  # rows that only fill up see nothing, and nobody sees them
            zeros = np.zeros(missing, np.int64)
            packing.feed(zeros, zeros, self.unread + np.arange(missing))
        packed = packing.packed(self.model.device, waste, self.buffer.size)
        with (
            torch.inference_mode(),
            running(self.hf, self.attention),
            recorded(self.hf, self.target_layer_ids) as outputs,
        ):
            inputs = packed.inputs(self.buffer)
            logits: torch.Tensor = self.hf(
                **inputs, grouped=True, logits_to_keep=packed.scored, scored=packed.scored
            ).logits[0]
        return logits, joined(outputs, self.target_layer_ids)

    def _keep(self, text: Any, draft: Draft, path: Sequence[int]) -> None:
        if draft.is_chain or list(path) == list(range(len(path))):
            return
        first, device = text.base + len(text.tokens), self.model.device
        chosen = torch.tensor(path, dtype=torch.int64, device=device)
        self.buffer.move(first + chosen, torch.arange(first, first + len(path), device=device))


def open_verifier(
    model: DiffusionModel, target_layer_ids: tuple[int, ...] = (), exact: bool = True
) -> Verifier:
    """A packed verifier where the network's attention can be packed, else one row by row; with
    recurrent layers one that can take their states back."""
    from .recurrent import RecurrentVerifier, has_recurrent_layers
    from .rowwise import RowVerifier

    if packs(model):
        return PackedVerifier(model, target_layer_ids, exact)
    kind = RecurrentVerifier if has_recurrent_layers(model) else RowVerifier
    return kind(model, target_layer_ids, exact)


@once_per_network
def packs(model: DiffusionModel) -> bool:
    """Whether packed forwards give this network's own logits."""
    return _may_pack(model.hf) and _agrees(model)


def _may_pack(hf: Any) -> bool:
    """What a trial on short texts would not show: windows, and rotations by the longest text."""
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
    own = torch.cat([logits[2:] for logits in alone])
    return verifier.agree(torch.cat([one.logits for one in rows]), own)
