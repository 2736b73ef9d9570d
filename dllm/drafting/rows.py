"""One text while it is drafted and verified, and what a round did to it."""

from dataclasses import dataclass, field

import numpy as np

from ..core.canvas import Canvas, IntArray
from ..engine.work import Row, Step
from ..samplers import NOTHING, Decision
from .accept.rows import KeyedNoise, Rows, Sampling
from .base import EMPTY, Budget, Draft, Drafting, DraftRequest, Feedback, Outcome, RoundStats
from .length.control import LengthController
from .recipe import DraftedRecipe
from .verifiers.base import Scored, Text, Verifier


@dataclass(slots=True)
class SharedForward:
    """One forward of the verifier: its ``seconds``, the tokens ``fed`` for all its texts, and how
    many of the ``texts`` got how many tokens so far."""

    seconds: float
    fed: int
    texts: int
    settled: int = 0
    emitted: int = 0


@dataclass(eq=False)
class DraftedRow(Row):
    """A text at work.  ``fresh`` is its canvas as it was admitted; ``text`` what the verifier keeps
    of it; ``draft`` the planned round, None before; ``draft_seconds`` its share of the drafter's
    time, None where the drafter was not asked."""

    recipe: DraftedRecipe
    fresh: Canvas
    draft: Draft | None = None
    draft_seconds: float | None = None
    rounds: list[RoundStats] = field(default_factory=list)
    verifier: Verifier = field(init=False)
    text: Text = field(init=False)
    drafting: Drafting | None = None
    controller: LengthController = field(init=False)
    sampling: Sampling = field(init=False)
    noise: KeyedNoise = field(init=False)

    @property
    def size(self) -> int:
        return len(self.fresh.tokens)

    @property
    def planned(self) -> bool:
        return self.draft is not None

    @property
    def cost(self) -> int:
        return len(self.text.fresh) + len(self.draft or EMPTY)

    @property
    def length(self) -> int:
        """Tokens that are committed, prompt included."""
        return len(self.text.tokens)

    @property
    def prefix(self) -> IntArray:
        """The committed tokens (n,)."""
        return self.canvas.tokens[: self.length]

    def open(self, verifier: Verifier) -> None:
        """Have verifier and drafter begin with the text."""
        recipe, canvas, model = self.recipe, self.canvas, verifier.model
        prompt, limit = canvas.tokens[: canvas.prompt_length], len(canvas.tokens)
        self.noise = KeyedNoise(recipe.config.seed, canvas.row)
        self.sampling = recipe.sampling(model, prompt, limit)
        self.controller = recipe.controller.fresh()
        self.verifier, self.text = verifier, verifier.open(prompt, limit, recipe.config.cache_salt)
        try:
            if recipe.drafter is not None:
                self.drafting = recipe.drafter.open(DraftRequest(
                    # of copies: what a drafter does to them is its own affair
                    prompt=prompt.copy(), vocab_size=model.facts.vocab_size, limit=limit,
                    stop_ids=model.facts.stop_token_ids, temperature=recipe.config.temperature,
                    noise_key=self.noise.emission, draft_key=self.noise.drafting,
                    trees=verifier.trees and recipe.rule.trees, verifier=model,
                ))  # fmt: skip
        except BaseException:
            verifier.close(self.text)
            raise

    def restart(self) -> None:
        self.canvas.become(self.fresh.fork())
        self.rounds = []
        self.restarts += 1

    def close(self) -> None:
        """Complete or given up: everybody gives back what they hold for the text."""
        drafting, self.drafting, self.draft = self.drafting, None, None
        try:
            if drafting is not None:
                drafting.close()
        finally:
            self.verifier.close(self.text)

    # -- a round --------------------------------------------------------------------------------

    @property
    def _room(self) -> int:
        """The longest draft of use: a token more may be emitted than is drafted."""
        return len(self.canvas.tokens) - self.length - self.recipe.rule.beyond

    def budget(self) -> Budget | None:
        """What the drafter may propose in this round; None: it is not asked."""
        if self.drafting is None or self._room <= 0:
            return None
        budget = self.controller.next(self._room, self.length)
        return budget if budget.length > 0 else None

    def plan(self, draft: Draft) -> None:
        """Have ``draft`` verified in the next round."""
        if len(draft):
            draft = draft.checked(self.verifier.model.facts.vocab_size).cut(self._room)
            self.recipe.rule.check(draft.distribution, not draft.is_chain)
        self.draft = draft if len(draft) else EMPTY

    def settle(self, scored: Scored, fed: int, forward: SharedForward) -> Step:
        """Commit of the draft what the rule accepts, and one token more; ``fed`` tokens of the
        ``forward`` were the text's."""
        began = self.verifier.clock()
        draft, prefix, canvas = self.draft, self.prefix, self.canvas
        assert draft is not None
        logits = scored.logits[: len(draft) + 1]
        rows = Rows(logits, draft, prefix, self.sampling, self.noise, len(self.rounds))
        outcome = self.recipe.rule.judge(rows, draft)
        judged = self.verifier.clock()
        emitted = self._cut([*draft.tokens[outcome.path].tolist(), outcome.extra])
        logprobs = rows.logprobs([-1, *outcome.path][: len(emitted)], emitted)
        decision = self._commit(emitted, logprobs)
        emitted = emitted[: len(decision.committed)]
        path, extra = self._accepted(draft, outcome, len(emitted))
        hidden = self.verifier.seen(self.text, scored.hidden)
        self.verifier.commit(self.text, draft, path, emitted, scored.hidden)
        canvas.nfe, canvas.computed = self.text.forwards, self.text.computed
        feedback = Feedback(draft, path, emitted, hidden)
        if self.drafting is not None:
            self.drafting.observe(feedback)
        stats = RoundStats(
            drafted=len(draft), depth=1 + max(map(draft.depth, range(len(draft))), default=-1),
            accepted=len(path), emitted=len(emitted), extra=extra, source=draft.source,
            draft_seconds=self.draft_seconds or 0.0, search_seconds=draft.search_seconds,
            verify_seconds=forward.seconds + judged - began,
            other_seconds=self.verifier.clock() - judged, context=len(prefix),
            first=not self.rounds, attempted=self.draft_seconds is not None,
            beside=forward.fed - fed,
            beside_emitted=forward.emitted + forward.texts - forward.settled - 1,
            deviations=outcome.deviations,
        )  # fmt: skip
        self.rounds.append(stats)
        self.controller.update(stats, feedback)
        self.draft, self.draft_seconds = None, None
        return Step(
            row=self, canvas=canvas, decision=decision, window=canvas.window,
            number=max(0, canvas.step - 1), positions=fed, accepted=len(path),
        )  # fmt: skip

    def _cut(self, emitted: list[int]) -> list[int]:
        """What fits, up to the first stop id."""
        emitted = emitted[: len(self.canvas.tokens) - self.length]
        for i, token in enumerate(emitted, 1):
            if token in self.recipe.stop_ids:
                return emitted[:i]
        return emitted

    def _commit(self, emitted: list[int], logprobs: list[float]) -> Decision:
        """Decide the next positions, and finish the text where they, or a stop string, end it."""
        canvas, low = self.canvas, self.length
        high = low + len(emitted)
        positions, tokens = np.arange(low, high), np.asarray(emitted, np.int64)
        known = np.asarray(logprobs, np.float32)
        canvas.commit(positions, tokens, known)
        canvas.window = high, high
        canvas.step += 1
        if emitted[-1] in self.recipe.stop_ids:
            canvas.stop_position = high - 1
            canvas.cut(high - 1)
            canvas.finish("stop")
        if self.recipe.after_step is not None:
            self.recipe.after_step(canvas)
        if not canvas.finished and high >= len(canvas.tokens):
            canvas.finish("length")
        n = canvas.end - low
        return Decision(positions[:n], NOTHING, tokens=tokens[:n], logprobs=known[:n])

    def _accepted(self, draft: Draft, outcome: Outcome, emitted: int) -> tuple[list[int], str]:
        """The accepted path, and the kind of the last token that was emitted."""
        path = outcome.path
        if emitted <= len(path):  # an accepted token ends the text
            return path[:emitted], "none"
        return path, "correction" if draft.children(path[-1] if path else -1) else "bonus"
