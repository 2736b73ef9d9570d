"""Scoring continuations of token ids: masks of many requests, in packed forwards."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from itertools import chain, pairwise
from typing import ClassVar

import numpy as np
import torch

from .. import cache as caches
from .. import samplers
from ..cache import Slots
from ..cache.base import full_plan
from ..core.canvas import BoolArray, Canvas, FloatArray, IntArray
from ..core.config import GenerationConfig
from ..core.errors import NOT_FINITE, ConfigError, NumericError, PromptError
from ..core.limits import COUNT, FINITE, bounds, limit
from ..core.spec import check_part
from ..engine import Engine, MaskedRecipe
from ..engine.forward import Forward
from ..engine.recipe import RowOptions, check_recipe
from ..engine.rows import Job, Row
from ..kernels.statistics import Head, logits_statistics, token_statistics
from ..models import DiffusionModel
from .estimators import ENDS_WITH_EOS, OFFICIAL, Masking, Weights, estimator

ROUND = 16  # samples between two looks at who leads
DECIDED = 3.0  # standard errors that the leader must be ahead


@dataclass(frozen=True)
class Score:
    """The log-likelihood of a continuation, in nats.

    ``logprob`` estimates a lower bound of it, ``stderr`` is the standard error of the estimate, 0
    where nothing was left to chance.  ``tokens``: length of the continuation; ``nfe``: forwards;
    ``computed``: token positions fed to the model.  ``greedy``: whether greedy decoding, one token
    per step, writes exactly this continuation; None if it was not asked for.
    """

    logprob: float
    stderr: float
    tokens: int
    nfe: int
    computed: int
    greedy: bool | None = None

    def __post_init__(self) -> None:
        if math.isnan(self.logprob):
            raise NumericError(f"a likelihood is no number: {NOT_FINITE}")


@dataclass(frozen=True)
class ScoreRequest:
    """What is to be scored: a continuation (L,) of a prompt (P,), both int64.  Those with the same
    ``group`` are choices for one question; ``length`` is what a normalised comparison divides
    by; guidance hides the first ``hidden`` tokens of the prompt, None: all."""

    prompt: IntArray
    continuation: IntArray
    group: int = 0
    length: int = 1
    hidden: int | None = None


Asked = tuple[ScoreRequest, BoolArray, IntArray]  # a mask (L,) of it, offsets into its continuation


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How to score; see `score`."""

    name: ClassVar = "score"  # in errors about its arguments
    limits: ClassVar = bounds(samples=COUNT, max_batch_tokens=COUNT, cfg_scale=FINITE, seed=limit(
        lambda n: 0 <= n < 2**63, "{name} must lie between 0 and 2**63 - 1, not {value}"
    ))  # fmt: skip

    estimator: str | None = None
    samples: int = 128
    greedy: bool = False
    early_stop: bool = False
    cfg_scale: float = 0.0
    seed: int = 0
    max_batch_tokens: int = 8192
    before_forward: Callable[[], None] | None = None

    @property
    def kind(self) -> str:
        """The estimator where masks are drawn."""
        return self.estimator or "stratified"

    @property
    def rounds(self) -> int:
        """Parts of about `ROUND` samples, after which a choice may be decided."""
        return max(1, round(self.samples / ROUND)) if self.early_stop else 1

    def __post_init__(self) -> None:
        check_part(self)
        estimator(self.kind)
        if self.before_forward is not None and not callable(self.before_forward):
            raise ConfigError(f"before_forward is a function, not {self.before_forward!r}")

    def go_on(self) -> None:
        """Raises what ends the call early, if the caller wants it ended."""
        if self.before_forward is not None:
            self.before_forward()


