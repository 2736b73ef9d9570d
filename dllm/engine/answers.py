"""From the numbers of a forward, once they are on the host, to what every job is told."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.canvas import FloatArray, IntArray
from ..core.errors import NOT_FINITE, NumericError
from ..kernels.statistics import COLDEST
from ..samplers import Prediction
from ..structured.format import Question, complete
from ..structured.judged import Judged
from .rows import Job

Predictions = tuple[Prediction, Prediction | None]  # of a job's targets, of its masks fed again


def by_group(
    jobs: list[Job], groups: list[list[int]], shared: list[list[str]], own: list[list[str]],
    arrays: list[Any],
) -> list[Predictions | NumericError]:  # fmt: skip
    """The answers to jobs in ``groups`` of equal options: ``arrays`` have the columns of each
    group, then the numbers of each job, by their names."""
    there = iter(arrays)
    columns = [{name: next(there) for name in names} for names in shared]
    host: list[dict[str, Any]] = [{name: next(there) for name in names} for names in own]
    for members, numbers in zip(groups, columns, strict=True):
        at = 0
        for i in members:
            here = slice(at, at + len(jobs[i].asked))
            host[i] |= {name: column[here] for name, column in numbers.items()}
            at = here.stop
    return _completed(jobs, [*map(predictions, jobs, host)], host)


def predictions(job: Job, numbers: Mapping[str, Any]) -> Predictions | NumericError:
    """What a job's numbers say, unless they are not finite."""
    logprob = numbers["logprob"]
    if np.count_nonzero(np.isfinite(logprob)) < len(logprob):
        where = int(job.asked[~np.isfinite(logprob)][0])
        return NumericError(f"the probabilities at position {where} are not finite: {NOT_FINITE}")
    if job.verifies:  # what a position gets in place of a refused draft
        numbers = {**numbers, "asked.stands": numbers["stands"], "token": numbers["residual"],
                   "logprob": numbers["residual_logprob"]}  # fmt: skip
        judged = _prediction(job.asked, numbers)
        return judged, judged
    return _prediction(job.targets, numbers), None


def _completed(
    jobs: list[Job], answers: list[Predictions | NumericError], host: list[dict[str, Any]]
) -> list[Predictions | NumericError]:
    """The same with one joint completion proposed where the text has a format."""
    asked: dict[int, Question] = {}
    for i, (job, answer, numbers) in enumerate(zip(jobs, answers, host, strict=True)):
        form, config = job.row.recipe.format, job.row.recipe.config
        if form is None or isinstance(answer, NumericError):
            continue
        if isinstance(form, Judged):
            answers[i] = _judged(job, form, answer, numbers)
        else:
            draws, whole = config.temperature >= COLDEST, numbers["class_logprob"]
            weight = numbers.get("class_weight", whole) if draws else numbers["class_token_logprob"]
            asked[i] = Question(form, job.canvas, job.targets, weight, whole, draws)
    for i, found in zip(asked, complete(list(asked.values())), strict=True):
        answer, numbers = answers[i], host[i]
        assert not isinstance(answer, NumericError)
        if found is None:
            answers[i] = NumericError(
                "no text of the structure is possible any more: probabilities are 0 or not finite"
            )
            continue
        token, logprob = answer[0].token.copy(), answer[0].logprob.copy()
        for at, classes, sure, exact in found:
            jobs[i].row.inexact |= not exact
            token[at] = numbers["class_token"][at, classes]
            logprob[at] = numbers["class_token_logprob"][at, classes]
            if jobs[i].row.recipe.config.confidence != "model":
                logprob[at] += sure - numbers["class_logprob"][at, classes]
        answers[i] = replace(answer[0], token=token, logprob=logprob, joint=True), answer[1]
    return answers


def _judged(
    job: Job, form: Judged, answer: Predictions, numbers: Mapping[str, Any]
) -> Predictions | NumericError:
    """The same where the format has no automaton."""
    config, n = job.row.recipe.config, len(job.targets)
    heat = config.temperature if config.temperature >= COLDEST else 0.0
    top = numbers["top_token"][:n], numbers["top_logprob"][:n]
    found = form.complete(job.canvas, job.targets, *top, heat)
    if found is None:
        return NumericError("no text of the structure is known that completes what is decided")
    job.row.inexact = True
    token, sure, known = found
    logprob = (known if config.confidence == "model" else sure).astype(answer[0].logprob.dtype)
    return replace(answer[0], token=token, logprob=logprob, joint=True), answer[1]


def _prediction(positions: IntArray, numbers: Mapping[str, Any]) -> Prediction:
    get = numbers.get
    asked: dict[str, FloatArray] = {
        name.removeprefix("asked."): array
        for name, array in numbers.items()
        if name.startswith("asked.")
    }
    if "select_logprob" in numbers:
        asked["held"] = numbers["select_logprob"][:, None]
    return Prediction(
        positions, numbers["token"], numbers["logprob"], get("margin"), get("gap"),
        get("entropy"), get("max_logprob"), get("top_token"), get("top_logprob"), asked,
    )  # fmt: skip
