"""A trained drafter in the formats that engines read.

``native``: transformers (``assistant_model`` with ``speculation_type="dflash"``) and this library.
``speculators``: vLLM.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ...core.errors import ConfigError, UnknownNameError
from ...drafting.dflash.checkpoint import EXTRAS, RENAMED, WEIGHTS, BlockCheckpoint

FORMATS = ("native", "speculators")


def export(
    checkpoint: BlockCheckpoint, folder: Path, kind: str, *, verifier: Any, verifier_name: str,
    head: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Write config.json and model.safetensors.

    ``verifier`` is its config and ``head`` (V, H) its head: ``speculators`` keeps the rows of a
    trimmed vocabulary in the checkpoint.
    """
    if kind not in FORMATS:
        raise UnknownNameError("format", kind, FORMATS)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: t.to(dtype).contiguous() for name, t in checkpoint.weights.items()}
    extras = _vocabulary(checkpoint, verifier.get_text_config().vocab_size)
    if kind == "native":
        config = checkpoint.config.to_diff_dict() | {
            "architectures": ["MuseGlimmerAssistantModel"], "dtype": str(dtype).split(".")[-1],
        }  # fmt: skip
        extras |= {f"markov_head.{name}": t.to(dtype).contiguous()
                   for name, t in checkpoint.markov.items()}  # fmt: skip
        if extras:
            save_file(extras, folder / EXTRAS)
    else:
        weights = {_old_name(name): t for name, t in weights.items()} | extras
        if checkpoint.draft_ids is not None:
            if head is None:
                raise ConfigError("a trimmed vocabulary needs the verifier's head for export")
            weights["lm_head.weight"] = head[checkpoint.draft_ids].to(dtype).contiguous()
        config = _speculators(checkpoint, verifier, verifier_name)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")


def _old_name(name: str) -> str:
    """Speculators' name of a native weight."""
    return next((old + name[len(new) :] for old, new in RENAMED.items() if name.startswith(new)),
                name)  # fmt: skip


def _vocabulary(checkpoint: BlockCheckpoint, vocab_size: int) -> dict[str, torch.Tensor]:
    """The trimmed vocabulary, under the names of speculators."""
    if checkpoint.draft_ids is None:
        return {}
    ids = checkpoint.draft_ids
    marked = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return {"t2d": marked, "d2t": ids - torch.arange(len(ids))}


def _layers(checkpoint: BlockCheckpoint, vocab_size: int) -> dict[str, Any]:
    """The layers, in the words of a Qwen3 config."""
    c = checkpoint.config
    return {
        "model_type": "qwen3", "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads, "head_dim": c.head_dim,
        "hidden_act": c.hidden_act, "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings, "attention_bias": False,
        "attention_dropout": 0.0, "rope_parameters": dict(c.rope_parameters or {}),
        "layer_types": list(c.layer_types or []), "sliding_window": c.sliding_window,
        "use_sliding_window": "sliding_attention" in (c.layer_types or []),
        "tie_word_embeddings": False, "vocab_size": vocab_size,
    }  # fmt: skip


def _speculators(checkpoint: BlockCheckpoint, verifier: Any, name: str) -> dict[str, Any]:
    c, ids = checkpoint.config, checkpoint.draft_ids
    vocab_size = verifier.get_text_config().vocab_size
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": _layers(checkpoint, vocab_size),
        "draft_vocab_size": vocab_size if ids is None else len(ids),
        "block_size": c.block_size, "mask_token_id": c.mask_token_id,
        # these count the embedding as layer 0
        "aux_hidden_state_layer_ids": [layer + 1 for layer in c.target_layer_ids or []],
        "sample_from_anchor": False, "sliding_window_non_causal": True, "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "dflash", "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": c.block_size - 1}
            ],
            "verifier": {"name_or_path": name, "architectures": verifier.architectures or []},
        },
    }  # fmt: skip
