"""A model at work: its sessions, and what is known of the requests in them."""

import asyncio
import hashlib
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from .. import __version__
from ..core.config import MAX_TEMPERATURE
from ..core.errors import CancelledError, ConfigError, DeadlineError, PromptError, QueueFullError
from ..core.text import hole_forms
from ..drafting.verifiers.base import is_causal_model
from ..engine.memory import is_out_of_memory
from ..likelihood.tokens import TokenScores
from ..models import DiffusionModel
from ..request.holes import measured, open_holes
from ..request.prompts import check_ids, encode_continuation, tokenizer_of
from ..request.requests import occurrences
from ..runtime.handle import Handle
from ..runtime.result import Result
from ..runtime.spelling import Spelling
from ..session import Session
from ..structured.building import WORKER
from .chats import Chats
from .encoding import Encoder
from .http import Client
from .likelihoods import Likelihoods
from .metrics import Metrics
from .problems import Problem, problem_of, shortened, stopping, unsupported
from .reading import Reader
from .replies import Choice, Reply, given_tokens
from .requests import GenerateRequest
from .responses import ResponseReply
from .settings import SAMPLER, Settings
from .verify import VerifyRoutes

log, access = logging.getLogger("dllm.serve"), logging.getLogger("dllm.access")
CANVAS = {"steps", "block_length", "length", "cfg_scale", "eos_policy", "constraints",
          "initial_text", "remask"}  # fmt: skip
MOST_UNKNOWN = 16  # holes of a request that are measured
OTHERS, LONGEST_PAUSE = 3, 1.0  # time left to texts that are written per time of that, and seconds
MOST_FORMS = 32  # whose automata are known, half of what the library remembers
SAMPLE = 64  # values of a weight that identify it
LONG_ENOUGH = 256  # tokens of an object, where the request does not say
DEFAULT_HOLE = 128  # tokens of a hole before a suffix, where the request does not say
MOST_CANDIDATES = 2**22
T = TypeVar("T")


class Started(NamedTuple):
    """A request at work: a handle per choice, the ids of its prompts, and how likely these are,
    per choice, where that is wanted."""

    handles: list[Handle]
    prompts: list[Any]
    given: Sequence[TokenScores | None]


