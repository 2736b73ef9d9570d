"""Many settings on many tasks, one line of JSON each; what was measured is not measured again."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from ..cache import available as caches
from ..cache import compose as compose_cache
from ..core.errors import ConfigError, UnknownNameError
from ..core.json_lines import name_in_errors, whole_lines
from ..engine import check_pair
from ..models import DiffusionModel
from ..samplers import compose as compose_sampler
from .curves import samplers_with_curves, settings
from .machine import machine
from .measure import Cell, Record, RefusedError, Setting, fingerprint, measure
from .problems import find_task, stamp
from .tasks import TASKS

FIELDS = {field.name for field in fields(Record)}
# One task with one answer, and two with several: there parallel decisions contradict each other.
README_TASKS = ("sort", "remove_random", "insert_random")
AT = "threshold(tau=0.9)"  # the sampler under which caches are compared
BASELINE = "llada(steps=32)"  # one token per step
RANDOM = "random+llada(steps=32)"  # for caches that must know commits beforehand
FORESEEING = "dkv_greedy"
CANVAS = (("max_new_tokens", 32), ("block_length", 16))


@dataclass(frozen=True)
class Sweep:
    """Every combination of samplers x caches on every task.

    ``samplers``: specs, ``{a,b}`` for several values; ``curves``: names whose whole curve is
    measured; ``arguments`` go to `dllm.generate`.
    """

    tasks: Sequence[str]
    samplers: Sequence[str] = ()
    curves: Sequence[str] = ()
    caches: Sequence[str] = ("none",)
    examples: int = 100
    seed: int = 0
    rows: int = 32
    arguments: tuple[tuple[str, Any], ...] = ()

    def cells(self) -> list[Cell]:
        """What there is to measure, without `refused`; names are checked here."""
        chosen = [setting for setting in self._settings() if refusal(setting) is None]
        if not self.tasks:
            raise ConfigError(f"there is no task: name one or more of {', '.join(TASKS)}")
        return [
            Cell(task, setting, self.examples, self.seed, self.rows)
            for task in self.tasks
            for setting in chosen
        ]

    def refused(self) -> dict[str, str]:
        """Combinations of a sampler and a cache that cannot work, and why."""
        reasons = {setting.label: refusal(setting) for setting in self._settings()}
        return {label: reason for label, reason in reasons.items() if reason is not None}

    def _settings(self) -> list[Setting]:
        result = settings(self.samplers, self.curves, self.caches, dict(self.arguments))
        if not result:
            raise ConfigError("a sweep needs at least one sampler and one cache")
        return result


def readme() -> list[Sweep]:
    """Every sampler as a curve, every cache as a ratio; under half an hour on two cores."""
    names = [cache.name for cache in caches()]
    how: dict[str, Any] = {"examples": 96, "rows": 96, "arguments": CANVAS}
    return [
        Sweep(README_TASKS, curves=samplers_with_curves(), **how),
        Sweep(README_TASKS, samplers=[BASELINE, AT], caches=names, **how),
        Sweep(README_TASKS, samplers=[RANDOM], caches=["none", FORESEEING], **how),
    ]


def quick() -> list[Sweep]:
    """One curve and one cache on two tasks: whether everything works, in seconds."""
    tasks = ("reverse", "sort")
    return [
        Sweep(tasks, curves=["threshold"], examples=8, rows=8, arguments=CANVAS),
        Sweep(tasks, samplers=[AT], caches=["none", "dual"], examples=8, rows=8, arguments=CANVAS),
    ]


PRESETS: dict[str, Callable[[], Sequence[Sweep]]] = {"readme": readme, "quick": quick}


def preset(name: str) -> list[Sweep]:
    """The sweeps of a preset.  Raises `UnknownNameError`."""
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    return list(PRESETS[name]())


def distinct(cells: Iterable[Cell]) -> list[Cell]:
    """The cells without those that measure the same once more, e.g. for several sweeps."""
    result: dict[str, Cell] = {}
    for cell in cells:
        result.setdefault(cell.key(""), cell)
    return list(result.values())


def refusal(setting: Setting) -> str | None:
    """Why the sampler does not go with the cache, if it does not."""
    try:
        check_pair(compose_sampler(setting.sampler), compose_cache(setting.cache))
    except ConfigError as error:
        return str(error)
    return None


class Journal:
    """Records in a file of JSON lines, appended one by one and flushed to disk.

    A last line without its end was cut off by an interruption: it is dropped and measured again.
    Any other line that cannot be read raises `ConfigError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        self.machines: dict[str, dict[str, Any]] = {}  # where each record was measured
        if path.exists():
            self._read()

    def _read(self) -> None:
        try:
            lines = whole_lines(self.path)
        except OSError as error:
            raise ConfigError(
                f"cannot read the results in {self.path}: {error.strerror}"
            ) from error
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                record = Record(**{k: v for k, v in entry.items() if k in FIELDS})
            except (ValueError, TypeError, AttributeError, RecursionError):
                raise ConfigError(
                    f"line {number} of {self.path} is not a record of a sweep; repair or remove it"
                ) from None
            self._keep(record, entry)

    def _keep(self, record: Record, about: dict[str, Any]) -> None:
        self.records[record.key] = record
        self.machines[record.key] = about.get("machine") or {}

    def mixed(self, records: Sequence[Record]) -> dict[str, list[Any]]:
        """What differed between the machines that measured the records: their seconds must not be
        compared.  How busy they were is left out, it always differs."""
        machines = [self.machines[record.key] for record in records]
        names = dict.fromkeys(name for each in machines for name in each if name != "load")
        values = {name: list(dict.fromkeys(m.get(name) for m in machines)) for name in names}
        return {name: result for name, result in values.items() if len(result) > 1}

    def add(self, record: Record, about: dict[str, Any]) -> None:
        """Append a record with what else is known of it."""
        entry = asdict(record) | about
        entry["right"] = [int(x) for x in entry["right"]]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with name_in_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._keep(record, entry)


Progress = Callable[[int, int, Cell, Record | None], None]


def run(
    model: DiffusionModel, cells: Sequence[Cell], journal: Journal,
    progress: Progress = lambda *_: None, refused: dict[str, str] | None = None,
    answered: Callable[[Cell, int], None] = lambda *_: None,
) -> list[Record]:  # fmt: skip
    """Measure what the journal lacks; the records of all cells, in order.

    ``progress(done, total, cell, record)`` is called before (record None) and after each cell,
    ``answered(cell, n)`` with the number of its answers so far.  Settings that the model does not
    go with are left out and told in ``refused``; without one they raise `RefusedError`.
    """
    identity = fingerprint(model)
    dtype, device = str(model.dtype).removeprefix("torch."), str(model.device)
    about = {"machine": machine(), "dtype": dtype, "device": device}
    loaded = {task: find_task(task) for task in dict.fromkeys(cell.task for cell in cells)}
    result = []
    for done, cell in enumerate(cells):
        questions = loaded[cell.task]
        record = journal.records.get(cell.key(identity + stamp(questions)))
        if record is None:
            progress(done, len(cells), cell, None)
            try:
                record = measure(model, questions, cell, identity, partial(answered, cell))
            except RefusedError as error:
                if refused is None:
                    raise
                refused[cell.setting.label] = str(error)
                continue
            journal.add(record, about)
        progress(done + 1, len(cells), cell, record)
        result.append(record)
    return result
