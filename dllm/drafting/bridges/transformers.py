"""Drafting inside ``model.generate`` of transformers, on two routes (checked with 5.23).

`custom_generate` replaces the decoding loop: all rules work, trees and `keyed` among them.
`attach` hands transformers' own assisted loop a candidate generator: chains, verified by sampling
every position and comparing, which is lossless for any draft.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ...canvas import Canvas
from ...config import GenerationConfig
from ...drive import events
from ...errors import ConfigError
from ...models import load
from ...streamers import Streamer, feeding
from .. import base
from ..accept.rows import LogitsProcessor
from ..base import EMPTY, Drafter, Drafting, DraftRequest, Feedback
from ..length.control import CONTROLLERS, LengthController
from ..naming import fit, make_drafter
from ..preparation import SpeculativePreparation

EXTRAS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def _check_interface() -> None:
    wanted = {"input_ids", "logits_processor", "stopping_criteria", "generation_config"}
    result = set(inspect.signature(GenerationMixin._sample).parameters)
    if not wanted <= result or not hasattr(GenerationMixin, "_get_candidate_generator"):
        raise ConfigError(
            "this version of transformers decodes differently inside: use dllm.speculate, or "
            "transformers 5.23"
        )


def custom_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    drafter: Any = None,
    rule: Any = None,
    controller: Any = None,
    seed: int = 0,
    on_tokens: Callable[[list[int]], None] | None = None,
    streamer: Streamer | None = None,
    verifier_tokenizer: Any = None,
    vocabulary: str = "auto",
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """For ``model.generate(ids, custom_generate=custom_generate, drafter=...)``.

    ``drafter``, ``rule``, ``controller``, ``vocabulary`` as for `dllm.speculate`; ``seed`` keys the
    noise when sampling; ``on_tokens`` receives the new ids of every round, as does the ``streamer``
    of the calling ``generate``.  A diffusion drafter's vocabulary is compared with
    ``verifier_tokenizer``, without one by size.  One sequence at a time.  Returns ids (1, L), or
    with ``return_dict_in_generate`` an output that holds them as ``sequences``.  The verifier's
    processors (penalties, temperature, top-p ...) are those that transformers built from the
    generation config; stopping criteria other than ids and length are asked after every token.
    Raises `ConfigError` for what it cannot do.
    """
    _check_interface()
    with feeding(streamer or _streamer_of_caller()) as feed:
        _check_asked(input_ids, generation_config, model_kwargs)
        verifier = load(model, tokenizer=verifier_tokenizer)
        part = fit(make_drafter(drafter), verifier, vocabulary)
        prompt, written = input_ids[0].cpu().numpy(), list[int]()
        config = GenerationConfig(
            max_new_tokens=max(1, generation_config.max_length - len(prompt)),
            temperature=1.0 if generation_config.do_sample else 0.0, seed=seed,
        )  # fmt: skip
        how = SpeculativePreparation.of(
            verifier, part, {}, config, rule=rule, controller=controller,
            logits_processor=_once(logits_processor), own_defaults=False,
        )  # fmt: skip
        eos = getattr(generation_config, "_eos_token_tensor", None)
        stop_ids = () if eos is None else tuple(eos.flatten().tolist())
        end = _criteria(stopping_criteria, input_ids) if stopping_criteria else None
        how = replace(how, recipe=replace(how.recipe, stop_ids=stop_ids, after_step=end))
        (request,) = how.prompts([prompt])
        for event in events(how.scheduler([request])):
            if feed is not None:  # transformers has handed over the prompt already
                feed.give(event.tokens)
            if on_tokens is not None:
                on_tokens(event.tokens)
            written += event.tokens
    ids: Any = torch.tensor([[*prompt.tolist(), *written]], device=input_ids.device)
    as_output = generation_config.return_dict_in_generate
    return GenerateDecoderOnlyOutput(sequences=ids) if as_output else ids


def _streamer_of_caller() -> Streamer | None:
    """The ``streamer`` of the ``generate`` that is running: transformers hands it to its own
    decoding loops, but leaves it out for those that users bring."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    streamer: Streamer | None = None if frame is None else frame.f_locals.get("streamer")
    return streamer


