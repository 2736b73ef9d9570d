"""What the records of a sweep say: tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from .measure import Record
from .metrics import dense_aup_interval, paired

BASE = "none"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [list(header), ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by_task(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records grouped by task, in order of appearance."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.task, []).append(record)
    return found


def curves(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of one task by method, each sorted by tokens per forward."""
    found: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda r: r.point):
        found.setdefault(record.method, []).append(record)
    return found


def percent(record: Record) -> str:
    low, high = record.interval
    return f"{100 * record.accuracy:.1f} ({100 * low:.0f}–{100 * high:.0f})"


def full_table(records: Sequence[Record]) -> str:
    """Every record."""
    header = ["task", "sampler", "cache", "% right (95 %)", "tokens per forward", "forwards",
              "positions computed", "tokens", "s per prompt", "peak MB"]  # fmt: skip
    rows = [
        [
            r.task, f"`{r.sampler}`", f"`{r.cache}`", percent(r), f"{r.point[0]:.2f}",
            f"{r.mean('nfe'):.1f}", f"{r.mean('computed'):.0f}", f"{r.mean('tokens'):.1f}",
            f"{r.mean('seconds'):.4f}", f"{r.peak_memory / 2**20:.0f}",
        ]
        for r in records
    ]  # fmt: skip
    return markdown(header, rows)


def area_table(records: Sequence[Record]) -> str:
    """Methods by tasks: area under the whole curve, with bootstrap intervals, and their mean."""
    tasks = by_task([r for r in records if r.cache == BASE])
    methods = list(dict.fromkeys(r.method for found in tasks.values() for r in found))
    cells: dict[str, list[float]] = {method: [] for method in methods}
    shown: dict[str, list[str]] = {method: [] for method in methods}
    for found in tasks.values():
        best = max(100 * record.accuracy for record in found)
        drawn = curves(found)
        for method in methods:
            outcomes = [record.outcome for record in drawn.get(method, [])]
            if not outcomes or best == 0:
                shown[method].append("–")
                continue
            area, low, high = dense_aup_interval(outcomes, best)
            cells[method].append(area)
            shown[method].append(f"{area:.0f} ({low:.0f}–{high:.0f})")
    complete = [m for m in methods if len(cells[m]) == len(tasks)]
    means = {m: sum(cells[m]) / len(cells[m]) for m in complete}
    order = sorted(methods, key=lambda m: -means.get(m, float("-inf")))
    rows = [[f"`{m}`", f"**{means[m]:.0f}**" if m in means else "–", *shown[m]] for m in order]
    return markdown(["sampler", "mean area", *tasks], rows)


def fastest_table(records: Sequence[Record]) -> str:
    """Per method: its fastest setting that is not shown to be less accurate than the slowest of
    all (paired difference, 95 %), and what it saves."""
    rows = []
    for task, found in by_task([r for r in records if r.cache == BASE]).items():
        slow = min(found, key=lambda r: r.point[0])
        for members in curves(found).values():
            good = [r for r in members if paired(slow.right, r.right).low <= 0]
            if good:
                fast = max(good, key=lambda r: r.point[0])
                saved = slow.mean("nfe") / fast.mean("nfe"), slow.seconds / fast.seconds
                rows.append(
                    [task, f"`{fast.sampler}`", percent(fast), f"{fast.point[0]:.2f}",
                     f"{saved[0]:.1f}×", f"{saved[1]:.1f}×"]
                )  # fmt: skip
    header = ["task", "fastest setting as good as the slowest", "% right (95 %)",
              "tokens per forward", "fewer forwards", "faster"]  # fmt: skip
    return markdown(header, rows)


def cache_table(records: Sequence[Record]) -> str:
    """Each cache against none, same sampler, all tasks together."""
    pairs: dict[tuple[str, str], list[tuple[Record, Record]]] = {}
    plain = {(r.task, r.sampler): r for r in records if r.cache == BASE}
    for record in records:
        if record.cache != BASE and (record.task, record.sampler) in plain:
            base = plain[record.task, record.sampler]
            pairs.setdefault((record.sampler, record.cache), []).append((base, record))
    rows = []
    for (sampler, cache), members in pairs.items():
        a = [x for base, _ in members for x in base.right]
        b = [x for _, record in members for x in record.right]
        change = paired(b, a)

        def ratio(name: str, members: list[tuple[Record, Record]] = members) -> float:
            return sum(r.mean(name) for r, _ in members) / sum(r.mean(name) for _, r in members)

        rows.append([
            f"`{sampler}`", f"`{cache}`", f"{100 * change.difference:+.1f} "
            f"({100 * change.low:+.1f} to {100 * change.high:+.1f})",
            f"{ratio('computed'):.2f}×", f"{1 / ratio('nfe'):.2f}×", f"{ratio('seconds'):.2f}×",
        ])  # fmt: skip
    header = ["sampler", "cache", "points of accuracy (95 %)", "fewer positions", "forwards",
              "faster"]  # fmt: skip
    return markdown(header, rows)
