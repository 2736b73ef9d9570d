"""What to know of the bundled models before taking their answers seriously."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .output import note

if TYPE_CHECKING:
    from ..models import DiffusionModel

ABILITIES = (
    "copy, reverse, sort, insert into, remove from and replace in lists of names and things; "
    "add and subtract numbers up to 99, also in small stories; sudokus of 4 x 4"
)
EXAMPLE = "Reverse this list: Tom, Anna, Ben"
WORD = re.compile(r"[^\W\d_]+")
SHOWN = 3  # words
_warned = False


def is_bundled(model: "DiffusionModel") -> bool:
    """Whether this is nano or its sibling, which know a few tasks only."""
    from ..models.checkpoint import BUNDLED

    return model.name in BUNDLED


def unknown_words(model: "DiffusionModel", texts: Iterable[str]) -> list[str]:
    """Words that are not in the vocabulary, in order: they would be read letter by letter."""
    assert model.tokenizer is not None
    words = dict.fromkeys(word for text in texts for word in WORD.findall(text))
    return [word for word in words if len(model.tokenizer.tokenize(word)) > 1]


def warn_of_unknown_words(model: "DiffusionModel", texts: Iterable[str]) -> None:
    """A line on stderr when a bundled model was asked about what it has never seen, once in a
    process.  Called after the answer, so that it stands beside no error."""
    global _warned
    if _warned or not is_bundled(model) or not (words := unknown_words(model, texts)):
        return
    _warned = True
    shown = ", ".join(map(repr, words[:SHOWN])) + (", ..." if len(words) > SHOWN else "")
    note(
        f"warning: {model.name} never saw {shown}; it knows lists, sums and sudokus, e.g. "
        f"{EXAMPLE!r} (another model: --model)"
    )
