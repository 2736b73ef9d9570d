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
    how = Tuning(["reverse"], by="nfe", rungs=(6,), confirm=48, tolerance=0.15)
    found = tune(model, candidates, baseline, how)
    print(f"{found.setting.label}: {found.saving:.1f} times fewer forwards, confirmed by "
          f"{found.examples} prompts: {found.confirmed}")  # fmt: skip
    out = dllm.generate(
        model, "Reverse this list: Tom, Anna, Ben",
        sampler=found.setting.sampler, cache=found.setting.cache, **found.setting.arguments,
    )  # fmt: skip
    print(out.text, out.footer(), sep="\n")


if __name__ == "__main__":
    main()
