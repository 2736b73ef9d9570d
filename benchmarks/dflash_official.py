"""Records what the official code of block drafters computes, on tiny random checkpoints.

    python benchmarks/dflash_official.py --speculators PATH/src --specforge PATH

PATH is a checkout of vllm-project/speculators (recorded: pull request 1006, 0a2da236) and of
sgl-project/SpecForge (recorded: a6b6b023); each runs in a process of its own, on a CPU, in float32,
with whatever of its training dependencies is missing replaced by empty modules.  Every case becomes
a folder of tests/golden/data/dflash: the checkpoint as its package names things, and
``recorded.safetensors``: the ``taps`` (S, taps * H) of a text, ``embedding`` (V, H) and ``head``
(v, H) of a verifier, ``anchors`` (N,) with their ``tokens`` (N,), and of the block behind each of
them the normed ``hidden`` states (N, K, H) of the rows that draft, their ``logits`` (N, K, v), the
greedy walk's ``drafts`` (N, K) as places in the drafted vocabulary, and ``sure`` (N, K) where a
head says how sure it is.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "golden" / "data" / "dflash"
WIDTH, VOCABULARY, TEXT, BLOCK, RANK, MASK = 16, 48, 14, 5, 4, 3
ANCHORS = (4, 8)
ABSENT = ("hs_connectors", "datasets", "vllm", "aiohttp", "openai", "loguru", "wandb", "trackio")
SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCABULARY,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "attention_bias": False,
}  # fmt: skip


class Empty(types.ModuleType):
    """A package that is not there: every name in it is an empty class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return Empty(spec.name)

    def exec_module(self, module: Any) -> None:
        return None


def randomise(model: torch.nn.Module) -> None:
    """Weights that make every part matter, the ones that start as the identity, too."""
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        near = 1.0 if "norm" in name else 0.0
        tensor.copy_(near + 0.4 * torch.randn_like(tensor))
        if name.endswith("base_kernel"):
            tensor[:, 0] += 1


