"""Reverse steps of uniform diffusion: every position takes the prediction, stays, or is redrawn."""

from typing import ClassVar

import numpy as np

from ..core.canvas import SELECTION, Canvas, FloatArray, IntArray
from ..core.capabilities import UNIFORM_NOISE
from ..core.limits import COUNT, NOT_NEGATIVE, TEMPERATURE, bounds, one_of
from .base import Draws, Prediction, top
from .compose import register
from .entropy_bound import Settled
from .turn import THE_ROW, Feed, Reviser, Turn

SELECTIONS = ("lowest_log_margin", "lowest_maxprob", "lowest_current_prob", "random")


@register(
    "ddim", paper="Structured Denoising Diffusion Models in Discrete State-Spaces",
    arxiv="2107.03006",
)  # fmt: skip
class DDIM(Reviser):
    """Step a canvas back along the posterior of uniform noise, given what the model predicts.

    Of ``num_inference_steps`` (16) steps per canvas, step k goes from a signal of k/N to one of
    (k+1)/N: each position takes the predicted token, keeps its own, or becomes random, with the
    probabilities of that posterior (D3PM; diffusers' ``DiscreteDDIMScheduler``).  The last step
    takes every prediction.  ``temperature`` draws predictions.  The canvas ends early when the
    likeliest tokens are those of the last ``stability_threshold`` (1) steps and their mean entropy
    is below ``confidence_threshold`` (0: never).

    With ``corrector_steps`` sweeps behind a step, ``corrector_k`` positions are drawn anew in each
    from what the model says without what they hold (arXiv 2605.22765): those that are least sure by
    ``corrector_selection`` ("lowest_log_margin", "lowest_maxprob", "lowest_current_prob"), with
    noise of scale ``corrector_selection_tau``, or at "random".  Sweeps count as steps.
    """

    needs = frozenset({UNIFORM_NOISE})
    limits = bounds(
        num_inference_steps=COUNT, stability_threshold=COUNT, confidence_threshold=NOT_NEGATIVE,
        corrector_steps=NOT_NEGATIVE, corrector_k=COUNT, corrector_selection_tau=TEMPERATURE,
        corrector_selection=one_of(SELECTIONS),
    )  # fmt: skip
    statistics: ClassVar = {"entropy": 1, "top_token": 2, "top_logprob": 2}

    num_inference_steps: int = 16
    stability_threshold: int = 1
    confidence_threshold: float = 0.0
    corrector_steps: int = 0
    corrector_k: int = 1
    corrector_selection: str = "lowest_log_margin"
    corrector_selection_tau: float = 1.0
    vocab_size: int | None = None  # the model's

    def begin_block(self, canvas: Canvas) -> None:
        canvas.states[Settled] = Settled()

    @property
    def _corrected(self) -> int:
        """Steps that have sweeps behind them: the first ones."""
        sweeps = self.corrector_steps
        return (self.num_inference_steps - 1) // (1 + sweeps) if sweeps else 0

    @property
    def _steps(self) -> int:
        """Steps that are no sweeps."""
        return self.num_inference_steps - self.corrector_steps * self._corrected

    def _place(self, canvas: Canvas) -> tuple[int, int]:
        """Which step this is, and which sweep behind it, from 1 on; 0: the step itself."""
        k, sweep = divmod(canvas.block_step, 1 + self.corrector_steps)
        if k < self._corrected:
            return k, sweep
        return canvas.block_step - self.corrector_steps * self._corrected, 0

    def feeds(self, canvas: Canvas) -> Feed:
        return Feed(soft=False) if self._place(canvas)[1] else THE_ROW

    def draws(self, canvas: Canvas) -> Draws | None:
        k, sweep = self._place(canvas)
        return Draws(signal=(k + 1) / self._steps) if sweep else None

    def decide(self, turn: Turn) -> None:
        canvas, p = turn.canvas, turn.view.prediction
        k, sweep = self._place(canvas)
        everything = np.ones(len(p.positions), np.bool_)
        assert p.top_token is not None and p.top_logprob is not None and p.entropy is not None
        if sweep:
            canvas.hold(p.positions, self._redrawn(canvas, p, (k + 1) / self._steps))
            turn.choose_these(~everything)
        elif canvas.state(Settled).settled(
            p.top_token[:, 0], p.entropy, self.stability_threshold, self.confidence_threshold
        ):
            turn.choose_these(everything, p.top_token[:, 0], p.top_logprob[:, 0])
        elif k + 1 >= self._steps:
            turn.choose_these(everything)
        else:
            canvas.hold(p.positions, self._moved(canvas, p, k))
            turn.choose_these(~everything)
        turn.go_on()

    def _moved(self, canvas: Canvas, p: Prediction, k: int) -> IntArray:
        """(n,) what positions become in a step, -1 for noise."""
        ids, here = self.vocab_size or 1, canvas.fed_ids(p.positions, self.vocab_size or 1)
        kept, after = k / (k + 1), (k + 1) / self._steps
        takes = after * (1 - kept) / ids + kept * after * (here == p.token)
        stays, leaves = kept * (1 - after) / ids, (1 - kept) * (1 - after) / ids
        drawn = canvas.uniform(SELECTION, p.positions) * (takes + stays + leaves)
        return np.where(drawn < takes, p.token, np.where(drawn < takes + stays, here, -1))

    def _redrawn(self, canvas: Canvas, p: Prediction, signal: float) -> IntArray:
        """(n,) what positions become in a sweep."""
        ids = self.vocab_size or 1
        here, drawn = canvas.fed_ids(p.positions, ids), canvas.uniform(SELECTION, p.positions)
        assert p.top_token is not None and p.top_logprob is not None

        def mixed(logprob: FloatArray) -> FloatArray:
            noisy = signal * np.exp(logprob.astype(np.float64)) + (1 - signal) / ids
            return np.log(noisy).astype(np.float32)

        own, best = mixed(p.asked["held"][:, 0]), mixed(p.top_logprob[:, 0])
        if self.corrector_selection == "random":
            keys: FloatArray = drawn.astype(np.float32)
        else:
            other = np.where(p.top_token[:, 0] == here, mixed(p.top_logprob[:, 1]), best)
            doubt = {"lowest_maxprob": -best, "lowest_current_prob": -own}.get(
                self.corrector_selection, other - own
            )
            gumbel = -np.log(-np.log(drawn.astype(np.float64)))
            keys = (doubt / self.corrector_selection_tau + gumbel).astype(np.float32)
        chosen = top(keys, self.corrector_k)
        here[chosen] = p.token[chosen]
        return here
