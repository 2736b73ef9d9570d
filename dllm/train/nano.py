"""Recipe of the bundled models: ``nano`` (masked diffusion) and ``nano-ar`` (autoregressive).

Both are Llama-shaped networks on the same tokenizer and the same generated tasks.  ``nano`` learns
to fill in masked answer tokens (mean cross-entropy over them), ``nano-ar`` to continue.  A run is a
pure function of the recipe, can be stopped at any time and resumed, and logs JSON lines.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from ..errors import ConfigError
from ..models import DiffusionModel, load
from .accuracy import accuracy
from .data import CANVAS, Batch, TaskStream
from .tokenizer import build_tokenizer

TASK_WEIGHTS = {
    "fact": 6.0, "sum": 12.0, "story1": 6.0, "story2": 22.0, "copy": 2.0, "reverse": 4.0,
    "sort": 14.0, "shuffle": 1.0, "insert": 7.0, "remove": 7.0, "replace": 7.0,
    "insert_random": 1.0, "remove_random": 1.0, "replace_random": 1.0, "latin": 2.0, "sudoku": 3.0,
}  # fmt: skip

# What comes before all tasks together, as (until this step, weights).  Digit facts come first:
# mixed with everything else they stay a vague sense of magnitude.  Then the sums made of them, and
# copying: attention that finds a token's neighbour is what all list tasks build on.
FIRST_PHASES = (
    (320, {"fact": 8.0, "copy": 1.0}),
    (1_600, {"fact": 6.0, "sum": 8.0, "copy": 2.0, "reverse": 1.0}),
)


DELIMITERS = ",:."  # where a unit of the tasks' answers ends, for adaptive blocks


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a run.  ``objective`` is "masked" or "causal"."""

    objective: str = "masked"
    hidden_size: int = 192
    layers: int = 5
    heads: int = 6
    intermediate_size: int = 512
    rope_theta: float = 1_000.0
    steps: int = 8_000
    tokens: int = 4_096  # token positions per step
    muon_lr: float = 0.006
    adam_lr: float = 1e-3
    weight_decay: float = 0.01
    warmup: int = 200
    decay: float = 0.5  # final share of the steps with a falling learning rate
    tail_weight: float = 0.2  # weight of end tokens after the first
    seed: int = 0
    weights: dict[str, float] = field(default_factory=lambda: dict(TASK_WEIGHTS))
    phases: tuple[tuple[int, dict[str, float]], ...] = FIRST_PHASES

    def __post_init__(self) -> None:
        if self.objective not in ("masked", "causal"):
            raise ConfigError(f"objective is 'masked' or 'causal', not {self.objective!r}")
        phases = tuple((int(until), dict(weights)) for until, weights in self.phases)
        object.__setattr__(self, "phases", phases)  # lists when read back from JSON

    @classmethod
    def of(cls, objective: str, **fields: Any) -> Recipe:
        """The recipe of ``nano`` ("masked") or ``nano-ar`` ("causal", from nano's weights)."""
        if objective == "causal":
            fields = {"steps": 1_700, "phases": (), "muon_lr": 0.005, **fields}
        return cls(objective=objective, **fields)

    def weights_at(self, step: int) -> dict[str, float]:
        """How often each task is drawn at ``step``."""
        for until, weights in self.phases:
            if step < until:
                return weights
        return self.weights


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A freshly initialised network in float32."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=8 * math.ceil(len(tokenizer) / 8),
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.is_causal = recipe.objective == "causal"
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # a token starts out predicting itself: half of what copying needs
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    return model