class Service:
    """The sessions of ``model``, one per cache, and everything around them that is not HTTP.

    Prompts are written by `Chats`, read by `Encoder`.  ``labels`` stand at all metrics.
    """

    def __init__(
        self, model: DiffusionModel, settings: Settings | None = None, **labels: str
    ) -> None:
        self.model, self.settings = model, settings or Settings()
        self.name = self.settings.name or model.name
        self.started = int(time.time())
        self.draining = False
        self.metrics = Metrics({"model_name": self.name, **labels}, {
            "requests_running": ("Rows that are being written.", lambda: self.running),
            "requests_waiting": ("Requests in the queue.", lambda: self.waiting),
            "cache_positions_used_ratio": (
                "Share of the positions for keys and values in use.", lambda: self.used
            ),
        })  # fmt: skip
        self.sessions = {name: self._session(name) for name in self.settings.caches}
        self.encoder = Encoder(model, self.settings.max_prompt_tokens, WORKER.close)
        self.reader = Reader(self.settings.max_body, self.encoder.limit)
        self.likelihoods = Likelihoods(self.encoder, self.settings.deadline)
        self.spelling = Spelling(model.tokenizer)
        self.chats = Chats(self.spelling, self.settings.tool_parser)
        self._seconds = 1.0  # of a request, lately
        facts = __version__, model.name, digest(model.hf), ""
        self._facts = hashlib.sha256("\0".join(facts).encode())
        self._forms: deque[str] = deque(maxlen=MOST_FORMS)
        self.verifying = None
        if is_causal_model(model):
            self.verifying = VerifyRoutes(next(iter(self.sessions.values())), self.reader)

    def _session(self, cache: str) -> Session:
        settings = self.settings
        options = settings.session(cache) | {"observe": self.metrics.step}
        if is_causal_model(self.model):
            if settings.sampler is not None:
                raise ConfigError(f"{self.model.name} is autoregressive: drop --sampler")
            options |= {"drafter": list(settings.drafters) or None}
            del options["sampler"]
        elif settings.drafters:
            raise ConfigError(f"{self.model.name} is a diffusion model, and drafters are for "
                              "autoregressive ones: drop --drafter")  # fmt: skip
        return Session(self.model, **options)

    @property
    def running(self) -> int:
        return sum(session.running for session in self.sessions.values())

    @property
    def waiting(self) -> int:
        return sum(session.waiting for session in self.sessions.values())

    @property
    def used(self) -> float:
        """Share of the positions for keys and values in use; 0 without a cache."""
        total = sum(session.positions for session in self.sessions.values())
        used = sum(session.positions_used for session in self.sessions.values())
        return used / total if total else 0.0

    @property
    def retry_after(self) -> float:
        """Seconds after which there may be room in the queue, a rough estimate."""
        return math.ceil(self._seconds * (1 + self.waiting / self.settings.max_batch_size))

    @property
    def broken(self) -> bool:
        """Whether an engine has ended: the process has to be started anew."""
        return any(session.failure is not None for session in self.sessions.values())

    def state(self) -> dict[str, Any]:
        status = "broken" if self.broken else "stopping" if self.draining else "ready"
        return {
            "status": status, "running": self.running, "waiting": self.waiting,
            "max_batch_size": self.settings.max_batch_size * len(self.sessions),
            "max_waiting": self.settings.max_waiting * len(self.sessions),
            "cache_positions_used_ratio": round(self.used, 4),
        }  # fmt: skip

    def fingerprint(self, ask: GenerateRequest) -> str:
        """What the answer is a function of, besides the request: versions, dtype, method."""
        sampler, cache = ask.sampler or self.settings.sampler or SAMPLER, self.cache_of(ask)
        facts = self._facts.copy()
        facts.update(f"{sampler}\0{cache}".encode())
        return f"fp_{facts.hexdigest()[:12]}"

    def reply(self, ask: GenerateRequest) -> Reply:
        """The reply that ``ask`` wants."""
        kind = Reply if ask.response is None else ResponseReply
        return kind(ask, self.name, self.fingerprint(ask), self.spelling)

    def cache_of(self, ask: GenerateRequest) -> str:
        return self.settings.caches[0] if ask.cache is None else ask.cache

    def check(self, ask: GenerateRequest) -> None:
        """Refuse what this server does not have, or cannot take any more."""
        self.check_model(ask.model)
        check_ids(self.model, ask.logprob_ids)
        called = self.model.name
        if is_causal_model(self.model):
            if ask.drafts or ask.logprobs:
                raise unsupported(None, f"{called} is autoregressive: it has no drafts of a canvas "
                                  "and no alternatives beside its tokens")  # fmt: skip
            if drop := {*filter(ask.arguments.get, CANVAS)}:
                raise unsupported(min(drop), f"{called} is autoregressive, and {min(drop)} is for "
                                  "diffusion models: drop it")  # fmt: skip
        elif ask.logprob_ids and self._costs(ask) > MOST_CANDIDATES:
            raise unsupported(
                "logprob_token_ids", f"logprob_token_ids needs an answer of fewer tokens on "
                f"{called}, whose vocabulary has {self.model.facts.vocab_size}: lower max_tokens"
            )  # fmt: skip
        elif name := next(iter(ask.penalties), None):
            raise unsupported(name, f"{name}={ask.penalties[name]} is not supported: tokens of a "
                              "canvas are decided several at a time, so that there is no past to "
                              "penalise")  # fmt: skip
        room = self.settings.max_batch_size + self.settings.max_waiting
        if ask.choices > room:  # later there would be no more room
            raise unsupported("n", f"{ask.choices} answers: this server takes {room} at a time")
        if ask.tool_choice == "auto" and ask.tools and not self.chats.shown(ask):
            raise unsupported("tools", f"the chat template of {called} shows no tools to the "
                              "model: with tool_choice 'required' or a named one it is made to "
                              "call one")  # fmt: skip
        if self.cache_of(ask) not in self.sessions:
            raise unsupported("cache", f"cache {shortened(ask.cache)} is not served: choose one of "
                              + ", ".join(self.sessions))  # fmt: skip

    def _costs(self, ask: GenerateRequest) -> float:
        """Log-probabilities that are kept of an answer with all alternatives."""
        length = ask.arguments.get("max_new_tokens", DEFAULT_HOLE)
        return float(self.model.facts.vocab_size * length * length * ask.choices)

    def check_model(self, name: str | None) -> None:
        """Raises for a model that is not here, and while the server stops or is broken."""
        if self.broken:
            raise Problem(503, "the engine has failed: the server must be restarted", code="broken")
        if self.draining:
            raise stopping()
        if name is not None and name != self.name:
            text = f"the model {name[:80]!r} does not exist: this server has {self.name!r}"
            raise Problem(404, text, "model", "model_not_found")

    async def start(self, ask: GenerateRequest, client: Client) -> Started:
        """Submit every choice of ``ask``: all of them or none."""
        self.check(ask)
        until = time.monotonic() + min(ask.deadline or math.inf, self.settings.deadline)
        texts = ask.texts
        if shown := self.chats.shown(ask):
            texts.append(json.dumps(shown))
        unknown = open_holes(ask.text)
        if unknown > MOST_UNKNOWN:
            raise unsupported("text", f"at most {MOST_UNKNOWN} holes may have an unknown length")

        def submit(model: DiffusionModel, go_on: Callable[[], None]) -> Started:
            encoded = []
            for prompt in ask.prompts:
                go_on()
                encoded.append(self._encoded(model, ask, prompt, go_on))
            go_on()
            salt = "\0".join((client.key, ask.user, ask.salt)).strip("\0")
            handles = self._submitted(ask, encoded, until, salt)
            return Started(handles, [one[0] for one in encoded], [None] * len(handles))

        form = ask.form
        slow = unknown > 0 or (form is not None and form not in self._forms)
        started = await self.encoder.run(
            submit, texts, until, lambda begun: cancel_all(begun.handles), slow, "\0".join(client)
        )
        if slow and form is not None:
            self._forms.append(form)
        if ask.prompt_logprobs is not None:
            try:
                top = max(1, ask.prompt_logprobs)
                given = await self.likelihoods.tokens(started.prompts, top, until)
            except BaseException:
                cancel_all(started.handles)
                raise
            started = started._replace(given=[one for one in given for _ in range(ask.n)])
        return started

    def _encoded(
        self, model: DiffusionModel, ask: GenerateRequest, prompt: Any, go_on: Callable[[], None]
    ) -> tuple[Any, Any]:
        """The ids of a prompt (None: there is none), and of a text with holes, -1 at these."""
        limit = self.settings.max_prompt_tokens
        ids = None if prompt is None else self.chats.prompt(ask, model, prompt)
        if ids is not None and ask.truncate:
            ids = self.chats.shortened(model, ask, prompt, ids, go_on)
        if ids is not None and limit is not None and len(ids) > limit:
            raise PromptError(f"the prompt has {len(ids)} tokens, the context here takes {limit}")
        if ask.text is not None:
            if any(hole_forms(ask.text)):
                return ids, ask.text
            before, began = np.zeros(0, np.int64) if ids is None else ids, time.monotonic()

            def in_spare_time() -> None:
                nonlocal began
                go_on()
                if self.running:
                    time.sleep(min(LONGEST_PAUSE, OTHERS * (time.monotonic() - began)))
                began = time.monotonic()

            rule = ask.arguments.get("length", "sure")
            return ids, measured(model, ask.text, before, rule, in_spare_time)
        if ask.suffix is not None:
            length = ask.arguments.get("max_new_tokens", DEFAULT_HOLE)
            if length > (most := model.facts.context_length):
                raise PromptError(f"max_tokens={length} exceeds the context of {most}: lower it")
            behind = encode_continuation(tokenizer_of(model), ask.suffix)
            return None, np.concatenate([ids, np.full(length, -1), np.asarray(behind, np.int64)])
        return ids, None

    def _submitted(
        self, ask: GenerateRequest, encoded: Sequence[tuple[Any, Any]], until: float, salt: str
    ) -> list[Handle]:
        handles: list[Handle] = []
        session, arguments = self.sessions[self.cache_of(ask)], dict(ask.arguments)
        if ask.suffix is not None:
            arguments.pop("max_new_tokens", None)
        if is_causal_model(self.model):
            arguments.pop("cfg_scale", None)  # 0: off
        if salt:
            arguments["cache_salt"] = salt
        if ask.forced or ask.either:
            choice = ask.tool_choice if ask.forced else "required"
            other = None if ask.forced else arguments["json_schema"]
            schema = self.chats.syntax.schema(ask.tools, choice, ask.several, other)
            arguments["json_schema"] = schema
        top = self.model.facts.vocab_size if ask.logprob_ids else ask.logprobs
        if top:
            arguments["top_candidates"] = top
        if ask.endless:
            never = dict.fromkeys(self.model.facts.stop_token_ids, -MAX_TEMPERATURE)
            arguments["logit_bias"] = {**arguments.get("logit_bias", {}), **never}
        given: dict[str, Any] = {
            "sampler": ask.sampler, "trace": ask.trace or bool(top), **arguments,
        }  # fmt: skip
        try:
            before = occurrences([str(prompt) for prompt in ask.prompts])
            for times, (prompt, text) in zip(before, encoded, strict=True):
                for given["repetition"] in range(ask.n * times, ask.n * (times + 1)):
                    given["deadline"] = round(until - time.monotonic(), 3)
                    if text is None:
                        given |= self._length(arguments, len(prompt))
                        given |= penalties(ask.penalties, len(prompt))
                        handles.append(session.submit(prompt, **given))
                    else:
                        handles.append(session.infill(text, prompt=prompt, **given))
        except BaseException:
            cancel_all(handles)
            raise
        return handles

    def _length(self, arguments: Mapping[str, Any], prompt: int) -> dict[str, Any]:
        """Room for an object behind a prompt of so many tokens, where the request names none: what
        checkpoints recommend is for prose, and too short for most calls of tools."""
        facts, usual = self.model.facts, self.model.generation_defaults.get("max_new_tokens", 0)
        named = "max_new_tokens" in arguments or "json_schema" not in arguments
        if named or facts.block_length or usual >= LONG_ENOUGH:
            return {}
        return {"max_new_tokens": max(1, min(LONG_ENOUGH, facts.context_length - prompt))}

    async def encoded(self, texts: Sequence[Any], work: Callable[[DiffusionModel], T]) -> T:
        """What ``work`` makes of ``texts`` with the model that it is given."""
        until = time.monotonic() + self.settings.deadline
        return await self.encoder.run(lambda model, _: work(model), texts, until)

    async def whole(
        self, reply: Reply, started: Started, name: str, arrived: float
    ) -> dict[str, Any]:
        """The body of an answer once it is there; ``name``, ``arrived``: see `answered`."""
        handles = started.handles
        try:
            results = [await handles[0]] if len(handles) == 1 else await asyncio.gather(*handles)
        finally:
            cancel_all(handles)
        self.answered(name, results, arrived)
        pairs = zip(results, started.given, strict=True)
        return reply.body([self.choice(reply.ask, *pair) for pair in pairs])

    def choice(
        self, ask: GenerateRequest, result: Result, given: TokenScores | None = None
    ) -> Choice:
        """What the client gets of a result."""
        if ask.suffix is not None:
            return Choice(result, "".join(result.holes))
        prompt = result.sequences[: result.prompt_length]
        parser = self.chats.parser(ask, prompt)
        if parser is not None:
            parser.feed(result.text)
            parser.end()
        before = self.spelling.decode(prompt.tolist()) if ask.echo else ""
        if ask.only_prompt:
            result = replace(result, text="", tokens=[], order=[], logprobs=result.logprobs[:0],
                             finish_reason="length")  # fmt: skip
        said = None if parser is None else parser.said
        return Choice(result, before + result.text, said, given)

    def answered(self, name: str, results: Sequence[Result], arrived: float) -> None:
        """Count the answers to request ``name``, which came at ``arrived`` (`time.monotonic`)."""
        seconds = time.monotonic() - arrived
        self._seconds += 0.1 * (seconds - self._seconds)
        for result in results:
            self.metrics.answered(result, given_tokens(result))
            self.metrics.observe("e2e_seconds", seconds)
        access.info(
            "%s 200: %d answers, %d tokens, %d forwards, %.3f s, queued %.3f s", name,
            len(results), sum(r.decided for r in results), sum(r.nfe for r in results), seconds,
            max(r.queue_seconds for r in results),
        )  # fmt: skip

    def problem(self, error: BaseException) -> Problem:
        """``error`` as an answer."""
        if isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error):
            return Problem(503, "memory does not suffice for this text now", code="out_of_memory",
                           retry_after=self.retry_after)  # fmt: skip
        return problem_of(error, self.retry_after, self.model.facts.context_length)

    def failed(self, error: BaseException) -> Problem:
        """Count a request that ended without an answer; what its client is told."""
        problem = self.problem(error)
        reasons = {QueueFullError: "rejected", DeadlineError: "deadline"}
        reasons |= {CancelledError: "cancelled", asyncio.CancelledError: "cancelled"}  # type: ignore[dict-item]
        kind = next((name for cls, name in reasons.items() if isinstance(error, cls)), "error")
        self.metrics.finished("rejected" if problem.status < 500 and kind == "error" else kind)
        if problem.status == 500:
            log.error("a request failed", exc_info=error)
        return problem

    def close(self) -> None:
        """Cancel what still runs, whose clients are told so, and end the threads."""
        self.draining = True
        for session in self.sessions.values():
            session.close(drain=False)
        for one in (self.reader, self.encoder, self.likelihoods):
            one.close()


def digest(network: torch.nn.Module) -> str:
    """What identifies the weights, those of an adapter among them: a few values of each."""
    found = hashlib.sha256()
    for name, weight in network.state_dict().items():
        if isinstance(weight, torch.Tensor) and weight.numel():
            flat = weight.reshape(-1)[:: max(1, weight.numel() // SAMPLE)]
            found.update(f"{name} {weight.dtype} {flat.tolist()}".encode())
    return found.hexdigest()


def penalties(wanted: Mapping[str, float], prompt: int) -> dict[str, Any]:
    """Arguments of a verifier.  ``repetition_penalty`` is of prompt and answer; the others of what
    is written behind a prompt of so many tokens, as OpenAI defines them."""
    given: dict[str, Any] = dict(wanted)
    frequency, presence = (given.pop(f"{name}_penalty", 0.0) for name in ("frequency", "presence"))

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids[0, prompt:], minlength=scores.shape[1])
        less: torch.Tensor = frequency * counts + presence * (counts > 0)
        return scores - less

    return given | ({"logits_processor": [process]} if frequency or presence else {})


def cancel_all(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.cancel()
