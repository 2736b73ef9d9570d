"""Drafting inside ``model.generate`` of transformers, on two routes (checked with 5.23).

`custom_generate` replaces the decoding loop: all rules work, trees and `keyed` among them.
`attach` hands transformers' own assisted loop a candidate generator: chains, verified by sampling
every position and comparing, which is lossless for any draft.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ...config import GenerationConfig
from ...errors import ConfigError
from ...models import load
from .. import base
from ..api import Session, fit, make_drafter
from ..base import EMPTY, Draft, Drafting, Feedback, Request
from ..control import CONTROLLERS, LengthController
from ..rows import LogitsProcessor


def _check_interface() -> None:
    wanted = {"input_ids", "logits_processor", "stopping_criteria", "generation_config"}
    found = set(inspect.signature(GenerationMixin._sample).parameters)
    if not wanted <= found or not hasattr(GenerationMixin, "_get_candidate_generator"):
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
    verifier_tokenizer: Any = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """For ``model.generate(ids, custom_generate=custom_generate, drafter=...)``.

    ``drafter``, ``rule``, ``controller`` as for `dllm.speculate`; ``seed`` keys the noise when
    sampling; ``on_tokens`` receives the new ids of every round; with ``verifier_tokenizer`` the
    vocabularies of both sides are compared.  One sequence at a time.  Returns
    ids (1, L).  The verifier's processors (penalties, temperature, top-p ...) are those that
    transformers built from the generation config; stopping criteria other than ids and length are
    asked after every token.
    """
    _check_interface()
    if input_ids.shape[0] != 1:
        raise ConfigError(f"drafting takes one sequence at a time, not {input_ids.shape[0]}")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ConfigError("drafting takes prompts without padding")
    sampling = bool(generation_config.do_sample)
    verifier = load(model, tokenizer=verifier_tokenizer)
    part = make_drafter(drafter)
    if verifier_tokenizer is not None:
        part = fit(part, verifier, "auto")
    prompt = input_ids[0].cpu().numpy()
    config = GenerationConfig(
        max_new_tokens=max(1, generation_config.max_length - len(prompt)),
        temperature=1.0 if sampling else 0.0, seed=seed,
    )  # fmt: skip
    session = Session(
        verifier, part, config, rule, controller,
        logits_processor=_once(logits_processor),
    )  # fmt: skip
    run = session.start(prompt)
    stops = getattr(generation_config, "_eos_token_tensor", None)
    run.stop_ids = () if stops is None else tuple(stops.flatten().tolist())
    if stopping_criteria:
        run.stops = _criteria(stopping_criteria, input_ids)
    for tokens in run.run():
        if on_tokens is not None:
            on_tokens(tokens)
    return torch.tensor([run.verifier.tokens], device=input_ids.device)


def _once(processors: Any) -> tuple[LogitsProcessor, ...]:
    """transformers' list of processors (temperature included) as one callable."""
    return (lambda ids, scores: processors(ids, scores),) if processors else ()


def _criteria(criteria: Any, prompt: torch.Tensor) -> Callable[[list[int]], bool]:
    def done(emitted: list[int]) -> bool:
        ids = torch.cat([prompt, torch.tensor([emitted], device=prompt.device)], 1)
        return bool(criteria(ids, None).all())

    return done


class DraftCandidates(CandidateGenerator):
    """A drafter as transformers' candidate generator.  Logits are never returned: with them the
    loop would take the draft for a sample, without them it compares, which is always right."""

    def __init__(self, drafter: Any, request: Request, controller: LengthController) -> None:
        self.drafting: Drafting = drafter.open(request)
        self.request, self.controller = request, controller
        self.draft: Draft = EMPTY

    def get_candidates(  # type: ignore[override]
        self, input_ids: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """(1, L) -> (1, L + k); k = 0 when there is nothing to propose."""
        prefix = input_ids[0].cpu().numpy()
        room = self.request.limit - len(prefix) - 1
        self.draft = EMPTY
        if room > 0:
            budget = self.controller.next(room, len(prefix))
            self.draft = self.drafting.propose(prefix, budget) if budget.length else EMPTY
            if not self.draft.is_chain:
                raise ConfigError("transformers' assisted loop takes chains: choose another search")
            self.draft = self.draft.cut(room)
        new = torch.from_numpy(self.draft.tokens).to(input_ids)[None]
        return torch.cat([input_ids, new], 1), None

    def update_candidate_strategy(
        self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        """Called after verification; ``num_matches`` leaves the extra token out."""
        accepted = list(range(min(int(num_matches), len(self.draft))))
        last = input_ids[0, -1:].cpu().numpy()
        fed = np.concatenate([last, self.draft.tokens])[: scores.shape[1]]
        tokens = self.draft.tokens[accepted].tolist()
        feedback = Feedback(self.draft, accepted, tokens, fed, scores[0])
        self.drafting.observe(feedback)
        stats = base.RoundStats(
            len(self.draft), len(self.draft), len(accepted), len(accepted) + 1, "", "transformers",
            0.0, 0.0, 0.0, 0.0, input_ids.shape[1], first=True,
        )  # fmt: skip
        self.controller.update(stats, feedback)


def attach(
    model: PreTrainedModel, drafter: Any, *, controller: str = "adl_repaired", tokenizer: Any = None
) -> None:
    """Make ``model.generate(ids, prompt_lookup_num_tokens=1, ...)`` draft with ``drafter``.

    The argument only switches assisted decoding on; `detach` undoes it.  Composes with everything
    transformers' assisted loop supports; one sequence at a time.
    """
    _check_interface()
    part = make_drafter(drafter)
    if part is None:
        raise ConfigError("there is nothing to attach: name a drafter")

    def candidates(**arguments: Any) -> DraftCandidates:
        config, ids = arguments["generation_config"], arguments["input_ids"]
        stops = getattr(config, "_eos_token_tensor", None)
        request = Request(
            prompt=ids[0].cpu().numpy(), vocab_size=model.config.get_text_config().vocab_size,
            stop_ids=() if stops is None else tuple(stops.flatten().tolist()),
            limit=config.max_length, tokenizer=tokenizer,
        )  # fmt: skip
        length = base.single(controller, CONTROLLERS, LengthController)
        return DraftCandidates(part, request, length.fresh())

    shadowed: Any = model
    shadowed._get_candidate_generator = candidates


def detach(model: PreTrainedModel) -> None:
    """Give the model its own candidate generators back."""
    model.__dict__.pop("_get_candidate_generator", None)
