"""``--watch``: what the frames show."""

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

import dllm
from dllm.api import Event
from dllm.cli import watch as watch_module
from dllm.cli.frames import AHEAD, COMMITTED, DRAFT, FRESH, MASK, REST, Frame, Span, Speller, frame
from dllm.cli.watch import compose, line, watch
from dllm.core.canvas import Canvas

from .conftest import Run

PROMPT = "Reverse this list: Tom, Anna"


def test_every_step_is_one_line_when_stderr_is_no_terminal(ask: Run) -> None:
    result = ask("generate", PROMPT, "--watch", "--json")
    *frames, footer = result.stderr.splitlines()
    outcome = json.loads(result.stdout)
    assert len(frames) == outcome["nfe"] and "tokens per forward" in footer
    assert "«" in frames[0] and "‹" in frames[0] and "░" * AHEAD + " +8" in frames[0]
    assert "‹" not in frames[-1] and "░" not in frames[-1]
    assert [f"row 0 step {i} " in text for i, text in enumerate(frames)] == [True] * len(frames)


def test_watching_changes_no_answer(ask: Run) -> None:
    assert ask("generate", PROMPT, "-w").stdout == ask("generate", PROMPT).stdout


def test_rows_are_told_apart(ask: Run, tmp_path: Path) -> None:
    (tmp_path / "two.jsonl").write_text('"Tom"\n"Ben, Adam"\n')
    result = ask("generate", "--file", str(tmp_path / "two.jsonl"), "--watch")
    rows = {outcome[1] for outcome in re.finditer(r"^row (\d+) step", result.stderr, re.M)}
    assert rows == {"0", "1"}
    assert len(result.stdout.splitlines()) >= 2


def test_the_last_frame_spells_the_answer(tiny: dllm.DiffusionModel) -> None:
    events = list(dllm.stream(tiny, PROMPT, max_new_tokens=24, block_length=8))
    assert tiny.tokenizer is not None
    speller = Speller(tiny.tokenizer, ())
    answer = events[-1].result
    assert answer is not None
    last = frame(events[-1], speller)
    whole = tiny.tokenizer.decode(answer.tokens)
    assert last.finished and last.decided == last.total == len(answer.tokens)
    if "\ufffd" not in whole:  # a character may be cut where two kinds of spans meet
        assert "".join(span.text for span in last.spans) == whole


def event_of(
    tiny: dllm.DiffusionModel, texts: list[str | None], window: int, **facts: object
) -> Event:
    """A row whose decided positions hold ``texts``, None where they are masked."""
    assert tiny.tokenizer is not None
    canvas = Canvas.for_prompt(np.array([5, 6]), len(texts), mask_id=1, pad_id=0)
    for i, text in enumerate(texts):
        if text is not None:
            (token,) = tiny.tokenizer.backend_tokenizer.encode(text).ids
            canvas.commit(np.array([2 + i]), np.array([token]), np.zeros(1, np.float32))
    canvas.window = (2, 2 + window)
    given: dict[str, object] = {"committed": {}, "drafts": {}, "remasked": []} | facts
    return Event(row=0, step=0, canvas=canvas, **given)  # type: ignore[arg-type]


@pytest.fixture
def speller(tiny: dllm.DiffusionModel) -> Speller:
    assert tiny.tokenizer is not None
    return Speller(tiny.tokenizer, tiny.facts.stop_token_ids)


def kinds(shown: Frame) -> list[str]:
    return [span.kind for span in shown.spans]


def test_kinds_of_spans(tiny: dllm.DiffusionModel, speller: Speller) -> None:
    event = event_of(tiny, ["Tom", "Anna", *[None] * 40], 4, committed={3: 9}, drafts={4: 65})
    shown = frame(event, speller)
    assert kinds(shown) == [COMMITTED, FRESH, DRAFT, MASK, REST]
    assert shown.spans[0].text == "Tom" and shown.spans[1].text == " Anna"
    assert shown.spans[3].text == "░" * (1 + AHEAD)
    assert shown.spans[4].text == f" +{42 - 4 - AHEAD}"
    assert (shown.decided, shown.total) == (2, 42)


def test_a_commit_taken_back_at_once_is_no_commit(
    tiny: dllm.DiffusionModel, speller: Speller
) -> None:
    event = event_of(tiny, ["Tom", None], 2, committed={2: 9, 3: 9}, remasked=[3])
    assert kinds(frame(event, speller)) == [FRESH, MASK]


def test_end_tokens_are_one_sign(tiny: dllm.DiffusionModel, speller: Speller) -> None:
    end = tiny.facts.eos_token_id
    assert end is not None
    event = event_of(tiny, ["Tom", None, None, None], 4, drafts={3: end, 4: end, 5: end})
    assert [span.text for span in frame(event, speller).spans] == ["Tom", "∎"]


def test_line_breaks_are_kept_and_controls_are_harmless(
    tiny: dllm.DiffusionModel, speller: Speller
) -> None:
    assert tiny.tokenizer is not None
    ids = tiny.tokenizer("x\n    y\x1b[31m", add_special_tokens=False)["input_ids"]
    assert speller(ids).endswith("x\n    y␛[31m")


def frames(*texts: str) -> Iterator[Frame]:
    for row, text in enumerate(texts):
        yield Frame(row, 3, 4, 8, 9, (Span(COMMITTED, text),), finished=row == 0)


def test_escape_sequences_reach_files_alone(ask: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x\x1b[31m\x9b2J\ty"
    assert text in ask("infill", f"{text} [[2]]").stdout
    terminal = SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True), stderr=sys.stderr)
    monkeypatch.setattr("dllm.cli.output.sys", terminal)
    assert ask("infill", f"{text} [[2]]").stdout.startswith("x␛[31m\ufffd2J\ty")


def test_a_line_stays_one_line() -> None:
    (shown,) = frames("if x:\n\treturn")
    assert line(shown) == "row 0 step 3 8/9 │ if x:⏎⇥return"


def drawn(*texts: str, height: int) -> list[str]:
    console = Console(width=60, height=height, legacy_windows=False)
    with console.capture() as capture:
        console.print(compose(list(frames(*texts)), console))
    return capture.get().splitlines()


def test_a_picture_keeps_indentation() -> None:
    picture = drawn("def f(x):\n    return x", height=20)
    assert picture[1].startswith("│ def f(x): ") and picture[2].startswith("│     return x ")
    assert "8/9 · 2.0 tokens per forward" in picture[3]


def test_a_long_text_shows_its_end() -> None:
    picture = drawn("\n".join(f"line {i}" for i in range(50)), height=10)
    assert len(picture) <= 9
    assert "line 49" in picture[-2] and not any("line 0 " in text for text in picture)


def test_many_rows_show_the_unfinished_ones() -> None:
    picture = drawn(*"abcdefgh", height=12)
    assert len(picture) <= 11
    assert "row 0" not in "\n".join(picture) and "│ b" in "\n".join(picture)
    assert picture[-1] == "… and 5 more rows"


def test_a_terminal_is_redrawn_in_place(
    tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=60, height=20, legacy_windows=False)
    monkeypatch.setattr(watch_module, "interactive", lambda: True)
    monkeypatch.setattr(watch_module, "stderr", lambda: terminal)
    monkeypatch.setattr(watch_module, "REDRAW", 0.0)
    (result,) = watch(dllm.stream(tiny, PROMPT, max_new_tokens=24, block_length=8), tiny, 1)
    assert screen.getvalue().count("tokens per forward") >= result.nfe
    assert "\x1b[1A" in screen.getvalue()  # cursor up, to draw over the last picture
    assert "24/24" in screen.getvalue().splitlines()[-2]
