"""Silence of transformers while its parts are used as parts of ours."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as hf_logging

logging: Any = hf_logging  # untyped functions
# Its log level, and what it changes of PyTorch while it loads (the dtype of new tensors, the
# functions that fill them), are those of the process: one thread at a time.
_LOCK = threading.RLock()


@contextmanager
def quiet() -> Iterator[None]:
    """Without log lines of transformers: what matters in them is raised."""
    with _LOCK:
        level = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(level)
