"""The recipe of the bundled models, at toy size."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from transformers import TrainerCallback, TrainerState

import dllm
from dllm.core.errors import ConfigError
from dllm.train.loop import Loop, Progress, Report
from examples.nano import recipe as nano
from examples.nano.__main__ import main
from examples.nano.data import TaskStream
from examples.nano.masks import Denoising, draw_masks
from examples.nano.noise import UniformDenoising
from examples.nano.recipe import (
    NanoTraining,
    build_model,
    export,
    last_weights,
    rate,
    snapshot,
    train,
)
from examples.nano.tokenizer import build_tokenizer

pytestmark = pytest.mark.filterwarnings("default")
TOY = NanoTraining(
    hidden_size=32, layers=1, heads=2, intermediate_size=48, steps=4, tokens=512, warmup=2,
    weights={"copy": 1.0}, phases=((2, {"sum": 1.0}),),
)  # fmt: skip


def run(recipe: NanoTraining, folder: Path, examples: int = 0) -> Loop:
    return train(
        recipe,
        folder,
        compile_model=False,
        save_every=2,
        report=Report(log_every=1),
        accuracy_examples=examples,
    )


@pytest.mark.slow  # tests/train/test_loop.py goes on with smaller runs
@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_a_run_resumes_where_it_was(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    class Stop(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise Stopped

    recipe = replace(TOY, objective=objective)
    whole = run(recipe, tmp_path / "whole")
    losses = [e["loss"] for e in whole.state.log_history if "loss" in e]
    from dllm.train import loop

    with monkeypatch.context() as patched:
        patched.setattr(loop.Progress, "on_save", Stop().on_save)
        with pytest.raises(Stopped):
            run(recipe, tmp_path / "parts")
    for step, written in ((3, "model.safetensors"), (4, "trainer_state.json")):  # killed meanwhile
        torn = tmp_path / "parts" / "checkpoints" / f"checkpoint-{step}"
        torn.mkdir()
        (torn / written).touch()
    monkeypatch.setattr(nano, "accuracy", partial(nano.accuracy, tasks=("story2",)))
    rest = run(recipe, tmp_path / "parts", examples=1)
    assert [e["loss"] for e in rest.state.log_history if "loss" in e] == losses
    one, other = (last_weights(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    log = (tmp_path / "parts" / "checkpoints" / "log.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in log]
    assert [entry["step"] for entry in entries if "loss" in entry] == [1, 2, 3, 4]
    assert any("eval_story2" in entry for entry in entries)


def test_a_log_says_nothing_twice(tmp_path: Path) -> None:
    log, progress, no = tmp_path / "log.jsonl", Progress(tmp_path, None), cast(Any, None)

    def state(step: int, main: bool = True) -> TrainerState:
        return TrainerState(global_step=step, is_world_process_zero=main)

    for step, more in ((1, {"loss": 3.0}), (2, {"eval_a": 0.5}), (3, {"loss": 2.0})):
        progress.on_log(no, state(step), no, logs=more)
        progress.on_log(no, state(step, main=False), no, logs=more)  # another process
    before = log.read_text().splitlines()
    assert len(before) == 3
    with log.open("a") as file:
        file.write('{"step": 2, "train_runtime": 2.5}\n{"step": 4, "lo')
    progress.on_train_begin(no, state(2), no)
    assert log.read_text().splitlines() == before[:2]
    progress.on_log(no, state(3), no, logs={"train_runtime": 1.0, "train_loss": 0.0})
    assert json.loads(log.read_text().splitlines()[-1]) == {"step": 3, "train_runtime": 1.0}


@pytest.mark.slow  # tests/cli/test_train.py has the refusal
def test_another_recipe_does_not_continue_a_run(tmp_path: Path) -> None:
    run(replace(TOY, steps=1), tmp_path)
    with pytest.raises(ConfigError, match="another recipe"):
        run(replace(TOY, seed=5), tmp_path)
    assert run(replace(TOY, steps=2), tmp_path).state.global_step == 2  # a longer run does


@pytest.mark.parametrize("objective", [pytest.param("masked", marks=pytest.mark.slow), "causal"])
def test_a_run_becomes_a_checkpoint(objective: str, tmp_path: Path) -> None:
    run(replace(TOY, objective=objective, steps=1), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    model = dllm.load(tmp_path / "out", dtype="float32")
    weights = last_weights(tmp_path / "run")
    weight = model.hf.state_dict()["lm_head.weight"]
    assert torch.equal(weight, weights["lm_head.weight"].half().float())
    marks = model.generation_defaults["delimiters"]
    assert model.generation_defaults == {
        "max_new_tokens": 64, "block_length": 32, "delimiters": marks,
    }  # fmt: skip
    assert model.tokenizer is not None
    assert {model.tokenizer.decode([i]).strip() for i in marks} == {",", ":", "."}


def test_batches_depend_on_the_step_alone() -> None:
    tokenizer = build_tokenizer()
    streams = [TaskStream(tokenizer, TOY.weights_at, 512, seed=1) for _ in range(2)]
    again = [streams[1][i]["ids"] for i in (3, 20, 9)][-1]
    assert torch.equal(streams[0][9]["ids"], again)
    batch = streams[0][9]
    assert batch["ids"].numel() <= 512
    text = tokenizer.decode(batch["ids"][0])
    assert text.startswith("<|user|>") and "<|assistant|>" in text
    assert not (batch["tail"] & ~batch["answer"]).any()


def test_only_answer_tokens_are_hidden() -> None:
    batch = TaskStream(build_tokenizer(), TOY.weights_at, 4096, seed=0)[9]
    hidden = draw_masks(batch["answer"], batch["tail"], torch.Generator().manual_seed(0))
    assert not (hidden & ~batch["answer"]).any()
    share = hidden.sum() / batch["answer"].sum()
    assert 0.4 < share < 0.8

    class Certain(torch.nn.Module):
        """Knows what it is fed, and that a mask is a mask."""

        config = SimpleNamespace(_attn_implementation="sdpa")

        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            return SimpleNamespace(logits=20.0 * F.one_hot(input_ids, 1000))

    loss = Denoising(Certain(), 999, False, 0.2)(**batch)["loss"]
    assert float(loss) == pytest.approx(20, rel=1e-5)


def test_the_head_starts_as_the_embedding() -> None:
    model = build_model(TOY, build_tokenizer())
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_the_learning_rate_warms_up_and_falls() -> None:
    rates = [rate(step, replace(TOY, steps=100, warmup=10, decay=0.5)) for step in range(100)]
    assert rates[0] == 0.1 and rates[30] == 1.0
    assert rates[-1] == pytest.approx(0.02)


def test_objectives_are_checked() -> None:
    with pytest.raises(ConfigError, match="masked"):
        NanoTraining(objective="reversed")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--weights-from /no/such", "no run in /no/such"),
        ("--steps 2", "another recipe"),
        ("--steps 0", "--steps and --log-every are 1 or more"),
        ("--objective reversed", "choose from"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    """And another run in the folder is not overwritten."""
    folder = tmp_path / "new" if "such" in arguments else tmp_path
    (tmp_path / "recipe.json").write_text('{"seed": 7}')
    with pytest.raises(SystemExit, match="2"):
        main([*arguments.split(), "-o", str(folder)])
    assert said in capsys.readouterr().err
    assert (tmp_path / "recipe.json").read_text() == '{"seed": 7}'


@pytest.mark.slow
def test_a_run_is_trained_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = "--objective causal --steps 2 --seed 4 --no-compile --examples 0 --log-every 1"
    main([*how.split(), "-o", str(tmp_path)])
    said = capsys.readouterr().out
    assert "step 1/2: loss" in said and "2 steps of the causal recipe" in said
    recipe = json.loads((tmp_path / "nano-ar" / "recipe.json").read_text())
    assert (recipe["objective"], recipe["steps"], recipe["seed"]) == ("causal", 2, 4)
    assert dllm.load(tmp_path / "nano-ar").facts.mask_kind == "causal"


@pytest.mark.slow
def test_a_small_model_for_uniform_noise(tmp_path: Path) -> None:
    """It is trained, and written with its recipe."""
    recipe = replace(TOY, objective="uniform", intermediate_size=96, phases=())
    whole = run(recipe, tmp_path / "whole")
    assert all(p.isfinite().all() for p in whole.model.parameters())
    export(tmp_path / "whole", tmp_path / "model")
    assert NanoTraining(**json.loads((tmp_path / "model" / "recipe.json").read_text())) == recipe
    model = dllm.load(tmp_path / "model")
    assert model.facts.uniform and model.facts.block_length == 32
    assert dllm.generate(model, "Copy: Tom", cache="block", max_new_tokens=32).nfe > 1


def test_masks_in_the_place_of_random_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same positions of the same batch are noised, and the model is read as a masked one."""
    recipe = replace(TOY, objective="uniform", intermediate_size=96, phases=())
    tokenizer = build_tokenizer()
    mask = int(tokenizer.mask_token_id)
    model: Any = build_model(recipe, tokenizer)
    batch = TaskStream(tokenizer, recipe.weights_at, 512, 0, 1)[0]
    fed = []

    def predict(self: Any, ids: torch.Tensor, *_: Any) -> torch.Tensor:
        fed.append(ids)
        return torch.zeros(*ids.shape, model.config.text_config.vocab_size)

    monkeypatch.setattr(UniformDenoising, "_logits", predict)
    for noise in (None, mask):
        UniformDenoising(model.model.decoder, 0.2, noise)(**batch)
    random, masked = fed[0], fed[-1]
    clean = F.pad(batch["ids"], (0, 32), value=int(batch["ids"][0, -1]))[:, : random.shape[1]]
    noisy = masked == mask
    assert noisy.any() and torch.equal(masked[~noisy], clean[~noisy])
    assert torch.equal(random[~noisy], clean[~noisy])
    assert (random[noisy] != clean[noisy]).float().mean() > 0.9  # 1 of 528 is drawn as it was
    assert not snapshot(model, tokenizer, mask).facts.uniform


