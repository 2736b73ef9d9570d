"""Prometheus metrics: of the engine's steps, and of requests."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..drafting.result import SpeculativeResult
from ..runtime.result import Result
from ..session import StepReport

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 600)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
POSITIONS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1)
RATES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64)
T = TypeVar("T", Counter, Gauge, Histogram)
Read = tuple[str, Callable[[], float]]


class Metrics:
    """``gauges``: name -> what it is, and its value when asked for; all of them bear ``labels``."""

    def __init__(self, labels: Mapping[str, str], gauges: Mapping[str, Read]) -> None:
        self.registry, self._labels = CollectorRegistry(), labels
        for name, (text, read) in gauges.items():
            self._made(Gauge, name, text).set_function(read)
        self._requests = Counter(
            "dllm_requests", "Requests that ended, by how they did.",
            [*labels, "finished_reason"], registry=self.registry,
        )  # fmt: skip
        counters = {
            "prompt_tokens": "Tokens of prompts.",
            "cached_prompt_tokens": "Tokens of prompts whose keys and values had been kept.",
            "generation_tokens": "Tokens of answers.",
            "forwards": "Steps: forwards of all rows together, or of as many as fit.",
            "computed_positions": "Token positions fed to the model.",
            "committed_tokens": "Positions decided.",
            "remasked_tokens": "Positions taken back.",
            "drafts": "Drafts that were verified, of answers that are complete.",
            "drafted_tokens": "Tokens of these drafts.",
            "accepted_tokens": "Drafted tokens that the verifier kept.",
        }
        self._counters = {name: self._made(Counter, name, text) for name, text in counters.items()}
        histograms: dict[str, tuple[str, Sequence[float]]] = {
            "step_seconds": ("A step of the engine.", SECONDS),
            "step_rows": ("Rows of a step.", COUNTS),
            "step_positions": ("Token positions of a step.", POSITIONS),
            "host_share": ("Share of a step outside the network.", SHARES),
            "queue_seconds": ("From arrival to admission.", SECONDS),
            "first_draft_seconds": ("From arrival to the first step, of streams.", SECONDS),
            "first_text_seconds": ("From arrival to the first final text, of streams.", SECONDS),
            "e2e_seconds": ("From arrival to the end.", SECONDS),
            "request_forwards": ("Forwards of a request.", COUNTS),
            "tokens_per_forward": ("Tokens of an answer per forward.", RATES),
            "request_prompt_tokens": ("Tokens of a prompt.", POSITIONS),
            "request_generation_tokens": ("Tokens of an answer.", POSITIONS),
        }
        self._histograms = {
            name: self._made(Histogram, name, text, buckets=buckets)
            for name, (text, buckets) in histograms.items()
        }

    def step(self, report: StepReport) -> None:
        """A step of an engine."""
        observe, count = self._histograms, self._counters
        observe["step_seconds"].observe(report.seconds)
        observe["step_rows"].observe(report.rows)
        observe["step_positions"].observe(report.positions)
        if report.seconds > 0:
            observe["host_share"].observe(max(0.0, 1 - report.forward_seconds / report.seconds))
        count["forwards"].inc()
        count["computed_positions"].inc(report.positions)
        count["committed_tokens"].inc(report.committed)
        count["remasked_tokens"].inc(report.remasked)

    def observe(self, name: str, value: float) -> None:
        """A value of the histogram ``name``."""
        self._histograms[name].observe(value)

    def finished(self, reason: str) -> None:
        """An answer ended: "stop", "length", "cancelled", "deadline", "rejected" or "error"."""
        self._requests.labels(*self._labels.values(), reason).inc()

    def answered(self, result: Result, given: int) -> None:
        """An answer is complete, to a prompt of so many tokens and what was fixed in it."""
        self.finished(result.finish_reason)
        self._counters["prompt_tokens"].inc(given)
        self._counters["cached_prompt_tokens"].inc(result.cached_tokens)
        self._counters["generation_tokens"].inc(result.decided)
        self.observe("queue_seconds", result.queue_seconds)
        self.observe("request_forwards", result.nfe)
        self.observe("tokens_per_forward", result.tokens_per_forward)
        self.observe("request_prompt_tokens", given)
        self.observe("request_generation_tokens", result.decided)
        if isinstance(result, SpeculativeResult):
            self._counters["drafts"].inc(sum(1 for round_ in result.rounds if round_.drafted))
            self._counters["drafted_tokens"].inc(result.drafted)
            self._counters["accepted_tokens"].inc(result.accepted)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)

    def _made(self, kind: type[T], name: str, text: str, **more: Any) -> T:
        made = kind(f"dllm_{name}", text, [*self._labels], registry=self.registry, **more)
        return made.labels(*self._labels.values())
