"""Tables of docs/results/drafting.md, each made of one JSON file."""

from __future__ import annotations

from typing import Any

from dllm.eval.report import markdown

Found = dict[str, Any]


def counts(result: Found) -> str:
    """Tokens per forward by category."""
    categories = result["categories"]
    methods = list(dict.fromkeys(m for rows in categories.values() for m in rows))
    rows = []
    for method in methods:
        cells = [by[method]["tokens"] / by[method]["forwards"] if method in by else None
                 for by in categories.values()]  # fmt: skip
        known = [cell for cell in cells if cell is not None]
        mean = f"**{sum(known) / len(known):.2f}**"
        shown = ["" if cell is None else f"{cell:.2f}" for cell in cells]
        rows.append([method, *shown, mean, different(categories, method)])
    each = max(row["prompts"] for by in categories.values() for row in by.values())
    size = result["settings"]["tokens"]
    return (
        f"Tokens per forward of the verifier, {each} prompts of each category, at most {size} "
        "tokens each, bfloat16; `different`: texts that are not those of plain decoding.\n\n"
        + markdown(["method", *categories, "mean", "different"], rows)
    )


def different(categories: Found, method: str) -> str:
    rows = [by[method] for by in categories.values() if method in by]
    return f"{sum(row['different'] for row in rows)} of {sum(row['prompts'] for row in rows)}"


def times(result: Found) -> str:
    """Time per token against the fastest plain decoding of each category."""
    settings = result["settings"]
    clock, meant = "cpu", "CPU time"
    if settings["threads"] > 1:
        clock, meant = "wall", "seconds"
    sums: dict[str, dict[str, Found]] = {}
    for key, by in result["categories"].items():
        for method, row in by.items():
            into = sums.setdefault(method, {}).setdefault(
                key.rsplit("/", 1)[0], {"time": 0.0, "tokens": 0, "parts": [0.0, 0.0, 0.0]}
            )
            into["time"], into["tokens"] = into["time"] + row[clock], into["tokens"] + row["tokens"]
            parts = row.get("parts", [0.0] * 3)
            into["parts"] = [a + b for a, b in zip(into["parts"], parts, strict=True)]
    plains = [m for m in sums if m.startswith("plain") or m in ("transformers", PLAIN_32)]
    names = list(next(iter(sums.values())))
    fastest = {n: min(sums[m][n]["time"] / sums[m][n]["tokens"] for m in plains) for n in names}
    rows = []
    for method, by in sums.items():
        speeds = [fastest[n] * by[n]["tokens"] / by[n]["time"] for n in names]
        spent = [sum(column) for column in zip(*(by[n]["parts"] for n in names), strict=True)]
        whole = sum(spent)
        shares = " / ".join(f"{100 * part / whole:.0f}" for part in spent) if whole else ""
        mean = f"**{sum(speeds) / len(speeds):.2f}**"
        rows.append([method, *(f"{s:.2f}" for s in speeds), mean, f"{min(speeds):.2f}", shares])
    prompts = max(int(key.rsplit("/", 1)[1]) for key in result["categories"]) + 1
    machine, count = result["machine"], settings["threads"]
    threads = f"{count} thread{'s' * (count > 1)}"
    kernels = result.get("kernels", "PyTorch's")
    return (
        f"How many times as fast as the fastest of the four plain decodings, {meant} per token, "
        f"prompt included, {prompts} prompts of each category, at most {settings['tokens']} "
        f"tokens, {kernels} kernels, {threads} of an {machine['cpu']} (load "
        f"{machine.get('load') or 0:.0f} at the end); methods took turns on every prompt.\n\n"
        + markdown(["method", *names, "mean", "least", "draft / verify / rest, %"], rows)
    )


PLAIN_32 = "transformers float32"
