"""What a generation returns.  Plain data: needs no torch."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Self

import numpy as np

from ..core.canvas import FloatArray, IntArray
from ..core.errors import ConfigError
from .trace import Trace


@dataclass(frozen=True)
class Result:
    """One generated text.

    ``tokens``: ids up to and including the first stop id, prompt excluded; of a text with holes
    all of its ids.  ``sequences``: the whole canvas, prompt and padding included.  ``nfe``:
    forwards this row took part in; ``computed``: token positions fed to the model for it.
    ``order``: the step that decided each of ``tokens``, -1 for what was given; ``logprobs``: their
    log-probabilities then.  ``finish_reason``: "stop" (a stop id or string, full holes, a complete
    form) or "length".  ``seconds``: time of the engine's steps from the row's admission to its
    end, which it may have shared with other rows; what a reader does between two steps is not
    counted.
    ``queue_seconds``: time from its submission to its admission.  ``restarts``: how often the
    row gave its memory back and began anew, in forwards that are not counted here.
    ``cached_tokens``: tokens of the prompt whose keys and values were kept from an earlier text.
    ``canvas``: positions that the answer had in the end; ``probes``: forwards, among ``nfe``, that
    only looked for its length.  ``holes``: what was written into each hole of such a text.
    ``peak_memory`` (bytes; of the device, or of the process on CPU) and ``cache_bytes`` (what is
    held in keys, values and hidden states) are those of all rows together.  ``schema``: the
    pydantic class or JSON schema that the text follows.
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
    queue_seconds: float = 0.0
    restarts: int = 0
    cached_tokens: int = 0
    canvas: int = 0
    probes: int = 0
    holes: list[str] = field(default_factory=list, repr=False)
    schema: Any = field(default=None, repr=False)

    @property
    def parsed(self) -> Any:
        """What the text says, where it was asked for as JSON (``json_schema``): an object of the
        pydantic class, else plain data; None for other texts."""
        if self.schema is None:
            return None
        if isinstance(self.schema, type):
            return self.schema.model_validate_json(self.text)  # type: ignore[attr-defined]
        return json.loads(self.text)

    @property
    def decided(self) -> int:
        """How many of ``tokens`` the model decided; the others were given."""
        return sum(step >= 0 for step in self.order)

    @property
    def tokens_per_forward(self) -> float:
        """Decided tokens per forward of this row."""
        return self.decided / max(1, self.nfe)

    @property
    def tokens_per_second(self) -> float:
        """Decided tokens of this row per second of its own ``seconds``."""
        return self.decided / self.seconds if self.seconds else 0.0

    def footer(self) -> str:
        """One line of figures."""
        return (
            f"{counted(self.decided, 'token')} · {counted(self.nfe, 'forward')} · "
            f"{self.tokens_per_forward:.2f} tokens per forward · "
            f"{self.computed} positions computed · {self.seconds:.2f} s · "
            f"peak {self.peak_memory / 2**20:.0f} MB · {self.finish_reason}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, such as strict JSON takes: arrays as lists, the trace as a dictionary, the
        class's name as "kind"; a log-probability that is not finite as None."""
        data = {
            "kind": type(self).__name__,
            **{f.name: getattr(self, f.name) for f in fields(self)},
        }
        data["sequences"] = self.sequences.tolist()
        data["logprobs"] = [x if math.isfinite(x) else None for x in self.logprobs.tolist()]
        if isinstance(self.schema, type):
            data["schema"] = self.schema.model_json_schema()  # type: ignore[attr-defined]
        data["trace"] = None if self.trace is None else self.trace.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The result that `to_dict` wrote, also after its way through JSON.

        Raises `ConfigError` for data of another kind of result, and where fields are missing or
        unknown.
        """
        kind = data.get("kind", cls.__name__)
        if kind != cls.__name__:
            raise ConfigError(f"these are data of a {kind}: read them with dllm.{kind}.from_dict")
        values = {name: value for name, value in data.items() if name != "kind"}
        known = {f.name for f in fields(cls)}
        needed = {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}
        for name in sorted((values.keys() - known) | (needed - values.keys())):
            what = "have the unknown" if name in values else "lack the"
            raise ConfigError(f"data of a {kind} {what} field {name!r}: pass what to_dict wrote")
        try:
            logprobs = [np.nan if x is None else x for x in values["logprobs"]]
            values["sequences"] = np.asarray(values["sequences"], np.int64)
            values["logprobs"] = np.asarray(logprobs, np.float32)
        except (TypeError, ValueError):
            raise ConfigError(f"these are no data of a {kind}: pass what to_dict wrote") from None
        if values.get("trace") is not None:
            values["trace"] = Trace.from_dict(values["trace"])
        return cls(**values)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return (
            f"<pre style='white-space:pre-wrap'>{html.escape(self.text)}</pre>"
            f"<small>{html.escape(self.footer())}</small>"
        )


def counted(n: int, noun: str) -> str:
    """``n`` and a noun in its number: "1 forward", "2 forwards"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
