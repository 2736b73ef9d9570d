"""Tables of the documentation, each made of one committed JSON file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dllm.eval.report import markdown

from cpu_tables import PROCESSORS  # isort: skip
from dflash_tables import counts, plain, times  # isort: skip
from harness import RESULTS  # isort: skip
from step_tables import compiled, conditions, dtypes, steps  # isort: skip

Found = dict[str, Any]
SHAPED = {"llada": "LLaDA-shaped", "dream": "Dream-shaped (grouped queries)"}
HEADS = {"llada": "LLaDA-8B, 4096 × 126,464", "dream": "Dream-7B, 3584 × 152,064"}


def load(name: str) -> Found:
    result: Found = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def heads(*files: Found) -> str:
    """Token statistics against the bare product: every head, dtype and number of rows."""
    rows = [
        [HEADS[case["head"]], case["dtype"], str(case["rows"]),
         f"{case['statistics_to_bare']['wall']:.2f}", f"{case['statistics_to_bare']['cpu']:.2f}",
         f"{case['peak_extra_mib']['statistics']:.0f} MiB"]
        for result in files for case in result["results"]
    ]  # fmt: skip
    return markdown(
        ["head", "dtype", "rows", "time / bare product", "processor time", "extra memory"], rows
    )


def setting(result: Found) -> str:
    """On what and in which dtype something was measured, and whose kernels multiplied."""
    return f"{result['dtype']}, {result['kernels']} kernels, {conditions(result)}"


def cache_costs(result: Found) -> str:
    """The shape that the README quotes: operations, what the machine's rates allow, time."""
    headline = [s for s in result["shapes"] if (s["prompt"], s["new"]) == (512, 256)]
    parts = []
    for shape in headline:
        rows = [
            [f"`{c['cache']}`", f"{c['computed']:,}", f"{c['cache_bytes'] / 2**20:.0f} MiB",
             f"{c['speedup']:.2f}×", f"{c['flop_ratio']:.2f}×", f"{c['measured_to_flops']:.2f}",
             f"{c['predicted']:.2f}×"]
            for c in shape["cases"]
        ]  # fmt: skip
        parts.append(
            f"{SHAPED[shape['model']]}, prompt {shape['prompt']}, {shape['new']} new "
            f"tokens, {shape['tokens_per_step']} per step, blocks of {result['block']}:\n\n"
            + markdown(["cache", "positions computed", "held", "faster than `none`",
                        "fewer operations", "quotient", "predicted from rates"], rows)
        )  # fmt: skip
    return "\n\n".join([f"135M parameters, random weights, {setting(result)}.", *parts])


def cache_shapes(result: Found) -> str:
    """Speed-up of every cache for every shape."""
    models = list(dict.fromkeys(shape["model"] for shape in result["shapes"]))
    parts = []
    for model in models:
        shapes = sorted(
            (s for s in result["shapes"] if s["model"] == model),
            key=lambda s: (s["prompt"], s["new"]),
        )
        if len(shapes) == 1:  # stands among the costs
            continue
        by_shape = [{c["cache"]: c["speedup"] for c in s["cases"]} for s in shapes]
        rows = [
            [f"`{cache}`", *(f"{cell[cache]:.2f}×" if cache in cell else "–" for cell in by_shape)]
            for cache in max(by_shape, key=len) if cache != "none"
        ]  # fmt: skip
        head = [f"{s['prompt']} → {s['new']}" for s in shapes]
        parts.append(f"{SHAPED[model]}:\n\n" + markdown(["cache", *head], rows))
    return "\n\n".join(parts)


def cache_memory(result: Found) -> str:
    """Time of a step between refreshes and bytes held, over the length of the prompt."""
    prompts = list(dict.fromkeys(case["prompt"] for case in result["cases"]))
    cells: dict[str, list[Found]] = {}
    for case in result["cases"]:
        cells.setdefault(case["cache"], []).append(case)
    rows = [
        [f"`{name}`", *(f"{1e3 * case['between']:.0f}" for case in mine),
         f"{mine[-1]['growth']:.1f}×", f"{mine[-1]['cache_bytes'] / 2**20:.0f} MiB"]
        for name, mine in cells.items()
    ]  # fmt: skip
    head = [f"ms at {prompts[0]}", *map(str, prompts[1:]), "growth", f"held at {prompts[-1]}"]
    return f"{setting(result)}.\n\n" + markdown(["cache", *head], rows)


def drafts(result: Found) -> str:
    """Searches and lengths: accepted tokens, forwards, modelled speed, and against argmax."""
    rows = []
    for entry in result["experiments"]:
        every, versus = entry["overall"], entry.get("against_argmax")
        rows.append(
            [f"{entry['temperature']:g}", f"`{entry['name']}`", str(every["prompts"]),
             f"{every['accepted_per_round']:.2f}", f"{every['forwards_saved']:.2f}×",
             f"{every['modelled_speed']:.2f}×",
             f"{versus['difference']:+.2f} ({versus['low']:+.2f} to {versus['high']:+.2f})"
             if versus else ""]
        )  # fmt: skip
    head = ["temperature", "search and length", "prompts", "accepted per round", "fewer forwards",
            "modelled speed", "accepted, against `argmax` (95 %)"]  # fmt: skip
    return markdown(head, rows)


