"""One call of generate, stream or infill: its rows, their steps, and what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from .canvas import Canvas, IntArray
from .config import GenerationConfig
from .engine.loop import Engine, Step
from .errors import ConfigError
from .memory import PeakMemory
from .models import DiffusionModel
from .result import Result
from .samplers.eos import stops
from .trace import Trace


@dataclass(frozen=True)
class Event:
    """One step of one row, as it happens.

    ``committed`` and ``drafts`` map positions to token ids: decided in this step, proposed but
    still open.  ``canvas`` is the live row (read only).  ``result`` is set on the row's last
    event.
    """

    row: int
    step: int
    committed: dict[int, int]
    drafts: dict[int, int]
    remasked: list[int]
    canvas: Canvas
    result: Result | None = None


@dataclass
class Call:
    """Rows being decoded.  ``seconds`` is the time spent in steps, not in between."""

    model: DiffusionModel
    config: GenerationConfig
    engine: Engine
    seconds: float = 0.0
    canvases: list[Canvas] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    index: dict[int, int] = field(default_factory=dict)
    memory: PeakMemory | None = None

    def start(self, canvases: list[Canvas], trace: bool) -> None:
        """Take the rows."""
        names = (self.engine.sampler.spec, self.engine.cache.name, self.model.name)
        self.canvases = canvases
        self.traces = [Trace.start(canvas, *names) for canvas in canvases] if trace else []
        self.index = {id(canvas): i for i, canvas in enumerate(canvases)}
        self.memory = PeakMemory(self.model.device)

    def run(self) -> Iterator[list[Step]]:
        """Decode to the end; yields what every step did."""
        running = self.engine.run(self.canvases)
        while True:
            began = time.perf_counter()
            steps = next(running, None)
            self.seconds += time.perf_counter() - began
            if steps is None:
                return
            if self.traces:
                for step in steps:
                    self.traces[self.index[id(step.canvas)]].add(step)
            yield steps

    def events(self) -> Iterator[Event]:
        """Decode to the end; yields an event per row and step."""
        for steps in self.run():
            for step in steps:
                yield self._event(step)

    def _event(self, step: Step) -> Event:
        row, canvas, p = self.index[id(step.canvas)], step.canvas, step.prediction
        proposals = dict(zip(p.positions.tolist(), p.token.tolist(), strict=True))
        remasked = step.decision.remasked.tolist()
        d = step.decision
        committed = dict(zip(d.committed.tolist(), d.tokens.tolist(), strict=True))
        return Event(
            row=row,
            step=canvas.step - 1,
            committed={i: t for i, t in committed.items() if i not in remasked},
            drafts={i: t for i, t in proposals.items() if canvas.masked[i]},
            remasked=remasked,
            canvas=canvas,
            result=self.result(row) if canvas.finished else None,
        )

    def result(self, row: int) -> Result:
        """What row ``row`` has become."""
        canvas, trace = self.canvases[row], None
        if self.traces:
            trace = self.traces[row]
            trace.close(canvas, self.model.tokenizer.decode if self.model.tokenizer else None)
        tokens, reason = _answer(canvas, self.model.facts.stop_token_ids)
        here = slice(canvas.prompt_length, canvas.prompt_length + len(tokens))
        return Result(
            text=self._text(tokens),
            tokens=tokens.tolist(),
            sequences=canvas.tokens.copy(),
            prompt_length=canvas.prompt_length,
            nfe=canvas.nfe,
            computed=canvas.computed,
            forced=canvas.forced,
            order=canvas.commit_step[here].tolist(),
            logprobs=canvas.logprob[here].copy(),
            finish_reason=reason,
            seconds=self.seconds,
            peak_memory=self.memory.peak() if self.memory else 0,
            sampler=self.engine.sampler.spec,
            cache=self.engine.cache.name,
            seed=self.config.seed,
            trace=trace,
            cache_bytes=self.engine.cache_bytes,
        )

    def _text(self, tokens: IntArray) -> str:
        """The answer as text, cut where the first stop string begins."""
        if self.model.tokenizer is None:
            return ""
        text = str(self.model.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))
        result = [text.index(stop) for stop in self.config.stop_strings if stop in text]
        return text[: min(result)] if result else text


def _answer(canvas: Canvas, stop_ids: tuple[int, ...]) -> tuple[IntArray, str]:
    """Ids of the answer, and why they end.  A text with holes is its own answer, all of it."""
    end = canvas.end if canvas.end == canvas.length else canvas.length
    tokens = canvas.tokens[canvas.prompt_length : end]
    result = stops(canvas, canvas.prompt_length, end, stop_ids)
    if result.size:
        return canvas.tokens[canvas.prompt_length : int(result[0]) + 1], "stop"
    return tokens, canvas.finish_reason or "length"


def stop_strings(model: DiffusionModel, config: GenerationConfig) -> Callable[[Canvas], None]:
    """After a step: finish a row whose decided beginning contains a stop string."""
    if model.tokenizer is None:
        raise ConfigError(f"{model.name} came without a tokenizer: it has no stop_strings")
    tokenizer = model.tokenizer

    def decode(tokens: IntArray) -> str:
        return str(tokenizer.decode(tokens.tolist()))

    def check(canvas: Canvas) -> None:
        undecided = canvas.masked[canvas.start : canvas.end]
        frontier = int(undecided.argmax()) if undecided.any() else len(undecided)
        if frontier == canvas.memory.get("stop_strings"):
            return
        canvas.memory["stop_strings"] = frontier
        tokens = canvas.tokens[canvas.start : canvas.start + frontier]
        text = decode(tokens)
        if any(stop in text for stop in config.stop_strings):
            last = _shortest_with(decode, tokens, config.stop_strings)
            canvas.stop_position = canvas.start + last
            canvas.cut(canvas.stop_position)
            canvas.finish("stop")

    return check


def _shortest_with(
    decode: Callable[[IntArray], str], tokens: IntArray, stops: Sequence[str]
) -> int:
    """Index of the token that completes the first stop string."""
    low, high = 0, len(tokens) - 1
    while low < high:
        middle = (low + high) // 2
        if any(stop in decode(tokens[: middle + 1]) for stop in stops):
            high = middle
        else:
            low = middle + 1
    return low
