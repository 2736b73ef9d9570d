"""``dllm generate --verifier``."""

import json
from pathlib import Path

import pytest

import dllm

from .conftest import Run

PROMPT = "Reverse this list: Tom, Anna"
SHORT = ("--max-new-tokens", "10")


def test_the_text_is_the_verifiers(cli: Run, causal_folder: Path) -> None:
    expected = dllm.speculate(dllm.load(causal_folder), None, PROMPT, max_new_tokens=10).text
    for drafters in (["none"], ["prompt_lookup"], ["suffix", "nano"]):
        named = [part for name in drafters for part in ("--drafter", name)]
        result = cli("generate", PROMPT, "--verifier", str(causal_folder), *named, *SHORT)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == expected + "\n"
        assert "verifier forwards" in result.stderr


def test_json_has_the_acceptance(cli: Run, causal_folder: Path) -> None:
    result = cli(
        "generate", PROMPT, "--verifier", str(causal_folder), "--search", "argmax", "--controller",
        "fixed(k=2)", "--temperature", "0.5", "--seed", "3", "--json", *SHORT,
    )  # fmt: skip
    payload = json.loads(result.stdout)
    assert payload["rule"] == "keyed"
    assert payload["drafted"] > 0
    assert payload["nfe"] == len(payload["tokens"]) - payload["accepted"]
    assert abs(sum(payload["shares"].values()) - 1) < 1e-6


@pytest.mark.parametrize(
    "arguments",
    [
        ("--drafter", "prompt_lookup"),
        ("--rule", "keyed"),
        ("--verifier", "nano"),
        ("--verifier", "{folder}", "--steps", "4"),
        ("--verifier", "{folder}", "--sampler", "threshold"),
        ("--verifier", "{folder}", "--cache", "none"),
        ("--verifier", "{folder}", "--drafter", "prompt_lookup", "--model", "nano-ar"),
        ("--verifier", "{folder}", "--watch"),
        ("--verifier", "{folder}", "--drafter", "suffix", "--search", "cps"),
        ("--verifier", "{folder}", "--controller", "fixd"),
    ],
)
def test_what_cannot_work_is_one_line(
    cli: Run, causal_folder: Path, arguments: tuple[str, ...]
) -> None:
    result = cli("generate", PROMPT, *(a.format(folder=causal_folder) for a in arguments))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
