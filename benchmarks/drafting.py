"""What drafting brings, counted: accepted tokens and verifier forwards, per search and length.

    python benchmarks/drafting.py                            # everything: hours on a slow machine
    python benchmarks/drafting.py --group searches --examples 200
    python benchmarks/drafting.py --quick
    python benchmarks/drafting.py --verifier smollm2 --prompts FILE --group lookups

Nothing here is a time: counts do not depend on the machine; `drafting_times.py` measures seconds.
The controller `adaptive` decides by a clock of its own, on which a draft costs ``DRAFT`` forwards
over one token of the verifier, and every further token of a forward ``TOKEN``;
``modelled_speed`` is the speed on that clock relative to plain decoding.

What was run is kept in ``--state``, in pieces of ten prompts per task; a run that was stopped goes
on there, and larger ``--examples`` add to it.  Differences between settings are paired by prompt,
with 95 % bootstrap intervals.  ``--prompts FILE ...`` (JSON lines with ``turns``, as Spec-Bench
has them) replaces the generated tasks; every file counts as a task.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dllm
from dllm.drafting.base import Feedback, RoundStats
from dllm.drafting.length.adaptive import Adaptive
from dllm.drafting.naming import make_drafter
from dllm.drafting.search.proxies import NGram
from dllm.eval.tasks import TASKS
from dllm.train.recipes.deer import teacher_answers
from dllm.train.trajectories import task_questions

from harness import RESULTS, load_verifier, write  # isort: skip

DRAFT, TOKEN = 1.0, 0.02  # nano drafts for a verifier of its own size
GROUPS = ("searches", "more", "lengths", "lookups")
CHUNK = 10  # prompts per task and piece of work
BEST_SEEN = "best_of_k(score=verifier)"
SAMPLE_TREE = "sample_tree(branching=(2, 2, 1, 1, 1, 1, 1, 1))"


@dataclass
class Clocked(Adaptive):
    """`adaptive` on the clock of this file."""

    def update(self, stats: RoundStats, feedback: Feedback) -> None:
        charged = replace(stats, draft_seconds=DRAFT * stats.attempted, search_seconds=0.0,
                       verify_seconds=1 + TOKEN * stats.drafted, other_seconds=0.0)  # fmt: skip
        super().update(charged, feedback)


@dataclass(frozen=True)
class Setting:
    """One line of the table.  ``make`` builds the drafter, once per run."""

    name: str
    temperature: float
    make: Callable[[], Any]
    how: dict[str, Any] = field(default_factory=dict)


class Bench:
    """The verifier, the drafter's network, and what settings are made of."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.verifier, self.model = load_verifier(options.verifier), dllm.load(options.drafter)
        self._answers: list[list[int]] | None = None

    def fitted(self) -> NGram:
        """The proxy of DiffuSpec as published: trigrams of training text, here the verifier's."""
        if self._answers is None:
            prompts = [question.prompt for question in task_questions(800, seed=1)]
            pairs = teacher_answers(self.verifier, prompts)
            self._answers = [prompt + answer for prompt, answer in pairs]
        return NGram(vocab_size=self.verifier.facts.vocab_size).fit(self._answers)

    def setting(
        self, search: str, controller: str, temperature: float, rule: str | None = None,
        fitted: bool = False,
    ) -> Setting:  # fmt: skip
        def make() -> Any:
            proxy = self.fitted() if fitted else None
            window = self.options.window
            return dllm.DiffusionDrafter(self.model, search=search, window=window, proxy=proxy)

        name = " ".join(
            [search, *(["fitted"] if fitted else []), controller, *filter(None, [rule])]
        )
        how: dict[str, Any] = {"controller": Clocked() if controller == "adaptive" else controller}
        return Setting(name, temperature, make, how | ({"rule": rule} if rule else {}))

    def searches(self) -> list[Setting]:
        """Every search at one length; the first of a temperature is what the others are held to."""
        k = f"fixed(k={self.options.length})"
        greedy = [self.setting("argmax", k, 0.0), self.setting("cps", k, 0.0),
                  self.setting("cps", k, 0.0, fitted=True)]  # fmt: skip
        sampled = [self.setting(search, k, 1.0) for search in ("argmax", "coupled", "cps")]
        return greedy + sampled

    def more(self) -> list[Setting]:
        """Other searches and accept rules at the same length."""
        k = f"fixed(k={self.options.length})"
        greedy = "cps(weight=0.8)", "best_of_k", BEST_SEEN, "best_first_tree(nodes=16)"
        result = [self.setting(search, k, 0.0) for search in greedy]
        result += [self.setting("cps(coupled=False)", k, 1.0),
                  self.setting(BEST_SEEN, k, 1.0, rule="point"),
                  self.setting(BEST_SEEN, k, 1.0, rule="match"),
                  self.setting("sample", k, 1.0, rule="ratio"),
                  self.setting("sample", k, 1.0, rule="block"),
                  self.setting(SAMPLE_TREE, k, 1.0, rule="traversal"),
                  self.setting("argmax", k, 0.5), self.setting("coupled", k, 0.5)]  # fmt: skip
        return result

    def lengths(self) -> list[Setting]:
        """Searches x controllers."""
        fixed = [f"fixed(k={k})" for k in (2, 4, 6, 12, 16)]
        adaptive = ["adl", "confidence(tau=0.5)", "confidence_extend", "threshold",
                    "adaptive"]  # fmt: skip
        result = [self.setting(search, controller, 0.0) for search in ("argmax", "cps")
                 for controller in fixed + adaptive]  # fmt: skip
        result += [
            self.setting("best_first_tree(nodes=16)", c, 0.0) for c in ("fixed(k=4)", "adaptive")
        ]
        result += [self.setting("coupled", c, 1.0) for c in (*fixed, "adaptive")]
        return result

    def lookups(self) -> list[Setting]:
        """Drafters without a network."""

        def setting(name: str) -> Setting:
            return Setting(name, 0.0, lambda: make_drafter(name), {"controller": "full"})

        return [setting(name) for name in ("prompt_lookup", "anpd", "suffix", "token_recycling")]


