"""Tables of docs/drafting.md about block drafters, each made of one JSON file."""

from __future__ import annotations

from typing import Any

from dllm.eval.report import markdown

Found = dict[str, Any]


def ablations(result: Found) -> str:
    """One thing changed at a time."""
    settings, variants = result["settings"], result["variants"]
    rows = []
    for name, got in variants.items():
        low, high = got.get("difference", [0, 0, 0])[1:]
        gap = f"{got['difference'][0]:+.2f} ({low:+.2f} to {high:+.2f})" if name != "base" else ""
        rows.append([
            name, f"{got['parameters'] / 1e6:.1f}M", f"{got['without_head']:.2f}",
            f"{got['tokens_per_forward']:.2f}", gap,
            " ".join(f"{share:.2f}" for share in got["reached"][:4]),
            f"{got['processor_seconds'] / settings['steps']:.1f} s",
        ])  # fmt: skip
    base = variants["base"]
    head = ["run", "weights", "without head", "as it drafts", "against `base` (95 %)",
            "drafts accepted, by place", "a step"]  # fmt: skip
    return (
        "Short runs that differ in one thing (`benchmarks/dflash_ablations.py`): "
        f"{settings['steps']} steps of {settings['rows']} answers with {settings['anchors']} "
        f"blocks each, {base['answer_tokens']:,} answer tokens; tokens per forward on "
        f"{base['held_out']} held-out answers.  `base`: 4 layers, 4 taps, blocks of 5, Markov head "
        "of rank 256, D-PACE, soft 0.5, 6144 head rows, start from the verifier's layers.\n\n"
        + markdown(head, rows)
    )
