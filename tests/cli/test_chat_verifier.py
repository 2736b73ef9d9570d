"""``dllm chat`` with an autoregressive model: the turns before are not computed again."""

from __future__ import annotations

from pathlib import Path

import pytest

import dllm

from ..drafting.conftest import make_verifier
from .conftest import Run

FIRST = "Reverse this list: Tom, Anna, Ben, Mia, Max, Eva, Zoe, Tim, Lea, Jan, Ida, Paul"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verifier")
    make_verifier("full").save_pretrained(path)
    return path


@pytest.mark.parametrize("drafter", [(), ("--drafter", "prompt_lookup")])
def test_a_second_turn_goes_on_from_the_first(
    cli: Run, folder: Path, drafter: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    reused: list[int] = []
    footer = dllm.SpeculativeResult.footer

    def spied(result: dllm.SpeculativeResult) -> str:
        reused.append(result.cached_tokens)
        return footer(result)

    monkeypatch.setattr(dllm.SpeculativeResult, "footer", spied)
    result = cli("chat", "--model", str(folder), "--max-new-tokens", "16", *drafter,
                 stdin=f"{FIRST}\nAnd sort it\n")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    model, messages, answers = dllm.load(folder), [], []
    for text in (FIRST, "And sort it"):
        messages.append({"role": "user", "content": text})
        answers.append(dllm.speculate(model, None, messages, max_new_tokens=16).text)
        messages.append({"role": "assistant", "content": answers[-1]})
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    assert reused[0] == 0 and reused[1] >= 16


def test_what_chat_cannot_do_is_one_line(cli: Run, folder: Path) -> None:
    for arguments in (("--model", str(folder), "--watch"), ("--drafter", "prompt_lookup")):
        result = cli("chat", *arguments, stdin="Tom\n")
        assert result.exit_code == 2 and result.stderr.splitlines()[-1].startswith("error: ")