def draft_times(result: Found) -> str:
    """Seconds against plain decoding and the shares of a round."""
    rows = []
    for entry in result["settings"]:
        if entry["name"].startswith("plain"):
            continue
        low, high = entry["quartiles"]
        shares = [f"{100 * entry['shares'][key]:.1f} %" for key in ("draft", "search", "verify")]
        ratio = f"{entry['time_ratio']:.2f}× ({low:.2f} to {high:.2f})"
        rows.append([f"`{entry['name']}`", ratio, *shares])
    head = ["setting", "faster than plain", "drafting", "search", "verifying"]
    return f"{setting(result)}.\n\n" + markdown(head, rows)


def draft_rate(result: Found, both: Found) -> str:
    """`rate` against the best fixed length, and two networks at once."""
    rate = result["rate_against_best_fixed"]
    low, high = rate["quartiles"]
    return (
        f"`argmax rate` against `{rate['fixed']}`, the fastest fixed length, in "
        f"{result['repeats']} turns: {rate['ratio']:.2f}× (quartiles {low:.2f} to {high:.2f}).  "
        f"A forward of each network takes {1e3 * both['serial_seconds']:.1f} ms one after the "
        f"other and {1e3 * both['parallel_seconds']:.1f} ms on two threads at once."
    )


def throughput(result: Found) -> str:
    """Tokens per processor second by batch, group and setting."""
    settings = list(dict.fromkeys(cell["setting"] for cell in result["cells"]))
    rows = {}
    for cell in result["cells"]:
        row = rows.setdefault((cell["batch"], cell["group"]), {})
        row[cell["setting"]] = f"{cell['tokens'] / cell['seconds']:.0f}"
    table = [[str(batch), group, *(row[name] for name in settings)]
             for (batch, group), row in rows.items()]  # fmt: skip
    return (
        f"Tokens per processor second, {result['tokens']} tokens per text; {setting(result)}.\n\n"
        + markdown(["batch", result["group"], *settings], table)
    )


def serving(result: Found) -> str:
    """Loads that are borne at equal p90 or p99, by mode, and the latencies behind them."""
    most = max(point["load"] for point in result["points"])
    rows = []
    alike = all(p["first text"] == p["end to end"] for p in result["points"])  # random weights
    for entry in result["borne"]:
        loads = entry["loads"]
        if alike and entry["what"] == "first text":
            continue
        rows.append([
            entry["what"], f"{entry['limit']:g}×",
            *(_load(load, most) for load in loads.values()),
            *(_ratio(loads["continuous"], loads[mode], most)
              for mode in ("static", "equal", "serial")),
        ])  # fmt: skip
    added = result.get("added_by_a_row")
    more = "" if added is None else f"  One more row adds {added:.2f} of a step of a single row."
    modes = list(result["borne"][0]["loads"])
    head = ["latency", f"{result['tail']} at most", *(f"`{mode}`" for mode in modes),
            *(f"over `{mode}`" for mode in modes[1:])]  # fmt: skip
    return (
        f"`{result['model']}`, cache `{result['cache']}`, blocks of {result['block']}, "
        f"{result['rows']} rows, answers of {', '.join(map(str, result['lengths']))} tokens at one "
        f"token per step, {result['requests']} requests at each load; a request alone takes "
        f"{1000 * result['alone_seconds']:.0f} ms in the mean; {conditions(result)}.  Loads are "
        "multiples of what `serial` can do at all, latencies of the mean request alone; the "
        f"highest load measured was {most:g}.{more}\n\n" + markdown(head, rows)
    )


def _load(load: float | None, most: float) -> str:
    return "–" if load is None else f"{'≥ ' * (load >= most)}{load:.2f}"


def _ratio(one: float | None, other: float | None, most: float = math.inf) -> str:
    """How many times ``other``, as far as loads up to ``most`` tell."""
    if not one or not other or other >= most:
        return "–"
    return f"{'≥ ' * (one >= most)}{one / other:.1f}×"


def serving_overhead(result: Found) -> str:
    """What HTTP, queue and events cost at one client."""
    low, high = min(result["ratios"]), max(result["ratios"])
    return (
        f"HTTP, queue, events and the client itself at one client: {result['overhead_percent']} % "
        f"of the processor time of a request of the 135M shape (8 forwards, 32 tokens; "
        f"{len(result['ratios'])} pairs of turns, {100 * (low - 1):+.1f} % to "
        f"{100 * (high - 1):+.1f} %); {conditions(result)}."
    )


