"""docs/reference/models.md says what the registry says."""

from pathlib import Path

import pytest

from ..benchmarks.script import run_script

ROOT = Path(__file__).parents[2]


def test_the_page_of_models_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    run_script("models.py", "--check", monkeypatch=monkeypatch)


def test_it_names_what_people_look_for() -> None:
    text = (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    for name in (
        "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1",
        "GSAI-ML/iLLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5", "inclusionAI/LLaDA-MoE-7B-A1B-Instruct",
        "Dream-org/Dream-Coder-v0-Instruct-7B", "apple/DiffuCoder-7B-cpGRPO",
        "Gen-Verse/TraDo-8B-Instruct", "divelab/OPDLM-0.6B",
        "ByteDance-Seed/Stable-DiffCoder-8B-Instruct", "nvidia/Nemotron-Labs-Diffusion-8B",
    ):  # fmt: skip
        assert f"| [`{name}`]" in text
