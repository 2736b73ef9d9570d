"""A network of LLaDA-8B's exact shape on this machine's processor.

    python benchmarks/eight_billion.py --folder /somewhere/8b --make    # 16 GB of random bfloat16
    python benchmarks/eight_billion.py --folder /somewhere/8b           # every way
    python benchmarks/eight_billion.py --folder /somewhere/8b --ways bfloat16 --caches dual

Each way is a process of its own: it loads the folder (`bfloat16`: mapped; `int8`, `int4`: rounded
while loading), and decodes ``--new``
tokens after ``--prompt`` random ones in ``--steps`` steps without a cache and with `dual`.  Seconds
are wall clock: run it on a machine that does nothing else, with ``--threads`` for its processors.
Random weights decide nothing here but the tokens.  Memory: ``anonymous`` is what the process needs,
``mapped`` what the system may drop.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import dllm

from harness import RESULTS, write  # isort: skip

CONFIG: dict[str, Any] = {
    "architectures": ["LLaDAModelLM"], "model_type": "llada", "torch_dtype": "bfloat16",
    "d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "n_layers": 32, "mlp_hidden_size": 12288,
    "vocab_size": 126464, "embedding_size": 126464, "max_sequence_length": 4096,
    "rms_norm_eps": 1e-5, "rope": True, "rope_theta": 500000.0, "rope_full_precision": True,
    "block_type": "llama", "block_group_size": 1, "layer_norm_type": "rms",
    "activation_type": "silu", "weight_tying": False, "include_bias": False,
    "include_qkv_bias": False, "mask_token_id": 126336, "eos_token_id": 126081,
}  # fmt: skip
PER_STEP = 4  # tokens
WAYS = {"bfloat16": None, "int8": "int8", "int4": "int4(embeddings=True)"}
SHARD = 6  # layers in a file


def make(folder: Path) -> None:
    """The checkpoint in the names of the original release."""
    folder.mkdir(parents=True, exist_ok=True)
    wide, inner, count = CONFIG["d_model"], CONFIG["mlp_hidden_size"], CONFIG["vocab_size"]
    draw = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        block = torch.randn(256, columns, generator=draw).mul_(0.02).bfloat16()
        scales = torch.rand(-(-rows // 256), 1, 1, generator=draw).add_(0.5)  # rows that differ
        return (block[None] * scales).bfloat16().flatten(0, 1)[:rows].contiguous()

    parts: list[dict[str, torch.Tensor]] = []
    places: dict[str, str] = {}

    def store(tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{len(parts) + 1:05d}.safetensors"
        parts.append({})
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, name))
        print(name, flush=True)

    top = "model.transformer."
    for first in range(0, CONFIG["n_layers"], SHARD):
        tensors = {}
        for layer in range(first, min(first + SHARD, CONFIG["n_layers"])):
            at = f"{top}blocks.{layer}."
            tensors |= {f"{at}{name}.weight": torch.ones(wide).bfloat16()
                        for name in ("attn_norm", "ff_norm")}  # fmt: skip
            tensors |= {f"{at}{name}.weight": matrix(wide, wide)
                        for name in ("q_proj", "k_proj", "v_proj", "attn_out")}  # fmt: skip
            tensors |= {
                f"{at}{name}.weight": matrix(inner, wide) for name in ("ff_proj", "up_proj")
            }
            tensors[f"{at}ff_out.weight"] = matrix(wide, inner)
        store(tensors)
    store({f"{top}wte.weight": matrix(count, wide), f"{top}ff_out.weight": matrix(count, wide),
           f"{top}ln_f.weight": torch.ones(wide).bfloat16()})  # fmt: skip
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def memory() -> dict[str, float]:
    """10^9 bytes of this process: anonymous, mapped from files, and the most there was of both."""
    names = {"RssAnon": "anonymous", "RssFile": "mapped", "VmHWM": "peak"}
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {
        names[line[0][:-1]]: 1024 * int(line[1]) / 1e9 for line in lines if line[0][:-1] in names
    }


def one(options: argparse.Namespace) -> None:
    """A way in this process: a line of JSON per cache."""
    way = options.one
    torch.set_num_threads(options.threads)
    steps = options.new // PER_STEP
    began = time.perf_counter()
    model = dllm.load(options.folder, threads=options.threads, quantization=WAYS[way])
    loaded, after = time.perf_counter() - began, memory()
    prompt = torch.randint(1, 126_000, (options.prompt,)).tolist()
    how = {"sampler": "llada", "eos_policy": "none"}
    began = time.perf_counter()
    dllm.generate(model, prompt, max_new_tokens=4, block_length=4, steps=1, **how)
    first = time.perf_counter() - began
    for cache in options.caches:
        began, busy = time.perf_counter(), time.process_time()
        result = dllm.generate(
            model, prompt, cache=cache, max_new_tokens=options.new, steps=steps,
            block_length=min(32, options.new), **how,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        found = {
            "way": way, "cache": cache, "load": loaded, "loaded": after, "first": first,
            "seconds": seconds, "processor": time.process_time() - busy, "forwards": result.nfe,
            "tokens_per_second": options.new / seconds, "memory": memory(),
        }  # fmt: skip
        print("found " + json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--caches", nargs="+", default=["none", "dual"])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--one", choices=list(WAYS), help="this way, in this process")
    parser.add_argument("--output", type=Path, default=RESULTS / "eight_billion.json")
    options = parser.parse_args()
    if options.make:
        make(options.folder)
        return
    if options.one:
        one(options)
        return
    known = json.loads(options.output.read_text())["cases"] if options.output.exists() else []
    cases = [case for case in known if case["way"] not in options.ways]
    for way in options.ways:
        command = [sys.executable, *sys.argv, "--one", way]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
        lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
        cases += [json.loads(line.removeprefix("found ")) for line in lines]
        print("\n".join(lines), flush=True)
        shape = {name: getattr(options, name) for name in ("prompt", "new", "threads")}
        write(options.output, {**shape, "cases": cases})


if __name__ == "__main__":
    main()