def test_noise_falls_on_a_canvas_that_has_some_of_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Canvases of 32: the first end token is the 32nd, and the last of one, or begins another."""
    tokenizer, fed = build_tokenizer(), []
    mask = int(tokenizer.mask_token_id)
    recipe = replace(TOY, objective="uniform", intermediate_size=96, phases=())
    model: Any = build_model(recipe, tokenizer)

    def predict(self: Any, ids: torch.Tensor, *_: Any) -> torch.Tensor:
        fed.append(ids)
        return torch.zeros(*ids.shape, model.config.text_config.vocab_size)

    monkeypatch.setattr(UniformDenoising, "_logits", predict)
    at, start, ends = torch.arange(110), torch.tensor([[5], [7]]), torch.tensor([[32], [33]])
    batch = {"ids": torch.full((2, 110), mask + 1), "answer": at >= start,
             "tail": at >= start + ends}  # fmt: skip
    for seed in range(40):
        UniformDenoising(model.model.decoder, 0.2, mask)(**batch, seed=torch.tensor(seed))
    noised = [{*torch.cat([(ids[row] == mask).nonzero()[:, 0] for ids in fed]).tolist()}
              for row in range(2)]  # fmt: skip
    assert noised == [{*range(5, 37)}, {*range(7, 71)}]


def test_the_example_is_of_the_recipe() -> None:
    file = Path(__file__).parents[2] / "examples" / "nano-uniform" / "recipe.json"
    assert NanoTraining(**json.loads(file.read_text())) == NanoTraining.of("uniform")
