"""Write one answer and look at how it came about.

python examples/generate.py
"""

from __future__ import annotations

import dllm

PROMPT = "Tom has 23 apples. Tom buys 12 more. Then Tom loses 7. How many apples does Tom have?"


def main() -> None:
    out = dllm.generate("nano", PROMPT, sampler="threshold(tau=0.9)", max_new_tokens=48)
    print(out.text)
    print(out.footer())
    # `order` holds the step that decided each token: tokens of one step were decided in parallel.
    for step in sorted(set(out.order)):
        decided = [i for i, when in enumerate(out.order) if when == step]
        print(f"step {step}: positions {decided}")


if __name__ == "__main__":
    main()
