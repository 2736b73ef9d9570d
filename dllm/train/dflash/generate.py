"""The verifier's own questions and answers (Magpie, arXiv 2406.08464), written by this library's
engine: a chat model that is shown the head of a user's turn continues with a question."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...core.canvas import IntArray
from ...core.errors import ConfigError
from ...drafting.api import speculate
from ...models import DiffusionModel
from ...request.prompts import encode
from ..batches import examples
from .data import read_answers

# how half of the self-written prompts begin, so that they cover more than small talk
STARTERS = (Path(__file__).parent / "starters.txt").read_text(encoding="utf-8").splitlines()
BATCH = 64  # prompts per call, and per piece of work when a stopped run goes on
HERE = "\u2063here\u2063"  # stands for the user's words in the template


def turn_ids(verifier: DiffusionModel) -> tuple[list[int], list[int]]:
    """Ids of the chat template before and after the words of the only user's turn."""
    tokenizer: Any = verifier.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise ConfigError(
            f"{verifier.name} has no chat template to prompt itself with: pass data of your own"
        )
    turns = [{"role": "user", "content": HERE}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    if text.count(HERE) != 1:
        raise ConfigError(f"the chat template of {verifier.name} changes the user's words")
    return around(tokenizer, text)


def around(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Ids of what stands before and after `HERE`."""
    before, after = tokenizer(text.split(HERE), add_special_tokens=False).input_ids
    return before, after


def self_prompts(
    verifier: DiffusionModel, count: int, seed: int, most: int = 60, starters: Sequence[str] = ()
) -> list[list[int]]:
    """``count`` prompts, template included, drawn at temperature 1, each of at most ``most``
    tokens.  With ``starters`` every second one begins with one of these, in turn."""
    before, after = turn_ids(verifier)
    tokenizer: Any = verifier.tokenizer
    heads = [before] * count
    if starters:
        begun = [tokenizer(s, add_special_tokens=False).input_ids for s in starters]
        heads = [before + begun[i // 2 % len(begun)] if i % 2 else before for i in range(count)]
    results = speculate(
        verifier, None, [np.asarray(head, np.int64) for head in heads], chat=False,
        max_new_tokens=most, temperature=1.0, seed=seed, exact=False,
    )  # fmt: skip
    stops = set(verifier.facts.stop_token_ids)
    prompts = []
    for head, result in zip(heads, results, strict=True):
        own = [token for token in result.tokens if token not in stops]
        prompts.append([*head, *own, *after])
    return prompts


def write_answers(
    verifier: DiffusionModel, file: Path, count: int, *, seed: int = 0,
    prompts: Sequence[IntArray] | None = None, max_new_tokens: int = 200,
    starters: Sequence[str] = (),
) -> Iterator[int]:  # fmt: skip
    """Append greedy answers to ``file`` until it has ``count`` lines; yields how many it has.

    Without ``prompts`` the verifier prompts itself.  A stopped run goes on with the piece of work
    that was not finished: what it writes does not depend on where it stopped.  Answers have at most
    ``max_new_tokens``, and what the context leaves behind their prompts.
    """
    # As its own default it gives way to the context, prompt by prompt.
    defaults = {**verifier.generation_defaults, "max_new_tokens": max_new_tokens}
    verifier = replace(verifier, generation_defaults=defaults)
    done = 0
    if file.exists():
        written = file.read_bytes()
        done = written.count(b"\n")
        os.truncate(file, written.rfind(b"\n") + 1)  # a killed run may have left part of a line
        asked = read_answers(file) if done and prompts is not None else ()
        if any([*a.ids[: a.start]] != [*ids] for a, ids in zip(asked, prompts or (), strict=False)):
            raise ConfigError(f"{file} answers other prompts: choose another folder")
    while done < count:
        piece, skip = divmod(done, BATCH)
        if prompts is None:
            here = self_prompts(verifier, BATCH, seed * 1_000_003 + piece, starters=starters)
        else:
            here = [ids.tolist() for ids in prompts[piece * BATCH : (piece + 1) * BATCH]]
        here = here[skip : skip + count - done]
        results = speculate(
            verifier, "prompt_lookup", [np.asarray(ids, np.int64) for ids in here], chat=False,
            temperature=0.0, exact=False,  # the faster attention
        )  # fmt: skip
        with file.open("a", encoding="utf-8") as out:
            for ids, result in zip(here, results, strict=True):
                entry = {"ids": [*ids, *result.tokens], "answer": len(ids)}
                out.write(json.dumps(entry) + "\n")
        done += len(here)
        yield done


def read_data(verifier: DiffusionModel, file: Path) -> list[IntArray] | None:
    """The prompts of a file of {"prompt": text} or {"messages": [...]}; None when its lines are
    answers already, {"ids", "answer"}.  Raises `ConfigError` for anything else."""

    def make(entry: Any) -> IntArray | None:
        if "ids" in entry and "answer" in entry:
            return None
        return encode(verifier, entry.get("messages") or entry["prompt"], None)

    prompts: list[IntArray] = []
    form = '{"ids", "answer"}, {"prompt"} or {"messages"}'
    for prompt in examples(file, "prompts or answers", form, make):
        if prompt is None:
            return None
        prompts.append(prompt)
    return prompts
