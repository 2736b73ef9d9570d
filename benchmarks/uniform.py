"""Which samplers carry over from masks to uniform noise: one small network, trained twice.

``python benchmarks/uniform.py train FOLDER`` trains both, and goes on where a run stands.  Network,
schedule, batches, noised positions and self-conditioning are the same: only what noise is differs.
``python benchmarks/uniform.py KIND MODEL [COUNT]`` (KIND: uniform or masked) decodes ``COUNT``
held-out prompts of each list task with every sampler along its parameter, and writes how many
answers are right, and the forwards, to ``benchmarks/results/uniform_KIND.json``.
``python benchmarks/uniform.py table`` prints both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import dllm
from dllm.eval.tasks import TASKS
from dllm.train.loop import Report

sys.path.append(str(Path(__file__).parents[1]))
from examples.nano.recipe import NanoTraining, export, train
from examples.nano.tokenizer import build_tokenizer

RESULTS = Path(__file__).parent / "results"
KINDS = ("uniform", "masked")
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
MASKED = ("dmax",)


def train_both(folder: str) -> None:
    for kind in KINDS:
        recipe, run = NanoTraining.of("uniform", tokens=1_024, steps=1_800), Path(folder) / kind
        train(
            recipe, run, accuracy_examples=0, noise_id=noise_id(kind),
            report=Report(print, log_every=50),
        )  # fmt: skip
        export(run, run / "model")


def noise_id(kind: str) -> int | None:
    return int(build_tokenizer().mask_token_id) if kind == "masked" else None


def measure(kind: str, folder: str, count: int) -> None:
    file = RESULTS / f"uniform_{kind}.json"
    examples = [(TASKS[name], e) for name in NAMES for e in TASKS[name].examples(count, 0)]
    model = dllm.load(folder, dtype="float32", mask_token_id=noise_id(kind))
    rows = dict[str, list[float] | None]()
    for sampler in (*SHARED, *OWN, *MASKED):
        try:
            answers = dllm.generate(
                model, [e.prompt for _, e in examples], sampler=sampler, max_batch_size=64,
                cache="block", max_new_tokens=64,
            )  # fmt: skip
        except dllm.ConfigError:
            rows[sampler] = None  # refused
        else:
            pairs = zip(examples, answers, strict=True)
            right = sum(task.check(e, a.text) for (task, e), a in pairs)
            nfe = sum(a.nfe for a in answers)
            rows[sampler] = [right / len(examples), nfe / len(examples)]
        print(sampler, rows[sampler], flush=True)
        file.write_text(json.dumps({"prompts": len(examples), "rows": rows}, indent=1) + "\n")


def table() -> None:
    found = [json.loads((RESULTS / f"uniform_{kind}.json").read_text())["rows"] for kind in KINDS]
    print("| sampler | uniform: right | forwards | masked: right | forwards |")
    print("| --- | --- | --- | --- | --- |")
    for sampler in found[0]:
        pairs = [rows[sampler] for rows in found]
        cells = [f"{100 * p[0]:.1f} % | {p[1]:.1f}" if p else "refused | " for p in pairs]
        print(f"| `{sampler}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    if sys.argv[1:] == ["table"]:
        table()
    elif sys.argv[1] == "train":
        train_both(sys.argv[2])
    else:
        measure(sys.argv[1], sys.argv[2], int((*sys.argv[3:], 30)[0]))
