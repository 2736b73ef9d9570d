"""Several prompts at once, and what samplers and caches change.

A batch is as many rows as there are prompts, of any lengths; each comes out as if it ran alone.

    python examples/batch.py
"""

from __future__ import annotations

import dllm

PROMPTS = [
    "Compute 69 + 49.",
    "Write this list backwards: Adam, Emma, Quinn, Paul, Gina",
    "Harry has 23 maps. Harry drops 8 maps. Harry receives 5 maps. How many maps are left?",
]
SAMPLERS = ["llada", "threshold(tau=0.9)", "threshold(tau=0.5)"]
CACHES = ["none", "prefix", "dual"]


def main() -> None:
    model = dllm.load("nano")
    together = dllm.generate(model, PROMPTS, max_new_tokens=64)
    for prompt, out in zip(PROMPTS, together, strict=True):
        alone = dllm.generate(model, prompt, max_new_tokens=64)
        assert out.tokens == alone.tokens
        print(f"{prompt}\n  {out.text}")

    print(f"\n{'sampler':20} {'cache':8} {'forwards':>8} {'positions':>9}")
    for sampler in SAMPLERS:
        for cache in CACHES:
            outs = dllm.generate(
                model, PROMPTS, sampler=sampler, cache=cache, max_new_tokens=64, block_length=16
            )
            forwards, computed = sum(out.nfe for out in outs), sum(out.computed for out in outs)
            print(f"{sampler:20} {cache:8} {forwards:8} {computed:9}")


if __name__ == "__main__":
    main()