def save(name: str, config: dict[str, Any], weights: dict[str, torch.Tensor],
         recorded: dict[str, torch.Tensor]) -> None:  # fmt: skip
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    plain = {k: v.detach().clone().contiguous() for k, v in weights.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    found = {k: v.detach().clone().contiguous() for k, v in recorded.items()}
    save_file(found, folder / "recorded.safetensors")


def speculators(variant: str) -> None:
    from speculators.models.dflash2.config import DFlash2SpeculatorConfig
    from speculators.models.dflash2.core import DFlash2DraftModel
    from speculators.models.dspark.config import DSparkSpeculatorConfig
    from speculators.models.dspark.core import DSparkDraftModel
    from transformers import Qwen3Config

    second = variant == "dflash2"
    kinds = ["sliding_attention", "full_attention"]
    layer = Qwen3Config(
        **SHAPE, layer_types=kinds, sliding_window=3, use_sliding_window=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    layer._attn_implementation = "eager"
    drafted = VOCABULARY if second else 16
    common: dict[str, Any] = {
        "transformer_layer_config": layer, "draft_vocab_size": drafted, "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [1, 3], "mask_token_id": MASK,
    }  # fmt: skip
    if second:
        config: Any = DFlash2SpeculatorConfig(
            **common, conv_group_size=4, selector_rank=RANK, selector_top_k=6
        )
        model: Any = DFlash2DraftModel(config)
    else:
        config = DSparkSpeculatorConfig(**common, markov_rank=RANK, markov_head_type=variant)
        model = DSparkDraftModel(config)
    model = model.float().eval()
    randomise(model)
    if not second:
        ids = torch.arange(1, VOCABULARY, 3)[:drafted]
        model.t2d.zero_()[ids] = True
        model.d2t.copy_(ids - torch.arange(drafted))
    taps, text = torch.randn(1, TEXT, 2 * WIDTH), torch.randint(4, VOCABULARY, (1, TEXT))
    allowed = torch.zeros(1, TEXT)
    allowed[:, list(ANCHORS)] = 1
    hidden, logits, *_ = model._backbone_forward(
        taps, text, allowed, torch.randn(1, TEXT, WIDTH), torch.zeros(1, TEXT, dtype=torch.long),
        max_anchors=len(ANCHORS),
    )  # fmt: skip
    first = 1 if second else 0
    hidden = hidden.view(len(ANCHORS), BLOCK, -1)[:, first:]
    logits = logits.view(len(ANCHORS), BLOCK, -1)[:, first:]
    tokens, drafts, sure = text[0, list(ANCHORS)], [], []
    known = tokens[:, None]  # (N, k): the anchor and what was drafted
    for k in range(hidden.shape[1]):
        own, before = hidden[:, k], known[:, -1]
        if second:
            at, scores = model.candidate_selector.select(logits[:, k], own, before)
            place = at.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
            token = place
        else:
            head = model.markov_head
            bias = head.block_bias(prev_token_ids=known, hidden_states=hidden[:, : k + 1])[:, -1]
            place = (logits[:, k] + bias).argmax(-1)
            token = place + model.d2t[place]
            features = torch.cat([own, head.prev_embeddings(before)], -1)
            sure.append(model.confidence_head(features).sigmoid())
        drafts.append(place)
        known = torch.cat([known, token[:, None]], 1)
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("verifier_")}
    recorded = {"taps": taps[0], "embedding": weights.pop("embed_tokens.weight"),
                "head": weights["lm_head.weight"], "anchors": torch.tensor(ANCHORS),
                "tokens": tokens, "hidden": hidden, "logits": logits,
                "drafts": torch.stack(drafts, 1)}  # fmt: skip
    if sure:
        recorded["sure"] = torch.stack(sure, 1)
    if second:
        weights.pop("lm_head.weight")
    written = json.loads(config.model_dump_json())
    save(f"speculators-{variant}", written, weights, recorded)


def specforge(variant: str) -> None:
    from specforge.modeling.draft.domino import DominoDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel
    from transformers import Qwen3Config

    domino = variant.startswith("domino")
    own: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": [0, 2],
                           "projector_type": "domino" if domino else "dspark"}  # fmt: skip
    if domino:
        own |= {"emb_dim": 6, "gru_hidden_dim": 5, "pure_draft_prefix_len": 1,
                "shift_label": variant == "domino-shifted"}  # fmt: skip
    else:
        own |= {"markov_rank": RANK, "markov_head_type": "vanilla"}
    raw = {**SHAPE, "num_target_layers": 6, "block_size": BLOCK, "dflash_config": own,
           "layer_types": ["full_attention"] * 2}  # fmt: skip
    config = Qwen3Config(**raw)
    config._attn_implementation = "eager"
    model: Any = (DominoDraftModel if domino else DSparkDraftModel)(config).float().eval()
    randomise(model)
    embedding, head = torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY, WIDTH)
    taps, text = torch.randn(1, TEXT, 2 * WIDTH), torch.randint(4, VOCABULARY, (1, TEXT))
    shifted = domino and own["shift_label"]
    rows = slice(0, None) if shifted else slice(1, None)
    target: Any = types.SimpleNamespace(
        lm_head=lambda x: x @ head.T,
        model=types.SimpleNamespace(embed_tokens=lambda ids: embedding[ids]),
    )
    hidden, drafts = [], []
    for anchor in ANCHORS:
        block = torch.full((1, BLOCK), MASK)
        block[:, 0] = text[0, anchor]
        out = model(
            target_hidden=taps[:, :anchor], noise_embedding=embedding[block],
            position_ids=torch.arange(anchor + BLOCK)[None],
        )  # fmt: skip
        drafts.append(model._sample_draft_tokens(target, out, block)[0])
        hidden.append(out[0, rows])
    states = torch.stack(hidden)
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("rotary")}
    kept = {**config.to_dict(), "architectures": [type(model).__name__]}
    save(f"specforge-{variant}", kept, weights, {
        "taps": taps[0], "embedding": embedding, "head": head, "anchors": torch.tensor(ANCHORS),
        "tokens": text[0, list(ANCHORS)], "hidden": states, "logits": states @ head.T,
        "drafts": torch.stack(drafts),
    })  # fmt: skip


CASES = {"speculators": ("dflash2", "vanilla", "gated", "rnn"),
         "specforge": ("dspark", "domino", "domino-shifted")}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--speculators", type=Path)
    parser.add_argument("--specforge", type=Path)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is None:
        for package, variants in CASES.items():
            if (path := getattr(options, package)) is None:
                continue
            for variant in variants:
                again = [sys.executable, __file__, f"--{package}", str(path)]
                subprocess.run([*again, "--case", package, variant], check=True)
        return
    package, variant = options.case
    sys.path.insert(0, str(getattr(options, package)))
    sys.meta_path.append(Finder())
    torch.manual_seed(list(CASES).index(package) * 10 + CASES[package].index(variant))
    with torch.no_grad():
        {"speculators": speculators, "specforge": specforge}[package](variant)


if __name__ == "__main__":
    main()
