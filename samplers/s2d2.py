"""S2D2: a block-diffusion model drafts a block, and verifies it from left to right itself."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from ..core.canvas import SELECTION, Canvas, FloatArray, IntArray
from ..core.capabilities import BLOCK_CAUSAL, FINAL, FIXED_WINDOW, KEEPS_TEXT, MASKED
from ..core.limits import COUNT, FINITE, POSITIVE, SHARE, THRESHOLD, bounds, one_of
from .base import NO_SCORES, Part, Prediction, View
from .compose import register
from .threshold import Threshold
from .turn import THE_ROW, Explorer, Feed, Trial, Turn, trial


@dataclass
class Routing:
    """The drafts that the next forward verifies, None where it does not; what was said where they
    were made; whether the last decision of hysteresis was to verify."""

    drafts: Trial | None = None
    prediction: Prediction | None = None
    score: FloatArray = field(default_factory=lambda: NO_SCORES)
    on: bool = False


@register(
    "s2d2",
    paper="S2D2: Fast Decoding for Diffusion LLMs via Training-Free Self-Speculation",
    arxiv="2603.25702",
)
class S2D2(Explorer):
    """Where it is likely to pay, commit the drafts of a block that the same model confirms.

    With blocks of one position a block-diffusion model is autoregressive.  So it can judge its own
    drafts for the first run of masks, in one more forward pass.  The pass reads the block filled
    with its drafts, and a mask for each position of the run; each sees only what is left of it.
    (Where logits are shifted no masks are needed.)  From left to right a draft stays with
    probability (q / p) ** ``tempering`` (1), at most 1: q is its probability in this pass, p the
    one it was drafted with.  The first draft that fails ends the run; with ``resample`` (True) it
    becomes a token from (q - p)+.  The selectors add tokens if fewer than ``n`` (1) were committed,
    or always with ``sure`` (official: always_check_high_confidence).  ``ratio`` commits all drafts
    of the run with at least that probability, and with ``everywhere`` those of the whole block.

    ``policy`` says when to verify: "span" where the run has ``tau_span`` (1) masks; "score" where
    S >= ``tau_score`` (0); "hysteresis" from S > ``tau_on`` (1) until S < ``tau_off`` (-5).  S is
    the expected number of accepted drafts, sum over k of the product of the first k acceptances,
    minus ``c`` (1), which with ``dynamic`` counts for every mask above ``tau`` (0.85).  An
    acceptance is exp(-``entropy_temperature`` H / ln V), or with ``estimator="margin"`` whether p1
    - p2 exceeds ``margin`` (0.05).

    The defaults are those of SDAR with blocks of 4; there ``causal`` also encodes what is decided
    from the left on as if blocks had one position (the official code's AR-like caching).  Other
    steps are those of the selectors, ``threshold(tau=0.85)`` unless others are given.

    p and q are what temperature and filters leave, at temperature 0 the model's own; the text
    depends on the seed there, too.  Where every step verifies, ``s2d2(policy=span, causal=True)``,
    it has the distribution of the same model with blocks of one position, at the temperature.
    Models whose attention is bidirectional are not autoregressive in any block and are refused.
    """

    needs = frozenset({BLOCK_CAUSAL, FIXED_WINDOW, KEEPS_TEXT, MASKED, FINAL})
    statistics: ClassVar = {"residual": 1, "entropy": 1, "margin": 1}
    limits = bounds(
        policy=one_of(("span", "score", "hysteresis")), estimator=one_of(("entropy", "margin")),
        tau_span=COUNT, c=FINITE, tau=THRESHOLD, margin=SHARE,
        entropy_temperature=FINITE, tempering=POSITIVE, n=COUNT, ratio=SHARE
    )  # fmt: skip

    policy: str = "score"
    tau_span: int = 1
    tau_score: float = 0.0
    tau_on: float = 1.0
    tau_off: float = -5.0
    c: float = 1.0
    dynamic: bool = False
    tau: float = 0.85
    estimator: str = "entropy"
    margin: float = 0.05
    entropy_temperature: float = 1.0
    tempering: float = 1.0
    resample: bool = True
    n: int = 1
    sure: bool = False
    ratio: float | None = None
    everywhere: bool = False
    causal: bool = False
    vocab_size: int | None = None

    def companions(self, family: str) -> tuple[Part, ...]:
        return (Threshold(self.tau, self.n),)

    def feeds(self, canvas: Canvas) -> Feed:
        routing, masks, (low, high) = canvas.state(Routing), canvas.masks(), canvas.window
        if routing.drafts is not None:
            first = masks[: run(masks)]
            judged = masks if self.everywhere and self.ratio is not None else first
            return Feed((routing.drafts,), judged, (0 if self.causal else low, high))
        if not self.causal:
            return THE_ROW
        return Feed(ordered=(0, int(masks[0]) if masks.size else high))

    def decide(self, turn: Turn) -> None:
        routing = turn.canvas.state(Routing)
        if routing.drafts is not None:
            self._accept(turn, routing)
        elif not turn.stopped() and self._pays(turn.view, routing):
            open_ = turn.canvas.masked[turn.view.positions]
            routing.drafts = trial(turn.view, open_)
            routing.prediction, routing.score = turn.view.all_predictions, turn.view.score
            turn.choose_these(np.zeros(len(open_), np.bool_))
        turn.go_on()

    def _pays(self, view: View, routing: Routing) -> bool:
        if self.policy == "span":
            verifies = bool(len(view.positions)) and run(view.positions) >= self.tau_span
        else:
            score = self.expected_gain(view)
            below = self.tau_score if self.policy == "score" else self.tau_off
            off = self.policy == "hysteresis" and not routing.on
            verifies = score > self.tau_on if off else score >= below
        routing.on = verifies
        return verifies

    def expected_gain(self, view: View) -> float:
        """S, minus infinity where nothing is masked."""
        p, count = view.prediction, run(view.positions)
        if not count:
            return -np.inf
        assert p.entropy is not None and p.margin is not None, "asked for by name"
        if self.estimator == "margin":
            acceptance = (p.margin[:count] > self.margin).astype(np.float32)
        else:
            entropy = p.entropy[:count] / np.log(self.vocab_size or 2)
            acceptance = np.exp(-self.entropy_temperature * entropy)
        above = int((np.exp(p.logprob) > self.tau).sum()) if self.dynamic else 1
        return float(acceptance.cumprod().sum()) - self.c * above

    def _accept(self, turn: Turn, routing: Routing) -> None:
        """Commit what stands of the drafts, and what the selectors add."""
        canvas, made, masks = turn.canvas, routing.prediction, turn.seen[0].masks
        assert made is not None and masks is not None
        view = turn.look_at(made, routing.score)
        p, routing.drafts, routing.prediction = view.prediction, None, None
        count = run(view.positions)
        judged = len(masks.positions)  # the first of the masks
        ratio = np.exp(np.minimum(masks.asked["stands"][:, 0], 0)) ** self.tempering
        stands = canvas.uniform(SELECTION, view.positions[:count]) < ratio[:count]
        first = count if stands.all() else int(stands.argmin())
        chosen = np.arange(len(view.positions)) <= min(first, count - 1)
        tokens, logprobs = p.token.copy(), p.logprob.copy()
        if first < count and self.resample:
            tokens[first], logprobs[first] = masks.token[first], masks.logprob[first]
        if self.ratio is not None:
            chosen[:judged] |= ratio >= self.ratio
        if self.sure or int(chosen.sum()) < self.n:  # what is accepted counts as the surest
            score = np.where(chosen, np.inf, view.score).astype(np.float32)
            chosen = chosen | turn.selection.choose(replace(view, score=score))[0]
        turn.choose_these(chosen, tokens, logprobs)


def run(positions: IntArray) -> int:
    """How many of the ascending ``positions`` follow one another from the first on."""
    gaps = np.flatnonzero(np.diff(positions) != 1)
    return int(gaps[0]) + 1 if gaps.size else len(positions)
