"""A network of LLaDA-8B's shape on a GPU: milliseconds of a step, of the statistics, of a draft.

    python benchmarks/gpu.py                              # writes results/gpu.json
    python benchmarks/gpu.py --code Fast-dLLM/llada       # and Fast-dLLM's loops beside it, one row

Random weights in bfloat16, made on the GPU.  Prompts of `PROMPT` tokens and more (ragged), blocks
of 32, ``llada`` with 4 tokens per step.  A session decodes the same rows four times; the shortest
but for the first counts (of Fast-dLLM: of three): wall clock over the forward passes of a row.
``computed``: positions of the network per step, all rows.  Statistics: medians of
`triton.testing.do_bench`, beside the bare product of the head and the softmax in float64 of
released loops.  Drafts: a forward pass of the causal network over so many new tokens of a text of
512.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import dllm
from dllm.eval.bounds import measure
from dllm.kernels.statistics import Filters, token_statistics
from dllm.models.forwards import CACHE

from eight_billion import CONFIG  # isort: skip
from harness import RESULTS, write  # isort: skip

PROMPT, NEW, PER_STEP, BLOCK = 128, 64, 4, 32
HOW: dict[str, Any] = {"sampler": f"llada(steps={NEW // PER_STEP})", "eos_policy": "none",
                       "max_new_tokens": NEW, "block_length": BLOCK}  # fmt: skip


def network(device: str, layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=CONFIG["vocab_size"], hidden_size=CONFIG["d_model"],
        intermediate_size=CONFIG["mlp_hidden_size"], num_hidden_layers=layers,
        num_attention_heads=CONFIG["n_heads"], num_key_value_heads=CONFIG["n_kv_heads"],
        max_position_embeddings=4096, rope_theta=CONFIG["rope_theta"], rms_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def wait() -> None:
    if torch.cuda.is_available():  # a machine without a GPU can try the script
        torch.cuda.synchronize()


def timed(function: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Seconds of the shortest of ``repeats`` runs after a first."""
    seconds = []
    for _ in range(repeats + 1):
        wait()
        began = time.perf_counter()
        result = function()
        wait()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:]), result


def prompts(rows: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(1, 126_000, (PROMPT + 7 * i,), generator=draw).tolist()
            for i in range(rows)]  # fmt: skip


def steps(model: dllm.DiffusionModel, most: int) -> Iterator[dict[str, Any]]:
    for rows in (n for n in (1, 8, 32, 128) if n <= most):
        for cache, graphs in product(("none", "dual"), (False, True)):
            how = {"cache": cache, "cuda_graphs": graphs, "max_batch_size": rows}
            with dllm.Session(model, **how) as session:

                def decode(session: dllm.Session = session, rows: int = rows) -> list[Any]:
                    handles = [session.submit(prompt, **HOW) for prompt in prompts(rows)]
                    return [handle.result() for handle in handles]

                seconds, results = timed(decode, 3)
            count = results[0].nfe
            yield {
                "rows": rows, "cache": cache, "graphs": graphs, "forwards": count,
                "computed": sum(result.computed for result in results) / count,
                "ms": 1e3 * seconds / count, "tokens_per_second": rows * NEW / seconds,
                "memory": torch.cuda.max_memory_allocated() / 1e9,
            }  # fmt: skip


