"""DiffusionGemma's own sampler: a canvas of provisional tokens, decided as a whole at its end."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ..core.canvas import Canvas, FloatArray, IntArray
from ..core.capabilities import GREEDY, UNIFORM_NOISE
from ..core.limits import COUNT, NOT_NEGATIVE, TEMPERATURE, bounds
from .base import Draws, Prediction
from .compose import register
from .turn import Reviser


@dataclass
class Settled:
    """What the last steps of a canvas found likeliest, one array of tokens per step."""

    likeliest: list[IntArray] = field(default_factory=list)

    def settled(self, tokens: IntArray, entropy: FloatArray, times: int, bound: float) -> bool:
        """Whether a canvas has come to rest: the likeliest ``tokens`` are those of so many steps
        before, and the mean ``entropy`` is below the bound."""
        before = self.likeliest[:times]
        same = len(before) == times and all(np.array_equal(tokens, one) for one in before)
        self.likeliest = [tokens, *before][:times]
        return bool(same and len(entropy) and float(entropy.mean()) < bound)


@register("entropy_bound", paper="DiffusionGemma; Entropy Bounded Unmasking", arxiv="2505.24857")
class EntropyBound(Reviser):
    """Accept draws of low entropy, put new noise elsewhere, and decide the canvas when it settles.

    In each of at most ``max_denoising_steps`` (48) steps per canvas, at a temperature that falls
    from ``t_max`` (0.8) towards ``t_min`` (0.4), a token is drawn at every position.  Those of
    lowest entropy stay, as long as the entropies before them sum up to at most ``entropy_bound``
    (0.1 nats); all others become random again, and nothing is final.  The canvas ends with its last
    step, or when the likeliest tokens are those of the last ``stability_threshold`` (1) steps and
    the mean entropy is below ``confidence_threshold`` (0.005; 0: never).  The text is the likeliest
    tokens.  What is left open is taken from the checkpoint's ``generation_config.json``.
    """

    needs = frozenset({GREEDY, UNIFORM_NOISE})
    statistics: ClassVar = {"entropy": 1, "top_token": 1, "top_logprob": 1}
    limits = bounds(
        entropy_bound=NOT_NEGATIVE, max_denoising_steps=COUNT, t_min=TEMPERATURE, t_max=TEMPERATURE,
        stability_threshold=NOT_NEGATIVE, confidence_threshold=NOT_NEGATIVE,
    )  # fmt: skip

    entropy_bound: float | None = None
    max_denoising_steps: int | None = None
    t_min: float | None = None
    t_max: float | None = None
    stability_threshold: int | None = None
    confidence_threshold: float | None = None

    @property
    def _steps(self) -> int:
        return self.max_denoising_steps or 48

    def begin_block(self, canvas: Canvas) -> None:
        canvas.states[Settled] = Settled()

    def draws(self, canvas: Canvas) -> Draws:
        low = 0.4 if self.t_min is None else self.t_min
        high = 0.8 if self.t_max is None else self.t_max
        return Draws(low + (high - low) * (self._steps - canvas.block_step) / self._steps)

    def decide(self, turn: Any) -> None:
        canvas, p = turn.canvas, turn.view.prediction
        times = 1 if self.stability_threshold is None else self.stability_threshold
        bound = 0.005 if self.confidence_threshold is None else self.confidence_threshold
        settled = canvas.state(Settled).settled(p.top_token[:, 0], p.entropy, times, bound)
        if settled or canvas.block_step + 1 >= self._steps:
            turn.choose_these(np.ones(len(p.positions), np.bool_), *self.final(canvas, p, settled))
        else:
            canvas.hold(p.positions, np.where(self.accepted(p), p.token, -1))
            turn.choose_these(np.zeros(len(p.positions), np.bool_))
        turn.go_on()

    def final(self, canvas: Canvas, p: Prediction, settled: bool) -> tuple[IntArray, FloatArray]:
        """What is decided when the canvas ends, and the log-probabilities: the likeliest tokens."""
        assert p.top_token is not None and p.top_logprob is not None
        return p.top_token[:, 0], p.top_logprob[:, 0]

    def accepted(self, p: Prediction) -> Any:
        """(n,) bool: positions by ascending entropy while the sum before each keeps the bound."""
        assert p.entropy is not None
        order = np.argsort(p.entropy, kind="stable")
        entropy = p.entropy[order].astype(np.float64)
        bound = 0.1 if self.entropy_bound is None else self.entropy_bound
        accepted = np.zeros(len(order), np.bool_)
        accepted[order] = entropy.cumsum() - entropy <= bound
        return accepted
