"""The loop of all trainings: checkpoints, signals, reports, and several processes."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainingArguments, get_scheduler

from dllm.core.errors import ConfigError, DllmError, NumericError, UnknownNameError
from dllm.core.json_lines import write_whole
from dllm.train.loop import (
    SCHEDULES,
    SILENT,
    Loop,
    OneDevice,
    Report,
    Schedule,
    last_checkpoint,
    loop,
    machine_has_bf16,
    resume,
    same_answers,
    same_recipe,
    saved_when_stopped,
)
from dllm.train.processes import by_the_first, own_device, shared
from dllm.train.trajectories import write_pieces

from ..thin import some

pytestmark = pytest.mark.filterwarnings("default")


class Line(nn.Module):
    """Learns a line, beside a part that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.linear = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.linear(self.frozen(x)) - y).square().mean()}


class Points:
    """Batch i, a function of i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(4, 64, generator=generator)
        return {"x": x, "y": x[:, :1] * 2}


def run_of(
    folder: Path, steps: int = 6, accumulate: int = 2, objective: Line | None = None,
    report: Report = SILENT, **more: Any,
) -> Loop:  # fmt: skip
    schedule = Schedule(steps, 1e-2, 1, "constant", 2, accumulate=accumulate)
    return loop(objective or Line(), Points(steps * accumulate), schedule, folder, report=report,
                held=Points(3), **more)  # fmt: skip


def weights_of(run: Loop) -> dict[str, torch.Tensor]:
    model: Any = run.model
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_checkpoints_hold_what_is_trained_alone(tmp_path: Path) -> None:
    whole = run_of(tmp_path / "whole")
    resume(whole)
    last = last_checkpoint(tmp_path / "whole")
    assert last is not None
    assert {*load_file(last / "model.safetensors")} == {"linear.weight", "linear.bias"}
    short = run_of(tmp_path / "parts", steps=4)
    resume(short)
    again = run_of(tmp_path / "parts")
    resume(again)
    assert same(weights_of(whole), weights_of(again))
    other = nn.Sequential(nn.Linear(2, 2))
    stranger = run_of(tmp_path / "parts", steps=8)
    stranger.model = other
    with pytest.raises(ConfigError, match="weights of another network"):
        stranger._load_from_checkpoint(str(last))


@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], 1))
def test_a_signal_ends_the_step_and_saves(tmp_path: Path, number: int) -> None:
    """The run that goes on ends with the weights of one that was never stopped."""
    whole = run_of(tmp_path / "whole")
    resume(whole)

    class Interrupted(Line):
        calls = 0

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            Interrupted.calls += 1
            if Interrupted.calls == 6:  # before the first half of step 3 was evaluated
                os.kill(os.getpid(), number)
            return super().forward(x, y)

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, end)
    try:
        with pytest.raises(KeyboardInterrupt):
            resume(run_of(tmp_path / "parts", objective=Interrupted()))
        assert signal.getsignal(number) is end
    finally:
        signal.signal(number, before)
    last = last_checkpoint(tmp_path / "parts")
    assert last is not None and 1 <= int(last.name.removeprefix("checkpoint-")) < 6
    again = run_of(tmp_path / "parts")
    resume(again)
    assert same(weights_of(whole), weights_of(again))


def test_a_system_without_hangups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows ``os.kill`` would end the process at once."""
    run, own = run_of(tmp_path), signal.default_int_handler
    before = signal.signal(signal.SIGINT, own)  # it is ignored in the background
    monkeypatch.delattr(signal, "SIGHUP")
    monkeypatch.delattr(os, "kill")
    try:
        with pytest.raises(KeyboardInterrupt), saved_when_stopped(run):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_hangup_saves_although_nobody_reads_and_below_nohup_changes_nothing(
    tmp_path: Path,
) -> None:
    """An ignored signal once ended the run as if it were complete."""

    def say(line: str) -> None:
        if line.startswith("step 1/"):
            os.kill(os.getpid(), signal.SIGHUP)
        raise OSError("Input/output error")

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGHUP, end)
    try:
        with pytest.raises(KeyboardInterrupt):
            resume(run_of(tmp_path / "heard", report=Report(say, log_every=1)))
        assert last_checkpoint(tmp_path / "heard") == tmp_path / "heard" / "checkpoint-2"
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        resume(run := run_of(tmp_path / "ignored", report=Report(say, log_every=1)))
        assert run.state.global_step == 6
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("file", "content", "said"), some([
    ("checkpoint-4/model.safetensors", b"", "checkpoint-4 is damaged"),
    ("checkpoint-4/optimizer.pt", b"\x93", "checkpoint-4 is damaged"),
    ("checkpoint-4/optimizer.pt", None, ""), ("checkpoint-4/scheduler.pt", None, ""),
    ("checkpoint-4/trainer_state.json", b"[1]", ""), ("checkpoint-4/rng_state.pth", b"", "damaged"),
    ("log.jsonl", b"{bad\n", "log.jsonl is damaged"), ("log.jsonl", b"[1]\n", "is damaged"),
    ("checkpoint-4-mine/trainer_state.json", b"{}", ""),
], 4))  # fmt: skip
def test_a_damaged_folder_is_told_or_passed_over(
    tmp_path: Path, file: str, content: bytes | None, said: str
) -> None:
    """And the run ends with the same weights once it is mended."""
    whole = run_of(tmp_path / "whole")
    resume(whole)
    resume(run_of(tmp_path / "parts", steps=4))
    path = tmp_path / "parts" / file
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    if said:
        with pytest.raises(ConfigError, match=said):
            resume(run_of(tmp_path / "parts"))
        path.unlink() if "log" in file else shutil.rmtree(path.parent)
    again = run_of(tmp_path / "parts")
    resume(again)
    assert same(weights_of(whole), weights_of(again))


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A write beyond ``size`` bytes fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
@pytest.mark.parametrize("size", some([700, 200, 3000], 1))  # optimizer, weights, state
def test_a_full_disk_is_told_and_the_run_goes_on(tmp_path: Path, size: int) -> None:
    short = run_of(tmp_path, steps=2)
    resume(short)
    with files_of_at_most(size), pytest.raises(DllmError, match="make room there"):
        resume(run_of(tmp_path, steps=4))
    again, whole = run_of(tmp_path, steps=4), run_of(tmp_path / "whole", steps=4)
    resume(again)
    resume(whole)
    assert same(weights_of(whole), weights_of(again))


