"""An autoregressive model that also fills in masks, by an adapter which acts on masks only; or all
its weights, for attention that is causal between blocks (`in_blocks`)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ...errors import ConfigError
from ...models import DiffusionModel, load
from ...models.adapters import LINEARS, SECTION, gate_adapter
from ...models.quiet import quiet
from ..dflash.card import card, curve
from ..dflash.data import Taps, common_tokens, read_answers
from ..dflash.objective import Objective, Trainee
from ..dflash.recipe import Schedule, Split, mask_id, run_of
from ..loop import Loop, same_recipe
from ..network import add_adapter
from ..objectives.gated import MaskBlocks

IN_BLOCKS = {  # families of networks that attend in blocks
    "LlamaForCausalLM": "a2d_llama", "Qwen2ForCausalLM": "a2d_qwen2",
    "Qwen3ForCausalLM": "a2d_qwen3",
}  # fmt: skip


@dataclass(frozen=True)
class Conversion:
    """``masks``: tokens drafted at once; ``rank`` of the adapter on every linear layer;
    ``mask_token_id``: None takes an id that no chat contains; ``held_out`` and ``evaluated`` as for
    block drafters."""

    masks: int = 3
    rank: int = 32
    mask_token_id: int | None = None
    held_out: int = 64
    evaluated: int = 32
    objective: Objective = field(default_factory=Objective)
    schedule: Schedule = field(
        default_factory=lambda: Schedule(rows=4, anchors=64, warmup=30, weight_decay=0.0)
    )


def causal(model: DiffusionModel) -> DiffusionModel:
    """The model, which must be autoregressive."""
    if model.facts.mask_kind != "causal":
        raise ConfigError(f"{model.name} is a diffusion model already: name an autoregressive one")
    return model


def start(
    model: DiffusionModel, files: Sequence[Path], recipe: Conversion, folder: Path, *,
    bf16: bool = False, say: Callable[[str], None] | None = None,
) -> tuple[Loop, Split]:  # fmt: skip
    """A run, ready: a checkpoint in ``folder`` is taken up by `resume`.  ``files``: the model's own
    answers, see `dllm train dflash`.  Changes the network in place: it gets the adapter."""
    hf: Any = causal(model).hf
    hf.train(False)
    answers = [a for file in files for a in read_answers(file)]
    split = Split.of(answers, recipe.held_out, recipe.evaluated)
    same_recipe(folder, recipe)
    torch.manual_seed(recipe.schedule.seed)
    layers = [name for name in LINEARS
              if any(part.endswith(name) for part, _ in hf.named_modules())]  # fmt: skip
    add_adapter(hf, recipe.rank, layers)
    gate = gate_adapter(hf, mask_id(model) if recipe.mask_token_id is None
                        else recipe.mask_token_id)  # fmt: skip
    blocks = MaskBlocks(hf, gate, recipe.masks)
    common = common_tokens(split.train, recipe.objective.head_rows)
    reader = SimpleNamespace(read=blocks.read)  # no second submodule
    trainee = Trainee(blocks, reader, hf, recipe.objective, common)
    taps = Taps((), hf.get_input_embeddings().weight.shape[1])
    return run_of(trainee, split, taps, recipe.schedule, folder, bf16, say), split


def in_blocks(model: DiffusionModel, block: int, mask_token_id: int | None) -> DiffusionModel:
    """A copy of an autoregressive model with attention that is causal between blocks of ``block``
    tokens, as OPDLM's: weights to train, no model to use yet."""
    family = IN_BLOCKS.get(type(model.hf).__name__)
    if model.facts.mask_kind != "causal" or family is None:
        raise ConfigError(
            f"{model.name} cannot become a model of blocks: that takes an autoregressive Llama, "
            "Qwen2 or Qwen3 network"
        )
    mask = mask_id(model) if mask_token_id is None else mask_token_id
    copies: Any = copy.deepcopy((model.hf, model.tokenizer))
    hf, tokenizer = copies
    hf.generation_config.block_length = block
    result = load(hf, family=family, tokenizer=tokenizer, mask_token_id=mask,
                  block_length=block)  # fmt: skip
    defaults = {**result.generation_defaults, "block_length": block}
    return replace(result, name=model.name, generation_defaults=defaults)


def finish(
    run: Loop, model: DiffusionModel, recipe: Conversion, split: Split, folder: Path
) -> None:
    """Write the adapter in bfloat16, with its card; ``dllm.load(base, adapter=folder)``."""
    hf: Any = model.hf
    trainee: Any = run.accelerator.unwrap_model(run.model)
    hf.to(dtype=torch.bfloat16)
    save_gated(hf, folder, trainee.blocks.gate.mask_token_id)
    settings = {k: v for k, v in asdict(recipe).items() if k not in ("objective", "schedule")}
    settings |= asdict(recipe.objective) | asdict(recipe.schedule)
    facts = {"answers": len(split.train), "answer tokens": sum(a.tokens for a in split.train),
             "held-out answers": len(split.held)}  # fmt: skip
    points = curve(run.state.log_history, recipe.schedule.rows * recipe.schedule.anchors)
    about = [
        "A low-rank adapter that acts on masks only: decided tokens compute what they did before.",
        "", "```python", "import dllm", "",
        f'model = dllm.load("{model.name}", adapter="path/to/this/folder")',
        'dllm.speculate(model, "self", "Why is the sky blue?")',
        'dllm.generate(model, "Why is the sky blue?", sampler="wedlm", cache="wedlm")', "```",
    ]  # fmt: skip
    text = card(model.name, f"{model.name} fills in masks", about, settings, points, facts,
                library_name="peft")  # fmt: skip
    (folder / "README.md").write_text(text, encoding="utf-8")


def save_gated(hf: Any, folder: Path, mask_token_id: int, **generation: Any) -> None:
    """Write the adapter of ``hf``, and what it is for."""
    with quiet():
        hf.save_pretrained(folder)  # of a network with an adapter, the adapter
    section = {"family": "gated", "mask_token_id": mask_token_id, "generation": generation}
    (folder / SECTION).write_text(json.dumps(section, indent=1) + "\n", encoding="utf-8")
