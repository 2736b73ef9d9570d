"""docs/models.md says what the registry says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_models_is_current() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "models.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_it_names_what_people_look_for() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for name in (
        "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1",
        "GSAI-ML/iLLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5", "inclusionAI/LLaDA-MoE-7B-A1B-Instruct",
        "Dream-org/Dream-Coder-v0-Instruct-7B", "apple/DiffuCoder-7B-cpGRPO",
        "Gen-Verse/TraDo-8B-Instruct", "divelab/OPDLM-0.6B",
        "ByteDance-Seed/Stable-DiffCoder-8B-Instruct", "nvidia/Nemotron-Labs-Diffusion-8B",
    ):  # fmt: skip
        assert f"| [`{name}`]" in text
