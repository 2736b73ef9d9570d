"""A masked diffusion model as a drafter.

Every round its canvas is the committed text, ``window`` masks and, if it was trained with one, an
end marker.  One forward gives a distribution for every mask; a search makes a draft of them.  The
distributions are marginals: each averages over what might stand at the other positions.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ... import cache as caches
from ... import samplers
from ...cache.base import Cache, Plan, Slots, full_plan
from ...core.canvas import Canvas, IntArray
from ...core.errors import ConfigError
from ...engine import Engine, MaskedRecipe
from ...engine.rows import Row
from ...models import load
from .. import base
from ..search.chains import SEARCHES, Search, SearchContext
from ..search.marginals import Marginals
from ..search.proxies import NGram

WINDOW = 32  # masks that a drafter sees at least, unless told otherwise


@dataclass(slots=True)
class Refresh:
    """What `Reuse` remembers: whether the next step recomputes everything."""

    due: bool = False


@dataclass(frozen=True)
class Reuse(Cache):
    """Keeps the keys and values of the committed text from round to round.

    Recomputed are masks and what was committed since; `DiffusionDrafting` says when everything is.
    For a bidirectional model this is an approximation, which can only cost acceptance.
    """

    name = "reuse"

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        refresh = slots.state(Refresh)
        if refresh.due:
            refresh.due = False
            return full_plan(canvas)
        live = slice(0, canvas.length)
        stale = (slots.age[live] < 0) | slots.pending[live] | canvas.masked[live]
        return Plan(np.flatnonzero(stale))


@base.DRAFTERS.register("diffusion")
@dataclass
class DiffusionDrafter(base.Drafter):
    """Any diffusion model of this library.

    ``model``: what `dllm.load` takes.  ``search``: how marginals become a draft (default "cps" at
    temperature 0, "coupled" above).  ``proxy``: the n-gram model that helps the search, learning
    from the prompt and from what the verifier accepts.  ``window``: masks the model sees, a
    hyperparameter of its own that changes every marginal, independent of how many tokens are sent
    to the verifier (default 32, more where a longer draft is asked for).  ``cache``: "reuse" keeps
    keys and values of the committed text across rounds and recomputes them every ``refresh_rounds``
    rounds (never for WeDLM's models, for which they stay right, nor with None); "none" recomputes
    everything.  ``end_marker``: id that stood behind the masks in training ("do not end here"), by
    default what the checkpoint says.  ``banned`` ids are never drafted; ``known_as`` gives the
    drafter's id of every verifier id where they differ (-1: none).
    """

    model: Any = "nano"
    search: Any = None
    proxy: Any = None
    window: int | None = None
    cache: str = "reuse"
    refresh_rounds: int | None = 8
    end_marker: int | None = None
    banned: tuple[int, ...] = ()
    known_as: IntArray | None = None

    def __post_init__(self) -> None:
        from .. import register_all

        register_all()
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        if any(n is not None and n < 1 for n in (self.window, self.refresh_rounds)):
            raise ConfigError("window and refresh_rounds must be at least 1")
        self.model = load(self.model)
        if self.model.facts.mask_token_id is None:
            raise ConfigError(
                f"{self.model.name} is autoregressive: it cannot draft by filling in masks; "
                "load a diffusion model, or use a lookup drafter"
            )
        if self.model.facts.uniform:
            raise ConfigError(
                f"{self.model.name} has no mask token to draft with: its noise is uniform; load a "
                "masked diffusion model, or use a lookup drafter"
            )
        if self.search is not None:
            self.search = base.single(self.search, SEARCHES, Search)
        self.proxy = self.proxy or NGram(vocab_size=self.model.facts.vocab_size)
        if self.end_marker is None:
            self.end_marker = self.model.generation_defaults.get("end_marker")

    @property
    def distributions(self) -> frozenset[base.Distribution]:  # type: ignore[override]
        return frozenset({self._search(0.0).distribution})

    @property
    def trees(self) -> bool:  # type: ignore[override]
        return self._search(0.0).trees

    def _search(self, temperature: float) -> Search:
        result: Search = self.search or SEARCHES["coupled" if temperature > 0 else "cps"]()
        return result

    def open(self, request: base.DraftRequest) -> base.Drafting:
        return DiffusionDrafting(self, request)

    def propose_all(self, work: Sequence[tuple[Any, IntArray, base.Budget]]) -> list[base.Draft]:
        """One forward for all sequences."""
        for drafting, prefix, _ in work:
            drafting.learn(prefix)
        found = self.marginals([(d, prefix, budget.length) for d, prefix, budget in work])
        return [
            base.EMPTY if marginals is None else drafting.pick(marginals, prefix, budget)
            for (drafting, prefix, budget), marginals in zip(work, found, strict=True)
        ]

    def marginals(
        self, work: Sequence[tuple["DiffusionDrafting", IntArray, int]]
    ) -> list[Marginals | None]:
        """Distributions of the positions after each prefix, for drafts of so many tokens; None
        where the context has no room for one."""
        ready = [d.lay_out(prefix, length) for d, prefix, length in work]
        rows = [d.row for (d, _, _), fits in zip(work, ready, strict=True) if fits]
        scored = iter(self.engine().scores(rows) if rows else ())
        return [
            drafting.read(next(scored), len(prefix)) if fits else None
            for (drafting, prefix, _), fits in zip(work, ready, strict=True)
        ]

    def engine(self) -> Engine:
        """The engine of all sequences that are open."""
        with self._lock:
            if self._engine is None:
                cache = self._cache()
                if cache.layerwise:
                    raise ConfigError(
                        f"cache {cache.name!r} decides at every layer, which drafting has no use "
                        "for; use 'reuse' or 'none'"
                    )
                self._engine = Engine(self.model, cache)
            return self._engine

    def _cache(self) -> Cache:
        name = self.cache
        if name == "reuse":  # these keep the committed text, and never have to refresh it
            kept = {"decided_first": "wedlm", "causal_prefix": "block"}
            name = kept.get(self.model.facts.mask_kind, name)
        return Reuse() if name == "reuse" else caches.compose(name, self.model.family.name)

    def leave(self, row: Row) -> None:
        """A sequence is complete; with the last one the memory is given back."""
        with self._lock:
            engine = self._engine
            if engine is None:
                return
            engine.drop(row)
            if not engine.live:
                engine.close()
                self._engine = None

    def __repr__(self) -> str:
        search = self.search.name if self.search is not None else "auto"
        return f"diffusion({self.model.name}, search={search}, window={self.window or WINDOW})"


@dataclass(eq=False)
class DiffusionDrafting(base.Drafting):
    """A diffusion drafter on one sequence: its row in the drafter's engine."""

    part: DiffusionDrafter
    request: base.DraftRequest
    rounds: int = 0
    learnt: int = 0  # committed tokens the proxy has seen
    since_refresh: int = 0
    fed: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        part, model = self.part, self.part.model
        self.search = part._search(self.request.temperature)
        self.marker = part.end_marker is not None
        self.reuse = part.cache == "reuse"
        facts = model.facts
        pad = facts.pad_token_id if facts.pad_token_id is not None else facts.mask_token_id
        self.canvas_facts = {"mask_id": facts.mask_token_id, "pad_id": pad}
        sampler = samplers.compose("llada+whole", options={"eos_policy": "none"})
        window = part.window or WINDOW
        longest = min(self.request.limit + window + self.marker, facts.context_length)
        canvas = Canvas.for_prompt(np.zeros(0, np.int64), longest, **self.canvas_facts)
        row = part.engine().admit(canvas, MaskedRecipe(sampler), held=True)
        assert row is not None, "the pool grows"
        self.row = row
        self.banned = (facts.mask_token_id, *part.banned)

    def pick(self, marginals: Marginals, prefix: IntArray, budget: base.Budget) -> base.Draft:
        """What the search makes of ``marginals``."""
        length = budget.chain_length(marginals.confidence)
        clock = base.clock_of(self.part.model.device)
        began = clock()
        context = SearchContext(
            prefix, self.part.proxy, self.request.temperature, self.request.noise_key,
            self.request.draft_key, self.rounds,
        )  # fmt: skip
        draft = self.search.find(marginals, length, context) if length else base.EMPTY
        return replace(draft, search_seconds=clock() - began)

    def lay_out(self, prefix: IntArray, length: int) -> bool:
        """A new canvas, for a draft of ``length`` tokens behind ``prefix``; False where there is no
        room for it.  Slots whose token changed, or that held a mask, are stale."""
        room = self.row.capacity - len(prefix) - self.marker
        window = min(self.part.window or max(WINDOW, length), room)
        if window < 1:
            return False
        prefix = self._own(prefix)
        canvas = Canvas.for_prompt(prefix, window + self.marker, **self.canvas_facts)
        canvas.window = (len(prefix), len(prefix) + window)
        if self.part.end_marker is not None:
            canvas.tokens[-1] = self.part.end_marker
            canvas.masked[-1], canvas.given[-1] = False, True
            canvas.end -= 1
        common = min(len(self.fed), len(prefix)) if self.reuse else 0
        different = np.flatnonzero(self.fed[:common] != prefix[:common])
        kept = int(different[0]) if different.size else common
        self.part.engine().replace(self.row, canvas, kept)
        self.since_refresh += 1
        every = self.part.refresh_rounds
        if self.reuse and (self.rounds == 0 or (every or math.inf) <= self.since_refresh):
            self.row.slots.state(Refresh).due = True
            self.since_refresh = 0
        self.fed = prefix.copy()
        self.rounds += 1
        return True

    def read(self, logits: torch.Tensor, first: int) -> Marginals:
        """Distributions from position ``first`` on, of the logits of the masks."""
        return Marginals.from_logits(
            logits, first, vocab_size=self.request.vocab_size, banned=self.banned,
            temperature=self.request.temperature, stop_ids=self.request.stop_ids,
        )  # fmt: skip

    def _own(self, prefix: IntArray) -> IntArray:
        """``prefix`` in the drafter's ids; tokens it does not have become padding."""
        if self.part.known_as is None:
            return prefix
        own = self.part.known_as[prefix]
        return np.where(own < 0, self.canvas_facts["pad_id"], own)

    def learn(self, prefix: IntArray) -> None:
        """Show the proxy what was committed since it was last asked."""
        self.part.proxy.learn(prefix.tolist(), len(prefix) - self.learnt)
        self.learnt = len(prefix)

    def close(self) -> None:
        self.part.leave(self.row)  # keys and values of a finished sequence
