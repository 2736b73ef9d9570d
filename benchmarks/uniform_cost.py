"""Cost of a step of a canvas: this library, transformers' generate and diffusers' pipeline with its
BlockRefinementScheduler, each in a process of its own.

83M parameters, a vocabulary of 262,144, float32, one thread, all warmed up.
``python benchmarks/uniform_cost.py [ROWS CANVAS STEPS]`` (1 256 4; in a batch of 8 at 256 positions
the others hold 15 GB) prints CPU seconds per step and row, and the peak of memory above the loaded
network.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Run = Callable[[int], None]
KINDS = ("ours", "generate", "ours refining", "diffusers")


def network(folder: Path, canvas: int) -> None:
    """Random weights under DiffusionGemma's names."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    sys.path.append(str(Path(__file__).parents[1]))
    from examples.nano.recipe import NO_IMAGES

    text = {
        "vocab_size": 262_144, "hidden_size": 256, "num_hidden_layers": 6, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 64,
        "intermediate_size": 1024, "moe_intermediate_size": 256, "num_experts": 8,
        "top_k_experts": 2, "sliding_window": 512, "pad_token_id": 0, "initializer_range": 0.05,
    }  # fmt: skip
    torch.manual_seed(0)
    config = DiffusionGemmaConfig(text_config=text, vision_config=NO_IMAGES, canvas_length=canvas)
    model: Any = DiffusionGemmaForBlockDiffusion(config)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)


def peak() -> int:
    """Bytes of this program; ``ru_maxrss`` begins with those of the one that started it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def touched(network: Any) -> None:
    """Weights are mapped: what is not read yet takes no memory."""
    for parameter in network.parameters():
        parameter.sum()


def ours(folder: str, prompts: list[list[int]], canvas: int, sampler: str) -> Run:
    import dllm

    model = dllm.load(folder, dtype="float32")
    touched(model.hf)

    def run(steps: int) -> None:
        how: dict[str, Any] = {"sampler": sampler, "steps": steps}
        if sampler == "entropy_bound":
            how = {"sampler": f"{sampler}(max_denoising_steps={steps}, confidence_threshold=0)"}
        dllm.generate(
            model, prompts, cache="block", max_new_tokens=canvas, eos_policy="none", **how
        )

    return run


def network_of_transformers(folder: str) -> Any:
    from transformers import DiffusionGemmaForBlockDiffusion

    model: Any = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32)
    touched(model)
    return model


def generate(folder: str, prompts: list[list[int]], canvas: int) -> Run:
    model = network_of_transformers(folder)

    def run(steps: int) -> None:
        model.generate(
            torch.tensor(prompts), max_new_tokens=canvas, max_denoising_steps=steps,
            confidence_threshold=None,
        )  # fmt: skip

    return run


class Ready:
    """In the place of a processor: prompts that are token ids already."""

    eos_token_id = 1

    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts

    def apply_chat_template(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor(self.prompts)}


def diffusers(folder: str, prompts: list[list[int]], canvas: int) -> Run:
    from diffusers import BlockRefinementScheduler, DiffusionGemmaPipeline

    pipeline: Any = DiffusionGemmaPipeline(
        network_of_transformers(folder), BlockRefinementScheduler(), Ready(prompts)
    )
    pipeline.set_progress_bar_config(disable=True)

    def run(steps: int) -> None:
        pipeline(
            "", gen_length=canvas, num_inference_steps=steps, confidence_threshold=None,
            output_type="seq",
        )  # fmt: skip

    return run


def report(kind: str, folder: str, rows: int, canvas: int, steps: int) -> None:
    """Seconds of one more step and row, and the peak above the loaded network."""
    prompts = [[*range(3 + i, 40 + i)] for i in range(rows)]
    if kind.startswith("ours"):
        sampler = "llada" if "refining" in kind else "entropy_bound"
        run = ours(folder, prompts, canvas, sampler)
    else:
        run = {"generate": generate, "diffusers": diffusers}[kind](folder, prompts, canvas)

    def seconds(count: int) -> float:
        began = time.process_time()
        run(count)
        return time.process_time() - began

    before = peak()
    seconds(1)
    short, long = seconds(1), seconds(1 + steps)
    print(f"{(long - short) / steps / rows:.3f} {(peak() - before) / 2**20:.0f}")


def main() -> None:
    rows, canvas, steps = map(int, sys.argv[1:] or (1, 256, 4))
    with tempfile.TemporaryDirectory() as folder:
        network(Path(folder), canvas)
        for kind in KINDS:
            done = subprocess.run(
                [sys.executable, __file__, kind, folder, *map(str, (rows, canvas, steps))],
                check=True, text=True, stdout=subprocess.PIPE,
            )  # fmt: skip
            seconds, mebibytes = done.stdout.split()[-2:]
            print(f"{kind}: {seconds} s per step and row, {mebibytes} MiB", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in KINDS:
        torch.set_num_threads(1)
        report(*sys.argv[1:3], *map(int, sys.argv[3:]))
    else:
        main()
