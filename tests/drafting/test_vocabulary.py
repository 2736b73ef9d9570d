"""Two tokenizers: compared, refused, bridged."""

import copy
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import dllm
from dllm.drafting.vocabulary import PROBE, compare, fingerprint
from dllm.request.prompts import encode_text

from ..thin import some
from .conftest import Scripted, make_verifier

TEXT = "Reverse this list: Tom, Anna, Ben"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrap: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerFast = wrap(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    return wrapped


@pytest.fixture(scope="module")
def foreign() -> dllm.DiffusionModel:
    """A random verifier on bytes."""
    return make_verifier("full", seed=1, tokenizer=byte_tokenizer())


def test_the_same_tokenizer_is_the_same(verifier: dllm.DiffusionModel) -> None:
    tokenizer = verifier.tokenizer
    size = verifier.facts.vocab_size
    assert compare(tokenizer, copy.deepcopy(tokenizer), size, size).match == "same"
    assert fingerprint(tokenizer, size) == fingerprint(copy.deepcopy(tokenizer), size)


def test_other_special_tokens_leave_the_text_the_same(verifier: dllm.DiffusionModel) -> None:
    other: Any = copy.deepcopy(verifier.tokenizer)
    other.add_special_tokens({"additional_special_tokens": ["<|tool|>"]}, False)
    size = len(other)
    result = compare(verifier.tokenizer, other, verifier.facts.vocab_size, size)
    assert result.match == "same text"
    assert size - 1 in result.foreign
    assert fingerprint(other, size) != fingerprint(verifier.tokenizer, size)


def test_equal_sizes_prove_nothing(verifier: dllm.DiffusionModel) -> None:
    ours = byte_tokenizer()
    size = len(ours)
    result = compare(ours, verifier.tokenizer, size, size)
    assert result.match == "different"


def test_a_different_vocabulary_is_refused(foreign: dllm.DiffusionModel) -> None:
    with pytest.raises(dllm.ConfigError, match="retokenize"):
        dllm.speculate(foreign, "nano", TEXT, max_new_tokens=4)
    with pytest.raises(dllm.ConfigError, match="'auto' or 'retokenize', not 'translate'"):
        dllm.speculate("not/loaded", "nano", TEXT, vocabulary="translate")


@pytest.mark.parametrize("temperature", some([1.0, 0.0], 1))
def test_drafts_as_text_do_not_change_the_output(
    foreign: dllm.DiffusionModel, temperature: float
) -> None:
    how: dict[str, Any] = {"max_new_tokens": 20, "temperature": temperature, "seed": 4}
    plain = dllm.speculate(foreign, None, TEXT, **how)
    result = dllm.speculate(
        foreign, "nano", TEXT, vocabulary="retokenize", controller="fixed(k=6)", window=8, **how
    )
    assert result.tokens == plain.tokens
    assert result.drafted > 0


def test_text_is_carried_over_as_the_verifier_would_write_it(
    foreign: dllm.DiffusionModel, nano: dllm.DiffusionModel
) -> None:
    """A drafter that knows the answer is accepted, in tokens of the other kind."""
    from dllm.drafting.base import DraftRequest
    from dllm.drafting.vocabulary import Retokenizing

    assert nano.tokenizer is not None
    words = encode_text(nano.tokenizer, TEXT)
    script = Scripted(np.array(words), k=4)
    part = Retokenizing(inner=script, ours=nano.tokenizer, theirs=foreign.tokenizer,
                        size=nano.facts.vocab_size)  # fmt: skip
    start = TEXT[: TEXT.index("list")].rstrip()
    prompt = np.array(encode_text(foreign.tokenizer, start))
    from dllm.drafting.base import Budget

    drafting = part.open(DraftRequest(prompt, foreign.facts.vocab_size, (), 200))
    draft = drafting.propose(prompt, Budget(50, 50))
    assert foreign.tokenizer is not None
    text = foreign.tokenizer.decode(draft.tokens.tolist())
    assert TEXT[len(start) :].startswith(text)
    assert len(text) > 8


def test_the_probe_is_worth_its_name(verifier: dllm.DiffusionModel) -> None:
    assert len(set(encode_text(verifier.tokenizer, PROBE))) > 40  # type: ignore[arg-type]


def test_special_tokens_that_the_drafter_does_not_have_may_stand_in_the_text(
    nano: dllm.DiffusionModel,
) -> None:
    tokenizer: Any = copy.deepcopy(nano.tokenizer)
    many = nano.facts.vocab_size - len(tokenizer) + 8  # the last ones lie beyond nano's table
    names = [f"<|tool{i}|>" for i in range(many)]
    tokenizer.add_special_tokens({"additional_special_tokens": names}, False)
    verifier = make_verifier("full", tokenizer=tokenizer)
    prompt = [20, 21, len(tokenizer) - 1, 22, 23]
    plain = dllm.speculate(verifier, None, prompt, max_new_tokens=8)
    drafted = dllm.speculate(verifier, nano, prompt, max_new_tokens=8)
    assert drafted.tokens == plain.tokens and drafted.drafted
