"""Recipe of the bundled models, and of an example: ``nano-uniform``.

``nano`` (masked diffusion) and ``nano-ar`` (autoregressive) are Llama-shaped networks on the same
tokenizer and the same generated tasks.  ``nano`` learns to fill in masked answer tokens (mean
cross-entropy over them), ``nano-ar`` to continue.  ``nano-uniform`` is a small DiffusionGemma: it
learns to correct canvases of random tokens.  A run is a pure function of the recipe, can be stopped
at any time and resumed, and logs JSON lines.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dllm.api import generate
from dllm.core.errors import ConfigError
from dllm.drafting.api import speculate
from dllm.eval.tasks import TASKS
from dllm.models import DiffusionModel, load
from dllm.train.loop import (
    SILENT,
    Loop,
    Metrics,
    Report,
    Schedule,
    last_checkpoint,
    loop,
    machine_has_bf16,
    resume,
    same_recipe,
)

from .data import CANVAS, TaskStream
from .masks import Denoising
from .noise import UniformDenoising
from .tokenizer import CONTEXT, build_tokenizer

TASK_WEIGHTS = {
    "fact": 6.0, "sum": 12.0, "story1": 6.0, "story2": 22.0, "copy": 2.0, "reverse": 4.0,
    "sort": 14.0, "shuffle": 1.0, "insert": 7.0, "remove": 7.0, "replace": 7.0,
    "insert_random": 1.0, "remove_random": 1.0, "replace_random": 1.0, "latin": 2.0, "sudoku": 3.0,
}  # fmt: skip

LIST_WEIGHTS = {
    "copy": 2.0, "reverse": 4.0, "sort": 8.0, "shuffle": 2.0, "insert": 6.0, "remove": 6.0,
    "replace": 6.0, "insert_random": 3.0, "remove_random": 3.0, "replace_random": 3.0,
}  # fmt: skip

# What comes before all tasks together, as (until this step, weights).  Digit facts come first:
# mixed with everything else they stay a vague sense of magnitude.  Then the sums made of them, and
# copying: attention that finds a token's neighbour is what all list tasks build on.
FIRST_PHASES = (
    (320, {"fact": 8.0, "copy": 1.0}),
    (1_600, {"fact": 6.0, "sum": 8.0, "copy": 2.0, "reverse": 1.0}),
)


NO_IMAGES = {  # the smallest vision tower that a DiffusionGemma can have
    "model_type": "gemma4_vision", "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
    "patch_size": 2, "pooling_kernel_size": 1, "position_embedding_size": 16,
    "default_output_length": 4,
}  # fmt: skip
NAMES = {"masked": "nano", "causal": "nano-ar", "uniform": "nano-uniform"}
EXPERT = 64  # width of the one expert of nano-uniform
DELIMITERS = ",:."  # where a unit of the tasks' answers ends, for adaptive blocks


@dataclass(frozen=True)
class NanoTraining:
    """Everything that determines a run.  ``objective`` is "masked", "causal" or "uniform"."""

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
        if self.objective not in ("masked", "causal", "uniform"):
            raise ConfigError(
                f"objective is 'masked', 'causal' or 'uniform', not {self.objective!r}"
            )
        phases = tuple((int(until), dict(weights)) for until, weights in self.phases)
        object.__setattr__(self, "phases", phases)  # lists when read back from JSON

    @classmethod
    def of(cls, objective: str, **fields: Any) -> NanoTraining:
        """The recipe of ``nano`` ("masked"), ``nano-ar`` ("causal", from nano's weights) or
        ``nano-uniform`` ("uniform", the list tasks alone)."""
        if objective == "causal":
            fields = {"steps": 1_700, "phases": (), "muon_lr": 0.005, **fields}
        elif objective == "uniform":
            fields = {
                "hidden_size": 128, "layers": 4, "heads": 4, "intermediate_size": 384,
                "steps": 3_200, "tokens": 2_048, "weights": LIST_WEIGHTS,
                "phases": ((300, {"copy": 1.0, "reverse": 1.0}),), **fields,
            }  # fmt: skip
        return cls(objective=objective, **fields)

    def weights_at(self, step: int) -> dict[str, float]:
        """How often each task is drawn at ``step``."""
        for until, weights in self.phases:
            if step < until:
                return weights
        return self.weights


def build_model(recipe: NanoTraining, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A freshly initialised network in float32."""
    torch.manual_seed(recipe.seed)
    if recipe.objective == "uniform":
        return _diffusion_gemma(recipe, tokenizer)
    config = LlamaConfig(
        vocab_size=8 * math.ceil(len(tokenizer) / 8),
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=CONTEXT,
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


def _diffusion_gemma(
    recipe: NanoTraining, tokenizer: PreTrainedTokenizerBase
) -> DiffusionGemmaForBlockDiffusion:
    """The smallest of its kind: one expert, whose work the MLP does mostly, and no images."""
    head, theta = recipe.hidden_size // recipe.heads, {"rope_theta": recipe.rope_theta}
    text = {
        "vocab_size": 8 * math.ceil(len(tokenizer) / 8), "hidden_size": recipe.hidden_size,
        "num_hidden_layers": recipe.layers, "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.heads, "head_dim": head, "global_head_dim": head,
        "intermediate_size": recipe.intermediate_size - EXPERT, "moe_intermediate_size": EXPERT,
        "num_experts": 1, "top_k_experts": 1, "max_position_embeddings": 128,
        "layer_types": [*["sliding_attention"] * (recipe.layers - 1), "full_attention"],
        "sliding_window": 128, "rms_norm_eps": 1e-5, "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", **theta},
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 1.0, **theta
            },
        },
    }  # fmt: skip
    how: dict[str, Any] = {"experts_implementation": "eager"}
    config = DiffusionGemmaConfig(
        text_config=text, vision_config=NO_IMAGES, canvas_length=CANVAS // 2, **how
    )
    model = DiffusionGemmaForBlockDiffusion(config)
    with torch.no_grad():  # scores are not scaled by the head size: these begin as if they were
        for layer in model.model.decoder.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight.fill_(head**-0.25)
    return model


