"""What a device decodes is what the CPU decodes, by every sampler and every cache."""

import functools
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

import dllm
from dllm.cache import CACHES
from dllm.samplers import SAMPLERS

DEVICE = "other" if "DLLM_OTHER_DEVICE" in os.environ else "cuda"
on_device = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no GPU"
)
PROMPTS = ["What is 23 + 12?", "Reverse this list: Tom, Anna, Ben"]


@cache
def model(device: str, name: str = "nano") -> dllm.DiffusionModel:
    return dllm.load(name, device=device, dtype="float32")


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize(
    ("sampler", "cache"),
    [*((name, "none") for name in SAMPLERS), *(("threshold", name) for name in CACHES)],
)
@pytest.mark.parametrize("how", [{}, {"temperature": 0.8, "top_p": 0.9}])
def test_the_texts_are_those_of_the_cpu(sampler: str, cache: str, how: dict[str, Any]) -> None:
    def decode(device: str) -> list[str]:
        results = dllm.generate(
            model(device), PROMPTS, sampler=sampler, cache=cache, max_new_tokens=32, seed=1, **how
        )
        return [result.text for result in results]

    try:
        wanted = decode("cpu")
    except dllm.ConfigError as error:
        pytest.skip(str(error))
    assert decode(DEVICE) == wanted


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU takes indices from the CPU")
def test_tensors_of_two_devices_are_refused() -> None:
    there, here = torch.ones(3, device=DEVICE), torch.ones(3, dtype=torch.long)
    for mixed in (
        lambda: there + here,
        lambda: there[here],
        lambda: torch.where(here > 0, there, 0),
    ):
        with pytest.raises(RuntimeError, match="devices"):
            mixed()


@pytest.mark.gpu
@on_device
def test_what_else_is_asked_is_that_of_the_cpu() -> None:
    """Structures, log-probabilities, guidance, holes, likelihoods, drafts."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    def answers(device: str) -> tuple[list[str], list[float]]:
        nano, causal = model(device), model(device, "nano-ar")
        results = [
            *dllm.generate(nano, PROMPTS, max_new_tokens=32, json_schema=schema, trace=True),
            dllm.generate(nano, PROMPTS[0], max_new_tokens=16, cfg_scale=1.5),
            dllm.generate(
                nano, PROMPTS[0], max_new_tokens=32, logit_bias={5: 1.0}, stop_strings=[":"]
            ),
            dllm.infill(nano, "The answer is [[2]].", prompt=PROMPTS[0]),
            *dllm.speculate(causal, "suffix", PROMPTS, max_new_tokens=24),
            *dllm.speculate(causal, "nano", PROMPTS, max_new_tokens=24, temperature=0.8, seed=1),
        ]
        values = [*results[0].logprobs, dllm.score(nano, PROMPTS[0], "35", seed=1).logprob,
                  dllm.score(causal, PROMPTS[0], "35").logprob]  # fmt: skip
        return [result.text for result in results], values

    (there, near), (here, exact) = answers(DEVICE), answers("cpu")
    assert there == here
    assert near == pytest.approx(exact, rel=1e-3, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cuda", reason="the CPU stands for one of two devices")
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.8, "seed": 1}, {"cfg_scale": 1.5}, {"sampler": "credit"},
        {"sampler": "d2f", "cache": "d2f"}, {"sampler": "lopa", "cache": "prefix"},
        {"choice": ["a list", "35"]}, {"cache": "elastic"}, {"cache": "dllm_cache"},
    ],
)  # fmt: skip
def test_a_network_may_lie_on_two_devices(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``device_map="auto"`` has it for one that is larger than a GPU."""
    whole = functools.partial(accelerate.dispatch_model, main_device="cpu")
    monkeypatch.setattr("transformers.integrations.accelerate.dispatch_model", whole)
    near = ["embed_tokens", "rotary_emb", "layers.0", "layers.1"]
    far = [*(f"layers.{i}" for i in range(2, model("cpu").layers)), "norm"]
    places = {f"model.{name}": "cpu" if name in near else f"{DEVICE}:0" for name in near + far}
    spread = dllm.load("nano", dtype="float32", device_map={**places, "lm_head": f"{DEVICE}:0"})
    spread_texts, texts = (
        [result.text for result in dllm.generate(one, PROMPTS, max_new_tokens=32, **how)]
        for one in (spread, model("cpu"))
    )
    assert spread_texts == texts
    scores = [dllm.score(one, PROMPTS[0], "35", seed=1).logprob for one in (spread, model("cpu"))]
    assert scores[0] == pytest.approx(scores[1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_a_device_that_is_not_the_cpu_needs_no_gpu(tmp_path: Path) -> None:
    """What lies on the wrong device fails on one whose memory is the host's as it does on a GPU."""
    library = tmp_path / "other_device.so"
    source = Path(__file__).with_name("other_device.cpp")
    flags = [*(f"-isystem{path}" for path in include_paths()),
             *(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch_cpu"]  # fmt: skip
    subprocess.run(
        ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", source, "-o", library, *flags], check=True
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.engine.other_device", "-m", "gpu",
               "-p", "no:cacheprovider", __file__]  # fmt: skip
    root = Path(__file__).parents[2]
    environment = {**os.environ, "DLLM_OTHER_DEVICE": str(library)}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout
