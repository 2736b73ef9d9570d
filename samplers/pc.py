"""Scores that know where a position lies or how common its token is."""

from __future__ import annotations

import io
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np

from ..core.canvas import Canvas, FloatArray
from ..core.capabilities import REPEATABLE
from ..core.errors import ConfigError
from .base import Part, Prediction, Scorer
from .compose import register
from .fixed import Fixed
from .llada import LLaDA


@cache
def _frequencies(source: str) -> FloatArray:
    """Relative frequencies (V,) from an ``.npy`` file of counts."""
    try:
        nano = resources.files("dllm") / "nano" / "nano" / "frequencies.npy"
        data = nano.read_bytes() if source == "nano" else Path(source).read_bytes()
        counts = np.load(io.BytesIO(data), allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read token frequencies from {source!r}: pass an .npy file with one count per "
            f"token id ({error})"
        ) from error
    if counts.ndim != 1 or not counts.sum() > 0:
        raise ConfigError(f"{source!r} must hold one count per token id, not {counts.shape}")
    result: FloatArray = (counts / counts.sum()).astype(np.float32)
    return result


@register(
    "pc",
    paper="PC-Sampler: Position-Aware Calibration of Decoding Bias in Masked Diffusion Models",
    arxiv="2508.13021",
)
class PC(Scorer):
    """Probability times the surprise of the token, fading with its position.

    Score: min(-p ln(f + 1e-10), ``alpha``) x exp(-``decay`` x offset in the region), f being the
    token's relative frequency in a corpus; ``alpha`` 10, ``decay`` 0.25 (0 leaves positions out,
    as a third-party implementation does).  ``frequencies``: an ``.npy`` file with one count per
    token id; the default is the bundled model's and fits no other.
    """

    offers = frozenset({REPEATABLE})

    alpha: float = 10.0
    decay: float = 0.25
    frequencies: str = "nano"

    def companions(self) -> tuple[Part, ...]:
        return (LLaDA(), Fixed())

    def score(self, canvas: Canvas, prediction: Prediction) -> FloatArray:
        frequency = _frequencies(self.frequencies)
        if prediction.token.size and prediction.token.max() >= len(frequency):
            raise ConfigError(
                f"frequencies={self.frequencies!r} knows {len(frequency)} ids, not "
                f"{int(prediction.token.max())}: pass counts for this model's vocabulary"
            )
        surprise = -np.log(frequency[prediction.token] + 1e-10)
        score = np.minimum(np.exp(prediction.logprob) * surprise, self.alpha)
        fade = np.exp(-self.decay * (prediction.positions - canvas.start))
        result: FloatArray = (score * fade).astype(np.float32)
        return result