def score_requests(
    model: DiffusionModel, requests: Sequence[ScoreRequest], how: Scoring
) -> list[Score]:
    if model.facts.uniform:
        raise ConfigError(
            f"{model.name} cannot score: its noise is uniform, and the bounds are those of "
            "masked diffusion"
        )
    most = longest(model, how)
    for request in requests:
        size = len(request.prompt) + len(request.continuation)
        if size > most:
            raise PromptError(
                f"prompt and continuation have {size} tokens, and {most} fit the context: shorten "
                "the prompt"
            )
    if model.facts.mask_token_id is not None:
        check_recipe(recipe_of(how), caches.compose("none"), model)
    if _exact(model, how):
        if how.cfg_scale or how.estimator:
            raise ConfigError(
                f"{model.name} is autoregressive: it is scored exactly and without guidance; leave "
                "estimator and cfg_scale out"
            )
        return [_autoregressive(model, request, how) for request in requests]
    pieces = [_pieces(model, _completed(model, request, how), how) for request in requests]
    running = [[_Running(piece, how, len(parts)) for piece in parts] for parts in pieces]
    every = [run for runs in running for run in runs]
    for number in range(how.rounds):
        _advance(model, [run for run in every if not run.decided], how, number)
        if how.early_stop and number:
            _decide(running)
    if how.greedy:
        for run, is_greedy in zip(every, _greedy(model, [*chain(*pieces)], how), strict=True):
            run.greedy = is_greedy
    return [total_score([run.score() for run in runs]) for runs in running]


def _exact(model: DiffusionModel, how: Scoring) -> bool:
    """Whether the chain rule of an autoregressive network is meant."""
    return model.facts.mask_token_id is None or (model.family.causal and how.estimator is None)


def longest(model: DiffusionModel, how: Scoring) -> int:
    """Most tokens of a prompt and its continuation.  The last one of a causal network is not fed;
    Dream's estimator adds an end token."""
    return model.facts.context_length + _exact(model, how) - (how.kind in ENDS_WITH_EOS)


def _completed(model: DiffusionModel, request: ScoreRequest, how: Scoring) -> ScoreRequest:
    """The request with the end token that some estimators want."""
    if how.kind not in ENDS_WITH_EOS:
        return request
    eos = model.facts.eos_token_id
    if eos is None:
        raise ConfigError(f"the {how.kind} estimator needs an end token: {model.name} has none")
    return replace(request, continuation=np.append(request.continuation, eos))


def _pieces(model: DiffusionModel, request: ScoreRequest, how: Scoring) -> list[ScoreRequest]:
    """The request block by block, each behind the text of those before: what a model was trained
    on whose attention is causal between blocks.  The official estimators mask whole texts."""
    size, start = model.facts.block_length, len(request.prompt)
    if size is None or how.kind in OFFICIAL:
        return [request]
    ids = np.concatenate([request.prompt, request.continuation])
    first = start + size - (start % size if model.facts.mask_kind == "block_causal" else 0)
    return [
        replace(request, prompt=ids[:a], continuation=ids[a:b], hidden=start)
        for a, b in pairwise([start, *range(first, len(ids), size), len(ids)])
    ]


def total_score(parts: Sequence[Score]) -> Score:
    """The score of a text from those of its parts, whose estimates are independent."""
    told = {part.greedy for part in parts} or {None}
    return Score(
        logprob=sum(part.logprob for part in parts),
        stderr=math.hypot(*(part.stderr for part in parts)),
        tokens=sum(part.tokens for part in parts), nfe=sum(part.nfe for part in parts),
        computed=sum(part.computed for part in parts),
        greedy=None if None in told else all(told),
    )  # fmt: skip


