"""What a user does with any model, on one whose canvases hold random tokens in place of masks."""

import re
from pathlib import Path
from typing import Any

import pytest

import dllm

from .cli.conftest import Run
from .cli.conftest import cli as cli
from .serve.conftest import deltas, serve
from .thin import some

UNIFORM = str(Path(__file__).parents[1] / "examples" / "nano-uniform")
PROMPT = "Reverse this list: Tom, Anna, Ben"


@pytest.mark.parametrize(
    "how",
    [
        {"eos_policy": "suppress"},
        {"top_p": 0.7, "temperature": 1.0},
        {"top_k": 3, "temperature": 1},
    ],
)
def test_sweeps_draw_what_bans_and_filters_leave(noisy: dllm.DiffusionModel, how: Any) -> None:
    sampler = "ddim(num_inference_steps=9, corrector_steps=2, corrector_k=8)"
    result = dllm.generate(noisy, PROMPT, sampler=sampler, cache="block", max_new_tokens=16, **how)
    assert result.nfe == 18
    if "eos_policy" in how:
        assert not {*result.tokens} & {*noisy.facts.stop_token_ids}


def test_a_canvas_is_never_cut(noisy: dllm.DiffusionModel) -> None:
    result = dllm.generate(noisy, PROMPT, cache="block", max_new_tokens=11, trace=True)
    assert result.trace is not None and result.trace.region[1] - result.trace.region[0] == 16


def test_a_position_is_decided_once(noisy: dllm.DiffusionModel) -> None:
    """Decided positions of an open canvas are predicted for self-conditioning alone."""
    how: dict[str, Any] = {"cache": "block", "max_new_tokens": 16, "eos_policy": "none"}
    result = dllm.generate(noisy, PROMPT, sampler="llada", trace=True, **how)
    assert result.trace is not None
    decided = [i for step in result.trace.steps for i, _, _ in step.commits]
    assert sorted(decided) == [*range(*result.trace.region)]