def soaked(result: Found) -> str:
    """A long run of the server."""
    first, last = result["windows"][1], result["windows"][-1]
    wrong = {end: n for end, n in result["ends"].items() if ":" in end}
    left = result["ends"].get("left", 0) + result["ends"].get("late", 0)
    left += result["ends"].get("malformed", 0)
    return (
        f"{result['seconds'] / 60:.0f} minutes, {result['requests']:,} requests, "
        f"{left:,} of which left, were late or malformed; {sum(wrong.values())} ended otherwise "
        f"than they should.  Memory {first['memory_mib']:.1f} MiB after "
        f"{result['seconds'] / len(result['windows']) / 30:.0f} minutes and "
        f"{last['memory_mib']:.1f} MiB in the end; processor time per request "
        f"{first['cpu_ms_per_request']:.0f} and {last['cpu_ms_per_request']:.0f} ms; afterwards "
        f"{result['left']['running']} rows, {result['left']['waiting']} waiting, "
        f"{result['left']['threads']} threads, {result['left']['files']} open files."
    )


def plot_of(docs: Path, name: str) -> str:
    """The plot beside a table, where there is one."""
    there = (docs / "reference" / f"{name}.svg").exists()
    return f"\n\n![Latency against load, by mode]({name}.svg)" if there else ""


SERVING = {
    "serving": serving, "serving_engine": serving,
    "serving_135m_engine": serving,
    "serving_overhead": serving_overhead, "soak": soaked,
}  # fmt: skip


def joining(result: Found) -> str:
    """What it brings that rows join and leave."""
    low, middle, high = result["batching"][0]["answers"]
    batches = [
        [str(r["rows"]), f"`{r['cache']}`", str(r["fixed_forwards"]),
         str(r["continuous_forwards"]), f"{r['fixed_rows_per_forward']:.1f}",
         f"{r['continuous_rows_per_forward']:.1f}", f"{r['faster']:.2f}×"]
        for r in result["batching"]
    ]  # fmt: skip
    (harness,) = result["harness"]
    ragged = [
        [str(r["rows"]), f"{r['computed']:,} / {r['computed_padded']:,}",
         f"{r['cache_bytes'] / 1e6:.0f} / {r['cache_bytes_padded'] / 1e6:.0f} MB",
         f"{r['tokens_per_second']:.0f}", f"{r['faster']:.2f}×"]
        for r in result["rows"]
    ]  # fmt: skip
    lost = ", ".join(
        f"{100 * r['slower_when_scattered']:.1f} % ({r['model']})" for r in result["folding"]
    )
    return "\n\n".join([
        f"256 prompts of `nano` with answers of {low} to {high} tokens (median {middle}), blocks "
        "of 16: batches that wait for their longest answer (fixed) against rows that join when "
        "another has left (continuous).  Processor time; "
        f"{conditions(result)}.",
        markdown(["rows", "cache", "forwards, fixed", "continuous", "rows per forward, fixed",
                  "continuous", "faster"], batches),
        f"The same prompts as `generate_until` requests of lm-evaluation-harness, "
        f"{harness['rows']} at a time: {harness['fixed_forwards']} forwards in fixed batches, "
        f"{harness['continuous_forwards']} in continuous ones, {harness['faster']:.2f}× as fast.",
        "Ragged rows of the 135M shape (prompts of 32 to 256 tokens, dual cache) against the same "
        "rows padded to the longest:",
        markdown(["rows", "positions computed, ragged / padded", "keys and values",
                  "tokens per second", "faster"], ragged),
        f"Eight rows in lockstep whose slots are scattered in the pool take {lost} longer than "
        "rows side by side.",
    ])  # fmt: skip


def pages(docs: Path) -> dict[Path, dict[str, str]]:
    """File -> name of a marked part -> its content."""
    result = {
        docs / "kernels.md": {
            "heads": heads(load("kernels_llada"), load("kernels_dream")),
            "steps": steps(load("step")), "compiled": compiled(load("cpu_kernels")),
        },
        docs / "reference" / "models.md": {
            "dtypes": dtypes(load("step")),
            **{name: table(load(file)) for name, (file, table) in PROCESSORS.items()
               if (RESULTS / f"{file}.json").exists()},
        },
        docs / "reference" / "caches.md": {
            "costs": cache_costs(load("caches")),
            "shapes": cache_shapes(load("caches")),
            "memory": cache_memory(load("cache_memory")),
        },
        docs / "reference" / "drafting.md": {
            "drafts": drafts(load("drafting")), "times": draft_times(load("drafting_times")),
            "rate": draft_rate(load("drafting_rate"), load("drafting_times")["overlap"]),
            "times135": draft_times(load("drafting_times_135m")),
            "throughput": throughput(load("throughput")),
            **drafter_tables(),
        },
        docs / "reference" / "http-api.md": {
            name: made(load(name)) + plot_of(docs, name) for name, made in SERVING.items()
            if (RESULTS / f"{name}.json").exists()
        },
    }  # fmt: skip
    return result


def drafter_tables() -> dict[str, str]:
    """Those whose measurements are there."""
    made = {
        "counts": ("dflash_counts", counts),
        "counts-2": ("dflash_counts_2", counts),
        "dflash-times": ("dflash_times", times), "dflash-times-2": ("dflash_times_2", times),
        "dflash-times-compiled": ("dflash_times_compiled", times),
        "plain": ("drafting_plain", plain),
    }  # fmt: skip
    return {
        name: table(load(file))
        for name, (file, table) in made.items()
        if (RESULTS / f"{file}.json").exists()
    }
