"""What the records of a sweep say: tables in Markdown.

Differences are to one token per step on the same prompts: in points of accuracy with Tango's 95 %
interval, and the p-value of the exact McNemar test, adjusted by Holm's method for the number of
comparisons in the table (in `full_table`: of the task).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .measure import Record
from .metrics import DROP, Paired, holm, paired

BASE = "none"
REFERENCE = "llada"  # its slowest setting is one token per step, which others are compared with
CHANGE = ["points of accuracy (95 %)", "p"]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(header), ["---"] * len(header), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def by_task(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records grouped by task, in order of appearance."""
    result: dict[str, list[Record]] = {}
    for record in records:
        result.setdefault(record.task, []).append(record)
    return result


def curves(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of one task by method, each sorted by tokens per forward."""
    result: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda r: r.point):
        result.setdefault(record.method, []).append(record)
    return result


def one_by_one(records: Sequence[Record]) -> Record:
    """One token per step: the slowest setting of the reference sampler, or else of all."""
    known = [record for record in records if record.method == REFERENCE]
    return min(known or records, key=lambda record: record.point[0])


def percent(record: Record) -> str:
    low, high = record.interval
    return f"{100 * record.accuracy:.1f} ({100 * low:.0f}–{100 * high:.0f})"


def full_table(records: Sequence[Record]) -> str:
    """Every record, compared with one token per step on its task."""
    changes: dict[str, list[str]] = {}
    for result in by_task(records).values():
        slow = one_by_one(result)
        others = [r for r in result if r is not slow and r.examples == slow.examples]
        shown = differences([paired(r.right, slow.right) for r in others])
        changes |= dict(zip((r.key for r in others), shown, strict=True))
    header = ["task", "sampler", "cache", "% right (95 %)", *CHANGE, "tokens per forward",
              "forwards", "positions computed", "tokens", "s per prompt", "peak MiB"]  # fmt: skip
    rows = [
        [
            r.task, f"`{r.sampler}`", f"`{r.cache}`", percent(r), *changes.get(r.key, ["–", "–"]),
            f"{r.point[0]:.2f}", f"{r.mean('nfe'):.1f}", f"{r.mean('computed'):.0f}",
            f"{r.mean('tokens'):.1f}", f"{r.mean('seconds'):.4f}", f"{r.peak_memory / 2**20:.0f}",
        ]
        for r in records
    ]  # fmt: skip
    return markdown(header, rows)


def differences(changes: Sequence[Paired]) -> list[list[str]]:
    """The two cells of `CHANGE` for comparisons that belong to one table."""
    adjusted = holm([change.p_value for change in changes])
    return [[points(c), p_value(p)] for c, p in zip(changes, adjusted, strict=True)]


def points(change: Paired) -> str:
    """A difference of accuracies in points."""
    low, high = 100 * change.low, 100 * change.high
    return f"{100 * change.difference:+.1f} ({low:+.1f} to {high:+.1f})"


def p_value(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


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


def pooled(records: Sequence[Record]) -> dict[tuple[str, str], Pooled]:
    """Settings that were measured on all tasks, by method and sampler."""
    tasks, groups = list(by_task(records)), dict[tuple[str, str], list[Record]]()
    for record in sorted(records, key=lambda r: tasks.index(r.task)):
        groups.setdefault((record.method, record.sampler), []).append(record)
    return {
        key: Pooled(tuple(result)) for key, result in groups.items() if len(result) == len(tasks)
    }


def fastest(records: Sequence[Record]) -> tuple[Pooled | None, dict[str, tuple[str, Pooled]]]:
    """One token per step; and per method, the fastest first, its setting with most tokens per
    forward among those that are shown to lose at most `DROP` points against it (lower end of the
    paired 95 % interval), all tasks together."""
    result = pooled([record for record in records if record.cache == BASE])
    if not result:
        return None, {}
    reference = one_by_one([each.members[0] for each in result.values()])
    slow = result[reference.method, reference.sampler]
    chosen: dict[str, tuple[str, Pooled]] = {}
    for (method, sampler), each in sorted(result.items(), key=lambda item: item[1].rate):
        if each is slow or 100 * paired(each.right, slow.right).low >= -DROP:
            chosen[method] = sampler, each
    return slow, dict(sorted(chosen.items(), key=lambda item: (-item[1][1].rate, item[0])))


def fastest_table(records: Sequence[Record], most: int | None = None) -> str:
    """The `fastest` setting of every method, ``most`` rows; p-values are adjusted for all."""
    slow, chosen = fastest(records)
    if slow is None:
        return ""
    shown = differences([paired(each.right, slow.right) for _, each in chosen.values()])
    rows = [
        [f"`{sampler}`", *cells, f"{each.rate:.2f}",
         *(f"{slow.total(n) / each.total(n):.1f}×" for n in ("nfe", "computed", "seconds"))]
        for (sampler, each), cells in zip(chosen.values(), shown, strict=True)
    ]  # fmt: skip
    header = ["fastest setting", *CHANGE, "tokens per forward", "fewer forwards",
              "fewer positions", "faster"]  # fmt: skip
    if most is not None:
        return markdown(header, rows[:most])
    every = pooled([record for record in records if record.cache == BASE])
    none = sorted({f"`{method}`" for method, _ in every if method not in chosen})
    return markdown(header, rows) + (f"\n\nNo such setting: {', '.join(none)}." if none else "")


def cache_table(records: Sequence[Record]) -> str:
    """Each cache against none, same sampler, all tasks together."""
    pairs: dict[tuple[str, str], list[tuple[Record, Record]]] = {}
    plain = {(r.task, r.sampler): r for r in records if r.cache == BASE}
    for record in records:
        if record.cache != BASE and (record.task, record.sampler) in plain:
            base = plain[record.task, record.sampler]
            pairs.setdefault((record.sampler, record.cache), []).append((base, record))
    both = [
        (Pooled(tuple(base for base, _ in members)), Pooled(tuple(r for _, r in members)))
        for members in pairs.values()
    ]
    shown = differences([paired(cached.right, base.right) for base, cached in both])
    rows = [
        [f"`{sampler}`", f"`{cache}`", *cells,
         f"{base.total('computed') / cached.total('computed'):.2f}×",
         f"{cached.total('nfe') / base.total('nfe'):.2f}×",
         f"{base.total('seconds') / cached.total('seconds'):.2f}×"]
        for (sampler, cache), cells, (base, cached) in zip(pairs, shown, both, strict=True)
    ]  # fmt: skip
    return markdown(["sampler", "cache", *CHANGE, "fewer positions", "forwards", "faster"], rows)
