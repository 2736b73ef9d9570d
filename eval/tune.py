"""The fastest setting that is as good as one token per step: successive halving, then a proof.

All candidates answer the same prompts as the baseline.  Each rung brings new prompts, drops what is
clearly worse and keeps the cheapest share of the rest.  Who is fastest by luck is not believed: the
finalists are confirmed, cheapest first, on prompts that had no part in choosing them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, UnknownNameError
from ..models import DiffusionModel
from .measure import Cell, Record, RefusedError, Setting, fingerprint, measure
from .metrics import Paired, paired
from .problems import problems
from .sweep import refusal

COSTS = ("seconds", "nfe", "computed")
CONFIRM_SEED = 10_000  # far from the seeds of the rungs
FORMAT = 1


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
    ``change`` compares them; ``saving`` is the baseline's cost over the setting's.  ``confirmed``
    is False when nothing passed and the baseline itself is returned."""

    setting: Setting
    accuracy: float
    baseline: float
    change: Paired
    saving: float
    by: str
    examples: int
    confirmed: bool


Progress = Callable[[str, Sequence[Candidate]], None]


@dataclass(frozen=True)
class Tuning:
    """How to search.  ``keep``: share of the baseline's accuracy to preserve; ``tolerance``: how
    far below that the lower end of the 95 % interval may lie (an interval has a width, also where
    two settings never differ); ``rungs``: new prompts per task in each round; ``confirm``: prompts
    per task of the proof; ``eta``: one in so many survives a rung; ``by``: what to save."""

    tasks: Sequence[str]
    keep: float = 0.99
    tolerance: float = 0.05
    rungs: Sequence[int] = (16, 32)
    confirm: int = 100
    eta: int = 3
    by: str = "seconds"
    seed: int = 0
    rows: int = 32

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep is a share of the accuracy in (0, 1], not {self.keep}")
        if self.by not in COSTS:
            raise UnknownNameError("cost", self.by, COSTS)
        if not self.tasks:
            raise ConfigError("tuning needs a task: name one that has checkable answers")
        if min(*self.rungs, self.confirm, self.eta - 1) < 1:
            raise ConfigError("rungs and confirm count prompts, eta is at least 2")


def tune(
    model: DiffusionModel,
    candidates: Sequence[Setting],
    baseline: Setting,
    how: Tuning,
    progress: Progress = lambda *_: None,
) -> Choice:
    """Search ``candidates`` for the cheapest that keeps the accuracy of ``baseline``."""
    identity = fingerprint(model)
    tasks = {name: problems(name) for name in how.tasks}

    def answer(who: Candidate, n: int, seed: int) -> list[Record]:
        cells = [Cell(name, who.setting, n, seed, how.rows) for name in tasks]
        return [measure(model, tasks[cell.task], cell, identity) for cell in cells]

    base = Candidate(baseline)
    alive = [Candidate(setting) for setting in candidates if refusal(setting) is None]
    for number, n in enumerate(how.rungs):
        base.records += answer(base, n, how.seed + number)
        able = []
        for who in alive:
            with suppress(RefusedError):  # e.g. a sampler whose trained part is not there
                who.records += answer(who, n, how.seed + number)
                able.append(who)
        alive = survivors(able, base, how)
        progress(f"{sum(how.rungs[: number + 1])} prompts per task", alive)
    proof = Candidate(baseline, answer(base, how.confirm, how.seed + CONFIRM_SEED))
    if not any(proof.right):
        raise ConfigError(
            f"one token per step solves none of {len(proof.right)} prompts of "
            f"{', '.join(how.tasks)}: there is no accuracy to keep; choose a task the model can do"
        )
    for who in alive:
        fresh = Candidate(who.setting, answer(who, how.confirm, how.seed + CONFIRM_SEED))
        passed = holds(fresh, proof, how)
        progress("confirmed" if passed else "not confirmed", [fresh])
        if passed:
            return _choice(fresh, proof, how, True)
    return _choice(proof, proof, how, False)


def survivors(alive: Sequence[Candidate], base: Candidate, how: Tuning) -> list[Candidate]:
    """The cheapest share of those that may still keep the accuracy, promising ones first."""
    least = (how.keep - 1) * base.accuracy
    changes = {id(who): paired(who.right, base.right) for who in alive}
    left = [who for who in alive if changes[id(who)].high >= least]
    left.sort(key=lambda who: (changes[id(who)].difference < least, who.cost(how.by)))
    return left[: math.ceil(len(alive) / how.eta)]


def holds(who: Candidate, base: Candidate, how: Tuning) -> bool:
    """Whether the accuracy is kept: as measured, and at the lower end of the interval."""
    least, change = (how.keep - 1) * base.accuracy, paired(who.right, base.right)
    cheaper = who.cost(how.by) < base.cost(how.by)
    return cheaper and change.difference >= least and change.low >= least - how.tolerance


def _choice(who: Candidate, base: Candidate, how: Tuning, confirmed: bool) -> Choice:
    saving = base.cost(how.by) / who.cost(how.by)
    change = paired(who.right, base.right)
    return Choice(who.setting, who.accuracy, base.accuracy, change, saving, how.by,
                  len(who.right), confirmed)  # fmt: skip


def write_preset(choice: Choice, model: str, how: Tuning, path: Path) -> None:
    """A preset that ``dllm generate --preset`` takes, with what it rests on."""
    setting = choice.setting
    found: dict[str, Any] = {
        "model": model, "tasks": list(how.tasks), "keep": how.keep, "by": how.by,
        "accuracy": choice.accuracy, "baseline": choice.baseline, "saving": choice.saving,
        "examples": choice.examples, "change": asdict(choice.change),
        "confirmed": choice.confirmed,
    }  # fmt: skip
    preset = {"format": FORMAT, "sampler": setting.sampler, "cache": setting.cache,
              "arguments": dict(setting.arguments), "found": found}  # fmt: skip
    path.write_text(json.dumps(preset, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