class Drafts:
    """A streamer that keeps what it is shown."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def put(self, value: Any) -> None: ...
    def end(self) -> None: ...

    def put_draft(self, value: Any) -> None:
        self.seen.append(value.tolist())


@pytest.mark.parametrize("sampler", ["entropy_bound(entropy_bound=16, t_min=3, t_max=3", "ddim(12"])
def test_drafts_are_what_the_canvas_would_end_as(sampler: str) -> None:
    """The likeliest tokens, not those drawn: a canvas ends once they are the draft before."""
    model = dllm.load(UNIFORM, dtype="float32")
    how: Any = {
        "sampler": f"{sampler}, stability_threshold=1, confidence_threshold=99)", "cache": "block",
        "max_new_tokens": 32, "temperature": 3.0 if sampler.startswith("ddim") else 0,
    }  # fmt: skip
    streamer = Drafts()
    result = dllm.generate(model, PROMPT, streamer=streamer, trace=True, **how)
    events = [*dllm.stream(model, PROMPT, **how)]
    assert 2 <= result.nfe < 12 and result.trace is not None
    drafts = [[*event.drafts.values()] for event in events[:-1]]
    assert streamer.seen == drafts
    assert [[t for _, t in step.drafts] for step in result.trace.steps[:-1]] == drafts
    assert drafts[-1] == [*events[-1].committed.values()]
    last, likeliest = result.trace.steps[-1], dict(result.trace.steps[-1].candidates)
    assert all((t, q) == likeliest[i][0] for i, t, q in last.commits)


@pytest.mark.slow
def test_holes_of_unknown_length(noisy: dllm.DiffusionModel) -> None:
    once, again = (dllm.infill(noisy, "Ben, [[1..6]], Tom", prompt=PROMPT) for _ in range(2))
    assert once.tokens == again.tokens and once.probes == 1
    assert once.text.startswith("Ben,") and once.text.endswith(", Tom")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler", some(["threshold(0.1)", "entropy_bound(max_denoising_steps=5)"], 1)
)
def test_prefixes_are_kept_between_turns(noisy: dllm.DiffusionModel, sampler: str) -> None:
    """Canvases are counted from the end of the prompt, and keys of sliding layers are all kept: a
    second turn reads what it shares with the first one, whatever its length."""
    turns = []
    for kept in (0, None):
        with dllm.Session(noisy, cache="block", prefix_cache_tokens=kept) as session:

            def ask(ids: list[int], session: dllm.Session = session) -> dllm.Result:
                how: dict[str, Any] = {"max_new_tokens": 16, "eos_policy": "none"}
                return session.submit(ids, sampler=sampler, **how).result(60)

            first = ask([*range(5, 24)])
            ids = [*range(5, 24), *first.tokens]
            turns.append((first, ask([*ids, 9, 8]), ask(ids[:21])))
    plain, again = turns
    for one, other in zip(plain, again, strict=True):
        assert (one.tokens, one.nfe) == (other.tokens, other.nfe)
        assert one.computed == other.computed + other.cached_tokens
    assert [one.cached_tokens for one in again] == [0, 27, 21]


@pytest.mark.parametrize("sampler", some(["threshold(0.1)", "localleap", "eb(gamma=1)"], 1))
def test_structured_output(noisy: dllm.DiffusionModel, sampler: str) -> None:
    result = dllm.generate(
        noisy, [PROMPT, "Tom"], sampler=sampler, cache="block", regex="[a-z ]+,[a-z]+",
        max_new_tokens=16,
    )  # fmt: skip
    assert all(re.fullmatch("[a-z ]+,[a-z]+", one.text) for one in result)
    for own in ("entropy_bound", "ddim"):
        with pytest.raises(dllm.ConfigError, match="may leave the structure"):
            dllm.generate(noisy, PROMPT, sampler=own, regex="[a-z]+")


@pytest.mark.slow
def test_append_adds_canvases(noisy: dllm.DiffusionModel) -> None:
    """A text that grows by canvases is the one whose length was given."""
    how: dict[str, Any] = {"sampler": "threshold(0.1)", "cache": "block", "eos_policy": "none"}
    fixed = dllm.generate(noisy, PROMPT, max_new_tokens=24, **how)
    grown = dllm.generate(noisy, PROMPT, max_new_tokens=24, length="append", **how)
    assert grown.tokens == fixed.tokens and grown.nfe == fixed.nfe


def test_what_cannot_apply_says_why(noisy: dllm.DiffusionModel) -> None:
    for how, reason in (
        ({"sampler": "dmax"}, "needs masks at undecided positions"),
        (
            {"sampler": "lopa(d2f(0.5), k=3)+staged_blocks(4)", "cache": "block"},
            "sliding window",
        ),
        ({"cfg_scale": 1.0}, "cfg_scale=1.0 needs masks .* leave it out"),
        ({"cache": "dual"}, "needs block-causal attention"),
    ):
        with pytest.raises(dllm.ConfigError, match=reason):
            dllm.generate(noisy, PROMPT, max_new_tokens=8, **how)  # type: ignore[arg-type]
    with pytest.raises(dllm.ConfigError, match="noise is uniform"):
        dllm.score(noisy, PROMPT, "Ben")


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", some(["staged_blocks(3)+threshold(0.1)", "multi_blocks(4)+threshold(0.1)"], 1)
)
def test_windows_that_move_over_canvases(noisy: dllm.DiffusionModel, spec: str) -> None:
    """Their blocks end where canvases end: what is behind a window was read causally."""
    plain, cached = (
        dllm.generate(noisy, [PROMPT, "Tom"], sampler=spec, cache=cache, max_new_tokens=20)
        for cache in ("none", "block")
    )
    assert [one.tokens for one in plain] == [one.tokens for one in cached]


@pytest.mark.slow
@pytest.mark.parametrize("way", some(["int8", "bfloat16", "int4(group=32)"], 1))
def test_other_precisions(noisy: dllm.DiffusionModel, way: str, tmp_path: Path) -> None:
    """Rows of a batch are the rows alone, and what was saved is read back."""
    noisy.save_pretrained(tmp_path / "plain")
    how = {"dtype": way} if way == "bfloat16" else {"quantization": way}
    model = dllm.load(tmp_path / "plain", **how)  # type: ignore[arg-type]
    model.save_pretrained(tmp_path / "saved")
    prompts = [PROMPT, "Tom", "Sort these names: Ben, Anna"]

    def write(model: dllm.DiffusionModel, prompts: list[str]) -> list[list[int]]:
        results = dllm.generate(
            model, prompts, sampler="entropy_bound(max_denoising_steps=5)", cache="block",
            max_new_tokens=12, eos_policy="none",
        )  # fmt: skip
        return [one.tokens for one in results]

    together = write(model, prompts)
    assert together == [*(write(model, [one])[0] for one in prompts)]
    assert together == write(dllm.load(tmp_path / "saved"), prompts)


def test_layers_on_devices_of_a_map(noisy: dllm.DiffusionModel, tmp_path: Path) -> None:
    noisy.save_pretrained(tmp_path)
    spread = dllm.load(tmp_path, device_map={"": "cpu"})
    how: dict[str, Any] = {
        "cache": "block",
        "max_new_tokens": 8,
        "sampler": "entropy_bound(max_denoising_steps=4)",
    }
    one, other = (dllm.generate(model, PROMPT, **how) for model in (noisy, spread))
    assert one.tokens == other.tokens


@pytest.mark.slow
def test_the_commands_know_it(cli: Run, tmp_path: Path) -> None:
    """bench and compare, with the checkpoint's own sampler beside one for masks."""
    own = ("--model", UNIFORM, "--sampler", "entropy_bound", "--sampler", "threshold")
    more = ("--cache", "block", "--max-new-tokens", "32")
    bench = ("bench", "--task", "copy", "--examples", "2", "--no-plot", "--output", str(tmp_path))
    for command in (("compare", PROMPT), bench):
        result = cli(*command, *own, *more)
        assert result.exit_code == 0, result.output
        assert "entropy_bound" in result.stdout and "threshold" in result.stdout


def test_the_server_answers_chats_and_streams() -> None:
    """By the checkpoint's chat template and its own sampler; a streamed text is the whole one."""
    model = dllm.load(UNIFORM, dtype="float32")
    served = serve(model, name="uniform", caches=("block",))
    messages: Any = [{"role": "user", "content": PROMPT}]
    body: dict[str, Any] = {"model": "uniform", "messages": messages, "max_tokens": 32}
    try:
        whole = served.post("/v1/chat/completions", body).json()
        assert whole["choices"][0]["message"]["content"] == "Ben, Anna, Tom"
        parts = deltas(served.post("/v1/chat/completions", body | {"stream": True}))
        assert "".join(part.get("content") or "" for part in parts) == "Ben, Anna, Tom"
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        refused = served.post(
            "/v1/chat/completions",
            body | {"messages": [{"role": "user", "content": [image]}]},
        )  # fmt: skip
        assert refused.status_code == 400 and "image" in refused.text
    finally:
        served.stop()
