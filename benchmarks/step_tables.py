"""Tables of the documentation about the time of a step on a CPU."""

from __future__ import annotations

from typing import Any

from dllm.eval.report import markdown

Found = dict[str, Any]


def conditions(result: Found) -> str:
    """On what something was measured."""
    machine = result["machine"]
    threads = result.get("threads", machine.get("threads"))
    load = machine.get("load")  # this program's own threads count, too
    beside = "" if load is None or load < threads + 0.5 else ", other work on the other core"
    return f"{threads} thread{'s' if threads != 1 else ''} of an {machine['cpu']}{beside}"


def steps(result: Found) -> str:
    """A step's time, how much of it is bare products, and how much of the roof it reaches."""
    rows = [
        [case["dtype"], str(case["rows"]), case["kernels"], f"{case['milliseconds']:.0f} ms",
         f"{100 * case['products']:.0f} %", f"{case['roof_gflops']:.0f} GFLOP/s",
         f"{100 * case['roof']:.0f} %"]
        for case in sorted(result["cases"], key=lambda case: (case["dtype"], case["rows"]))
    ]  # fmt: skip
    return f"{conditions(result)}, processor time:\n\n" + markdown(
        ["dtype", "positions", "kernels", "a step", "of it products", "roof", "of the roof"], rows
    )


def compiled(result: Found) -> str:
    """Products and attention by PyTorch's kernels and by compiled ones."""
    rows = [
        [case["kind"], f"{case['outputs']} × {case['inputs']}", str(case["rows"]),
         f"{case['PyTorch']:.0f}", f"{case['compiled']:.0f}",
         f"{case['compiled'] / case['PyTorch']:.1f}×"]
        for case in result["products"]
    ]  # fmt: skip
    attended = [
        [str(case["queries"]), str(case["keys"]), f"{case['PyTorch']:.2f} ms",
         f"{case['compiled']:.2f} ms", f"{case['PyTorch'] / case['compiled']:.1f}×"]
        for case in result["attention"]
    ]  # fmt: skip
    exact = [
        [str(case["texts"]), str(case["queries"]), f"{case['keys']:,}", f"{case['PyTorch']:.2f} ms",
         f"{case['compiled']:.2f} ms", f"{case['PyTorch'] / case['compiled']:.1f}×"]
        for case in result["exact"]
    ]  # fmt: skip
    return (
        f"GFLOP/s, {conditions(result)}, processor time, in turns "
        "(`benchmarks/cpu_kernels.py`):\n\n"
        + markdown(["weights", "size", "rows", "PyTorch", "compiled", "faster"], rows)
        + "\n\nAttention in bfloat16, nine heads of 64, SDPA beside the compiled kernel:\n\n"
        + markdown(["queries", "keys", "SDPA", "compiled", "faster"], attended)
        + "\n\nExact attention of verifiers (sums over keys in float64), three heads of 64:\n\n"
        + markdown(["texts", "queries", "keys", "PyTorch", "compiled", "faster"], exact)
    )


def dtypes(result: Found) -> str:
    """A step in float32 over the same step in bfloat16."""
    times = {
        (case["dtype"], case["rows"]): case["milliseconds"]
        for case in result["cases"] if case["kernels"] == "PyTorch"
    }  # fmt: skip
    rows = [
        [str(count), *(f"{times[name, count]:.0f} ms" for name in ("float32", "bfloat16")),
         f"{times['float32', count] / times['bfloat16', count]:.1f}×"]
        for name, count in times if name == "float32"
    ]  # fmt: skip
    return f"A step of the 135M shape, {conditions(result)}, processor time:\n\n" + markdown(
        ["positions", "float32", "bfloat16", "faster"], rows
    )


RELEASED = {"window_diffusion": "Window-Diffusion", "dinfer": "dInfer, blockwise"}


def official(result: Found) -> str:
    """Processor time over that of released code."""
    rows = [
        [case["dtype"], RELEASED.get(case["cache"], f"`{case['cache']}`"), case["kernels"],
         str(case["batch"]),
         str(case["prompt"]),
         f"{case['new']} in {case['steps']}", f"{case['official_seconds']:.2f} s",
         f"{case['seconds']:.2f} s",
         f"{case['ratio']:.2f} ({case['low']:.2f} to {case['high']:.2f})",
         f"{100 * case['equal']:.0f} %"]
        for case in result["cases"]
    ]  # fmt: skip
    head = ["dtype", "loop", "kernels", "prompts", "shortest", "new tokens in steps", "official",
            "dllm", "ratio per forward", "equal commits"]  # fmt: skip
    threads = result["cases"][0]["threads"]
    return (
        "135M parameters, LLaDA-shaped, random weights, blocks of 32, prompts of so "
        "many tokens and more (ragged ones one by one in the official loop), int8 against the "
        f"official bfloat16, {conditions(result | {'threads': threads})}; in turns, medians and "
        "range of the ratios:\n\n" + markdown(head, rows)
    )