class Together(torch.optim.Optimizer):
    """Several optimizers as one."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        super().__init__([p for part in parts for g in part.param_groups for p in g["params"]], {})
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, own in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(own)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def optimizer_of(model: Any, recipe: NanoTraining) -> Together:
    """Muon on the matrices of the layers, AdamW on embeddings, head and norms."""
    layers = model.layers if recipe.objective == "uniform" else model.model.layers
    hidden = [p for p in layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return Together([
        torch.optim.Muon(hidden, lr=recipe.muon_lr, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(rest, lr=recipe.adam_lr, weight_decay=0.0, betas=(0.9, 0.98), fused=True),
    ])  # fmt: skip


def rate(step: int, recipe: NanoTraining) -> float:
    """Share of the peak learning rate: warm-up, plateau, linear decay."""
    left = (recipe.steps - step) / max(1.0, recipe.decay * recipe.steps)
    return min(1.0, (step + 1) / recipe.warmup, left)


def train(
    recipe: NanoTraining, folder: Path, *, device: str = "cpu", compile_model: bool = True,
    save_every: int = 500, accuracy_every: int = 1_000, accuracy_examples: int = 16,
    weights_from: Path | None = None, noise_id: int | None = None, report: Report = SILENT,
) -> Loop:  # fmt: skip
    """Run ``recipe`` in ``folder``, or go on with it there; more steps may be asked for.

    ``weights_from``: the folder of a run whose weights a new one starts with.  ``noise_id``: what
    objective "uniform" puts in the place of random ids, such as the mask token.  Every
    ``accuracy_every`` steps the run says which share of held-out prompts is answered correctly.
    """
    same_recipe(folder, recipe, steps=recipe.steps)
    tokenizer = build_tokenizer()
    model = build_model(recipe, tokenizer).to(device)  # type: ignore[arg-type]
    network = _trained(model)
    if weights_from is not None:
        network.load_state_dict(last_weights(weights_from))
    if recipe.objective == "uniform":
        objective: torch.nn.Module = UniformDenoising(network, recipe.tail_weight, noise_id)
    else:
        objective = Denoising(
            model, int(tokenizer.mask_token_id), recipe.objective == "causal", recipe.tail_weight,
            compile_model,
        )  # fmt: skip
    optimizer = optimizer_of(network, recipe)
    warm = LambdaLR(optimizer, lambda step: rate(step, recipe))

    def measure(_: Any) -> Metrics:
        return accuracy(snapshot(model, tokenizer, noise_id), n=accuracy_examples)

    run = loop(
        objective, TaskStream(tokenizer, recipe.weights_at, recipe.tokens, recipe.seed,
                              recipe.steps),
        Schedule(recipe.steps, evaluate_every=min(accuracy_every, recipe.steps), clip=0.0,
                 save_every=save_every, seed=recipe.seed),
        folder / "checkpoints", measure=measure if accuracy_examples else None, device=device,
        bf16=machine_has_bf16(device), report=report, optimizers=(optimizer, warm),
    )  # fmt: skip
    resume(run)
    return run


def _trained(model: Any) -> torch.nn.Module:
    """What of a network is trained: of DiffusionGemma the decoder, which shares its weights."""
    network: torch.nn.Module = getattr(model.base_model, "decoder", model)
    return network


def accuracy(
    model: DiffusionModel, n: int = 100, tasks: Iterable[str] = TASKS, seed: int = 0, **how: Any
) -> dict[str, float]:
    """Share of ``n`` held-out prompts answered correctly, per task.

    ``how``: arguments of `dllm.generate`; the default is one token per step.  An autoregressive
    model continues greedily.
    """
    how = how or {"sampler": "llada"}
    result = {}
    for name in tasks:
        examples = TASKS[name].examples(n, seed)
        prompts = [example.prompt for example in examples]
        if model.facts.mask_token_id is None:
            answers: list[Any] = speculate(model, None, prompts, max_new_tokens=CANVAS)
        else:
            answers = generate(model, prompts, **how)
        right = [TASKS[name].check(e, a.text) for e, a in zip(examples, answers, strict=True)]
        result[name] = sum(right) / n
    return result


def last_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The network's weights where a run stands.  Raises `ConfigError` when there is none."""
    checkpoints = folder / "checkpoints"
    last = last_checkpoint(checkpoints)
    if last is None:
        raise ConfigError(f"there is no run in {folder}: name the folder of one")
    weights = load_file(Path(last) / "model.safetensors")
    return {name.removeprefix("network."): tensor for name, tensor in weights.items()}


