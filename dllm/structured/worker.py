"""The process in which structures are read and compiled: it can be ended at any moment without
harm to the program that asked.

One process serves a program.  It starts with the first structure, keeps the prefix trees of the
vocabularies it was sent, and ends with the program.  What a structure may take is counted in steps
and bytes, so that a busy machine refuses nothing that an idle one takes.
"""

import atexit
import json
import warnings
from functools import partial

from ..core.child import Child
from ..core.errors import ConfigError, short
from .compiling import MEMORY, Refused, Tables, compiled, keep_vocabulary
from .source import Source, named
from .vocabulary import Vocabulary

SECONDS = 120.0  # of processor time, after which the process counts as hung
LEARN_SECONDS = 60.0  # the same for a vocabulary


class RefusedError(ConfigError):
    """A source that has no automaton; ``told``: what a judge may know of it."""

    def __init__(self, told: Refused) -> None:
        super().__init__(told.why)
        self.told = told


class Worker:
    """Compiles structures in a process of its own, one at a time."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._child = Child()
        atexit.register(self.close)

    def compile(self, source: Source, vocabulary: Vocabulary) -> Tables:
        """The automaton of ``source`` over the tokens of ``vocabulary``.

        Raises `ConfigError` where it is not understood or exceeds a limit.
        """
        child, text = self._child, json.dumps(source)
        ask = partial(child.call, compiled, text, vocabulary.key, self.seconds)
        try:
            while (answer := ask()) is None:
                child.call(keep_vocabulary, vocabulary.key, vocabulary.pieces, LEARN_SECONDS)
        except Exception as error:
            raise ConfigError(
                f"{named(source)} was given up: the process that compiles it ended, or took more "
                f"than {MEMORY >> 30} GB or {self.seconds:g} s of processor time"
            ) from error
        if isinstance(answer, Refused):
            raise RefusedError(answer)
        if answer.ignored:
            warnings.warn(
                "the schema has keywords that say nothing about values here, which are ignored: "
                + ", ".join(map(short, answer.ignored))[:300], stacklevel=2,
            )  # fmt: skip
        return answer

    def close(self) -> None:
        """End the process; what it compiles is given up."""
        self._child.close()
        self._child = Child()
