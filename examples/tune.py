"""Find the fastest setting that is as good as one token per step, and use it.

python examples/tune.py
"""

from __future__ import annotations

import dllm
from dllm.eval.curves import settings
from dllm.eval.measure import Setting
from dllm.eval.tune import Tuning, tune

CANVAS = {"max_new_tokens": 32}
CURVES = ["threshold"]  # which samplers to search; names as in `dllm samplers`


def main() -> None:
    model = dllm.load("nano")
    candidates = settings([], CURVES, ["none"], CANVAS)
    baseline = Setting("llada", "llada", "none", CANVAS)
    how = Tuning(["reverse"], by="nfe", screen=6, confirm=48, tolerance=0.15)
    result = tune(model, candidates, baseline, how)
    print(f"{result.setting.label}: {result.saving:.1f} times fewer forwards, confirmed by "
          f"{result.examples} prompts: {result.confirmed}")  # fmt: skip
    out = dllm.generate(
        model, "Reverse this list: Tom, Anna, Ben",
        sampler=result.setting.sampler, cache=result.setting.cache, **result.setting.arguments,
    )  # fmt: skip
    print(out.text, out.footer(), sep="\n")


if __name__ == "__main__":
    main()