def test_a_note_that_does_not_fit_leaves_the_old_one_alone(tmp_path: Path) -> None:
    write_whole(tmp_path / "note", "old")
    with files_of_at_most(3), pytest.raises(OSError, match="too large"):
        write_whole(tmp_path / "note", "longer")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_file_of_answers_that_does_not_fit_is_named(tmp_path: Path) -> None:
    answers = write_pieces(["a"], tmp_path / "answers.jsonl", lambda _: [{"text": "b" * 200}])
    with files_of_at_most(100), pytest.raises(OSError, match=r"too large: '.*answers\.jsonl'"):
        next(answers)


def test_a_step_that_breaks_the_weights_ends_the_run_and_is_not_saved(tmp_path: Path) -> None:
    class Broken(Line):
        calls = 0

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            Broken.calls += 1
            loss = super().forward(x, y)["loss"]
            weight = self.linear.weight
            if Broken.calls == 3:  # in step 2: adds 0, of which the gradient is none
                loss = loss + (weight - weight.detach()).abs().sqrt().sum()
            return {"loss": loss}

    with pytest.raises(NumericError, match="of step 2 is not finite"):
        resume(run_of(tmp_path, objective=Broken()))
    assert last_checkpoint(tmp_path) is None


def test_a_schedule_that_takes_more_than_a_name_is_refused_at_once() -> None:
    with pytest.raises(UnknownNameError, match="did you mean"):
        Schedule(schedule="cosine_with_min_lr")
    for name in (*SCHEDULES, "warmup_stable_decay", "reduce_lr_on_plateau"):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        if name in SCHEDULES:
            get_scheduler(Schedule(schedule=name).schedule, optimizer, 2, 6)
        else:
            with pytest.raises(UnknownNameError, match="unknown schedule"):
                Schedule(schedule=name)


