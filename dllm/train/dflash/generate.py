"""The verifier's own questions and answers (Magpie, arXiv 2406.08464), written by this library's
engine: a chat model that is shown the head of a user's turn continues with a question."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.canvas import IntArray
from ...core.errors import ConfigError
from ...drafting.api import speculate
from ...models import DiffusionModel
from ...request.prompts import encode
from ..batches import examples
from ..trajectories import greedy, write_pieces

# how half of the self-written prompts begin, so that they cover more than small talk
STARTERS = (Path(__file__).parent / "starters.txt").read_text(encoding="utf-8").splitlines()
HERE = "\u2063here\u2063"  # stands for the user's words in the template


def around(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Ids of what stands before and after `HERE`."""
    before, after = tokenizer(text.split(HERE), add_special_tokens=False).input_ids
    return before, after


def self_prompts(
    verifier: DiffusionModel, count: int, seed: int, most: int = 60, starters: Sequence[str] = ()
) -> list[list[int]]:
    """``count`` prompts, template included, drawn at temperature 1, each of at most ``most``
    tokens.  With ``starters`` every second one begins with one of these, in turn."""
    tokenizer: Any = verifier.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise ConfigError(
            f"{verifier.name} has no chat template to prompt itself with: pass data of your own"
        )
    turns = [{"role": "user", "content": HERE}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    if text.count(HERE) != 1:
        raise ConfigError(f"the chat template of {verifier.name} changes the user's words")
    before, after = around(tokenizer, text)
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
    known = [None] * count if prompts is None else [ids.tolist() for ids in prompts[:count]]

    def decode(here: slice) -> Iterator[dict[str, Any]]:
        asked: list[Any] = known[here]
        if prompts is None:
            turn = here.start // 2 % max(1, len(starters))
            asked = self_prompts(verifier, len(asked), seed * 1_000_003 + here.start,
                                 starters=[*starters[turn:], *starters[:turn]])  # fmt: skip
        written = greedy(verifier, "prompt_lookup", [np.asarray(ids, np.int64) for ids in asked],
                         max_new_tokens, chat=False, exact=False)  # fmt: skip
        for ids, start in written:
            yield {"ids": ids, "answer": start}

    yield from write_pieces(known, file, decode, verifier.name, seed, max_new_tokens)


def read_data(verifier: DiffusionModel, file: Path) -> list[IntArray] | None:
    """The prompts of a file of {"prompt": text} or {"messages": [...]}, which may have "tools";
    None when its lines are answers already, {"ids", "answer"}.  Raises `ConfigError` for others."""

    def make(entry: Any) -> IntArray | None:
        if "ids" in entry and "answer" in entry:
            return None
        messages, tools = entry.get("messages"), entry.get("tools")
        if messages and messages[-1]["role"] == "assistant":
            raise ValueError("an answer ends it: leave that out, the verifier writes its own")
        how = {"tools": tools} if tools else {}
        ids = encode(verifier, messages or entry["prompt"], None, how)
        if len(ids) >= verifier.facts.context_length:
            raise ValueError(f"{len(ids)} tokens fill a context of {verifier.facts.context_length}")
        return ids

    prompts: list[IntArray] = []
    form = '{"ids", "answer"}, {"prompt"} or {"messages"}'
    for prompt in examples(file, "prompts or answers", form, make):
        if prompt is None:
            return None
        prompts.append(prompt)
    return prompts
