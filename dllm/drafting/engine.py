"""The engine of autoregressive texts: rounds of drafting and verification, for all of them at once.

A step is a round: the drafters propose for all texts, the verifier scores the drafts in one
forward, and a rule says what stays.  Without a drafter it decodes plainly.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ..core.canvas import Canvas
from ..core.errors import FAILURES, ConfigError, failure
from ..engine.work import Step, Work
from ..models import DiffusionModel
from ..request.request import Request
from ..request.requests import positions_for
from .base import EMPTY, Budget, Draft, Drafter
from .recipe import DraftedRecipe
from .result import SpeculativeResult
from .rows import DraftedRow, SharedForward
from .verifiers.packed import open_verifier

MOST_TOKENS = 4096  # of a forward: prompts of long texts that join together are read in several


class SpeculativeEngine(Work[DraftedRow, Step]):
    """Writes autoregressive texts, each as its `DraftedRecipe` says.

    ``target_layer_ids``, ``exact``: see `Verifier`.  ``most``, ``max_batch_size``,
    ``max_batch_tokens`` (default: 4096): see `Work`.  Texts drafted elsewhere take no room.
    """

    cache_name = "verifier"
    kind = SpeculativeResult

    def __init__(
        self, model: DiffusionModel, *, target_layer_ids: tuple[int, ...] = (), exact: bool = True,
        most: int | None = None, max_batch_size: int | None = None,
        max_batch_tokens: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, max_batch_size, most, max_batch_tokens or MOST_TOKENS)
        self.verifier = open_verifier(model, target_layer_ids, exact)
        self._seconds = 0.0

    @property
    def forward_seconds(self) -> float:
        return self._seconds

    def check(self, recipe: DraftedRecipe) -> None:
        drafter, rule = recipe.drafter, recipe.rule
        if drafter is None:
            return
        if not drafter.distributions & rule.accepts:
            rule.check(next(iter(drafter.distributions)), False)
        self.verifier.check_drafts(drafter.trees)
        if drafter.target_layer_ids and drafter.target_layer_ids != self.verifier.target_layer_ids:
            raise ConfigError(
                f"{type(drafter).__name__} reads layers of the verifier, which has to be opened "
                "for it: name it as the drafter of the session"
            )

    def figures(self, row: DraftedRow) -> dict[str, Any]:
        recipe, canvas = row.recipe, row.canvas
        return {
            "sampler": recipe.rule.name, "cache": self.cache_name, "rule": recipe.rule.name,
            "cached_tokens": row.text.reused,
            "drafter": "none" if recipe.drafter is None else repr(recipe.drafter),
            "lossy": recipe.rule.lossy, "rounds": row.rounds,
            "sequences": canvas.tokens[: canvas.length].copy(),
        }  # fmt: skip

    def ready(self, row: DraftedRow) -> bool:
        return row.drafting is None or not row.drafting.waits

    def takes_room(self, row: DraftedRow) -> bool:
        return not row.recipe.outside

    def admit(self, canvas: Canvas, recipe: DraftedRecipe) -> DraftedRow | None:
        with self._lock:
            self.must_fit(recipe, len(canvas.tokens))
            row = DraftedRow(canvas, recipe, canvas.fork())
            return row if self._join(row) else None

    def prefix_cache_tokens(self, tokens: int | None) -> None:
        with self._lock:
            self.verifier.prefixes.allow(tokens)

    def _allot(self, row: DraftedRow) -> bool:
        if self.positions is not None and self.takes_room(row):
            if self.used + row.size > self.positions:
                return False
            self.verifier.prefixes.shrink(self.positions - self.used - row.size)
        row.open(self.verifier)
        return True

    def _shrink(self) -> None:
        self.verifier.prefixes.shrink(0)

    def _leave(self, row: DraftedRow) -> None:
        try:
            row.close()
        except FAILURES as error:  # the drafter's: only its own text fails
            row.error = row.error or failure(error)

    def _plan(self, rows: list[DraftedRow]) -> None:
        """A draft for every text, in one call of each drafter."""
        asked: dict[int, list[tuple[DraftedRow, Budget]]] = {}
        clock = self.verifier.clock
        for row in rows:
            row.draft_seconds, began = None, clock()
            budget = self._guarded(row, row.budget)
            if row.error is None and budget is None:
                row.draft = EMPTY
            if budget is not None:
                row.draft_seconds = clock() - began
                asked.setdefault(id(row.recipe.drafter), []).append((row, budget))
        for work in asked.values():
            drafter = work[0][0].recipe.drafter
            assert drafter is not None
            began = clock()
            drafts = self._propose(drafter, work)
            seconds = (clock() - began) / len(work)
            for (row, _), draft in zip(work, drafts, strict=True):
                row.draft_seconds = (row.draft_seconds or 0.0) + seconds
                if draft is not None:
                    self._guarded(row, partial(row.plan, draft))

    def _propose(
        self, drafter: Drafter, work: Sequence[tuple[DraftedRow, Budget]]
    ) -> list[Draft | None]:
        """Drafts for all texts, in one call where the drafter gains by that.  If it fails, there is
        a call for each text: None for those whose own call fails, too."""

        def propose(part: Sequence[tuple[DraftedRow, Budget]]) -> list[Draft]:
            drafts = drafter.propose_all(
                [(row.drafting, row.prefix.copy(), budget) for row, budget in part if row.drafting]
            )
            if len(drafts) != len(part) or not all(isinstance(draft, Draft) for draft in drafts):
                raise ConfigError(f"{drafter!r:.60} does not return a draft for each text")
            return drafts

        if len(work) > 1 and type(drafter).propose_all is not Drafter.propose_all:
            with suppress(*FAILURES):
                return [*propose(work)]
        drafts = [self._guarded(one[0], partial(propose, [one])) for one in work]
        return [None if draft is None else draft[0] for draft in drafts]

    def _forward(self, rows: list[DraftedRow]) -> Callable[[], Iterator[Any]]:
        clock = self.verifier.clock
        began, passed = clock(), time.perf_counter()
        scored = self.verifier.score([(row.text, row.draft or EMPTY) for row in rows])
        seconds = clock() - began
        self._seconds += time.perf_counter() - passed
        fed = [row.cost for row in rows]
        forward = SharedForward(seconds, sum(fed), len(rows))
        return lambda: ((*own, forward) for own in zip(scored, fed, strict=True))

    def _settle(self, row: DraftedRow, answer: Any) -> Step:
        step = row.settle(*answer)
        forward: SharedForward = answer[-1]
        forward.settled += 1
        forward.emitted += len(step.decision.committed)
        return step


def engine_for(
    model: DiffusionModel, requests: Sequence[Request], exact: bool = True
) -> SpeculativeEngine:
    """An engine with room for ``requests``, which have one recipe."""
    recipe: DraftedRecipe = requests[0].recipe
    engine = SpeculativeEngine(
        model, target_layer_ids=recipe.target_layer_ids, exact=exact, most=positions_for(requests),
        max_batch_size=recipe.config.max_batch_size,
        max_batch_tokens=recipe.config.max_batch_tokens,
    )  # fmt: skip
    engine.check(recipe)
    return engine