def released(code: Path, device: str, layers: int) -> Iterator[dict[str, Any]]:
    """Fast-dLLM's loops with its own network."""
    sys.path.insert(0, str(code))
    import generate as loops
    from model.configuration_llada import LLaDAConfig
    from model.modeling_llada import LLaDAModelLM

    given = CONFIG | {"n_layers": layers}
    for name in ("architectures", "model_type", "torch_dtype"):
        given.pop(name)
    settings = LLaDAConfig(**given)
    settings.init_device, settings.use_cache = device, False
    LLaDAModelLM.all_tied_weights_keys = {}
    for kind in (nn.Linear, nn.Embedding):
        kind.reset_parameters = lambda self: None  # they are drawn below
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LLaDAModelLM(settings)
    torch.set_default_dtype(torch.float32)
    model = model.to(device, torch.bfloat16).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.02) if weight.ndim > 1 else weight.fill_(1)
    ids = torch.tensor(prompts(1), device=device)
    for cache, loop in (("none", loops.generate), ("dual", loops.generate_with_dual_cache)):
        with torch.inference_mode():
            seconds, (_, count) = timed(lambda loop=loop: loop(
                model, ids, steps=NEW // PER_STEP, gen_length=NEW, block_length=BLOCK,
                mask_id=CONFIG["mask_token_id"],
            ), 2)  # fmt: skip
        yield {"cache": cache, "forwards": count, "ms": 1e3 * seconds / count}


def statistics(head: nn.Linear) -> Iterator[dict[str, Any]]:
    from triton.testing import do_bench

    weight = head.weight
    for rows in (32, 256, 1024):
        hidden = torch.randn(rows, weight.shape[1], device=weight.device, dtype=weight.dtype)
        sure = 10 * weight[torch.arange(rows, device=weight.device)]  # all but certain of one token

        def softmax(hidden: torch.Tensor = hidden) -> torch.Tensor:
            logits = hidden @ weight.T
            token = logits.argmax(-1, keepdim=True)
            return torch.softmax(logits.double(), -1).gather(-1, token)

        ways: dict[str, Callable[[], Any]] = {
            "product": lambda hidden=hidden: hidden @ weight.T, "float64_softmax": softmax,
            "statistics": lambda hidden=hidden: token_statistics(hidden, weight),
            **{name: partial(
                token_statistics, x, weight, filters=Filters(0.7, top_p=0.9),
                noise_keys=torch.arange(4 * rows, device=weight.device).view(-1, 4),
            ) for name, x in (("top_p", sure), ("top_p_of_flat_rows", hidden))},
        }  # fmt: skip
        with torch.inference_mode():
            yield {"rows": rows} | {
                name: do_bench(way, return_mode="median") for name, way in ways.items()
            }


def drafts(hf: LlamaForCausalLM) -> Iterator[dict[str, Any]]:
    from transformers import DynamicCache

    text = torch.randint(1, 126_000, (1, 512), device=hf.device)
    with torch.inference_mode():
        for count in (1, 4, 8, 16, 32, 64):
            cache = DynamicCache(config=hf.config)
            hf(input_ids=text, use_cache=True, logits_to_keep=1, **{CACHE: cache})

            def once(count: int = count, cache: Any = cache) -> None:
                hf(input_ids=text[:, :count], use_cache=True, **{CACHE: cache})
                cache.crop(-count)

            seconds, _ = timed(once, 10)
            yield {"tokens": count, "ms": 1e3 * seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--code", type=Path, help="Fast-dLLM's folder with generate.py")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=CONFIG["n_layers"])
    parser.add_argument("--rows", type=int, default=128, help="at most")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.json")
    options = parser.parse_args()
    hf = network(options.device, options.layers)
    model = dllm.load(hf, family="llada", mask_token_id=CONFIG["mask_token_id"],
                      eos_token_id=CONFIG["eos_token_id"])  # fmt: skip
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "steps": lambda: steps(model, options.rows), "statistics": lambda: statistics(hf.lm_head),
        "drafts": lambda: drafts(network(options.device, options.layers)),
    }  # fmt: skip
    if options.code:
        parts["released"] = lambda: released(options.code, options.device, options.layers)
    found: dict[str, Any] = {name: [] for name in parts}
    found["device"] = asdict(measure(model.device, model.dtype))
    print(found["device"])
    for name, part in parts.items():
        try:
            for case in part():
                found[name].append(case)
                print(name, case, flush=True)
        except Exception:
            traceback.print_exc()
        write(options.output, {"prompt": PROMPT, "new": NEW, "per_step": PER_STEP, **found})


if __name__ == "__main__":
    main()
