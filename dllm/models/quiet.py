"""Silence of transformers while its parts are used as parts of ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as hf_logging

logging: Any = hf_logging  # untyped functions


@contextmanager
def quiet() -> Iterator[None]:
    """Without log lines of transformers: what matters in them is raised."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