def snapshot(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, noise_id: int | None = None
) -> DiffusionModel:
    """The network as `dllm.load` would return it: a copy on CPU, ready to decode."""
    if isinstance(model, DiffusionGemmaForBlockDiffusion):
        with TemporaryDirectory() as folder:
            _write(model, tokenizer, Path(folder))
            return load(folder, mask_token_id=noise_id)
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


def _write(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """A DiffusionGemma with its tokenizer, as transformers writes it."""
    generation = {
        "max_new_tokens": CANVAS, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    tokenizer.save_pretrained(folder)


def export(folder: Path, destination: Path) -> None:
    """Write the run in ``folder`` as a float16 checkpoint: ``nano`` in LLaDA's official layout,
    ``nano-ar`` as a plain Llama, ``nano-uniform`` under the names of transformers' DiffusionGemma.
    """
    recipe = NanoTraining(**json.loads((folder / "recipe.json").read_text()))
    tokenizer = build_tokenizer()
    model = build_model(recipe, tokenizer)
    _trained(model).load_state_dict(last_weights(folder))
    if recipe.objective == "uniform":
        _write(model.to(dtype=torch.float16), tokenizer, destination)  # type: ignore[call-arg]
    else:
        loaded = snapshot(model, tokenizer)
        loaded.hf.to(dtype=torch.float16)  # type: ignore[call-arg]
        layout = "official" if recipe.objective == "masked" else "native"
        loaded.save_pretrained(destination, layout=layout)
    (destination / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1) + "\n")
