"""Which case of a fuzzer failed."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case_of(seed: int, about: object) -> Iterator[None]:
    """Whatever fails inside says the seed, and what it made."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed}: {about!s:.1500}")
        raise
