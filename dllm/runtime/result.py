"""What a generation returns.  Plain data: needs no torch."""

import html
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..core.canvas import Canvas, FloatArray, IntArray
from ..core.text import stop_at, stop_floor
from ..samplers.eos import stops
from .trace import Trace

if TYPE_CHECKING:
    from ..engine.work import Work
    from ..request.request import Request

Decode = Callable[[IntArray], str]


@dataclass(frozen=True, eq=False)
class Result:
    """One generated text.

    ``tokens``: ids up to and including the first stop id, prompt excluded; of a text with holes
    all of its ids.  ``sequences`` (N,) int64: the whole canvas, padding included; its first
    ``prompt_length`` are the prompt.  ``nfe``: forwards this row took part in; ``computed``: token
    positions fed to the model for it; ``forced``: steps in which no selector chose, so that the
    most confident position was committed.  ``order``: the step that decided each of ``tokens``, -1
    for what was given (a step that a schedule leaves empty counts, and takes no forward);
    ``logprobs`` float32: their log-probabilities then, in nats.  ``finish_reason``: "stop" (a stop
    id or string, full holes, a complete structure) or "length".  ``seconds``: time of the engine's
    steps from the row's admission to its end, which it may have shared with other rows; what a
    reader does between two steps is not counted.
    ``queue_seconds``: time from its submission to its admission.  ``restarts``: how often the
    row gave its memory back and began anew, in forwards that are not counted here.
    ``cached_tokens``: tokens of the prompt whose keys and values were kept from an earlier text.
    ``canvas``: positions that the answer had in the end; ``probes``: forwards, among ``nfe``, that
    only looked for its length.  ``holes``: what was written into each hole of such a text.
    ``peak_memory`` (bytes; of the device, or of the process on CPU) and ``cache_bytes`` (what is
    held in keys, values and hidden states) are those of all rows together.  ``schema``: the
    pydantic class or JSON schema that the text follows.  ``structured``, of a text that has a
    structure: "exact" where each step proposed its likeliest completion, or one drawn from all;
    "completable" where some step looked at a part of them.
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
    structured: str | None = None

    @classmethod
    def of(cls, request: "Request", engine: "Work[Any, Any]", peak: int) -> "Result":
        """That of a ``request`` whose canvas is finished; ``peak``: see ``peak_memory``."""
        row, canvas, recipe = request.row, request.canvas, request.recipe
        assert row is not None and canvas is not None
        config, low, tokenizer = recipe.config, canvas.prompt_length, engine.model.tokenizer
        tokens, reason = _answer(canvas, recipe.stop_ids)
        if config.formatted or (canvas.holes and not recipe.grows):
            reason = "stop"  # the form is complete, every hole full
        here = slice(low, low + len(tokens))
        order = canvas.commit_step[here]

        def decode(ids: IntArray) -> str:
            return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))

        text = "" if tokenizer is None else decode(tokens)
        if config.stop_strings and not canvas.holes:
            floor = max(0, stop_floor(canvas, config) - low)
            least = len(decode(tokens[:floor])) if floor else 0
            text = text[: stop_at(text, config.stop_strings, least)]
        holes = list[str]()
        if canvas.holes and tokenizer is not None:
            spans = [(hole.low - low, hole.high - low) for hole in canvas.holes]
            holes = [_hole(decode, tokens, *span) for span in spans]
            if (at := stop_at(holes[-1], config.stop_strings)) is not None:
                holes[-1] = holes[-1][:at]
                text = decode(tokens[: spans[-1][0]]) + holes[-1]
        if request.trace is not None:
            request.trace.close(canvas, tokenizer.decode if tokenizer else None)
        made = {
            "text": text, "holes": holes, "tokens": tokens.tolist(), "order": order.tolist(),
            "sequences": canvas.tokens.copy(), "prompt_length": low, "nfe": canvas.nfe,
            "computed": canvas.computed, "forced": canvas.forced, "seconds": row.seconds,
            "logprobs": canvas.logprob[here].copy(), "finish_reason": reason,
            "peak_memory": peak, "seed": config.seed, "trace": request.trace,
            "cache_bytes": engine.cache_bytes, "restarts": row.restarts,
            "queue_seconds": request.queue_seconds or 0.0, "schema": config.json_schema,
            "canvas": canvas.region[1] - canvas.region[0], "probes": canvas.probes,
            "structured": None if recipe.format is None
            else "completable" if row.inexact else "exact",
        }  # fmt: skip
        return cls(**made | engine.figures(row))

    def __getattr__(self, name: str) -> Any:
        told = {
            "outputs": ": its text is result.text; n answers are a list of results",
            "choices": ": its text is result.text",
            "token_ids": ": they are result.tokens",
        }
        raise AttributeError(
            f"a {type(self).__name__} has no {name}{told.get(name, '')}", name=name, obj=self
        )

    @property
    def parsed(self) -> Any:
        """What the text says, where it was asked for as JSON (``json_schema``): an object of the
        pydantic class, else plain data; None for other texts."""
        if self.schema is None:
            return None
        if isinstance(self.schema, type):
            return self.schema.model_validate_json(self.text)  # type: ignore[attr-defined]
        return json.loads(self.text)

    @cached_property
    def decided(self) -> int:
        """How many of ``tokens`` the model decided; the others were given."""
        return len(self.order) - self.order.count(-1)

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
            f"peak {self.peak_memory / 2**20:.0f} MiB · {self.finish_reason}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, such as strict JSON takes: arrays as lists, the trace as a dictionary, the
        class's name as "kind"; a log-probability that is not finite as None."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["kind"] = type(self).__name__
        data["sequences"] = self.sequences.tolist()
        data["logprobs"] = [x if math.isfinite(x) else None for x in self.logprobs.tolist()]
        if isinstance(self.schema, type):
            data["schema"] = self.schema.model_json_schema()  # type: ignore[attr-defined]
        data["trace"] = None if self.trace is None else self.trace.to_dict()
        return data

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


def _answer(canvas: Canvas, stop_ids: tuple[int, ...]) -> tuple[IntArray, str]:
    """Ids of the answer, and why they end.  A text with holes is its own answer, all of it."""
    low, end = canvas.prompt_length, canvas.length
    where = stops(canvas, low, end, stop_ids)
    if where.size:
        return canvas.tokens[low : int(where[0]) + 1], "stop"
    return canvas.tokens[low:end], canvas.finish_reason or "length"


def _hole(decode: Decode, tokens: IntArray, low: int, high: int) -> str:
    """What a hole adds to the text before it: tokenizers write a token differently at the start
    of a text."""
    before, after = decode(tokens[:low]), decode(tokens[:high])
    return after[len(before) :] if after.startswith(before) else decode(tokens[low:high])
