"""A trained drafter, as this library and transformers (``speculation_type="dflash"``) read it."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from ...drafting.dflash.checkpoint import EXTRAS, WEIGHTS, BlockCheckpoint


def export(
    checkpoint: BlockCheckpoint, folder: Path, vocab_size: int,
    dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Write config.json and model.safetensors; ``vocab_size`` is the verifier's."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: t.to(dtype).contiguous() for name, t in checkpoint.weights.items()}
    extras = trimmed_vocabulary(checkpoint, vocab_size)
    extras |= {f"markov_head.{name}": t.to(dtype).contiguous()
               for name, t in checkpoint.markov.items()}  # fmt: skip
    if extras:
        save_file(extras, folder / EXTRAS)
    config = checkpoint.config.to_diff_dict() | {
        "architectures": ["MuseGlimmerAssistantModel"], "dtype": str(dtype).split(".")[-1],
    }  # fmt: skip
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")


def trimmed_vocabulary(checkpoint: BlockCheckpoint, vocab_size: int) -> dict[str, torch.Tensor]:
    """The trimmed vocabulary, under the names of speculators."""
    if checkpoint.draft_ids is None:
        return {}
    ids = checkpoint.draft_ids
    marked = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return {"t2d": marked, "d2t": ids - torch.arange(len(ids))}
