"""The fastest setting that is as good as one token per step: a screening, then a confirmation.

All candidates answer the same screening prompts as the baseline; the cheapest that may be as good
are the finalists.  The fastest of one sample may be so by luck: finalists are confirmed, cheapest
first, on prompts that had no part in choosing them, at a level that allows for their number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from ..core.errors import ConfigError, UnknownNameError
from ..models import DiffusionModel
from .machine import machine
from .measure import Cell, Record, RefusedError, Setting, fingerprint, measure
from .metrics import Paired, paired
from .problems import draw, problems
from .sweep import refusal

COSTS = ("seconds", "nfe", "computed")
LEVEL = 0.05  # of the interval that confirms, for all finalists together
FORMAT = 1
UNREACHABLE = 2**62  # prompts


@dataclass
class Candidate:
    """A setting and what it has answered so far."""

    setting: Setting
    records: list[Record] = field(default_factory=list)

    @property
    def right(self) -> list[bool]:
        return [x for record in self.records for x in record.right]

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)

    def cost(self, by: str) -> float:
        """Per prompt."""
        total = sum(record.mean(by) * record.examples for record in self.records)
        return total / len(self.right)


@dataclass(frozen=True)
class Choice:
    """What was found.  ``accuracy`` and ``baseline`` are shares on the confirming prompts,
    ``change`` compares them, with the interval that confirmed; ``saving`` is the baseline's cost
    over the setting's (of seconds at least: its fastest run over the setting's slowest).
    ``confirmed`` is False when nothing passed and the baseline itself is
    returned."""

    setting: Setting
    accuracy: float
    baseline: float
    change: Paired
    saving: float
    by: str
    examples: int
    confirmed: bool


# What the finalists of a first screening are tried with: a cache of each kind that saves most of a
# forward.
CACHES = ("prefix", "dual", "dkv", "dllm_cache", "block", "wedlm")

Progress = Callable[[str, Sequence[Candidate]], None]


@dataclass(frozen=True)
class Tuning:
    """How to search.  ``keep``: share of the baseline's accuracy to preserve; ``tolerance``: how
    far below that the lower end of the 95 % interval may lie (an interval has a width, also where
    two settings never differ); ``screen``: prompts per task that all candidates answer;
    ``finalists``: how many settings are confirmed at most, each with an interval of 1 - 0.05 /
    their number (Bonferroni); ``confirm``: prompts per task for that, which are different ones;
    ``by``: what to save; ``caches``: those that finalists are crossed with and screened again, as
    far as the model can run them; ``timings``: runs of the baseline and each finalist where seconds
    are saved."""

    tasks: Sequence[str]
    keep: float = 0.99
    tolerance: float = 0.05
    screen: int = 96
    confirm: int = 200
    finalists: int = 5
    by: str = "seconds"
    seed: int = 0
    rows: int = 32
    caches: Sequence[str] = ()
    timings: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep is a share of the accuracy in (0, 1], not {self.keep}")
        if self.by not in COSTS:
            raise UnknownNameError("cost", self.by, COSTS)
        if not self.tasks:
            raise ConfigError("there is no task to tune on: pass tasks=[...] (--task), e.g. 'sort'")
        if min(self.screen, self.confirm, self.finalists, self.timings) < 1:
            raise ConfigError(
                "screen and confirm count prompts, finalists settings, timings runs: all from 1"
            )


def needed(how: Tuning, settings: int) -> int:
    """Confirming prompts, all tasks together, from which ``settings`` that change no answer are
    confirmed: Tango's interval around no difference in n pairs ends at -z^2 / (n + z^2)."""
    z, room = _z(min(how.finalists, settings)), how.tolerance + 1 - how.keep
    return max(1, math.ceil(z * z * (1 / room - 1))) if room > 0 else UNREACHABLE


def check_enough(how: Tuning, settings: int) -> None:
    """Raise `ConfigError` where even settings that change no answer could not be confirmed."""
    asked, least = how.confirm * len(how.tasks), needed(how, settings)
    if asked >= least:
        return
    prompts = "1 prompt" if asked == 1 else f"{asked} prompts"
    if least == UNREACHABLE:
        raise ConfigError(
            "keep 1 and tolerance 0 cannot be confirmed by any number of prompts: leave some room"
        )
    raise ConfigError(
        f"{prompts} cannot confirm that {100 * how.keep:g} % of the accuracy is kept within "
        f"{100 * how.tolerance:g} points, even if no answer changes: take at least "
        f"{math.ceil(least / len(how.tasks))} per task (-n), or a larger tolerance"
    )


def _z(finalists: int) -> float:
    """Width of the interval that confirms one of so many (Bonferroni)."""
    return NormalDist().inv_cdf(1 - LEVEL / max(1, finalists) / 2)


