"""Beside llama.cpp's `llama-diffusion-cli`: one network in the same files, measured in turns.

    pip install gguf
    python benchmarks/llama_cpp.py PATH/TO/llama-diffusion-cli --commit 0c1e57098
    python benchmarks/llama_cpp.py ... --folder /tmp/networks --types Q8_0 --runs 3

Writes a LLaDA-shaped network of random weights (about 1B parameters, all layers alike) as GGUF
files in bfloat16, Q8_0 and Q4_0, which both programs read.  Prompt, canvas, steps and threads are
the same.  `forward`: seconds per forward without a cache.  `text`: seconds of the whole text, here
also with the cache `dual`, which llama.cpp lacks, at the same number of forwards.  `first`: from
the start of the process to the end of the first forward.  Memory is the largest resident set,
mapped pages included.  `busy` is the processor time of a forward, which other programs disturb
less: of llama.cpp that of the whole process over its forwards, as its file is mapped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from harness import RESULTS, write  # isort: skip

TYPES = ("BF16", "Q8_0", "Q4_0")
SHAPE = {"hidden": 2048, "wide": 5632, "layers": 16, "heads": 16, "vocabulary": 32768}
PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
LINE = re.compile(r"total time: ([\d.]+)ms, time per step: ([\d.]+)ms")


def network(file: Path, kind: str, context: int) -> None:
    """A GGUF file with the type ``kind`` for every matrix."""
    import gguf

    d, wide, vocabulary = SHAPE["hidden"], SHAPE["wide"], SHAPE["vocabulary"]
    generator = np.random.default_rng(0)
    held = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(file, "llada")
    writer.add_block_count(SHAPE["layers"])
    writer.add_context_length(context)
    writer.add_embedding_length(d)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(SHAPE["heads"])
    writer.add_head_count_kv(SHAPE["heads"])
    writer.add_rope_dimension_count(d // SHAPE["heads"])
    writer.add_rope_freq_base(5e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_diffusion_shift_logits(False)
    writer.add_vocab_size(vocabulary)
    letters = [chr(i) for i in range(33, 127)] + [chr(i) for i in range(0x100, 0x144)]
    tokens = letters + [f"<{i}>" for i in range(vocabulary - len(letters))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llada-moe")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * vocabulary)
    writer.add_token_merges(["a b"])
    writer.add_chat_template("{{ messages[0]['content'] }}")
    writer.add_mask_token_id(vocabulary - 1)
    writer.add_eos_token_id(vocabulary - 2)
    writer.add_bos_token_id(vocabulary - 3)

    def matrix(rows: int, columns: int) -> Any:
        numbers = generator.standard_normal((rows, columns), dtype=np.float32) * 0.02
        return gguf.quants.quantize(numbers, held)

    sizes = {"attn_q": (d, d), "attn_k": (d, d), "attn_v": (d, d), "attn_output": (d, d),
             "ffn_gate": (wide, d), "ffn_up": (wide, d), "ffn_down": (d, wide)}  # fmt: skip
    layer = {name: matrix(*sizes[name]) for name in PARTS}
    one = np.ones(d, dtype=np.float32)
    writer.add_tensor("token_embd.weight", matrix(vocabulary, d), raw_dtype=held)
    writer.add_tensor("output.weight", matrix(vocabulary, d), raw_dtype=held)
    writer.add_tensor("output_norm.weight", one)
    for i in range(SHAPE["layers"]):
        for name, numbers in layer.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", numbers, raw_dtype=held)
        writer.add_tensor(f"blk.{i}.attn_norm.weight", one)
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", one)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run(command: list[str], threads: int) -> dict[str, Any]:
    """What a program printed, its wall and processor seconds and its largest resident set."""
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} failed:\n{printed[-2000:]}")
    return {
        "printed": printed,
        "wall": time.perf_counter() - start,
        "processor": used.ru_utime + used.ru_stime,
        "memory": used.ru_maxrss / 1024,
    }


def llama(options: Any, file: Path) -> dict[str, float]:
    """One text by llama.cpp."""
    length = options.prompt + options.new
    done = run([
        str(options.binary), "-m", str(file), "-p", "a" * (options.prompt - 1), "-ub", str(length),
        "-b", str(length), "-c", str(length), "--diffusion-steps", str(options.steps),
        "--diffusion-block-length", str(length), "--temp", "0", "-t", str(options.threads),
        "-tb", str(options.threads), *options.extra,
    ], options.threads)  # fmt: skip
    line = LINE.search(done["printed"])
    if line is None:
        raise SystemExit(
            f"no times in what llama-diffusion-cli printed:\n{done['printed'][-2000:]}"
        )
    total, step = float(line[1]) / 1000, float(line[2]) / 1000
    return {"forward": step, "text": total, "first": done["wall"] - total + step,
            "busy": done["processor"] / options.steps, "memory": done["memory"]}  # fmt: skip


def ours(options: Any, file: Path, cache: str) -> dict[str, float]:
    """One text by this library, in a process of its own."""
    given = [str(options.prompt), str(options.new), str(options.block), str(options.steps)]
    done = run([sys.executable, __file__, "--decode", str(file), cache, *given], options.threads)
    inner = json.loads(done["printed"].splitlines()[-1])
    return {**inner, "memory": done["memory"]}


def decode(file: str, cache: str, prompt: int, new: int, block: int, steps: int) -> None:
    """Print the times of a text: the first one, of one step, counts from the process's start."""
    import psutil

    import dllm

    born = psutil.Process().create_time()
    model = dllm.load(file)
    how: dict[str, Any] = {"sampler": "llada", "max_new_tokens": new, "block_length": block,
                           "eos_policy": "none"}  # fmt: skip
    ids = list(range(1, prompt + 1))
    for _ in dllm.stream(model, ids, steps=steps, cache=cache, **how):
        first = time.time() - born
        break
    start, busy = time.perf_counter(), time.process_time()
    result = dllm.generate(model, ids, steps=steps, cache=cache, **how)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    times = {"forward": seconds / result.nfe, "text": seconds, "first": first}
    print(json.dumps({**times, "forwards": result.nfe, "busy": busy / result.nfe}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=Path, nargs="?", help="llama-diffusion-cli")
    parser.add_argument("--commit", default="", help="of llama.cpp, for the record")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/dllm-llama-cpp"))
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=2, help="in turns; medians are shown")
    parser.add_argument("--extra", nargs="*", default=[], help="more arguments of llama.cpp")
    parser.add_argument("--output", type=Path, default=RESULTS / "llama_cpp.json")
    parser.add_argument("--decode", nargs=6, help="internal: one text by this library")
    options = parser.parse_args()
    if options.decode:
        file, cache, *numbers = options.decode
        decode(file, cache, *map(int, numbers))
        return
    if options.binary is None or not options.binary.is_file():
        parser.error("give the path of a llama-diffusion-cli: this script builds nothing")
    options.folder.mkdir(parents=True, exist_ok=True)
    cases = []
    for kind in options.types:
        file = options.folder / f"{kind}.gguf"
        if not file.exists():
            network(file, kind, 2 * (options.prompt + options.new))
        ways = {
            "llama.cpp": lambda f: llama(options, f),
            "dllm": lambda f: ours(options, f, "none"),
            "dllm, dual": lambda f: ours(options, f, "dual"),
        }
        taken: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(options.runs):
            for way, measure in ways.items():
                taken[way].append(measure(file))
        for way, runs in taken.items():
            case = {name: median(one[name] for one in runs) for name in runs[0]}
            cases.append({"type": kind, "way": way, **case})
            print(json.dumps(cases[-1]), flush=True)
    write(options.output, {
        "commit": options.commit, "shape": SHAPE, "cases": cases,
        **{name: getattr(options, name) for name in
           ("prompt", "new", "block", "steps", "threads", "runs")},
    })  # fmt: skip


if __name__ == "__main__":
    main()