def test_a_run_of_another_model_is_another_run(tmp_path: Path) -> None:
    schedule = Schedule()
    same_recipe(tmp_path, schedule)
    same_recipe(tmp_path, schedule, "one")  # of an earlier version, which did not say
    same_recipe(tmp_path, schedule, "one")
    with pytest.raises(ConfigError, match="with another base"):
        same_recipe(tmp_path, schedule, "other")


def test_a_run_of_other_answers_is_another_run(tmp_path: Path) -> None:
    answers = [((5, 6), 1), ((7, 8), 1)]
    same_answers(tmp_path, answers)
    same_answers(tmp_path, answers)
    for other in (answers[::-1], answers[:1], [*answers, ((7, 8), 1)]):
        with pytest.raises(ConfigError, match="with another answers_checksum"):
            same_answers(tmp_path, other)


def test_the_loss_of_held_out_batches_is_said_while_it_runs(tmp_path: Path) -> None:
    said: list[str] = []
    run = run_of(tmp_path / "run", report=Report(said.append, log_every=3),
                 measure=lambda _: {"accuracy": 0.5})  # fmt: skip
    first = Line()
    expected = sum(first(**Points(3)[i])["loss"].item() for i in range(3)) / 3
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    resume(run)
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    losses = [entry["eval_loss"] for entry in entries if entry["step"] and "eval_loss" in entry]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert [entry["step"] for entry in entries if "loss" in entry] == [3, 6]
    assert any("held-out loss" in line and "accuracy 0.5" in line for line in said)


def test_reports_go_where_they_are_sent(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'tensorboard'"):
        Report(to=["tensorbord"])
    try:
        import tensorboard  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="cannot report to tensorboard"):
            run_of(tmp_path, report=Report(to=["tensorboard"]))
    else:
        resume(run_of(tmp_path, report=Report(to=["tensorboard"])))
        assert [*tmp_path.rglob("events.out.*")]


def test_processes_share_the_batches_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (shared(3), own_device("cuda"), own_device("cpu")) == (3, "cuda:0", "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert (shared(4), own_device("cuda"), own_device("cuda:5")) == (2, "cuda:1", "cuda:5")
    with pytest.raises(ConfigError, match="make --accumulate a multiple of 2"):
        shared(3)


def test_a_process_trains_on_one_of_several_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers would spread every batch over all of them, from the first one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert run_of(tmp_path, device="cuda").args.n_gpu == 1
    present = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "set_device", present.append)
    arguments = OneDevice(str(tmp_path))
    arguments.chosen = torch.device("cuda:1")
    assert arguments.device == torch.device("cuda:1") == present[-1]
    monkeypatch.setenv("WORLD_SIZE", "2")  # each has one of its own
    assert arguments.device == TrainingArguments(str(tmp_path)).device


def test_bfloat16_that_a_gpu_emulates_is_not_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    assert not machine_has_bf16("cuda")


PROGRAM = """
import sys, torch
from pathlib import Path
from dllm.train.loop import resume
from dllm.train.processes import by_the_first, is_first
from tests.train.test_loop import run_of, weights_of

folder = Path(sys.argv[1])
def write():
    with (folder / "answers").open("a") as file:
        file.write("answer\\n")
    yield 1
for _ in by_the_first(write(), "cpu"):
    pass
assert (folder / "answers").read_text() == "answer\\n"
run = run_of(folder / "checkpoints")
resume(run)
assert not run.model_wrapped.broadcast_buffers
if is_first():
    torch.save(weights_of(run), folder / "weights.pt")
"""


@pytest.mark.slow
def test_two_processes_end_with_the_weights_of_one(tmp_path: Path) -> None:
    """At the same batches per step; the data is seen once, and written once."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    alone = run_of(tmp_path / "alone")
    resume(alone)
    together = tmp_path / "together"
    together.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(program), str(together)],
        capture_output=True, text=True, timeout=400, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    weights = torch.load(together / "weights.pt")
    for name, tensor in weights_of(alone).items():
        # the mean of two gradients is rounded once more or less in each of six steps
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
    lines = (together / "checkpoints" / "log.jsonl").read_text().splitlines()
    epochs = [json.loads(line).get("epoch") for line in lines]
    assert max(epoch for epoch in epochs if epoch is not None) == 1.0


def test_one_process_does_the_work_itself() -> None:
    assert [*by_the_first(iter([1, 2]), "cpu")] == [1, 2]
