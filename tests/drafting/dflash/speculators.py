"""Block drafters in the format of the package speculators, with names as it documents them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dllm.drafting.dflash.checkpoint import RENAMED, WEIGHTS, BlockCheckpoint
from dllm.train.dflash.export import trimmed_vocabulary


def write_speculators(
    checkpoint: BlockCheckpoint, path: Path, verifier: Any, name: str, dtype: torch.dtype
) -> None:
    """A folder with config.json and model.safetensors; a trimmed vocabulary brings its rows of
    the head."""
    path.mkdir(parents=True, exist_ok=True)
    weights = {_old_name(key): t.to(dtype).contiguous() for key, t in checkpoint.weights.items()}
    weights |= trimmed_vocabulary(checkpoint, verifier.config.vocab_size)
    if checkpoint.draft_ids is not None:
        head = verifier.get_output_embeddings().weight.detach()
        weights["lm_head.weight"] = head[checkpoint.draft_ids].to(dtype).contiguous()
    save_file(weights, path / WEIGHTS, metadata={"format": "pt"})
    config = _speculators(checkpoint, verifier.config, name)
    (path / "config.json").write_text(json.dumps(config, default=str))


def _old_name(name: str) -> str:
    """Speculators' name of a native weight."""
    return next((old + name[len(new) :] for old, new in RENAMED.items() if name.startswith(new)),
                name)  # fmt: skip


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
