"""The loop: draft, verify, accept, one sequence.  Without a drafter it is plain decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ..memory import PeakMemory
from .accept.rows import Coins, Rows, Sampling
from .base import EMPTY, AcceptRule, Draft, Drafting, Feedback, Outcome, RoundStats
from .length.control import LengthController
from .verifier import Verifier

# emitted ids -> whether their text contains a stop string
StopCheck = Callable[[list[int]], bool]


@dataclass
class Speculation:
    """One sequence being written.  ``limit`` is the longest it may get, prompt included."""

    verifier: Verifier
    drafting: Drafting | None
    controller: LengthController
    rule: AcceptRule
    sampling: Sampling
    coins: Coins
    limit: int
    stop_ids: tuple[int, ...] = ()
    stops: StopCheck | None = None
    rounds: list[RoundStats] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.prompt_length = len(self.verifier.tokens)
        self.memory = PeakMemory(self.verifier.model.device)
        self._attempted = False

    @property
    def tokens(self) -> list[int]:
        """What was emitted so far."""
        return self.verifier.tokens[self.prompt_length :]

    def run(self) -> Iterator[list[int]]:
        """Decode to the end; yields the tokens of every round."""
        while self.finish_reason is None:
            yield self.round()
        if self.drafting is not None:
            self.drafting.close()

    def round(self) -> list[int]:
        """Draft, verify, accept; returns the emitted tokens."""
        clock = [time.perf_counter()]
        prefix = self.verifier.prefix
        room = self.limit - len(prefix)  # one of them is the extra token
        draft = self._draft(room - 1, len(prefix))
        clock.append(time.perf_counter())
        logits = self.verifier.score(draft)
        rows = Rows(logits, draft, prefix, self.sampling, self.coins, len(self.rounds))
        outcome = self.rule.judge(rows, draft)
        clock.append(time.perf_counter())
        path, emitted, extra = self._cut(draft, outcome)
        self._record(rows, draft, path, emitted)
        self.verifier.commit(draft, path, emitted)
        fed = np.concatenate([prefix[-1:], draft.tokens])
        feedback = Feedback(draft, path, emitted, fed, logits)
        if self.drafting is not None:
            self.drafting.observe(feedback)
        clock.append(time.perf_counter())
        stats = RoundStats(
            drafted=len(draft), depth=1 + max(map(draft.depth, range(len(draft))), default=-1),
            accepted=len(path), emitted=len(emitted), extra=extra, source=draft.source,
            draft_seconds=clock[1] - clock[0], search_seconds=draft.search_seconds,
            verify_seconds=clock[2] - clock[1], other_seconds=clock[3] - clock[2],
            context=len(prefix), first=not self.rounds, attempted=self._attempted,
        )  # fmt: skip
        self.rounds.append(stats)
        self.controller.update(stats, feedback)
        self.seconds += time.perf_counter() - clock[0]
        return emitted

    def _draft(self, room: int, context: int) -> Draft:
        self._attempted = False
        if self.drafting is None or room <= 0:
            return EMPTY
        budget = self.controller.next(room, context)
        self._attempted = budget.length > 0
        if not self._attempted:
            return EMPTY
        draft = self.drafting.propose(self.verifier.prefix, budget)
        if not len(draft):
            return EMPTY
        self.rule.check(draft.distribution, not draft.is_chain)
        return draft.cut(room)

    def _cut(self, draft: Draft, outcome: Outcome) -> tuple[list[int], list[int], str]:
        """Accepted path, emitted tokens and the kind of the last, ended at the first stop."""
        path = outcome.path
        emitted = [*draft.tokens[path].tolist(), outcome.extra]
        extra = "correction" if draft.children(path[-1] if path else -1) else "bonus"
        length = min(len(emitted), self.limit - len(self.verifier.tokens))
        for i, token in enumerate(emitted[:length], 1):
            if token in self.stop_ids or self._stops(emitted[:i]):
                self.finish_reason, length = "stop", i
                break
        else:
            if len(self.verifier.tokens) + length >= self.limit:
                self.finish_reason = "length"
        if length <= len(path):  # an accepted token ends the text
            return path[:length], emitted[:length], "none"
        return path, emitted, extra

    def _stops(self, emitted: list[int]) -> bool:
        return self.stops is not None and self.stops(self.tokens + emitted)

    def _record(self, rows: Rows, draft: Draft, path: list[int], emitted: list[int]) -> None:
        nodes = [-1, *path][: len(emitted)]
        self.logprobs += rows.logprobs(nodes, emitted)
        self.order += [len(self.rounds)] * len(emitted)
