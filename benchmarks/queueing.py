"""What continuous batching can gain, by arithmetic: a queue whose steps cost 1 + b (rows - 1).

    python benchmarks/queueing.py && python benchmarks/readme.py

``b`` is what one more row adds to a step, in steps of a single row: 0 where the weights have to be
read anyway (few rows on a GPU), 1 where arithmetic is the limit.  The modes are those of
`serving.py`; requests differ in length only, nothing is measured.
"""

from __future__ import annotations

import random
from statistics import fmean, median
from typing import Any

from report import RESULTS, write  # isort: skip
from serving import LENGTHS, LIMITS, MODES, ROWS  # isort: skip

ADDED = (0.05, 0.2, 0.4, 0.7)
REQUESTS, SEEDS = 600, 3
LIGHT = 0.7  # a load at which nobody waits for long


def latencies(
    mode: str, load: float, added: float, rows: int = ROWS, count: int = REQUESTS, seed: int = 0
) -> list[float]:
    """Steps of a single row from arrival to end, over the mean length, of every request."""
    rng, lengths = random.Random(seed), LENGTHS["nano"]
    size = [rng.choice(lengths) for _ in range(count)]
    mean, arrivals, at = fmean(lengths), [], 0.0
    for _ in range(count):
        arrivals.append(at)
        at += rng.expovariate(load / mean)
    most = 1 if mode == "serial" else rows
    left: dict[int, int] = {}
    ends, clock, entered = [0.0] * count, 0.0, 0
    while entered < count or left:
        if not left and entered < count:
            clock = max(clock, arrivals[entered])
        if not left or mode in ("continuous", "serial"):
            entering = []
            while entered < count and arrivals[entered] <= clock and len(left) < most:
                left[entered] = size[entered]
                entering.append(entered)
                entered += 1
            if mode == "equal":
                left |= dict.fromkeys(entering, max((size[i] for i in entering), default=0))
        clock += 1 + added * (len(left) - 1)
        for i in list(left):
            left[i] -= 1
            if not left[i]:
                ends[i] = clock
                del left[i]
    return [(end - arrival) / mean for end, arrival in zip(ends, arrivals, strict=True)]


def borne(mode: str, added: float, limit: float, rows: int = ROWS) -> float | None:
    """The largest load at which p99 stays below ``limit`` mean lengths; None where not even a
    twentieth is borne."""

    def late(load: float) -> bool:
        each = [sorted(latencies(mode, load, added, rows, seed=seed)) for seed in range(SEEDS)]
        return fmean(one[int(0.99 * len(one))] for one in each) > limit

    low, high = 0.05, 1.0 / added + 1
    if late(low):
        return None
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (low, middle) if late(middle) else (middle, high)
    return round(low, 2)


def light(added: float) -> dict[str, float]:
    """Median latency at a load of `LIGHT`, by mode."""
    return {
        mode: round(median(x for seed in range(SEEDS)
                           for x in latencies(mode, LIGHT, added, seed=seed)), 2)
        for mode in MODES
    }  # fmt: skip


def main() -> None:
    entries: list[dict[str, Any]] = []
    for added in ADDED:
        for limit in LIMITS:
            loads = {mode: borne(mode, added, limit) for mode in MODES}
            entries.append({"added": added, "limit": limit, "loads": loads})
            print(entries[-1], flush=True)
    medians = [{"added": added, "p50": light(added)} for added in (*ADDED, 0.85, 1.0)]
    write(RESULTS / "queueing.json", {
        "rows": ROWS, "lengths": LENGTHS["nano"], "borne": entries, "load": LIGHT, "light": medians,
    })  # fmt: skip


if __name__ == "__main__":
    main()
