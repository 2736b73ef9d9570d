"""Drafting inside ``model.generate`` of transformers (checked with 5.23): all rules work, trees and
`keyed` among them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ...core.canvas import Canvas
from ...core.config import GenerationConfig
from ...core.errors import ConfigError
from ...models import load
from ...request.requests import answering
from ...runtime.scheduler import Scheduler
from ...runtime.streamers import Streamer, feeding
from ..accept.rows import LogitsProcessor
from ..engine import engine_for
from ..naming import fit, make_drafter
from ..recipe import recipe_for

EXTRAS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


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
    noise when sampling; ``on_tokens`` receives the new ids of every round, as does ``streamer``,
    which transformers keeps to itself: ``custom_generate=partial(custom_generate, streamer=...)``.
    A diffusion drafter's vocabulary is compared with ``verifier_tokenizer``, without one by size.
    One sequence at a time.  Returns ids (1, L), or with ``return_dict_in_generate`` an output that
    holds them as ``sequences``.  The verifier's processors (penalties, temperature, top-p ...) are
    those that transformers built from the generation config; stopping criteria other than ids and
    length are asked after every token.
    Raises `ConfigError` for what it cannot do.
    """
    following: Any = nullcontext() if streamer is None else feeding(streamer)
    with following as feed:
        _check_asked(input_ids, generation_config, model_kwargs)
        verifier = load(model, tokenizer=verifier_tokenizer)
        part = fit(make_drafter(drafter), verifier, vocabulary)
        prompt, written = input_ids[0].cpu().numpy(), list[int]()
        config = GenerationConfig(
            max_new_tokens=max(1, generation_config.max_length - len(prompt)),
            temperature=1.0 if generation_config.do_sample else 0.0, seed=seed,
        )  # fmt: skip
        recipe = recipe_for(
            verifier, part, config, rule=rule, controller=controller,
            logits_processor=_once(logits_processor), own_defaults=False,
        )  # fmt: skip
        eos = getattr(generation_config, "_eos_token_tensor", None)
        stop_ids = () if eos is None else tuple(eos.flatten().tolist())
        end = _criteria(stopping_criteria, input_ids) if stopping_criteria else None
        recipe = replace(recipe, stop_ids=stop_ids, after_step=end)
        requests = answering(verifier, recipe, [prompt])
        for event in Scheduler.of(engine_for(verifier, requests), requests).events():
            if feed is not None:  # transformers has handed over the prompt already
                feed.give(event.tokens)
            if on_tokens is not None:
                on_tokens(event.tokens)
            written += event.tokens
    ids: Any = torch.tensor([[*prompt.tolist(), *written]], device=input_ids.device)
    as_output = generation_config.return_dict_in_generate
    return GenerateDecoderOnlyOutput(sequences=ids) if as_output else ids


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
