"""The loop: draft, verify, accept, for one text or many.  Without a drafter it decodes plainly."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ..memory import PeakMemory
from .accept.rows import KeyedNoise, Rows, Sampling
from .base import (
    EMPTY,
    AcceptRule,
    Budget,
    Draft,
    Drafter,
    Drafting,
    Feedback,
    Outcome,
    RoundStats,
)
from .length.control import LengthController
from .verifiers.base import Scored, Text, Verifier

# emitted ids -> whether their text contains a stop string
StopCheck = Callable[[list[int]], bool]


@dataclass
class Speculation:
    """One text being written.  ``seconds`` are those of the rounds it took part in."""

    verifier: Verifier
    text: Text
    drafting: Drafting | None
    controller: LengthController
    rule: AcceptRule
    sampling: Sampling
    coins: KeyedNoise
    stop_ids: tuple[int, ...] = ()
    stops: StopCheck | None = None
    rounds: list[RoundStats] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.prompt_length = len(self.text.tokens)
        self.memory = PeakMemory(self.verifier.model.device)

    @property
    def tokens(self) -> list[int]:
        """What was emitted so far."""
        return self.text.tokens[self.prompt_length :]

    def budget(self) -> Budget | None:
        """What the drafter may propose in this round; None: it is not asked."""
        room = self.text.limit - len(self.text.tokens) - 1  # one is the extra token
        if self.drafting is None or room <= 0:
            return None
        budget = self.controller.next(room, len(self.text.tokens))
        return budget if budget.length > 0 else None

    def checked(self, draft: Draft) -> Draft:
        """``draft`` as it goes to the verifier."""
        if not len(draft):
            return EMPTY
        self.rule.check(draft.distribution, not draft.proposed.is_chain)
        return draft.cut(self.text.limit - len(self.text.tokens) - 1)

    def take(self, draft: Draft, scored: Scored, clock: RoundClock) -> list[int]:
        """Accept of ``draft`` what the rule accepts; returns the emitted tokens."""
        began = time.perf_counter()
        prefix = self.text.prefix
        fed, draft = draft, draft.proposed
        logits = scored.logits[: len(draft) + 1]
        rows = Rows(logits, draft, prefix, self.sampling, self.coins, len(self.rounds))
        outcome = self.rule.judge(rows, draft)
        judged = time.perf_counter()
        path, emitted, extra = self._cut(draft, outcome)
        self._record(rows, path, emitted)
        self.verifier.commit(self.text, fed, path, emitted)
        ids = np.concatenate([prefix[-1:], fed.tokens])
        feedback = Feedback(fed, path, emitted, ids, scored.logits, scored.hidden)
        if self.drafting is not None:
            self.drafting.observe(feedback)
        stats = RoundStats(
            drafted=len(draft), depth=1 + max(map(draft.depth, range(len(draft))), default=-1),
            accepted=len(path), emitted=len(emitted), extra=extra, source=draft.source,
            draft_seconds=clock.draft, search_seconds=draft.search_seconds,
            verify_seconds=clock.verify + judged - began,
            other_seconds=time.perf_counter() - judged, context=len(prefix),
            first=not self.rounds, attempted=clock.attempted, beside=clock.beside,
            beside_emitted=clock.beside_emitted, deviations=outcome.deviations,
        )  # fmt: skip
        self.rounds.append(stats)
        self.controller.update(stats, feedback)
        return emitted

    def _cut(self, draft: Draft, outcome: Outcome) -> tuple[list[int], list[int], str]:
        """Accepted path, emitted tokens and the kind of the last, ended at the first stop."""
        path = outcome.path
        emitted = [*draft.tokens[path].tolist(), outcome.extra]
        extra = "correction" if draft.children(path[-1] if path else -1) else "bonus"
        length = min(len(emitted), self.text.limit - len(self.text.tokens))
        for i, token in enumerate(emitted[:length], 1):
            if token in self.stop_ids or self._stops(emitted[:i]):
                self.finish_reason, length = "stop", i
                break
        else:
            if len(self.text.tokens) + length >= self.text.limit:
                self.finish_reason = "length"
        if length <= len(path):  # an accepted token ends the text
            return path[:length], emitted[:length], "none"
        return path, emitted, extra

    def _stops(self, emitted: list[int]) -> bool:
        return self.stops is not None and self.stops(self.tokens + emitted)

    def _record(self, rows: Rows, path: list[int], emitted: list[int]) -> None:
        nodes = [-1, *path][: len(emitted)]
        self.logprobs += rows.logprobs(nodes, emitted)
        self.order += [len(self.rounds)] * len(emitted)

    def close(self) -> None:
        """The text is complete, or given up: everybody gives back what they hold for it."""
        if self.drafting is not None:
            self.drafting.close()
        self.verifier.close(self.text)


@dataclass
class RoundClock:
    """What a round cost before its tokens are accepted; see `RoundStats`."""

    attempted: bool = False
    draft: float = 0.0
    verify: float = 0.0
    beside: int = 0
    beside_emitted: int = 0


Start = Callable[[], Speculation]


class Batch:
    """Texts written side by side: every round verifies the drafts of all in one call.

    ``waiting`` starts texts; at most ``rows`` are written at a time, the next one joins when one
    has finished, and joining ones feed prompts of at most ``prompt_tokens`` tokens per round (or
    one).  ``drafter`` is the one whose draftings the texts have.
    """

    def __init__(
        self, verifier: Verifier, drafter: Drafter | None, waiting: Iterable[Start],
        rows: int = 1, prompt_tokens: int = 4096,
    ) -> None:  # fmt: skip
        self.verifier, self.drafter = verifier, drafter
        self.waiting = deque(waiting)
        self.rows, self.prompt_tokens = rows, prompt_tokens
        self.active: list[Speculation] = []

    def run(self) -> Iterator[list[tuple[Speculation, list[int]]]]:
        """Decode to the end; yields after every round its texts and what they got."""
        try:
            while self.active or self.waiting:
                began = time.perf_counter()
                self._admit()
                emitted = self._round()
                seconds = time.perf_counter() - began
                for row in self.active:
                    row.seconds += seconds
                finished = [row for row in self.active if row.finish_reason is not None]
                pairs = list(zip(self.active, emitted, strict=True))
                self.active = [row for row in self.active if row.finish_reason is None]
                for row in finished:
                    row.close()
                yield pairs
        finally:
            for row in self.active:  # given up in the middle
                row.close()
            self.active = []

    def _admit(self) -> None:
        tokens = 0
        while self.waiting and len(self.active) < self.rows and tokens < self.prompt_tokens:
            row = self.waiting.popleft()()
            tokens += row.prompt_length
            self.active.append(row)

    def _round(self) -> list[list[int]]:
        clocks, drafts = self._draft()
        began = time.perf_counter()
        work = [(row.text, draft) for row, draft in zip(self.active, drafts, strict=True)]
        fed = [len(text.fresh) + len(draft) for text, draft in work]
        scored = self.verifier.score(work)
        seconds = time.perf_counter() - began
        emitted: list[list[int]] = []
        for row, draft, rows, clock, own in zip(
            self.active, drafts, scored, clocks, fed, strict=True
        ):
            clock.verify, clock.beside = seconds, sum(fed) - own
            clock.beside_emitted = (
                sum(len(tokens) for tokens in emitted) + len(self.active) - len(emitted) - 1
            )
            emitted.append(row.take(draft, rows, clock))
        return emitted

    def _draft(self) -> tuple[list[RoundClock], list[Draft]]:
        """A draft for every text, in one call of the drafter."""
        clocks, drafts = [RoundClock() for _ in self.active], [EMPTY] * len(self.active)
        work, asked = [], []
        began = time.perf_counter()
        for i, row in enumerate(self.active):
            budget = row.budget()
            if budget is not None:
                assert row.drafting is not None
                work.append((row.drafting, row.text.prefix, budget))
                asked.append(i)
        if not work:
            return clocks, drafts
        assert self.drafter is not None
        proposed = self.drafter.propose_all(work)
        seconds = (time.perf_counter() - began) / len(work)
        for i, draft in zip(asked, proposed, strict=True):
            drafts[i] = self.active[i].checked(draft)
            clocks[i] = RoundClock(attempted=True, draft=seconds)
        return clocks, drafts
