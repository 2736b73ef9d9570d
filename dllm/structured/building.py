"""From a source to the format of a model's texts; what was built is remembered."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..core.errors import ConfigError
from .automaton import Automaton
from .compiling import Refused
from .format import Format
from .judged import REMEMBERED, Judged, judged
from .literals import Literals
from .source import Source, encoded
from .vocabulary import Vocabulary, vocabulary_of
from .worker import RefusedError, Worker

WORKER = Worker()


class Built(NamedTuple):
    """An automaton, where its texts begin, where those that lose a blank do, and what of them is
    without a choice."""

    automaton: Automaton
    start: int
    stripped_start: int
    literals: Literals


@lru_cache(REMEMBERED)
def built(
    text: str, vocabulary: Vocabulary, stop_ids: Sequence[int], pad_id: int, size: int
) -> Built | Refused:
    """The automaton of a source, as JSON, over ``size`` ids, or why it has none.  Raises
    `ConfigError` where the process that compiles it ended."""
    try:
        tables = WORKER.compile(json.loads(text), vocabulary)
    except RefusedError as error:
        return error.told
    automaton = Automaton.ending(tables, stop_ids, pad_id, size)
    literals = Literals(automaton, vocabulary.pieces)
    return Built(automaton, tables.start, tables.stripped_start, literals)


def _built(model: Any, text: str) -> tuple[Built, Vocabulary]:
    """Raises `RefusedError` for a source that is not understood or too large."""
    vocabulary, facts = _facts(model)
    found = built(text, vocabulary, *facts)
    if isinstance(found, Refused):
        raise RefusedError(found)
    return found, vocabulary


def _facts(model: Any) -> tuple[Vocabulary, tuple[tuple[int, ...], int, int]]:
    """A model's vocabulary; its stop ids, the id for padding or -1, and how many ids there are."""
    facts, vocabulary = model.facts, vocabulary_of(model.tokenizer, model.name)
    pad = facts.pad_token_id if facts.pad_token_id is not None else facts.eos_token_id
    return vocabulary, (tuple(facts.stop_token_ids), -1 if pad is None else pad, facts.vocab_size)


def _judged(model: Any, error: RefusedError) -> Judged | None:
    """What llguidance makes of a refused source; None where it does not read it, or otherwise."""
    if error.told.source is None:
        return None
    vocabulary, facts = _facts(model)
    return judged(error.told.source, vocabulary, *facts, error.told.shortest)


def format_of(
    model: Any, source: Source, ends: bool = True, literals: bool = False
) -> Format | Judged:
    """The format of the texts of a ``source``, of a `dllm.DiffusionModel`.  ``ends``: whether a
    stop id may end the text before its canvas does; ``literals``: whether text that it leaves no
    choice about is written without asking the model."""
    try:
        found, vocabulary = _built(model, encoded(source))
    except RefusedError as error:
        form = _judged(model, error)
        if form is None:
            raise
        if literals or not ends:
            raise ConfigError(
                f"{error}, or drop literals and holes: llguidance then judges it"
            ) from None
        return form
    start = found.stripped_start if vocabulary.strips else found.start
    return Format(found.automaton, start, ends=ends, literals=found.literals if literals else None)


def holes_format(model: Any, sources: Sequence[Source | None], opens: bool) -> Format:
    """The format of a text whose holes are of the ``sources``, None for any text.  ``opens``:
    whether the text begins with its first hole."""
    texts = [None if source is None else encoded(source) for source in sources]
    found = {text: _built(model, text) for text in texts if text is not None}
    automaton, offsets = Automaton.union([each.automaton for each, _ in found.values()])
    at = dict(zip(found, offsets, strict=True))
    starts: list[int | None] = []
    for i, text in enumerate(texts):
        if text is None:
            starts.append(None)
            continue
        each, vocabulary = found[text]
        stripped = i == 0 and opens and vocabulary.strips
        starts.append(at[text] + (each.stripped_start if stripped else each.start))
    return Format(automaton, holes=tuple(starts), ends=False)
