"""DiffusionGemma beside transformers: recorded forwards, and random shapes of the class itself."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dllm
from dllm import cache as caches
from dllm import samplers
from dllm.core.canvas import FED, PROPOSAL, Canvas, IntArray
from dllm.engine import Engine
from dllm.engine.recipe import MaskedRecipe
from dllm.engine.rows import Soft
from dllm.kernels.noise import uniform
from dllm.kernels.statistics import Filters, token_statistics
from dllm.models.checkpoint import open_checkpoint
from dllm.models.footprint import footprint
from dllm.samplers.ddim import DDIM
from dllm.samplers.entropy_bound import EntropyBound
from examples.nano.recipe import NO_IMAGES

from ..golden.conftest import goldens_dir
from ..thin import covering

TOLERANCE = 5e-5  # transformers differs from itself by up to 2e-5
RECORDED = load_file(goldens_dir() / "forward" / "dgemma_forward.safetensors")
NAMES = sorted({key.rpartition(".")[0] for key in RECORDED})


def logits(
    model: dllm.DiffusionModel, prompts: list[IntArray], finished: IntArray, canvases: IntArray,
    soft: torch.Tensor | None, kept: str,
) -> list[torch.Tensor]:  # fmt: skip
    """Of the canvas of each row, decoded together: what the engine's forward gives."""
    recipe = MaskedRecipe(samplers.compose("threshold", facts={"block_length": 8}))
    engine, rows = Engine(model, caches.compose(kept)), []
    for row, (prompt, ids) in enumerate(zip(prompts, canvases, strict=True)):
        begun = np.concatenate([prompt, *([finished] if len(finished) else [])])
        canvas = Canvas.for_prompt(begun, len(ids), mask_id=-1, pad_id=0)
        canvas.prompt_length = len(prompt)
        canvas.hold(np.arange(canvas.start, canvas.end), ids)
        canvas.open_window(canvas.start, canvas.end)
        admitted = engine.admit(canvas, recipe)
        assert admitted is not None
        if soft is not None:
            admitted.soft = Soft(np.arange(canvas.start, canvas.end), soft[row])
        rows.append(admitted)
    return engine.scores(rows)


@pytest.mark.parametrize(("name", "kept"), covering(NAMES, ["block", "none"]))
def test_recorded_forwards(name: str, kept: str) -> None:
    own = {k.removeprefix(f"{name}."): v for k, v in RECORDED.items() if k.startswith(f"{name}.")}
    model = dllm.load(goldens_dir() / name.partition(".")[0])
    valid = own.get("attention_mask", torch.ones_like(own["prompt_ids"])).bool()
    prompts = [ids[seen].numpy() for ids, seen in zip(own["prompt_ids"], valid, strict=True)]
    soft: Any = own.get("self_conditioning_logits")
    if soft is not None:
        embedding = model.embedding.weight.detach()
        soft = soft.softmax(-1) @ embedding
    finished = own.get("finished_ids", torch.zeros(1, 0, dtype=torch.int64))[0].numpy()
    found = logits(model, prompts, finished, own["canvas_ids"].numpy(), soft, kept)
    for mine, theirs in zip(found, own["logits"], strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)
    # the same rows one by one
    for row, prompt in enumerate(prompts):
        part = None if soft is None else soft[row : row + 1]
        (alone,) = logits(
            model, [prompt], finished, own["canvas_ids"][row : row + 1].numpy(), part, kept
        )
        torch.testing.assert_close(alone, found[row], atol=TOLERANCE, rtol=0)


