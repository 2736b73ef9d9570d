"""Prompts and answers of speculative decoding benchmarks, and what they are summed up with.

Reads and writes the JSON lines of Spec-Bench (arXiv 2401.07851) and of SPEED-Bench's prepared files
(arXiv 2604.09557): ``question_id``, ``category`` (in its throughput split the entropy), ``turns``,
or ``messages`` in place of the turns.  The figures are SPEED-Bench's, per category: acceptance
length, and the rate at each draft position given that the positions before it were accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..core.json_lines import read_json_lines
from .metrics import Acceptance, acceptance

PLACEHOLDER = "SPECDEC_BENCH"  # in the published files, where a licence forbids to ship the prompt


@dataclass(frozen=True)
class Question:
    """``turns``: what the user says, one after the other; ``reference``: answers, if known."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()


@dataclass(frozen=True)
class Turn:
    """One answer.  ``drafted``, ``accepted``: tokens per verification; ``seconds``: wall time."""

    text: str
    tokens: int
    seconds: float
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @classmethod
    def of(cls, result: Any) -> Turn:
        """From what `dllm.speculate` returns: the depth of each round's draft, what it kept."""
        drafted = tuple(int(entry.depth) for entry in result.rounds)
        accepted = tuple(int(entry.accepted) for entry in result.rounds)
        return cls(result.text, len(result.tokens), result.seconds, drafted, accepted)

    @property
    def lengths(self) -> list[int]:
        """Tokens that each verification added: those accepted and the verifier's own, as far as
        they are part of the text, which an accepted token may have ended."""
        before = accumulate((count + 1 for count in self.accepted), initial=0)
        return [
            min(count + 1, max(0, self.tokens - start))
            for count, start in zip(self.accepted, before, strict=False)
        ]


def read_questions(path: Path) -> list[Question]:
    """Raises `ConfigError` with the line that is wrong."""
    return [_question(*entry) for entry in read_json_lines(path, "questions")]


def _question(where: str, entry: Any) -> Question:
    entry = entry if isinstance(entry, dict) else {}
    if "turns" not in entry and isinstance(entry.get("messages"), list):
        said = [m for m in entry["messages"] if isinstance(m, dict) and m.get("role") == "user"]
        entry["turns"] = [m.get("content") for m in said]
    lacking = {"question_id", "category", "turns"} - set(entry)
    if lacking:
        raise ConfigError(f"{where} lacks {', '.join(sorted(lacking))}")
    turns = entry["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise ConfigError(f"{where}: turns is a list of strings, at least one")
    if any(PLACEHOLDER in turn for turn in turns):
        raise ConfigError(
            f"{where} holds the place of a prompt that is to be fetched from its source: run "
            "SPEED-Bench's own preparation first"
        )
    reference = entry.get("reference") or ()
    reference = (reference,) if isinstance(reference, str) else tuple(map(str, reference))
    return Question(entry["question_id"], str(entry["category"]), tuple(turns), reference)


def answer(question: Question, speak: Callable[[list[dict[str, str]]], Any]) -> list[Turn]:
    """All turns of a question, each with what was said before.

    ``speak(messages)`` answers a conversation, e.g. with `dllm.speculate`.
    """
    messages: list[dict[str, str]] = []
    turns = []
    for text in question.turns:
        messages.append({"role": "user", "content": text})
        turns.append(Turn.of(speak(list(messages))))
        messages.append({"role": "assistant", "content": turns[-1].text})
    return turns


def write_answers(
    path: Path, model_id: str, answers: Iterable[tuple[Question, Sequence[Turn]]]
) -> None:
    """Answers as Spec-Bench's own scripts read them."""
    with path.open("w", encoding="utf-8") as file:
        for question, turns in answers:
            choice = {
                "index": 0,
                "turns": [turn.text for turn in turns],
                "decoding_steps": [len(turn.accepted) for turn in turns],
                "new_tokens": [turn.tokens for turn in turns],
                "wall_time": [turn.seconds for turn in turns],
                "accept_lengths": [length for turn in turns for length in turn.lengths],
            }
            entry = {"question_id": question.question_id, "category": question.category,
                     "model_id": model_id, "choices": [choice]}  # fmt: skip
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class CategoryReport:
    """One category: its acceptance, tokens, seconds, and tokens per second."""

    acceptance: Acceptance
    questions: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def by_category(answers: Iterable[tuple[Question, Sequence[Turn]]]) -> dict[str, CategoryReport]:
    """Figures per category, and over all under "overall" (of all rounds, not a mean of means)."""
    groups: dict[str, list[Sequence[Turn]]] = {}
    for question, turns in answers:
        groups.setdefault(question.category, []).append(turns)
        groups.setdefault("overall", []).append(turns)
    order = [name for name in groups if name != "overall"] + ["overall"] * bool(groups)
    return {name: _report(groups[name]) for name in order}


def _report(group: Sequence[Sequence[Turn]]) -> CategoryReport:
    turns = [turn for answer in group for turn in answer]
    drafted = [count for turn in turns for count in turn.drafted]
    accepted = [count for turn in turns for count in turn.accepted]
    tokens, seconds = sum(t.tokens for t in turns), sum(t.seconds for t in turns)
    return CategoryReport(acceptance(drafted, accepted, tokens), len(group), tokens, seconds)


def rows(reports: Mapping[str, CategoryReport]) -> list[dict[str, Any]]:
    """The reports as plain rows, for a table or JSON."""
    return [
        {
            "category": name, "questions": r.questions, "acceptance_length": r.acceptance.length,
            "acceptance_rate": r.acceptance.rate, "conditional": list(r.acceptance.conditional),
            "rounds": r.acceptance.rounds, "tokens": r.tokens, "seconds": r.seconds,
            "tokens_per_second": r.tokens_per_second,
        }
        for name, r in reports.items()
    ]  # fmt: skip
