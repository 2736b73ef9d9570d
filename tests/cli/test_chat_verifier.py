"""``dllm chat`` where nothing behind a turn changes its keys and values: not computed again."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import dllm

from ..models.wedlm import SHAPE
from .conftest import Run

FIRST = "Reverse this list: Tom, Anna, Ben, Mia, Max, Eva, Zoe, Tim, Lea, Jan, Ida, Paul"


@pytest.mark.parametrize(
    "drafter", [("--drafter", "prompt_lookup"), pytest.param((), marks=pytest.mark.slow)]
)
def test_a_second_turn_goes_on_from_the_first(
    cli: Run, causal_folder: Path, drafter: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    reused: list[int] = []
    footer = dllm.SpeculativeResult.footer

    def spied(result: dllm.SpeculativeResult) -> str:
        reused.append(result.cached_tokens)
        return footer(result)

    monkeypatch.setattr(dllm.SpeculativeResult, "footer", spied)
    result = cli("chat", "--model", str(causal_folder), "--max-new-tokens", "16", *drafter,
                 stdin=f"{FIRST}\nAnd sort it\n")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    model, messages, answers = dllm.load(causal_folder), [], []
    for text in (FIRST, "And sort it"):
        messages.append({"role": "user", "content": text})
        answers.append(dllm.speculate(model, None, messages, max_new_tokens=16).text)
        messages.append({"role": "assistant", "content": answers[-1]})
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    assert reused[0] == 0 and reused[1] >= 16


@pytest.mark.slow
def test_a_block_causal_model_goes_on_with_its_exact_cache(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    tokenizer = dllm.load("nano").tokenizer
    shape = {**SHAPE, "vocab_size": len(tokenizer), "head_dim": 8}
    ids = {"mask_token_id": tokenizer.mask_token_id, "block_length": 4}
    dllm.load(Qwen3ForCausalLM(Qwen3Config(**shape)), family="sdar", tokenizer=tokenizer,
              **ids).save_pretrained(tmp_path / "sdar")  # fmt: skip
    reused: dict[str, list[int]] = {"none": [], "block": []}
    footer, outputs = dllm.Result.footer, {}
    for cache, seen in reused.items():

        def spied(result: dllm.Result, seen: list[int] = seen) -> str:
            seen.append(result.cached_tokens)
            return footer(result)

        monkeypatch.setattr(dllm.Result, "footer", spied)
        out = cli("chat", "--model", str(tmp_path / "sdar"), "--cache", cache,
                  "--max-new-tokens", "8", stdin=f"{FIRST}\nAnd sort it\n")  # fmt: skip
        assert out.exit_code == 0, out.stderr
        outputs[cache] = out.stdout
    assert outputs["none"] == outputs["block"]
    assert reused["none"] == [0, 0] and reused["block"][0] == 0 and reused["block"][1] >= 16


def test_what_chat_cannot_do_is_one_line(cli: Run, causal_folder: Path) -> None:
    causal = ("--model", str(causal_folder))
    refused = (("--watch",), ("--sampler", "llada"), ("--cache", "none"), ("--constraint", "3=x"))
    for arguments in (*((*causal, *more) for more in refused), ("--drafter", "prompt_lookup")):
        result = cli("chat", *arguments, stdin="Tom\n")
        assert result.exit_code == 2 and result.stderr.splitlines()[-1].startswith("error: ")
        assert not result.stdout
