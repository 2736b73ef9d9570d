"""What a generation returns."""

from __future__ import annotations

import html
from dataclasses import dataclass, field

from .canvas import FloatArray, IntArray
from .trace import Trace


@dataclass(frozen=True)
class Result:
    """One generated text.

    ``tokens``: generated ids up to and including the first stop id, prompt excluded.
    ``sequences``: the whole canvas, prompt and padding included.  ``nfe``: forwards this row took
    part in; ``computed``: token positions fed to the model for it.  ``order``: the step that
    decided each of ``tokens``; ``logprobs``: their log-probabilities then.  ``finish_reason``:
    "stop" (a stop id or string) or "length".  ``seconds`` and ``peak_memory`` (bytes; of the
    device, or of the process on CPU) are those of the whole call, as are ``cache_bytes``: what
    the cache holds in keys, values and hidden states.
    """

    text: str
    tokens: list[int]
    sequences: IntArray = field(repr=False)
    prompt_length: int
    nfe: int
    computed: int
    forced: int
    order: list[int] = field(repr=False)
    logprobs: FloatArray = field(repr=False)
    finish_reason: str
    seconds: float
    peak_memory: int
    sampler: str
    cache: str
    seed: int
    trace: Trace | None = field(default=None, repr=False)
    cache_bytes: int = 0

    @property
    def tokens_per_forward(self) -> float:
        """Generated tokens per forward of this row."""
        return len(self.tokens) / max(1, self.nfe)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the seconds of the whole call (shared by its rows)."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    def footer(self) -> str:
        """One line of figures."""
        return (
            f"{len(self.tokens)} tokens · {self.nfe} forwards · "
            f"{self.tokens_per_forward:.2f} tokens per forward · "
            f"{self.computed} positions computed · {self.seconds:.2f} s · "
            f"peak {self.peak_memory / 2**20:.0f} MB · {self.finish_reason}"
        )

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return (
            f"<pre style='white-space:pre-wrap'>{html.escape(self.text)}</pre>"
            f"<small>{html.escape(self.footer())}</small>"
        )