def _check_asked(input_ids: torch.Tensor, config: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise `ConfigError` for what this loop cannot do."""
    if input_ids.shape[0] != 1:
        raise ConfigError(f"drafting takes one sequence at a time, not {input_ids.shape[0]}")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ConfigError("drafting takes prompts without padding")
    for name in EXTRAS:
        if config.return_dict_in_generate and getattr(config, name, False):
            raise ConfigError(f"drafting returns sequences only: leave out {name}")


def _once(processors: Any) -> tuple[LogitsProcessor, ...]:
    """transformers' list of processors (temperature included) as one callable."""
    return (lambda ids, scores: processors(ids, scores),) if processors else ()


def _criteria(criteria: Any, prompt: torch.Tensor) -> Callable[[Canvas], None]:
    """Ends a text after the first new token at which transformers would."""

    def check(canvas: Canvas) -> None:
        new = canvas.commit_step == canvas.step - 1
        for at in np.flatnonzero(new[: canvas.length]).tolist():
            ids = torch.from_numpy(canvas.tokens[None, : at + 1]).to(prompt)
            if bool(criteria(ids, None).all()):
                canvas.stop_position = at
                canvas.cut(at)
                canvas.finish("stop")
                return

    return check


class DraftCandidates(CandidateGenerator):
    """A drafter as transformers' candidate generator.  Logits are never returned: with them the
    loop would take the draft for a sample, without them it compares, which is always right."""

    def __init__(
        self, drafter: Drafter, request: DraftRequest, controller: LengthController
    ) -> None:
        self.drafting: Drafting = drafter.open(request)
        self.request, self.controller = request, controller
        self.prefix, self.draft, self.first = request.prompt, EMPTY, True
        self.attempted = False
        self.clock = [0.0, 0.0]  # when the round began, and when its draft was ready

    def get_candidates(  # type: ignore[override]
        self, input_ids: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """(1, L) -> (1, L + k); k = 0 when there is nothing to propose."""
        began = time.perf_counter()
        self.prefix = input_ids[0].cpu().numpy()
        room = self.request.limit - len(self.prefix) - 1
        self.draft, self.attempted = EMPTY, False
        if room > 0:
            budget = self.controller.next(room, len(self.prefix))
            self.attempted = budget.length > 0
            self.draft = self.drafting.propose(self.prefix, budget) if self.attempted else EMPTY
            if not self.draft.is_chain:
                raise ConfigError("transformers' assisted loop takes chains: choose another search")
            self.draft = self.draft.cut(room)
        new = torch.from_numpy(self.draft.tokens).to(input_ids)[None]
        self.clock = [began, time.perf_counter()]
        return torch.cat([input_ids, new], 1), None

    def update_candidate_strategy(
        self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        """Called after verification, with the extra token in ``input_ids`` already; ``num_matches``
        leaves it out.  ``scores`` are logits after the processors."""
        verified = time.perf_counter()
        draft, accepted = self.draft, list(range(int(num_matches)))
        emitted: list[int] = input_ids[0, len(self.prefix) :].tolist()
        fed = np.concatenate([self.prefix[-1:], draft.tokens])
        feedback = Feedback(draft, accepted, emitted, fed, scores[0])
        self.drafting.observe(feedback)
        began, drafted = self.clock
        stats = base.RoundStats(
            drafted=len(draft), depth=len(draft), accepted=len(accepted), emitted=len(emitted),
            extra="bonus" if len(accepted) == len(draft) else "correction", source=draft.source,
            draft_seconds=drafted - began, search_seconds=draft.search_seconds,
            verify_seconds=verified - drafted, other_seconds=time.perf_counter() - verified,
            context=len(self.prefix), first=self.first, attempted=self.attempted,
        )  # fmt: skip
        self.first = False
        self.controller.update(stats, feedback)


class _Attached:
    """What `attach` puts in place of the model's choice of a candidate generator.

    transformers does not say when a text is complete: its drafter is closed when the next one
    begins, or by `detach`.
    """

    def __init__(
        self, drafter: Drafter, controller: LengthController, tokenizer: Any, vocab_size: int
    ) -> None:
        self.drafter, self.controller = drafter, controller
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.running: DraftCandidates | None = None

    def __call__(self, **arguments: Any) -> DraftCandidates:
        self.close()
        config, ids = arguments["generation_config"], arguments["input_ids"]
        stops = getattr(config, "_eos_token_tensor", None)
        request = DraftRequest(
            prompt=ids[0].cpu().numpy(), vocab_size=self.vocab_size,
            stop_ids=() if stops is None else tuple(stops.flatten().tolist()),
            limit=config.max_length, tokenizer=self.tokenizer,
        )  # fmt: skip
        self.running = DraftCandidates(self.drafter, request, self.controller.fresh())
        return self.running

    def close(self) -> None:
        if self.running is not None:
            self.running.drafting.close()
        self.running = None


def attach(
    model: PreTrainedModel, drafter: Any, *, controller: Any = "adl_repaired",
    tokenizer: Any = None, vocabulary: str = "auto",
) -> None:  # fmt: skip
    """Make ``model.generate(ids, prompt_lookup_num_tokens=1, ...)`` draft with ``drafter``.

    The argument only switches assisted decoding on; `detach` undoes it.  Composes with everything
    transformers' assisted loop supports; one sequence at a time.  ``drafter``, ``controller`` and
    ``vocabulary`` as for `dllm.speculate`; a diffusion drafter's vocabulary is compared with
    ``tokenizer``, the model's, without one by size.  Raises `ConfigError` when they do not fit.
    """
    _check_interface()
    size = model.config.get_text_config().vocab_size
    verifier: Any = SimpleNamespace(
        name=type(model).__name__, tokenizer=tokenizer, facts=SimpleNamespace(vocab_size=size)
    )
    part = fit(make_drafter(drafter), verifier, vocabulary)
    if part is None:
        raise ConfigError("there is nothing to attach: name a drafter")
    length = base.single(controller, CONTROLLERS, LengthController)
    detach(model)
    shadowed: Any = model
    shadowed._get_candidate_generator = _Attached(part, length, tokenizer, size)


def detach(model: PreTrainedModel) -> None:
    """Give the model its own candidate generators back."""
    attached = model.__dict__.pop("_get_candidate_generator", None)
    if isinstance(attached, _Attached):
        attached.close()
