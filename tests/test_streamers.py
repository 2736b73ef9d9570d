"""What a streamer receives, whoever decodes: `generate` or `speculate`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TextIteratorStreamer, TextStreamer

import dllm
from dllm.core.errors import OutOfMemoryError
from dllm.drafting.base import Budget, Draft, Drafter, Drafting, DraftRequest
from dllm.request.prompts import encode

from .thin import some

PROMPT = "What is 4 + 5?"
NEW = 24


class Recorder:
    """What transformers' plain streamers have: no drafts."""

    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


class Failing(Drafter):
    """Drafts nothing, and fails in the third round."""

    def open(self, request: DraftRequest) -> Drafting:
        return Failure()


class Failure(Drafting):
    rounds = 0

    def propose(self, prefix: Any, budget: Budget) -> Draft:
        self.rounds += 1
        if self.rounds == 3:
            raise RuntimeError("the drafter has failed")
        return Draft(np.zeros(0, np.int64))


def by_generate(streamer: Any, **how: Any) -> list[int]:
    out = dllm.generate("nano", PROMPT, streamer=streamer, max_new_tokens=NEW, **how)
    return out.tokens


def by_speculate(streamer: Any, drafter: Any = "prompt_lookup", **how: Any) -> list[int]:
    how = {"max_new_tokens": NEW} | how
    return dllm.speculate("nano-ar", drafter, PROMPT, streamer=streamer, **how).tokens


WAYS = {"generate": by_generate, "speculate": by_speculate}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@ways
def test_the_prompt_then_the_answer_then_the_end(way: Callable[..., list[int]]) -> None:
    recorder = Recorder()
    tokens = way(recorder)
    assert recorder.values[0] == encode(dllm.load("nano-ar"), PROMPT).tolist()
    assert recorder.ends == 1
    assert [token for value in recorder.values[1:] for token in value] == tokens
    assert len(recorder.values) > 2  # in pieces
    stop_ids = dllm.load("nano").facts.stop_token_ids
    assert tokens[-1] in stop_ids and not {*tokens[:-1]} & {*stop_ids}  # and nothing behind it


@ways
def test_text_streamers_of_transformers(
    way: Callable[..., list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer: Any = dllm.load("nano").tokenizer
    how = {"skip_prompt": True, "skip_special_tokens": True}
    text = tokenizer.decode(way(TextStreamer(tokenizer, **how)), skip_special_tokens=True)
    assert capsys.readouterr().out == text + "\n" and "9" in text
    pieces = TextIteratorStreamer(tokenizer, timeout=60, **how)
    way(pieces)
    assert "".join(pieces) == text


@pytest.mark.parametrize(
    ("way", "how", "error"),
    some(
        [
            (by_generate, {"sampler": "nothing"}, dllm.UnknownNameError),
            (by_generate, {"n": 2, "temperature": 1.0}, dllm.ConfigError),
            (by_speculate, {"rule": "nothing"}, dllm.UnknownNameError),
            (by_speculate, {"max_new_tokens": 10**6}, dllm.PromptError),
            (by_speculate, {"drafter": Failing()}, RuntimeError),
        ],
        4,
    ),
)
def test_a_reader_hears_the_end_whatever_fails(
    way: Callable[..., list[int]], how: dict[str, Any], error: type[Exception]
) -> None:
    pieces = TextIteratorStreamer(dllm.load("nano").tokenizer, skip_prompt=True, timeout=1)
    with pytest.raises(error):
        way(pieces, **how)
    written = "".join(pieces)  # raises where nothing ends it
    assert len(written) > 1 if error is RuntimeError else not written


def test_a_reader_hears_the_end_when_a_forward_fails(
    tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    pieces = TextIteratorStreamer(tiny.tokenizer, timeout=1)
    with monkeypatch.context() as patch, pytest.raises(OutOfMemoryError):
        patch.setitem(tiny.backbone.__dict__, "forward", fail)
        dllm.generate(tiny, PROMPT, max_new_tokens=8, streamer=pieces)
    assert list(pieces) == [""]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"sampler": "whole+threshold(0.8)"},
        {"eos_policy": "none", "temperature": 1.5, "seed": 3},
        {"sampler": "remdm", "max_new_tokens": 30},
        {"constraints": {4: "Tom"}},
        {"stop_strings": ("a", "e")},
    ],
)
def test_what_is_final_is_streamed_once(tiny: dllm.DiffusionModel, how: dict[str, Any]) -> None:
    """Also where decisions are taken back and where the canvas goes on behind a stop id."""
    recorder, how = Recorder(), {"max_new_tokens": NEW, "block_length": 8} | how
    if "sampler" in how:
        del how["block_length"]
    out = dllm.generate(tiny, PROMPT, streamer=recorder, **how)
    assert recorder.values[0] == encode(tiny, PROMPT).tolist() and recorder.ends == 1
    assert [token for value in recorder.values[1:] for token in value] == out.tokens


def test_what_is_no_streamer_is_refused(tiny: dllm.DiffusionModel) -> None:
    with pytest.raises(dllm.ConfigError, match=r"put and end, .*not <class"):
        dllm.generate(tiny, [5], streamer=TextStreamer, max_new_tokens=4)  # type: ignore[arg-type]
    with pytest.raises(dllm.ConfigError, match="put and end"):
        dllm.generate(tiny, PROMPT, streamer=print)
    with pytest.raises(dllm.ConfigError, match="a streamer follows one prompt"):
        dllm.speculate("nano-ar", None, ["a", "b"], streamer=Recorder())