@dataclass
class _Running:
    """A request, one of ``pieces`` that share its samples, and what its rows gave, by round."""

    request: ScoreRequest
    how: Scoring
    pieces: int
    greedy: bool | None = None
    sums: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    nfe: int = 0
    decided: bool = False

    @property
    def logprob(self) -> float:
        return float(np.mean(self.sums))

    @property
    def stderr(self) -> float:
        return float(np.sqrt(np.sum(np.square(self.errors))) / len(self.errors))

    def draws(self, number: int) -> Masking:
        each, more = divmod(self.how.samples, self.how.rounds)
        rows = each + (number < more)
        rows = max(min(rows, 2), rows // self.pieces)
        sizes = len(self.request.continuation), len(self.request.prompt)
        return estimator(self.how.kind)(*sizes, rows, (self.how.seed, number))

    def add(self, draws: Masking, values: Weights) -> None:
        self.sums.append(float(values.sum()))
        self.errors.append(draws.standard_error(values))
        self.decided |= draws.spread == "exact"  # another round would say the same

    def score(self) -> Score:
        size = len(self.request.prompt) + len(self.request.continuation)
        lanes = 2 if self.how.cfg_scale else 1
        tokens = len(self.request.continuation)
        computed = self.nfe * size * lanes
        return Score(self.logprob, self.stderr, tokens, self.nfe, computed, self.greedy)


def _advance(model: DiffusionModel, live: list[_Running], how: Scoring, number: int) -> None:
    """One round of every request that is not decided yet."""
    plans = [run.draws(number) for run in live]
    asked = [np.flatnonzero(draws.weight.any(1)) for draws in plans]
    rows = [
        (run.request, draws.masked[j], np.flatnonzero(draws.weight[j]))
        for run, draws, which in zip(live, plans, asked, strict=True)
        for j in which
    ]
    logprobs = zip(rows, _logprobs(model, rows, how), strict=True)
    for run, draws, which in zip(live, plans, asked, strict=True):
        values = np.zeros(len(draws.weight))
        for j in which:
            (_, _, wanted), found = next(logprobs)
            values[j] = draws.weight[j][wanted] @ found.astype(np.float64)
        run.nfe += len(which)
        run.add(draws, values)


def _decide(running: list[list[_Running]]) -> None:
    """Mark the requests of every group whose leader is clear, in total and per length."""
    groups: dict[int, list[list[_Running]]] = {}
    for runs in running:
        groups.setdefault(runs[0].request.group, []).append(runs)
    for rivals in groups.values():
        scores = [total_score([run.score() for run in runs]) for runs in rivals]
        lengths = [runs[0].request.length for runs in rivals]
        if len(rivals) > 1 and _leads(scores, [1] * len(scores)) and _leads(scores, lengths):
            for run in chain(*rivals):
                run.decided = True


def _leads(scores: list[Score], by: list[int]) -> bool:
    means = np.array([score.logprob for score in scores]) / by
    errors = np.array([score.stderr for score in scores]) / by
    best = int(np.argmax(means))
    ahead = means[best] - means > DECIDED * np.hypot(errors[best], errors)
    return int(ahead.sum()) == len(scores) - 1  # of all but itself


def _logprobs(model: DiffusionModel, rows: list[Asked], how: Scoring) -> Iterator[FloatArray]:
    """Log-probabilities of every row's wanted tokens, in order."""
    for part, hidden, head in forwards(model, rows, how):
        wanted = np.concatenate([request.continuation[offsets] for request, _, offsets in part])
        with torch.inference_mode():
            select = torch.from_numpy(wanted).to(hidden.device)
            result = token_statistics(hidden, head, select=select, needs=()).numpy()
        assert result.select_logprob is not None
        yield from np.split(result.select_logprob, np.cumsum([len(row[2]) for row in part])[:-1])


def forwards(
    model: DiffusionModel, rows: Iterable[Asked], how: Scoring
) -> Iterator[tuple[list[Asked], torch.Tensor, Head]]:
    """Packed forwards of the engine, guidance included: the rows of each, the hidden states at all
    that they ask for, and the head."""
    forward, recipe = Forward(model, caches.compose("none")), recipe_of(how)
    for part in _parts(rows, how.max_batch_tokens // recipe.lanes):
        how.go_on()
        with torch.inference_mode():
            hidden = forward.hidden([_job_of(model, recipe, *row) for row in part])
        yield part, hidden, forward.head


def _parts(rows: Iterable[Asked], most: int) -> Iterator[list[Asked]]:
    """The rows in runs of at most ``most`` tokens, each of one row at least."""
    part, size = list[Asked](), 0
    for row in rows:
        length = len(row[0].prompt) + len(row[0].continuation)
        if part and size + length > most:
            yield part
            part, size = [], 0
        part.append(row)
        size += length
    if part:
        yield part


def _job_of(
    model: DiffusionModel, recipe: MaskedRecipe, request: ScoreRequest, masked: BoolArray,
    wanted: IntArray,
) -> Job:  # fmt: skip
    """A canvas on which the continuation is decided where it is not ``masked`` (L,) bool; all of it
    is computed, and the ``wanted`` offsets into it are asked about."""
    prompt, text = request.prompt, request.continuation
    canvas = _canvas(model, request)
    canvas.masked[len(prompt) :] = masked
    canvas.tokens[len(prompt) :] = np.where(masked, canvas.mask_id, text)
    slots = Slots.empty(len(canvas.tokens))
    held = Row(canvas, recipe, RowOptions.of(recipe, model), slots, canvas)
    return Job(held, canvas, full_plan(canvas), wanted + len(prompt))


def _canvas(model: DiffusionModel, request: ScoreRequest) -> Canvas:
    mask = model.facts.mask_token_id
    assert mask is not None
    new = len(request.continuation)
    canvas = Canvas.for_prompt(request.prompt, new, mask_id=mask, pad_id=mask)
    if request.hidden is not None:
        canvas.given[request.hidden :] = False
    return canvas


def recipe_of(how: Scoring) -> MaskedRecipe:
    """One most confident token per step, where something is decoded at all."""
    sampler = samplers.compose("llada+whole", options={"eos_policy": "none"})
    config = GenerationConfig(cfg_scale=how.cfg_scale, suppress_mask=False)
    return MaskedRecipe(sampler, config=config)


def _autoregressive(model: DiffusionModel, request: ScoreRequest, how: Scoring) -> Score:
    """The chain rule in one forward.  Without a prompt the first token is given, not scored."""
    ids = np.concatenate([request.prompt, request.continuation])
    text = ids[max(1, len(request.prompt)) :]
    if not len(text):
        return Score(0.0, 0.0, len(ids), 0, 0, True)
    how.go_on()
    select = torch.from_numpy(text).to(model.device)
    with torch.inference_mode():
        rows = own_logits(model, ids[:-1], len(text))
        result = logits_statistics(rows, select=select, needs=()).numpy()
    assert result.select_logprob is not None
    total = float(result.select_logprob.astype(np.float64).sum())
    greedy = bool((result.token == text).all())
    return Score(total, 0.0, len(request.continuation), 1, len(ids) - 1, greedy)


def own_logits(model: DiffusionModel, ids: IntArray, last: int) -> torch.Tensor:
    """Logits (last, V) of an autoregressive network, which may scale or cap what its head says,
    behind the ``last`` of ``ids`` (n,); of the others none are held where it can do without."""
    fewer = "logits_to_keep" in signature(model.hf.forward).parameters
    logits: torch.Tensor = model.hf(
        input_ids=torch.from_numpy(ids)[None].to(model.device), use_cache=False,
        **({"logits_to_keep": last} if fewer else {}),
    ).logits[0, -last:]  # fmt: skip
    return logits


def _greedy(model: DiffusionModel, requests: Sequence[ScoreRequest], how: Scoring) -> list[bool]:
    """Whether one most confident token per step writes the continuation; ends where it differs."""
    canvases = [_canvas(model, request) for request in requests]
    wanted = {id(c): r.continuation for c, r in zip(canvases, requests, strict=True)}

    def differs(canvas: Canvas) -> bool:
        written = slice(canvas.start, None)
        open_ = canvas.masked[written]
        return bool((open_ | (canvas.tokens[written] == wanted[id(canvas)])).sum() < len(open_))

    def check(canvas: Canvas) -> None:
        if differs(canvas):
            canvas.finish("differs")

    recipe = replace(recipe_of(how), after_step=check)
    engine = Engine(model, caches.compose("none"), max_batch_tokens=how.max_batch_tokens)
    how.go_on()
    for _ in engine.run(canvases, recipe):
        how.go_on()
    return [not canvas.masked.any() and not differs(canvas) for canvas in canvases]
