"""Which samplers carry over from masks to uniform noise: two small models of one recipe.

``python benchmarks/uniform.py UNIFORM MASKED [COUNT]`` decodes held-out prompts of the list tasks
with every sampler along its parameter, and prints how many answers are right, and the forwards.
"""

from __future__ import annotations

import sys

import dllm
from dllm.eval.tasks import TASKS

NAMES = ("copy", "reverse", "sort", "insert", "remove", "replace", "remove_random")
SHARED = (
    "llada", "threshold(tau=0.99)", "threshold(tau=0.9)", "threshold(tau=0.7)",
    "threshold(tau=0.5)", "localleap", "eb(gamma=0.1)", "eb(gamma=1.0)", "factor(factor=1.0)",
    "dcd", "threshold(tau=0.9)+edit(tau=0.9)", "threshold(tau=0.5)+edit(tau=0.5)",
)  # fmt: skip
OWN = (
    "entropy_bound(max_denoising_steps=8)", "entropy_bound(max_denoising_steps=16)",
    "entropy_bound(max_denoising_steps=48)",
    "entropy_bound(max_denoising_steps=48, entropy_bound=1.0)",
    "ddim(num_inference_steps=8)", "ddim(num_inference_steps=16)", "ddim(num_inference_steps=32)",
    "ddim(num_inference_steps=32, corrector_steps=1)",
)  # fmt: skip
MASKED = ("dmax", "wino")


def main(uniform: str, masked: str, count: int = 24) -> None:
    examples = [(TASKS[name], e) for name in NAMES for e in TASKS[name].examples(count, 0)]
    print("| sampler | uniform: right | forwards | masked: right | forwards |")
    print("| --- | --- | --- | --- | --- |")
    models = {"uniform": dllm.load(uniform), "masked": dllm.load(masked)}
    for sampler in (*SHARED, *OWN, *MASKED):
        cells = []
        for name, model in models.items():
            cache = "block" if name == "uniform" else "none"
            try:
                answers = dllm.generate(
                    model, [e.prompt for _, e in examples], sampler=sampler, cache=cache,
                    max_batch_size=64, max_new_tokens=64, block_length=32,
                )  # fmt: skip
            except dllm.ConfigError:
                cells += ["refused", ""]
                continue
            pairs = zip(examples, answers, strict=True)
            right = sum(task.check(e, a.text) for (task, e), a in pairs) / len(examples)
            cells += [f"{100 * right:.1f} %", f"{sum(a.nfe for a in answers) / len(answers):.1f}"]
        print(f"| `{sampler}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