def prompts_of(options: argparse.Namespace) -> dict[str, list[str]]:
    """Task -> prompts."""
    if options.prompts is not None:
        lines = {file.stem: file.read_text(encoding="utf-8").splitlines()
                 for file in options.prompts}  # fmt: skip
        most = options.examples
        return {name: [json.loads(line)["turns"][0] for line in result[:most]]
                for name, result in lines.items()}  # fmt: skip
    names = options.tasks or list(TASKS)
    return {n: [e.prompt for e in TASKS[n].examples(options.examples, 0)] for n in names}


def counts(result: Any) -> dict[str, Any]:
    """What is kept of one answer."""
    rounds = result.rounds
    deepest = max((r.depth for r in rounds), default=0)
    reached = [sum(r.depth >= d and r.accepted >= d - 1 for r in rounds)
               for d in range(1, deepest + 1)]  # fmt: skip
    kept = [sum(r.accepted >= d for r in rounds) for d in range(1, deepest + 1)]
    return {
        "tokens": result.tokens, "rounds": len(rounds), "drafted": result.drafted,
        "accepted": result.accepted, "reached": reached, "kept": kept,
        "clock": sum(DRAFT * r.attempted + 1 + TOKEN * r.drafted for r in rounds),
    }  # fmt: skip


def pieces(bench: Bench, settings: list[Setting]) -> Iterator[tuple[Setting, str, int, Any]]:
    """Work not done yet, a piece at a time: settings grow together, so that they stay paired."""
    prompts = prompts_of(bench.options)
    most = max(map(len, prompts.values()))
    parts: dict[tuple[str, float], Any] = {}
    done = {(r["name"], r["temperature"], r["task"], r["first"]) for r in stored(bench.options)}
    plain = [Setting("plain", t, lambda: None) for t in sorted({s.temperature for s in settings})]
    for first in range(0, most, CHUNK):
        for setting in plain + settings:
            for task, texts in prompts.items():
                chunk = texts[first : first + CHUNK]
                if chunk and (setting.name, setting.temperature, task, first) not in done:
                    key = setting.name, setting.temperature
                    if key not in parts:
                        parts[key] = setting.make()
                    yield setting, task, first, dllm.speculate(
                        bench.verifier, parts[key], chunk, temperature=setting.temperature,
                        max_new_tokens=bench.options.max_new_tokens, **setting.how,
                    )  # fmt: skip


