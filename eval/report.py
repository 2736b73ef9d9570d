"""What the records of a sweep say: tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .measure import Record
from .metrics import Paired, dense_aup_interval, paired

BASE = "none"
REFERENCE = "llada"  # its slowest setting is one token per step, which others are compared with


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


def one_by_one(records: Sequence[Record]) -> Record:
    """One token per step: the slowest setting of the reference sampler, or else of all."""
    known = [record for record in records if record.method == REFERENCE]
    return min(known or records, key=lambda record: record.point[0])


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
    """Methods by tasks: area under the whole curve, with bootstrap intervals, and their mean.

    Every curve begins at one token per step: the area's first rectangle would otherwise favour a
    method whose sweep begins where others end.
    """
    tasks = by_task([r for r in records if r.cache == BASE])
    methods = list(dict.fromkeys(r.method for found in tasks.values() for r in found))
    areas: dict[str, list[float]] = {method: [] for method in methods}
    shown: dict[str, list[str]] = {method: [] for method in methods}
    for found in tasks.values():
        best, slow = max(100 * r.accuracy for r in found), one_by_one(found)
        drawn = curves(found)
        for method in methods:
            line = drawn.get(method, [])
            if not line or best == 0:
                shown[method].append("–")
                continue
            outcomes = [record.outcome for record in (slow, *(r for r in line if r is not slow))]
            area, low, high = dense_aup_interval(outcomes, best)
            areas[method].append(area)
            shown[method].append(f"{area:.0f} ({low:.0f}–{high:.0f})")
    means = {m: sum(found) / len(tasks) for m, found in areas.items() if len(found) == len(tasks)}
    order = sorted(methods, key=lambda m: -means.get(m, float("-inf")))
    rows = [[f"`{m}`", f"**{means[m]:.0f}**" if m in means else "–", *shown[m]] for m in order]
    return markdown(["sampler", "mean area", *tasks], rows)


@dataclass(frozen=True)
class Pooled:
    """One setting on all tasks together."""

    members: tuple[Record, ...]

    @property
    def right(self) -> list[bool]:
        return [x for record in self.members for x in record.right]

    @property
    def rate(self) -> float:
        """Tokens per forward."""
        return self.total("tokens") / self.total("nfe")

    def total(self, name: str) -> float:
        return sum(record.mean(name) * record.examples for record in self.members)


def fastest_table(records: Sequence[Record]) -> str:
    """Per method: its setting with most tokens per forward, among those that were measured on all
    tasks and are not shown to be less accurate than one token per step (paired, 95 %)."""
    plain = [record for record in records if record.cache == BASE]
    tasks, groups = by_task(plain), dict[tuple[str, str], list[Record]]()
    for record in sorted(plain, key=lambda r: list(tasks).index(r.task)):
        groups.setdefault((record.method, record.sampler), []).append(record)
    pooled = {
        key: Pooled(tuple(found)) for key, found in groups.items() if len(found) == len(tasks)
    }
    if not pooled:
        return ""
    reference = one_by_one([found.members[0] for found in pooled.values()])
    slow = pooled[reference.method, reference.sampler]
    fastest: dict[str, tuple[str, Pooled]] = {}
    for (method, sampler), found in sorted(pooled.items(), key=lambda item: item[1].rate):
        if paired(slow.right, found.right).low <= 0:
            fastest[method] = sampler, found
    rows = []
    for sampler, found in sorted(fastest.values(), key=lambda item: -item[1].rate):
        change = paired(found.right, slow.right)
        ratios = (slow.total(name) / found.total(name) for name in ("nfe", "computed", "seconds"))
        rows.append(
            [f"`{sampler}`", points(change), f"{found.rate:.2f}", *(f"{r:.1f}×" for r in ratios)]
        )
    header = ["fastest setting", "points of accuracy (95 %)", "tokens per forward",
              "fewer forwards", "fewer positions", "faster"]  # fmt: skip
    return markdown(header, rows)


def points(change: Paired) -> str:
    """A difference of accuracies in points."""
    low, high = 100 * change.low, 100 * change.high
    return f"{100 * change.difference:+.1f} ({low:+.1f} to {high:+.1f})"


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

        def ratio(name: str, members: list[tuple[Record, Record]] = members) -> float:
            return sum(r.mean(name) for r, _ in members) / sum(r.mean(name) for _, r in members)

        rows.append([
            f"`{sampler}`", f"`{cache}`", points(paired(b, a)),
            f"{ratio('computed'):.2f}×", f"{1 / ratio('nfe'):.2f}×", f"{ratio('seconds'):.2f}×",
        ])  # fmt: skip
    header = ["sampler", "cache", "points of accuracy (95 %)", "fewer positions", "forwards",
              "faster"]  # fmt: skip
    return markdown(header, rows)
