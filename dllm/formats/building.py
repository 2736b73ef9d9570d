"""From an expression to the format of a model's texts; what was built is remembered."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .automaton import Automaton
from .compiling import Tables
from .format import Format
from .literals import Literals
from .vocabulary import Vocabulary, vocabulary_of
from .worker import Worker

REMEMBERED = 64  # expressions


@dataclass(frozen=True)
class Built:
    """An automaton, and where its texts begin."""

    automaton: Automaton
    start: int
    stripped_start: int
    _literals: list[Literals] = field(default_factory=list)

    def literals(self, vocabulary: Vocabulary) -> Literals:
        """What a text leaves no choice about; remembered."""
        if not self._literals:
            self._literals.append(Literals(self.automaton, vocabulary.pieces))
        return self._literals[0]


class Builder:
    """Builds automata, each once per vocabulary, in a worker that can be ended."""

    def __init__(self) -> None:
        self._worker = Worker()
        self._built: OrderedDict[tuple[Any, ...], Built] = OrderedDict()
        self._lock = threading.Lock()

    def build(
        self, pattern: str, vocabulary: Vocabulary, stop_ids: Sequence[int], pad_id: int, size: int
    ) -> Built:
        """The automaton of ``pattern`` over ``size`` ids; raises `ConfigError` for an expression
        that is not understood or too large."""
        key = pattern, vocabulary.key, tuple(stop_ids), pad_id, size
        with self._lock:
            if key in self._built:
                self._built.move_to_end(key)
                return self._built[key]
        tables: Tables = self._worker.compile(pattern, vocabulary)
        built = Built(
            Automaton.ending(tables, stop_ids, pad_id, size), tables.start, tables.stripped_start
        )
        with self._lock:
            built = self._built.setdefault(key, built)
            while len(self._built) > REMEMBERED:
                self._built.popitem(last=False)
        return built


BUILDER = Builder()


def format_of(model: Any, pattern: str, ends: bool = True, literals: bool = False) -> Format:
    """The format whose texts match ``pattern``, of a `dllm.DiffusionModel`.  ``ends``: whether a
    stop id may end the text before its canvas does; ``literals``: whether text that it leaves no
    choice about is written without asking the model."""
    built, vocabulary = _built(model, pattern)
    start = built.stripped_start if vocabulary.strips else built.start
    spelt = built.literals(vocabulary) if literals else None
    return Format(built.automaton, start, ends=ends, literals=spelt)


def holes_format(model: Any, patterns: Sequence[str | None], opens: bool) -> Format:
    """The format of a text whose holes match the ``patterns``, None for any text.  ``opens``:
    whether the text begins with its first hole."""
    found = {p: _built(model, p) for p in patterns if p is not None}
    automaton, offsets = Automaton.union([built.automaton for built, _ in found.values()])
    at = dict(zip(found, offsets, strict=True))
    starts: list[int | None] = []
    for i, pattern in enumerate(patterns):
        if pattern is None:
            starts.append(None)
            continue
        built, vocabulary = found[pattern]
        stripped = i == 0 and opens and vocabulary.strips
        starts.append(at[pattern] + (built.stripped_start if stripped else built.start))
    return Format(automaton, holes=tuple(starts), ends=False)


def _built(model: Any, pattern: str) -> tuple[Built, Vocabulary]:
    facts, vocabulary = model.facts, vocabulary_of(model.tokenizer, model.name)
    pad = facts.pad_token_id if facts.pad_token_id is not None else facts.eos_token_id
    stops, size = facts.stop_token_ids, facts.vocab_size
    return BUILDER.build(pattern, vocabulary, stops, -1 if pad is None else pad, size), vocabulary
