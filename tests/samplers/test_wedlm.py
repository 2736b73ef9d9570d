"""WeDLM's rule on scores worked out by hand."""

import numpy as np
import pytest

import dllm
from dllm.core.canvas import Canvas
from dllm.samplers import Prediction, View, compose
from dllm.samplers.dcd import DCD
from dllm.samplers.wedlm import WeDLM

from ..table import EOS, MASK


@pytest.mark.parametrize(("entropy", "penalty", "expected"), [
    ([0.3, 0.5, 0.39, 0.41], 0.0, [3, 5]),
    ([0.3, 0.5, 0.39, 0.31], 0.02, [3, 6]),  # 0.39 + 2 x 0.02 is not below 0.4
    ([0.9, 0.5, 0.49, 0.6], 0.0, [5]),  # none: the least
    ([0.52, 0.5, 0.9, 0.9], 0.1, [3]),  # the least with its distance
    ([0.4, 0.9, 0.9, 0.9], 0.0, [3]),  # not below, but the least
])  # fmt: skip
def test_entropy_and_distance_stay_below_the_threshold(
    entropy: list[float], penalty: float, expected: list[int]
) -> None:
    canvas = Canvas.for_prompt(np.array([1, 2, 3]), 4, mask_id=MASK, pad_id=EOS)
    canvas.open_window(3, 7)
    at = np.arange(3, 7)
    prediction = Prediction(at, at, np.zeros(4, np.float32))
    view = View(canvas, prediction, -np.array(entropy, np.float32), prediction)
    chosen = WeDLM(penalty=penalty).select(view)
    assert at[chosen].tolist() == expected


def test_what_comes_with_it() -> None:
    sampler = compose("wedlm")
    assert isinstance(sampler.window, DCD)
    assert (sampler.window.s_init, sampler.window.s_max) == (16, 16)
    assert sampler.eos.eos_policy == "prefix_complete"  # type: ignore[attr-defined]
    narrow = compose("wedlm(penalty=0.1)+dcd(6, 6)")
    assert (narrow.window.s_max, len(narrow.selectors)) == (6, 1)  # type: ignore[attr-defined]
    out = dllm.generate("nano", "Compute 69 + 49.", sampler="wedlm", max_new_tokens=32)
    assert out.nfe < len(out.tokens)
    for spec in ("wedlm(-1)", "wedlm(penalty=-1)", "wedlm(penalty=inf)", "credit(inf)"):
        with pytest.raises(dllm.ConfigError, match=r"must (not be negative|be finite)"):
            compose(spec)