def config(seed: int) -> Any:
    from transformers import DiffusionGemmaConfig

    rng = np.random.default_rng(seed)
    layers, heads = int(rng.integers(2, 5)), int(rng.choice([2, 4]))
    kinds = rng.choice(["sliding_attention", "full_attention"], layers).tolist()
    text = {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": layers, "head_dim": 8,
        "layer_types": [*kinds[:-1], "full_attention"], "num_attention_heads": heads,
        "num_key_value_heads": int(rng.choice([1, 2])), "global_head_dim": int(rng.choice([8, 16])),
        "intermediate_size": 24, "moe_intermediate_size": 8, "num_experts": int(rng.integers(1, 5)),
        "top_k_experts": 1, "sliding_window": int(rng.integers(4, 9)), "pad_token_id": 0,
        "max_position_embeddings": 128, "initializer_range": 0.3,
    }  # fmt: skip
    return DiffusionGemmaConfig(text_config=text, vision_config=NO_IMAGES, canvas_length=6)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 12))]
)
def test_random_shapes_beside_transformers(seed: int, tmp_path: Path) -> None:
    from transformers import DiffusionGemmaForBlockDiffusion

    torch.manual_seed(seed)
    network: Any = DiffusionGemmaForBlockDiffusion(config(seed)).eval()
    for layer in (*network.model.decoder.layers, *network.model.encoder.language_model.layers):
        layer.layer_scalar.fill_(float(torch.rand(()) + 0.5))
    network.save_pretrained(tmp_path)
    model = dllm.load(tmp_path)
    window = network.config.text_config.sliding_window
    for length in range(window - 2, window + 3):
        prompt, canvas = torch.randint(64, (1, length)), torch.randint(64, (1, 6))
        guess = torch.randn(1, 6, 64)
        with torch.no_grad():
            theirs = network(
                input_ids=prompt, decoder_input_ids=canvas, self_conditioning_logits=guess
            ).logits[0]
        soft = guess.softmax(-1) @ model.embedding.weight.detach()
        (mine,) = logits(
            model, [prompt[0].numpy()], np.zeros(0, np.int64), canvas.numpy(), soft, "block"
        )
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_bfloat16_is_within_its_noise() -> None:
    """At a position, on average, as far from float32 as transformers in bfloat16.

    Errors of n roundings add up to the root of n.  1.15 are four roundings where transformers has
    three; the average of 192 ratios, each of which varies by 0.4, is uncertain by 0.03.
    """
    from transformers import DiffusionGemmaForBlockDiffusion as Theirs

    folder = goldens_dir() / "dgemma-tiny"
    exact: Any = Theirs.from_pretrained(folder).eval()
    how: Any = {"dtype": torch.bfloat16, "experts_implementation": "eager"}  # sizes of 4 numbers
    rounded: Any = Theirs.from_pretrained(folder, **how).eval()
    model, generator = dllm.load(folder, dtype="bfloat16"), torch.Generator().manual_seed(0)
    embedding, ratios = exact.model.decoder.embed_tokens.weight.detach(), []
    for length in range(3, 27):
        prompt = torch.randint(192, (1, length), generator=generator)
        canvas = torch.randint(192, (1, 8), generator=generator)
        guess = torch.randn(1, 8, 192, generator=generator)
        inputs = {"input_ids": prompt, "decoder_input_ids": canvas}
        with torch.no_grad():
            wanted = exact(**inputs, self_conditioning_logits=guess).logits[0]
            theirs = rounded(**inputs, self_conditioning_logits=guess.bfloat16()).logits[0]
        soft, nothing = guess.softmax(-1) @ embedding, np.zeros(0, np.int64)
        (ours,) = logits(model, [prompt[0].numpy()], nothing, canvas.numpy(), soft, "block")
        off = [(found.float() - wanted).norm(dim=-1) for found in (ours, theirs)]
        ratios.append((off[0] / off[1]).log())
    assert 1 / 1.15 < float(torch.cat(ratios).mean().exp()) < 1.15


@pytest.mark.slow
def test_saved_and_loaded(tmp_path: Path) -> None:
    model = dllm.load(goldens_dir() / "dgemma-tiny")
    model.save_pretrained(tmp_path)
    again = dllm.load(tmp_path)
    assert again.facts == model.facts
    assert dict(again.generation_defaults) == dict(model.generation_defaults)
    before, after = model.hf.state_dict(), again.hf.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_its_memory_is_known_from_the_files() -> None:
    """Layers differ in their heads: the keys of each are counted."""
    folder = goldens_dir() / "dgemma-tiny"
    needs, model = footprint(open_checkpoint(folder)), dllm.load(folder)
    assert needs.parameters == sum(p.numel() for p in model.hf.parameters())
    layers = model.hf.base_model.decoder.layers
    keys = sum(layer.self_attn.k_proj.out_features for layer in layers)
    assert needs.keys_values == 2 * keys * needs.context * 4  # keys and values, float32


def test_the_text_is_read_alone(tmp_path: Path) -> None:
    """The vision tower is left in the files; a prompt with an image has nothing to read it."""
    model = dllm.load(goldens_dir() / "dgemma-tiny")
    assert not any("vision" in name for name in model.hf.state_dict())
    with pytest.raises(dllm.PromptError, match="image"):
        dllm.generate(model, [5, 6, 190, 7])


