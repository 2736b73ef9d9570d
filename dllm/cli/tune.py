"""``dllm tune``: the fastest setting that keeps the accuracy of one token per step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .options import MEASURING, OUTPUT, Measured, option, takes
from .output import check_output, note, waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..eval.tune import Candidate, Choice


@dataclass(frozen=True, kw_only=True)
class Tune(Measured):
    """Options of ``dllm tune``; without samplers and curves it searches all of them, without
    caches those of `dllm.eval.tune.CACHES`, and none where forwards are saved."""

    keep: float = option(
        0.99, "Fraction of the baseline's accuracy to keep, default 0.99.", MEASURING
    )
    tolerance: float = option(
        0.05, "How far below it the 95 % interval may reach, default 0.05.", MEASURING
    )
    by: str = option("seconds", "What to save: seconds (default), nfe, computed.", MEASURING)
    examples: int = option(
        200, "Prompts per task that confirm the choice, default 200.", MEASURING, min=1
    )
    screen: int = option(
        96, "Prompts per task that all candidates answer, default 96.", MEASURING, min=1
    )
    seed: int = option(0, "Random seed of the prompts, default 0.", MEASURING, min=0)
    output: Path = option(Path("preset.json"), "Preset file to write, default preset.json.", OUTPUT)


@takes(Tune)
def tune(*, options: Tune) -> None:
    """Find sampler, cache and parameters that are fastest at no loss; write them as a preset.

    Without -s and --curve it tries the curves of all samplers; without -c it tries prefix, dual,
    dkv, dllm_cache and block with the finalists, unless --by nfe, which no cache lowers.

    Use it: dllm generate PROMPT --preset preset.json
    """
    with waiting("loading dllm"):
        from ..eval.curves import samplers_with_curves, settings
        from ..eval.measure import Setting
        from ..eval.problems import problems
        from ..eval.tune import CACHES, Tuning, check_enough, write_preset
        from ..eval.tune import tune as search

    check_output(options.output, "the preset ")
    how = Tuning(
        options.task_names(), options.keep, options.tolerance, options.screen, options.examples,
        by=options.by, seed=options.seed,
        caches=() if options.cache or options.by == "nfe" else CACHES,
    )  # fmt: skip
    for task in how.tasks:
        problems(task)  # a mistake in one is reported at once
    arguments = {"max_new_tokens": 64} | options.given("max_new_tokens", "block_length")
    curves = options.curves() or ([] if options.sampler else samplers_with_curves())
    result = settings(options.sampler or [], curves, options.cache or ["none"], arguments)
    check_enough(how, len(result) * (1 + len(how.caches)))
    model = options.load()
    baseline = Setting("llada", "llada", "none", arguments)
    choice = search(model, result, baseline, how, tell)
    write_preset(choice, model.name, how, options.output)
    print(summary(choice))
    note(f"written: {options.output}")


def tell(stage: str, left: Sequence[Candidate]) -> None:
    """One line per round."""
    shown = ", ".join(who.setting.label for who in left[:4])
    note(f"{stage}: {len(left)} left{': ' + shown if left else ''}")


def summary(choice: Choice) -> str:
    """What was found and what it rests on."""
    change = choice.change
    if not choice.confirmed:
        return (
            f"nothing was confirmed to be cheaper at that accuracy: {choice.setting.label} stays "
            f"({100 * choice.baseline:.1f} % right of {choice.examples})"
        )
    least = "at least " if choice.by == "seconds" else ""
    return (
        f"{choice.setting.label}: {least}{choice.saving:.1f}x less {choice.by} than "
        f"one token per step, "
        f"{100 * choice.accuracy:.1f} % right instead of {100 * choice.baseline:.1f} % "
        f"({100 * change.low:+.1f} to {100 * change.high:+.1f} points, p = {change.p_value:.2g}, "
        f"{choice.examples} prompts)"
    )
