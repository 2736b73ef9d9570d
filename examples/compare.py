"""One prompt, several samplers and caches, side by side.

    python examples/compare.py

The same from a shell: dllm compare -s llada -s threshold -s eb "..."
"""

from __future__ import annotations

import dllm

PROMPT = "Remove index 2: Tom, Anna, Ben, Mia, Zoe"
SAMPLERS = ["llada", "threshold", "eb"]  # any of `dllm samplers`, or a composition with '+'


def main() -> None:
    model = dllm.load("nano")
    for sampler in SAMPLERS:
        for cache in ("none", "dual"):
            out = dllm.generate(model, PROMPT, sampler=sampler, cache=cache, max_new_tokens=32)
            print(f"{sampler:10} {cache:6} {out.nfe:3} forwards {out.computed:5} positions  {out}")


if __name__ == "__main__":
    main()