def test_a_checkpoint_with_a_weight_missing(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = goldens_dir() / "dgemma-tiny"
    weights = load_file(folder / "model.safetensors")
    del weights["model.encoder.language_model.layers.1.layer_scalar"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(dllm.CheckpointError, match="layer_scalar"):
        dllm.load(tmp_path)


class Draws:
    """This library's keyed numbers in the place of transformers' draws, one row at a time."""

    def __init__(self, seed: int, prompt: int, size: int, vocabulary: int) -> None:
        self.seed, self.size, self.vocabulary = seed, size, vocabulary
        self.low, self.step, self.drawn = prompt - size, 0, False

    def _numbers(self, stream: int, step: int) -> Any:
        return uniform(self.seed, stream, self.low + np.arange(self.size), step, 0)

    def randint(self, *_: Any, **__: Any) -> torch.Tensor:
        """A canvas at the beginning, or the noise behind a step, which the next one is fed."""
        if not self.drawn:
            self.low += self.size
        self.drawn = False
        ids = self._numbers(FED, self.step).astype(np.float64) * self.vocabulary
        return torch.from_numpy(ids.astype(np.int64))[None]

    def multinomial(self, probabilities: torch.Tensor, **_: Any) -> torch.Tensor:
        shares = torch.from_numpy(self._numbers(PROPOSAL, self.step)).double()[:, None]
        sums = probabilities.double().cumsum(1)
        self.step, self.drawn = self.step + 1, True
        return (sums <= shares * sums[:, -1:]).sum(1, keepdim=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 200))]
)
def test_generate_beside_transformers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same canvas before every step, the same number of passes, the same text."""
    network, model = beside()
    rng = np.random.default_rng(seed)
    first, pace = rng.integers(4, 100), rng.integers(1, 4)
    prompt = (first + pace * np.arange(rng.integers(3, 24))).tolist()
    how: Any = {
        "entropy_bound": float(rng.choice([0.05, 0.1, 0.5, 1.0, 2.0])),
        "max_denoising_steps": int(rng.integers(3, 12)),
        "t_max": float(rng.uniform(0.5, 1.2)), "t_min": float(rng.uniform(0.1, 0.5)),
        "stability_threshold": int(rng.integers(0, 3)),
        "confidence_threshold": float(rng.choice([0.005, 0.3, 0.6])),
    }  # fmt: skip
    canvases, length = int(rng.integers(1, 4)), 8
    theirs: list[list[int]] = []

    def record(module: Any, args: Any, inputs: Any) -> None:
        theirs.append(inputs["decoder_input_ids"][0].tolist())

    draws = Draws(seed, len(prompt), length, 192)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randint", draws.randint)
        patch.setattr(torch, "multinomial", draws.multinomial)
        hook = network.model.decoder.register_forward_pre_hook(record, with_kwargs=True)
        bound = how["entropy_bound"]
        config = network.generation_config
        settings = {k: v for k, v in how.items() if k != "entropy_bound"}
        out = network.generate(
            torch.tensor([prompt]), max_new_tokens=canvases * length, **settings,
            sampler_config=type(config.sampler_config)(entropy_bound=bound),
        )  # fmt: skip
        hook.remove()
    wanted = out.sequences[0, len(prompt) :].tolist()
    mine: list[list[int]] = []

    def remember(module: Any, args: Any, inputs: Any) -> None:
        mine.append(inputs["input_ids"][0][inputs["open"]].tolist())

    handle = model.hf.base_model.register_forward_pre_hook(remember, with_kwargs=True)
    said = ", ".join(f"{name}={value}" for name, value in how.items())
    result = dllm.generate(
        model, prompt, sampler=f"entropy_bound({said})", cache="block", seed=seed,
        max_new_tokens=canvases * length,
    )  # fmt: skip
    handle.remove()
    assert mine == theirs
    text = result.sequences[len(prompt) :].tolist()
    assert text[: len(wanted)] == wanted and not any(text[len(wanted) :])


@cache
def beside() -> tuple[Any, dllm.DiffusionModel]:
    from transformers import DiffusionGemmaForBlockDiffusion

    folder = goldens_dir() / "dgemma-tiny"
    return DiffusionGemmaForBlockDiffusion.from_pretrained(folder).eval(), dllm.load(folder)


def test_entropy_bound_scheduler_of_diffusers() -> None:
    """The same logits: the same positions are accepted."""
    scheduling = pytest.importorskip("diffusers.schedulers.scheduling_entropy_bound")
    generator = torch.Generator().manual_seed(0)
    for bound in (0.05, 0.5, 3.0):
        scheduler = scheduling.EntropyBoundScheduler(entropy_bound=bound)
        scheduler.set_timesteps(8)
        for index in range(8):
            logits = torch.randn(1, 12, 50, generator=generator) * 3
            out = scheduler.step(logits, index, torch.zeros(1, 12, dtype=torch.int64))
            heat = scheduler.config.t_min + (
                scheduler.config.t_max - scheduler.config.t_min
            ) * (8 - index) / 8  # fmt: skip
            p = (logits[0] / heat).softmax(-1)
            entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
            at = np.arange(12)
            mine = EntropyBound(entropy_bound=bound).accepted(
                samplers.Prediction(at, at, at.astype(np.float32), entropy=entropy.numpy())
            )
            assert mine.tolist() == out.accepted_index[0].tolist()


@pytest.mark.parametrize("selection", ["lowest_log_margin", "lowest_maxprob", "random"])
def test_ddim_scheduler_of_diffusers(selection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits and numbers: the same positions move, and the same are drawn anew."""
    scheduling = pytest.importorskip("diffusers.schedulers.scheduling_discrete_ddim")
    size, length, at = 40, 12, np.arange(1, 13)
    rng = np.random.default_rng(0)
    for _ in range(40):
        steps, often = int(rng.integers(2, 9)), int(rng.integers(1, 6))
        k, share = int(rng.integers(0, steps - 1)), float(rng.random())
        numbers = rng.random(length).astype(np.float32)
        logits = torch.from_numpy(rng.normal(size=(1, length, size)) * 3).float()
        ids = rng.integers(size, size=length)
        ids[::3] = logits[0].argmax(-1).numpy()[::3]
        held = torch.from_numpy(ids)[None]
        canvas = Canvas.for_prompt(
            np.zeros(1, np.int64), length, mask_id=-1, pad_id=0,
            noise=lambda stream, step, where, numbers=numbers: numbers[where - 1],
        )  # fmt: skip
        canvas.hold(at, ids)
        how: Any = {"corrector_k": often, "corrector_selection": selection}
        mine = DDIM(num_inference_steps=steps, vocab_size=size, **how)
        theirs = scheduling.DiscreteDDIMScheduler(**how)
        theirs.set_timesteps(steps)

        def multinomial(
            p: torch.Tensor, numbers: Any = numbers, share: float = share, **_: Any
        ) -> Any:
            sums = p.double().cumsum(-1)
            each = torch.from_numpy(numbers).double() if p.shape[1] == 3 else torch.tensor([share])
            return (sums <= each[:, None] * sums[:, -1:]).sum(1, keepdim=True)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "multinomial", multinomial)
            patch.setattr(torch, "randint", lambda size, **_: torch.full(size, -1))
            patch.setattr(torch, "rand", lambda *_, n=numbers, **__: torch.from_numpy(n)[None])
            moved = theirs.step(logits, k, held).prev_sample[0]
            swept = theirs.step_correct(logits, k, held).prev_sample[0]
        best = logits[0].max(-1)
        p = samplers.Prediction(at, best.indices.numpy(), best.values.numpy())
        assert mine._moved(canvas, p, k).tolist() == moved.tolist()
        signal = (k + 1) / steps
        said = token_statistics(
            logits[0], None, filters=Filters(1.0), uniforms=torch.full((length,), share), top=2,
            floor=1 - signal, select=held[0],
            lowered=(held[0], float(np.log1p(size * signal / (1 - signal)))),
        )  # fmt: skip
        assert said.select_logprob is not None and said.top_token is not None
        assert said.top_logprob is not None
        p = samplers.Prediction(
            at, said.token.numpy(), said.logprob.numpy(), top_token=said.top_token.numpy(),
            top_logprob=said.top_logprob.numpy(),
            asked={"held": said.select_logprob[:, None].numpy()},
        )  # fmt: skip
        assert mine._redrawn(canvas, p, signal).tolist() == swept.tolist()
