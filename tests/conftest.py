"""A model small enough for any test: random weights under the tokenizer of the bundled models."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ or not re.search(
    r" (-n|--numprocesses)[ =]?(?!0)\w", " ".join(sys.argv)
):  # else others run the tests, and this process need not wait for PyTorch
    gc.disable()  # until the tests are collected: what is imported for them stays
    import torch

    if not torch.cuda.is_available():
        # Triton's interpreter has to be asked for before anything imports Triton.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)  # tiny tensors: threads cost more than they bring
# Tests learn nothing from other calls, and leave nothing behind.
os.environ.setdefault("DLLM_KERNELS", "")  # compiled kernels only where a folder is named

sys.path.append(str(Path(__file__).parents[1]))  # for `examples`, behind what is installed

import dllm

# What `pytest -m smoke` runs: a sample of every part, in under a minute on a quiet machine.
SMOKE = (
    "tests/test_api.py", "tests/test_values.py", "tests/cache/test_plans.py",
    "tests/cli/test_generate.py", "tests/drafting/accept/test_lossless.py",
    "tests/engine/test_constraints.py", "tests/engine/test_extents.py",
    "tests/fuzz/test_decoding.py::test_a_batch_is_its_rows_alone[0-9]",
    "tests/fuzz/test_command_lines.py::test_a_command_line[0-19]",
    "tests/golden/test_forward.py", "tests/samplers/test_vectors.py", "tests/test_layering.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """``pytest -n 2``: tests that share what they compute stay together."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadgroup"


def shares(item: pytest.Item) -> bool:
    """Whether a test has fixtures in common with others of its module."""
    known = getattr(item, "_fixtureinfo", None)
    every = known.name2fixturedefs.values() if known else ()
    return any(each.scope in ("module", "class") for defs in every for each in defs)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``-n`` tests that share fixtures go to the same worker, which makes these once.  Mark
    the sample; nothing slow belongs to it."""
    parallel = config.pluginmanager.hasplugin("xdist")
    for item in items:
        together = hasattr(getattr(item, "module", None), "TOGETHER")  # see golden/conftest.py
        grouped = together or item.get_closest_marker("xdist_group")
        if parallel and not grouped and shares(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
        if item.nodeid.startswith(SMOKE) and not item.get_closest_marker("slow"):
            item.add_marker("smoke")


def pytest_collection_finish() -> None:
    """No later collection of garbage looks at what was imported: 0.4 s each time."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries in C++ warn of what is left when the process ends


def small(
    network: str, family: str, block_length: int | None = None, **more: Any
) -> dllm.DiffusionModel:
    """Random weights of a network of transformers under the tokenizer of the bundled models: a
    context of 128 and weights large enough to prefer something."""
    import torch
    import transformers

    from examples.nano.tokenizer import build_tokenizer

    tokenizer, kind = build_tokenizer(), getattr(transformers, network)
    torch.manual_seed(0)
    config = kind.config_class(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.6, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False, **more,
    )  # fmt: skip
    return dllm.load(
        kind(config), family=family, tokenizer=tokenizer, mask_token_id=tokenizer.mask_token_id,
        block_length=block_length,
    )  # fmt: skip


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """PyTorch's own kernels, also where a folder of compiled ones is named."""
    from dllm.kernels import cpu

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLLM_KERNELS", "")
        cpu.library.cache_clear()
        yield
    cpu.library.cache_clear()


@pytest.fixture(scope="session")
def tiny() -> dllm.DiffusionModel:
    """A LLaDA-shaped model."""
    return small("LlamaForCausalLM", "llada")


@pytest.fixture(scope="session")
def nano() -> dllm.DiffusionModel:
    """The bundled model."""
    return dllm.load("nano")


@pytest.fixture(scope="session")
def reordered() -> dllm.DiffusionModel:
    """A WeDLM-shaped model: it attends to decided tokens first."""
    return small("Qwen3ForCausalLM", "wedlm", head_dim=8)


@pytest.fixture(scope="session")
def tiny_folder(tiny: dllm.DiffusionModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a checkpoint folder."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    tiny.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> dllm.DiffusionModel:
    """A small DiffusionGemma with random weights, as `tiny`: canvases of 8 with uniform noise, and
    a window of 6 in two of its layers."""
    import torch
    from transformers import DiffusionGemmaForBlockDiffusion

    from examples.nano.recipe import NanoTraining, build_model
    from examples.nano.tokenizer import build_tokenizer

    tokenizer, folder = build_tokenizer(), tmp_path_factory.mktemp("noisy")
    recipe = NanoTraining.of("uniform", hidden_size=32, layers=3, heads=4, intermediate_size=96)
    config = build_model(recipe, tokenizer).config
    config.canvas_length, config.text_config.sliding_window = 8, 6
    config.text_config.initializer_range = 0.4
    torch.manual_seed(0)
    network: Any = DiffusionGemmaForBlockDiffusion(config)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return dllm.load(folder)
