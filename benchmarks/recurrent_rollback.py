"""Two ways to take drafts back from a hybrid verifier: states per token, or restore and replay.

    python benchmarks/recurrent_rollback.py [--width 512] [--layers 12] [--threads 1]

A random Qwen3.5-like and a random Nemotron-H-like network (bfloat16 where the processor multiplies
it, else float32) decode plainly and with drafts of 4 tokens of which so many are right as --right
says; processor milliseconds per round, medians of turns, and what a round costs against a plain
token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import dllm
from dllm.drafting.base import chain
from dllm.drafting.verifiers.recurrent import ROLLBACKS, RecurrentVerifier
from dllm.train.loop import machine_has_bf16

from report import RESULTS, write  # isort: skip

DRAFTED, PROMPT, ROUNDS = 4, 64, 24


def networks(width: int, layers: int) -> dict[str, Any]:
    heads = width // 64
    common = {"vocab_size": 8192, "hidden_size": width, "intermediate_size": 3 * width,
              "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4),
              "head_dim": 64, "bos_token_id": None, "eos_token_id": None,
              "pad_token_id": None}  # fmt: skip
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    delta = {"num_hidden_layers": layers, "layer_types": kinds, "linear_num_value_heads": heads,
             "linear_num_key_heads": heads, "linear_key_head_dim": 64,
             "linear_value_head_dim": 64}  # fmt: skip
    mixed = [["linear_attention", "mlp", "linear_attention", "full_attention"][i % 4]
             for i in range(layers)]  # fmt: skip
    mamba = {"num_hidden_layers": layers, "layers_block_type": mixed, "mamba_num_heads": 2 * heads,
             "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 2,
             "use_mamba_kernels": False}  # fmt: skip
    shapes = {"qwen3_5_text": delta, "nemotron_h": mamba}
    return {name: AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **common, **shape))
            for name, shape in shapes.items()}  # fmt: skip


def rounds(model: Any, rollback: str | None, right: int) -> list[float]:
    """Processor seconds of every round; plain decoding without ``rollback``."""
    verifier = RecurrentVerifier(model, rollback=rollback)
    rng = np.random.default_rng(0)
    text = verifier.open(rng.integers(0, 8192, PROMPT), 4096)
    seconds = []
    for _ in range(ROUNDS):
        draft = chain(rng.integers(0, 8192, DRAFTED if rollback and text.cached else 0))
        path = list(range(min(right, len(draft))))
        began = time.process_time()
        verifier.score([(text, draft)])
        verifier.commit(text, draft, path, [*draft.tokens[path].tolist(), 7])
        seconds.append(time.process_time() - began)
    return seconds[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    result: dict[str, Any] = {"settings": vars(options)}
    for name, hf in networks(options.width, options.layers).items():
        hf = hf.to(torch.bfloat16 if machine_has_bf16("cpu") else torch.float32).eval()
        model = dllm.load(hf, family="autoregressive")
        seen: dict[str, list[float]] = {}
        for _ in range(options.turns):
            seen.setdefault("plain", []).extend(rounds(model, None, 0))
            for rollback in ROLLBACKS:
                for right in (0, 2, DRAFTED):
                    key = f"{rollback}, {right} of {DRAFTED} right"
                    seen.setdefault(key, []).extend(rounds(model, rollback, right))
        plain = statistics.median(seen["plain"])
        result[name] = {key: {"ms": round(1e3 * statistics.median(values), 2),
                              "of a plain token": round(statistics.median(values) / plain, 2)}
                        for key, values in seen.items()}  # fmt: skip
        print(name, result[name], flush=True)
    write(RESULTS / "recurrent_rollback.json", result)


if __name__ == "__main__":
    main()
