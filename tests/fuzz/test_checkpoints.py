"""Damaged checkpoint folders: every one loads and decodes, or fails with one sentence.

A case is a copy of a tiny checkpoint with one to three random faults in it; `damage` says which.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import dllm

from ..thin import some
from . import damage as harm

DATA = Path(__file__).resolve().parents[1] / "golden" / "data"
DECODING: Any = {"max_new_tokens": 4, "block_length": 4, "steps": 2}

NEW_FIELDS = (
    "dllm", "quantization_config", "rope_scaling", "rope_parameters", "dtype", "torch_dtype",
    "mask_token_id", "block_size", "sliding_window", "layer_types", "auto_map", "is_causal",
    "tie_word_embeddings", "head_dim", "pad_token_id", "num_labels", "id2label", "pretraining_tp",
    "embedding_size", "attn_implementation", "use_cache", "transformers_version",
)  # fmt: skip
SECTION = (
    "family", "generation", "official_config", "context_length", "block_length", "logit_shift",
    "score_source", "stop_token_ids", "eos_token_id",
)  # fmt: skip
GENERATION = ("eos_token_id", "max_new_tokens", "block_length", "delimiters", "mask_token_id",
              "temperature", "do_sample", "top_k")  # fmt: skip


def config_field(folder: Path, rng: random.Random) -> str:
    config = json.loads((folder / "config.json").read_text())
    name = rng.choice([*config, *NEW_FIELDS])
    value = rng.choice(harm.HOSTILE)
    harm.rewrite(folder / "config.json", lambda c: c.__setitem__(name, value))
    return f"config {name}={value!r:.40}"


def section_field(folder: Path, rng: random.Random) -> str:
    name, value = rng.choice(SECTION), rng.choice(harm.HOSTILE)
    section = {"family": "llada", name: value}
    harm.rewrite(folder / "config.json", lambda c: c.__setitem__("dllm", section))
    return f"dllm section {name}={value!r:.40}"


def generation_field(folder: Path, rng: random.Random) -> str:
    name, value = rng.choice(GENERATION), rng.choice(harm.HOSTILE)
    harm.rewrite(folder / "generation_config.json", lambda c: c.__setitem__(name, value))
    return f"generation {name}={value!r:.40}"


def tokenizer(folder: Path, rng: random.Random) -> str:
    content = rng.choice(["{}", "[]", "", '{"model": 3}', '{"version": "1.0", "model": {}}'])
    (folder / rng.choice(["tokenizer.json", "vocab.json"])).write_text(content)
    return f"tokenizer {content!r}"


FAULTS = (config_field, config_field, config_field, section_field, generation_field,
          harm.drop_field, harm.index, *harm.OF_FILES, tokenizer)  # fmt: skip


def check(folder: Path, seed: int) -> bool:
    """Load and decode a damaged copy; whether it could be."""
    rng = random.Random(seed)
    source = DATA / rng.choice(["llada-tiny", "dream-tiny"])
    folder.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, folder / file.name)
    done = [source.name, *harm.damage(folder, rng, FAULTS, (1, 1, 1, 2, 3))]

    def read() -> None:
        model = dllm.load(folder)
        if model.facts.mask_token_id is not None:
            dllm.generate(model, [1, 2, 3], sampler="llada", **DECODING)

    return harm.works(read, (seed, done))


@pytest.mark.fuzz(10)
def test_a_damaged_folder_is_one_sentence(tmp_path: Path, seeds: range) -> None:
    assert not all(harm.of_each(seeds, tmp_path, check))


@pytest.mark.parametrize("seed", [4, 26, 50])
def test_some_faults_do_no_harm(tmp_path: Path, seed: int) -> None:
    """One folder in seven still loads: the others are not refused for something they share."""
    assert check(tmp_path / str(seed), seed)


# What 10,000 cases have found: values of 10,000 characters in messages, and a section that is null.
FOUND = (725, 889, 1949, 2506, 2957, 3064, 3401, 4025, 5016, 6433, 7520, 8268, 9154, 9835)


@pytest.mark.parametrize("seed", some(FOUND, 4))
def test_a_folder_that_was_none(tmp_path: Path, seed: int) -> None:
    assert check(tmp_path / str(seed), seed) in (True, False)
