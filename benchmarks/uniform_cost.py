"""Cost of a step of a canvas: this library and transformers' generate, in processes of their own.

83M parameters, a vocabulary of 262,144, canvases of 256, float32, one thread, both warmed up.
``python benchmarks/uniform_cost.py`` prints CPU seconds per step and row, and the peak of memory
above the loaded network.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

STEPS = 4


def network(folder: Path) -> None:
    """Random weights under DiffusionGemma's names."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    text = {
        "vocab_size": 262_144, "hidden_size": 256, "num_hidden_layers": 6, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 64,
        "intermediate_size": 1024, "moe_intermediate_size": 256, "num_experts": 8,
        "top_k_experts": 2, "sliding_window": 512, "pad_token_id": 0, "initializer_range": 0.05,
    }  # fmt: skip
    vision = {
        "model_type": "gemma4_vision", "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
        "patch_size": 2, "pooling_kernel_size": 1, "position_embedding_size": 16,
        "default_output_length": 4,
    }  # fmt: skip
    torch.manual_seed(0)
    config = DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=256)
    model: Any = DiffusionGemmaForBlockDiffusion(config)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def ours(folder: str, rows: int) -> None:
    import dllm

    model = dllm.load(folder, dtype="float32")
    prompts = [[*range(3 + i, 40 + i)] for i in range(rows)]

    def run(steps: int) -> float:
        began = time.process_time()
        dllm.generate(
            model, prompts, cache="block", max_new_tokens=256, eos_policy="none",
            sampler=f"entropy_bound(max_denoising_steps={steps}, confidence_threshold=0)",
        )  # fmt: skip
        return time.process_time() - began

    report(run, rows)


def theirs(folder: str, rows: int) -> None:
    from transformers import DiffusionGemmaForBlockDiffusion

    model: Any = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32)
    prompts = torch.tensor([[*range(3 + i, 40 + i)] for i in range(rows)])

    def run(steps: int) -> float:
        began = time.process_time()
        model.generate(
            prompts, max_new_tokens=256, max_denoising_steps=steps, confidence_threshold=None
        )
        return time.process_time() - began

    report(run, rows)


def report(run: Any, rows: int) -> None:
    """Seconds of one more step, and the peak beyond what the first pages of weights take."""
    before = peak()
    run(1)
    short, long = min(run(1) for _ in range(2)), run(1 + STEPS)
    print(f"{(long - short) / STEPS / rows:.3f} {(peak() - before) / 2**20:.0f}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        network(Path(folder))
        for rows in map(int, sys.argv[1:] or ("1",)):
            for kind in ("ours", "theirs"):
                done = subprocess.run(
                    [sys.executable, __file__, kind, folder, str(rows)], check=True, text=True,
                    stdout=subprocess.PIPE,
                )  # fmt: skip
                seconds, mebibytes = done.stdout.split()[-2:]
                print(f"{kind}, {rows} rows: {seconds} s per step and row, {mebibytes} MiB")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ("ours", "theirs"):
        torch.set_num_threads(1)
        {"ours": ours, "theirs": theirs}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
    else:
        main()
