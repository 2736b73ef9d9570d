"""What the shell offers after Tab: names of samplers, caches and bundled models.

Only modules that need neither torch nor transformers are imported, so that it answers at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

LAST = re.compile(r"[A-Za-z_0-9]*$")  # the name being typed, e.g. after 'adablock+'


def samplers(incomplete: str) -> list[tuple[str, str]]:
    """Sampler parts, also behind ``+`` and inside brackets."""
    from ..samplers import available

    return _matching(incomplete, ((info.name, info.summary) for info in available()))


def caches(incomplete: str) -> list[tuple[str, str]]:
    """Caches."""
    from ..cache import available

    return _matching(incomplete, ((info.name, info.summary) for info in available()))


def models(incomplete: str) -> list[tuple[str, str]]:
    """The bundled models; folders are the shell's own business."""
    names = {"nano": "masked diffusion, 2.4M parameters", "nano-ar": "its autoregressive sibling"}
    return [(name, text) for name, text in names.items() if name.startswith(incomplete)]


def _matching(incomplete: str, choices: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    match = LAST.search(incomplete)
    assert match is not None
    before, start = incomplete[: match.start()], match[0]
    return [
        (before + name, summary.replace("``", ""))
        for name, summary in choices
        if name.startswith(start)
    ]