def _float32_attention(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA in float32: on CPU its bfloat16 backward is an order of magnitude slower."""
    causal = module.config.is_causal  # type: ignore[union-attr]
    with torch.autocast(q.device.type, enabled=False):
        out = F.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), is_causal=bool(causal), scale=scaling
        )
    return out.to(v.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register("dllm_train_float32", _float32_attention)


def loss_of(
    model: Any, batch: Batch, recipe: Recipe, mask_id: int, gen: torch.Generator
) -> torch.Tensor:
    """Mean cross-entropy over the masked (or, causal: over all) answer tokens of a batch."""
    ids, weight = batch.ids, batch.answer * torch.where(batch.tail, recipe.tail_weight, 1.0)
    inputs, targets = ids, ids
    if recipe.objective == "masked":
        masked = draw_masks(batch, gen)
        inputs, weight = torch.where(masked, mask_id, ids), weight * masked
    else:
        inputs, targets, weight = ids[:, :-1], ids[:, 1:], weight[:, 1:]
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits
    losses = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
    return (losses * weight).sum() / weight.sum().clamp(min=1.0)


def draw_masks(batch: Batch, gen: torch.Generator) -> torch.Tensor:
    """(B, L) bool: which answer tokens are hidden.

    Half of the rows hide each token with a probability drawn with density 2t; the others show the
    answer up to a uniform place and hide at least half of what follows.  Plain uniform ratios
    leave too many results visible a second time further right, and the model learns to copy them
    from there instead of computing them.
    """
    rows, device = len(batch.ids), batch.ids.device
    ratio, cut, late, kind = torch.rand(4, rows, 1, generator=gen).to(device)
    noise = torch.rand(batch.ids.shape, generator=gen).to(device)
    place = batch.answer.cumsum(1)  # 1 at the first answer token
    shown = cut * (batch.answer & ~batch.tail).sum(1, keepdim=True)
    suffix = (place > shown) & (noise < 1 - 0.5 * late)
    return batch.answer & torch.where(kind < 0.5, noise < ratio.sqrt(), suffix)


def optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon on the matrices of the layers, AdamW on embeddings, head and norms."""
    hidden = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(hidden, lr=recipe.muon_lr, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(rest, lr=recipe.adam_lr, weight_decay=0.0, betas=(0.9, 0.98), fused=True),
    ]


def rate(step: int, recipe: Recipe) -> float:
    """Share of the peak learning rate: warm-up, plateau, linear decay."""
    left = (recipe.steps - step) / max(1.0, recipe.decay * recipe.steps)
    return min(1.0, (step + 1) / recipe.warmup, left)


def train(
    recipe: Recipe,
    folder: Path,
    device: str = "cpu",
    compile_model: bool = True,
    save_every: int = 500,
    log_every: int = 50,
    accuracy_every: int = 1_000,
    accuracy_examples: int = 16,
    weights_from: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Run ``recipe`` in ``folder``, or resume it there.

    Yields (and writes to ``log.jsonl``) an entry per ``log_every`` steps: step, mean loss, seconds,
    and now and then the accuracy per task on a few held-out prompts.  Leaves ``state.pt``, to be
    resumed from and to be turned into a checkpoint by `export`.  ``weights_from``: the folder of
    another run whose weights a new run starts with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    model: Any = build_model(recipe, tokenizer)
    model.to(device)
    if device == "cpu":
        model.set_attn_implementation("dllm_train_float32")
    opts = optimizers(model, recipe)
    peaks = [group["lr"] for opt in opts for group in opt.param_groups]
    start = _restore(recipe, folder, model, opts)
    if weights_from is not None and start == 0:
        other = torch.load(weights_from / "state.pt", weights_only=True, map_location=device)
        model.load_state_dict(other["model"])
    stream = TaskStream(tokenizer, recipe.weights_at, recipe.tokens, recipe.seed)
    forward = torch.compile(model, dynamic=True) if compile_model else model
    mask_id = int(tokenizer.mask_token_id)
    clock, total, since = time.perf_counter(), 0.0, start
    with (folder / "log.jsonl").open("a") as log:
        for step in range(start, recipe.steps):
            gen = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
            loss = loss_of(forward, stream[step].to(device), recipe, mask_id, gen)
            loss.backward()  # type: ignore[no-untyped-call]
            groups = [group for opt in opts for group in opt.param_groups]
            for group, peak in zip(groups, peaks, strict=True):
                group["lr"] = peak * rate(step, recipe)
            for opt in opts:
                opt.step()
                opt.zero_grad()
            total += loss.item()
            done = step + 1
            if done % save_every == 0 or done == recipe.steps:
                _save(folder, model, opts, done)
            if done % log_every == 0 or done == recipe.steps:
                entry: dict[str, Any] = {
                    "step": done,
                    "loss": total / (done - since),
                    "seconds": time.perf_counter() - clock,
                }
                if done % accuracy_every == 0 or done == recipe.steps:
                    entry["accuracy"] = accuracy(snapshot(model, tokenizer), n=accuracy_examples)
                log.write(json.dumps(entry) + "\n")
                log.flush()
                yield entry
                clock, total, since = time.perf_counter(), 0.0, done


def _restore(
    recipe: Recipe,
    folder: Path,
    model: LlamaForCausalLM,
    opts: list[torch.optim.Optimizer],
) -> int:
    """The step to go on from.  Only the length of a run may change between its parts."""
    recipe_file, state_file = folder / "recipe.json", folder / "state.pt"
    if state_file.exists():
        begun = Recipe(**json.loads(recipe_file.read_text()))
        if replace(begun, steps=recipe.steps) != recipe:
            raise ConfigError(
                f"{folder} holds a run of another recipe: choose another folder or repeat its "
                "options (only the number of steps may change)"
            )
        state = torch.load(state_file, weights_only=True, map_location=model.device)
        model.load_state_dict(state["model"])
        for opt, saved in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
    recipe_file.write_text(json.dumps(asdict(recipe), indent=1) + "\n")
    return int(state["step"]) if state_file.exists() else 0


def _save(
    folder: Path, model: LlamaForCausalLM, opts: list[torch.optim.Optimizer], step: int
) -> None:
    state = {
        "model": model.state_dict(),
        "optimizers": [opt.state_dict() for opt in opts],
        "step": step,
    }
    torch.save(state, folder / "state.tmp")
    (folder / "state.tmp").replace(folder / "state.pt")


def snapshot(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> DiffusionModel:
    """The network as `dllm.load` would return it: a copy on CPU, ready to decode."""
    clone: Any = copy.deepcopy(model).requires_grad_(False)
    clone.to("cpu")
    clone.set_attn_implementation("sdpa")
    clone.generation_config.max_new_tokens = CANVAS
    clone.generation_config.block_length = CANVAS // 2
    marks: Any = tokenizer.convert_tokens_to_ids(list(DELIMITERS))
    clone.generation_config.delimiters = sorted(marks)
    if model.config.is_causal:
        return load(clone, family="autoregressive", tokenizer=tokenizer)
    mask_id = tokenizer.mask_token_id
    return load(clone, family="llada", tokenizer=tokenizer, mask_token_id=mask_id)


def export(folder: Path, destination: Path) -> None:
    """Write the run in ``folder`` as a float16 checkpoint: ``nano`` in LLaDA's official layout,
    ``nano-ar`` as a plain Llama."""
    recipe = Recipe(**json.loads((folder / "recipe.json").read_text()))
    tokenizer = build_tokenizer()
    model = build_model(recipe, tokenizer)
    state = torch.load(folder / "state.pt", weights_only=True, map_location="cpu")
    model.load_state_dict(state["model"])
    loaded = snapshot(model, tokenizer)
    loaded.hf.to(dtype=torch.float16)  # type: ignore[call-arg]
    layout = "official" if recipe.objective == "masked" else "native"
    loaded.save_pretrained(destination, layout=layout)
    (destination / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1) + "\n")
