"""Tables of the documentation about models on a processor without a GPU."""

from __future__ import annotations

from typing import Any

from dllm.eval.report import markdown

from step_tables import conditions  # isort: skip

Found = dict[str, Any]


def quantised(result: Found) -> str:
    """What fewer bits change."""
    rows = [
        [case["model"], f"`{case['setting']}`", case["kernels"], f"{case['bytes'] / 1e6:.0f} MB",
         f"{case['bits']:.3f}", f"{100 * case['equal']:.1f} %", f"{case['tokens']:,}"]
        for case in result["cases"]
    ]  # fmt: skip
    return markdown(
        [
            "model",
            "setting",
            "kernels",
            "weights",
            "bits per token",
            "greedy tokens as in bfloat16",
            "of",
        ],
        rows,
    )


def eight(result: Found) -> str:
    """A network of LLaDA-8B's shape, and what was predicted of it."""
    rows = []
    for case in result["cases"]:
        told = case["predicted"]
        predicted = "" if told is None else f"{told:.2f} ({told / case['tokens_per_second']:.2f}×)"
        rows.append(
            [f"`{case['way']}`", f"`{case['cache']}`", f"{case['load']:.0f} s",
             f"{case['memory']['anonymous']:.1f} GB", f"{case['memory']['peak']:.1f} GB",
             str(case["forwards"]), f"{case['seconds']:.1f} s",
             f"{case['tokens_per_second']:.2f}", predicted]
        )  # fmt: skip
    head = ["weights", "cache", "loads in", "held", "peak with mapped file", "forwards", "answer",
            "tokens/s", "predicted by doctor"]  # fmt: skip
    return (
        f"Random weights, prompt {result['prompt']}, {result['new']} new tokens, 4 decided per "
        f"step, {conditions(result)}, {result['kernels']} kernels, wall clock:\n\n"
        + markdown(head, rows)
    )


def llama(result: Found) -> str:
    """Beside llama.cpp's llama-diffusion-cli."""
    base = {case["type"]: case for case in result["cases"] if case["way"] == "llama.cpp"}
    rows = [
        [case["type"], case["way"], f"{case['busy']:.2f} s",
         f"{case['busy'] / base[case['type']]['busy']:.2f}", f"{case['memory']:,.0f} MB"]
        for case in result["cases"]
    ]  # fmt: skip
    shape = result["shape"]
    return (
        f"{shape['layers']} layers of {shape['hidden']}, random weights, {conditions(result)}, "
        f"{result['kernels']} kernels in dllm; "
        "processor time of a forward, in turns:\n\n"
        + markdown(["weights", "program", "a forward", "over llama.cpp", "peak memory"], rows)
    )


PROCESSORS = {  # marked part of docs/reference/models.md: its file, and what makes it
    "quantised": ("quantised", quantised), "eight": ("eight_billion", eight),
    "llama": ("llama_cpp", llama),
}  # fmt: skip
