"""The largest resident memory of a text, beside released code: the same weights, prompt and steps.

    git clone https://github.com/NVlabs/Fast-dLLM
    python benchmarks/memory.py --code Fast-dLLM/llada

Each text in a process of its own, with the 135M shape in safetensors, `dual`, one thread.  What the
process holds once all is imported and a small text is decoded is taken off.  Pages that are mapped
from a file count where they are resident.  Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import dllm

from fast_dllm import fast_dllm, official_network  # isort: skip
from harness import RESULTS, llada_135m, vectors, write  # isort: skip

NEW, STEPS = 64, 16


def megabytes(name: str) -> float:
    """VmRSS, what is resident now, or VmHWM, the most that has been."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split(f"{name}:")[1].split()[0]) * 1024 / 1e6


def text(who: str, dtype: str, folder: Path, code: Path, prompt: int) -> float:
    """Megabytes above the start."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(code))
    ids = torch.randint(1, 49_000, (1, prompt), generator=torch.Generator().manual_seed(0))
    loop = fast_dllm("dual")
    dllm.generate("nano", "Copy: a")
    before = megabytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
    if who == "official":
        network = official_network(folder, getattr(torch, dtype), copy=False)
        loop(network, ids, NEW, STEPS)
    else:
        quantization = "int8" if who == "dllm, int8" else None
        model = dllm.load(str(folder), dtype=dtype, quantization=quantization)
        dllm.generate(
            model, ids[0].tolist(), sampler=f"llada(steps={STEPS})", cache="dual",
            max_new_tokens=NEW, block_length=32, eos_policy="none",
        )  # fmt: skip
    return megabytes("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--code", type=Path, required=True, help="Fast-dLLM's, with generate.py")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--output", type=Path, default=RESULTS / "memory.json")
    parser.add_argument("--text", nargs=3, help="internal: one text")
    options = parser.parse_args()
    if options.text:
        who, dtype, folder = options.text
        print(text(who, dtype, Path(folder), options.code, options.prompt))
        return
    cases: list[dict[str, Any]] = []
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            llada_135m(dtype).save_pretrained(folder, layout="official")
            for who in ("official", "dllm", "dllm, int8"):
                command = [
                    sys.executable, __file__, "--code", str(options.code),
                    "--prompt", str(options.prompt), "--text", who, dtype, folder,
                ]  # fmt: skip
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                size = float(done.stdout.splitlines()[-1])
                cases.append({"dtype": dtype, "who": who, "vectors": vectors(), "peak": size})
                print(json.dumps(cases[-1]), flush=True)
    write(options.output, {"prompt": options.prompt, "new": NEW, "cases": cases})


if __name__ == "__main__":
    main()