def tune(
    model: DiffusionModel,
    candidates: Sequence[Setting],
    baseline: Setting,
    how: Tuning,
    progress: Progress = lambda *_: None,
) -> Choice:
    """Search ``candidates`` for the cheapest that keeps the accuracy of ``baseline``.

    Raises `ConfigError` where the prompts are too few to confirm
    anything, before any is answered.
    """
    check_enough(how, len(candidates) * (1 + len(how.caches)))
    identity = fingerprint(model)
    tasks = {name: problems(name) for name in how.tasks}
    # One order of each task's prompts, cut in two.  Seed 0 leaves files as they stand, maybe sorted
    # by difficulty, so it is not used.
    for task in tasks.values():
        draw(task, how.screen + how.confirm, how.seed + 1)  # too few are refused now

    def answer(setting: Setting, n: int, start: int) -> Candidate:
        cells = [Cell(name, setting, n, how.seed + 1, how.rows, start) for name in tasks]
        records = [measure(model, tasks[cell.task], cell, identity) for cell in cells]
        return Candidate(setting, records)

    def screened(settings: Sequence[Setting]) -> list[Candidate]:
        able = []
        for setting in settings:
            if refusal(setting) is None:
                with suppress(RefusedError):  # e.g. a sampler whose trained part is not there
                    able.append(answer(setting, how.screen, 0))
        return able

    base = answer(baseline, how.screen, 0)
    finalists = survivors(screened(candidates), base, how)
    if how.caches:
        progress("screened without a cache", finalists)
        crossings = crossed([who.setting for who in finalists], how.caches)
        finalists = survivors(finalists + screened(crossings), base, how)
    progress("screened", finalists)
    proof = answer(baseline, how.confirm, how.screen)
    if not any(proof.right):
        raise ConfigError(
            f"one token per step solves none of {len(proof.right)} prompts of "
            f"{', '.join(how.tasks)}: there is no accuracy to keep; choose a task the model can do"
        )
    slowest: dict[str, float] = {}
    if how.by == "seconds":  # one timing says little: the worst of each against the baseline's best
        spans = timings(
            [who.setting for who in (base, *finalists)],
            lambda setting: answer(setting, how.screen, 0),
            how.timings,
        )
        quickest = min(spans.pop(0))
        slowest = {who.setting.label: max(span) for who, span in zip(finalists, spans, strict=True)}
        finalists.sort(key=lambda who: slowest[who.setting.label])
    z = _z(len(finalists))
    for who in finalists:
        fresh = answer(who.setting, how.confirm, how.screen)
        change = paired(fresh.right, proof.right, z)
        saving = (
            quickest / slowest[who.setting.label] if slowest
            else proof.cost(how.by) / fresh.cost(how.by)
        )  # fmt: skip
        passed = saving > 1 and holds(change, proof.accuracy, how)
        progress("confirmed" if passed else "not confirmed", [fresh])
        if passed:
            return _choice(fresh, proof, change, how, saving)
    return _choice(proof, proof, paired(proof.right, proof.right, z), how, None)


def crossed(settings: Sequence[Setting], caches: Sequence[str]) -> list[Setting]:
    """The settings without a cache, with each of the ``caches``."""
    return [
        replace(setting, cache=cache, method=f"{setting.method} · {cache}")
        for setting in settings if setting.cache == "none"
        for cache in caches
    ]  # fmt: skip


def timings(
    settings: Sequence[Setting], run: Callable[[Setting], Candidate], times: int
) -> list[list[float]]:
    """Seconds per prompt of each setting, several times, in turns: a busy moment meets all."""
    turns = [[run(setting).cost("seconds") for setting in settings] for _ in range(times)]
    return [list(span) for span in zip(*turns, strict=True)]


def survivors(screened: Sequence[Candidate], base: Candidate, how: Tuning) -> list[Candidate]:
    """The cheapest of those that may keep the accuracy, first those that did on these prompts."""
    least = (how.keep - 1) * base.accuracy
    changes = {id(who): paired(who.right, base.right) for who in screened}
    left = [who for who in screened if changes[id(who)].high >= least]
    left.sort(key=lambda who: (changes[id(who)].difference < least, who.cost(how.by)))
    return left[: how.finalists]


def holds(change: Paired, baseline: float, how: Tuning) -> bool:
    """Whether the accuracy is kept: as measured, and at the lower end of the interval."""
    least = (how.keep - 1) * baseline
    return change.difference >= least and change.low >= least - how.tolerance


def _choice(
    who: Candidate, base: Candidate, change: Paired, how: Tuning, saving: float | None
) -> Choice:
    return Choice(who.setting, who.accuracy, base.accuracy, change, saving or 1.0, how.by,
                  len(who.right), saving is not None)  # fmt: skip


def write_preset(choice: Choice, model: str, how: Tuning, path: Path) -> None:
    """A preset that ``dllm generate --preset`` takes, with what it rests on."""
    setting = choice.setting
    result: dict[str, Any] = {
        "model": model, "tasks": list(how.tasks), "keep": how.keep, "by": how.by,
        "accuracy": choice.accuracy, "baseline": choice.baseline, "saving": choice.saving,
        "examples": choice.examples, "change": asdict(choice.change),
        "confirmed": choice.confirmed, "machine": machine(),
    }  # fmt: skip
    preset = {"format": FORMAT, "sampler": setting.sampler, "cache": setting.cache,
              "arguments": dict(setting.arguments), "found": result}  # fmt: skip
    path.write_text(json.dumps(preset, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
