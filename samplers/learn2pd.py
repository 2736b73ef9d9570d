"""Learn2PD: a small learned filter decides which proposals are final."""

from __future__ import annotations

import io
import zipfile
from functools import cache
from importlib import resources
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..core.canvas import BoolArray, Canvas, FloatArray
from ..core.capabilities import FIXED_WINDOW, OWN_PREDICTIONS, PROBABILITY, WINDOW_LOGITS
from ..core.errors import ConfigError
from ..core.limits import THRESHOLD, bounds
from .base import Part, Reads, Selector, View, top
from .compose import register
from .windows import StaticBlocks

LEARN2PD = "Learning to Parallel: Accelerating Diffusion LLMs via Adaptive Parallel Decoding"


@cache
def filter_weights(source: str) -> dict[str, FloatArray]:
    """``w1`` (K, H), ``b1`` (H,), ``w2`` (H, K), ``b2`` (K,) of a filter."""
    try:
        nano = resources.files("dllm") / "nano" / "nano" / "filter.npz"
        data = nano.read_bytes() if source == "nano" else Path(source).read_bytes()
        with np.load(io.BytesIO(data), allow_pickle=False) as result:
            return {name: result[name].astype(np.float32) for name in ("w1", "b1", "w2", "b2")}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"cannot read the filter {source!r}: train one with `dllm train filter` ({error})"
        ) from error


def apply_filter(weights: dict[str, FloatArray], confidence: FloatArray) -> FloatArray:
    """(..., K) confidences of a block to (..., K) logits of being final."""
    hidden = np.maximum(confidence @ weights["w1"] + weights["b1"], 0)
    logits: FloatArray = hidden @ weights["w2"] + weights["b2"]
    return logits


@register("learn2pd", paper=LEARN2PD, arxiv="2509.25188")
class Learn2PD(Selector):
    """Commit what a filter over the block's confidences calls final, and always the best one.

    The filter is a two-layer perceptron from the K likeliest-token probabilities of a block,
    decided positions included, to K logits; what exceeds the probability ``theta`` (0.96) is
    committed.  Its width is not published; 64 is this library's.  ``filter``: an ``.npz`` file
    made by ``dllm train filter``; the default was trained on the bundled model, which it fits.
    Blocks are as long as the filter is wide; shorter ones are padded with certainty, longer ones
    filtered piece by piece.
    """

    needs = frozenset({PROBABILITY, WINDOW_LOGITS, FIXED_WINDOW, OWN_PREDICTIONS})
    statistics: ClassVar = {"max_logprob": 1}
    limits = bounds(theta=THRESHOLD)

    theta: float = 0.96
    filter: str = "nano"

    def companions(self, family: str) -> tuple[Part, ...]:
        return (StaticBlocks(len(filter_weights(self.filter)["b2"])),)

    def reads(self, canvas: Canvas) -> Reads:
        return Reads(np.arange(*canvas.window))

    def select(self, view: View) -> BoolArray:
        weights = filter_weights(self.filter)
        low, high = view.canvas.window
        width = len(weights["b2"])
        pieces = -(-(high - low) // width)
        confidence = np.ones(pieces * width, np.float32)
        whole = view.all_predictions
        here = (whole.positions >= low) & (whole.positions < high)
        assert whole.max_logprob is not None
        confidence[whole.positions[here] - low] = np.exp(whole.max_logprob[here])
        logits = apply_filter(weights, confidence.reshape(pieces, width)).ravel()
        sure = 1 / (1 + np.exp(-logits))
        chosen: BoolArray = sure[view.positions - low] > self.theta
        return chosen | top(view.score, 1)