def stored(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Pieces of earlier runs with the same models and window."""
    if not options.state.exists():
        return []
    result = [json.loads(line) for line in options.state.read_text().splitlines()]
    return [piece for piece in result if piece["run"] == identity(options)]


def identity(options: argparse.Namespace) -> list[Any]:
    """What pieces of work must share to be put together."""
    prompts = " ".join(file.stem for file in options.prompts or ())
    return [str(options.verifier), str(options.drafter), options.window, options.max_new_tokens,
            prompts]  # fmt: skip


Answers = dict[tuple[str, int], dict[str, Any]]  # (task, prompt) -> counts


def figures(answers: Answers, plain: Answers) -> dict[str, Any]:
    """Figures over the rounds of many answers."""
    rows = list(answers.values())
    rounds, tokens = sum(r["rounds"] for r in rows), sum(len(r["tokens"]) for r in rows)
    deepest = max(len(r["reached"]) for r in rows)
    depth = {name: np.zeros(deepest) for name in ("reached", "kept")}
    for row in rows:
        for name, total in depth.items():
            total[: len(row[name])] += row[name]
    share = depth["kept"] / np.maximum(1, depth["reached"])
    same = [plain[key]["tokens"] == row["tokens"] for key, row in answers.items() if key in plain]
    return {
        "prompts": len(rows),
        "identical": float(np.mean(same)),
        "accepted_per_round": round(sum(r["accepted"] for r in rows) / rounds, 4),
        "forwards_saved": round(tokens / rounds, 4),
        "acceptance_rate": round(sum(r["accepted"] for r in rows)
                                 / max(1, sum(r["drafted"] for r in rows)), 4),
        "modelled_speed": round(tokens / sum(r["clock"] for r in rows), 4),
        "conditional_acceptance": np.round(share, 4).tolist(),
    }  # fmt: skip


def paired(answers: Answers, against: Answers, draws: int = 2_000) -> dict[str, float]:
    """Difference of accepted tokens per round, with its 95 % bootstrap interval over prompts."""
    keys = sorted(set(answers) & set(against))
    table = np.array([[a[k][n] for a in (answers, against) for n in ("accepted", "rounds")]
                      for k in keys], np.float64)  # fmt: skip
    weights = np.random.default_rng(0).multinomial(len(keys), np.full(len(keys), 1 / len(keys)),
                                                   size=draws)  # fmt: skip

    def difference(sums: Any) -> Any:
        return sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3]

    low, high = np.quantile(difference(weights @ table), [0.025, 0.975])
    result = {"difference": difference(table.sum(0)), "low": low, "high": high}
    return {name: round(float(value), 4) for name, value in result.items()}


def summary(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every setting: overall, by task, and against argmax at the same length and temperature."""
    result: dict[tuple[str, float], Answers] = {}
    for piece in stored(options):
        answers = result.setdefault((piece["name"], piece["temperature"]), {})
        for i, row in enumerate(piece["answers"]):
            answers[piece["task"], piece["first"] + i] = row
    entries = []
    for (name, temperature), answers in result.items():
        plain = result["plain", temperature]
        if name == "plain":
            continue
        tasks = {task: {k: v for k, v in answers.items() if k[0] == task}
                 for task in dict.fromkeys(task for task, _ in answers)}  # fmt: skip
        entry = {"name": name, "temperature": temperature, "overall": figures(answers, plain)}
        entry["tasks"] = {task: figures(rows, plain) for task, rows in tasks.items()}
        length = next((word for word in name.split() if word.startswith("fixed")), None)
        reference = result.get((f"argmax {length}", temperature))
        if reference is not None and reference is not answers:
            entry["against_argmax"] = paired(answers, reference)
            entry["tasks_against_argmax"] = {t: paired(r, reference) for t, r in tasks.items()}
        entries.append(entry)
    return entries


def show(entries: Iterable[dict[str, Any]]) -> None:
    for entry in entries:
        overall, versus = entry["overall"], entry.get("against_argmax")
        print(
            f"T={entry['temperature']} {entry['name']:46} {overall['accepted_per_round']:.2f} "
            f"accepted  {overall['forwards_saved']:.2f}x fewer forwards  "
            f"{overall['modelled_speed']:.2f}x modelled  identical {overall['identical']:.3f}"
            + (f"  vs argmax {versus['difference']:+.3f} [{versus['low']:+.3f}, "
               f"{versus['high']:+.3f}]" if versus else "")
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verifier", default="nano-ar")
    parser.add_argument("--drafter", default="nano")
    parser.add_argument("--group", choices=GROUPS, action="append")
    parser.add_argument("--examples", type=int, default=200, help="prompts per task")
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--prompts", type=Path, nargs="+", help="JSON lines instead of tasks")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--length", type=int, default=8, help="k where searches are compared")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few prompts of three tasks")
    parser.add_argument("--state", type=Path, default=Path("runs/drafting.jsonl"))
    parser.add_argument("--output", type=Path, default=RESULTS / "drafting.json")
    options = parser.parse_args()
    if options.quick:
        options.examples, options.group = 2, options.group or ["searches"]
        options.tasks = options.tasks or ["copy", "shuffle", "story1"]
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    groups = options.group or GROUPS
    settings = [setting for group in groups for setting in getattr(bench, group)()]
    options.state.parent.mkdir(parents=True, exist_ok=True)
    with options.state.open("a") as state:
        for setting, task, first, results in pieces(bench, settings):
            piece = {"run": identity(options), "name": setting.name, "task": task, "first": first,
                     "temperature": setting.temperature,
                     "answers": [counts(result) for result in results]}  # fmt: skip
            print(json.dumps(piece), file=state, flush=True)
    entries = summary(options)
    show(entries)
    result = {
        "verifier": bench.verifier.name, "drafter": bench.model.name, "window": options.window,
        "clock": {"draft": DRAFT, "token": TOKEN}, "experiments": entries,
    }  # fmt: skip
    write(options.output, result)


if __name__ == "__main__":
    main()
