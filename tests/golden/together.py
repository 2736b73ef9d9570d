"""Recorded cases side by side: those that share a model and a cache are rows of one `Session`.

A row does not depend on the others, so each case gets the result it would have got alone, in a
fraction of the time.
"""

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import dllm
from dllm.core.canvas import FloatArray, IntArray, UniformNoise
from dllm.kernels.noise import uniform
from dllm.request import requests

from .call import Call
from .conftest import goldens_dir

ROWS = 32  # decoded at a time

Case = dict[str, Any]


@cache
def model_of(
    name: str, eos_id: int | None = None, block_length: int | None = None
) -> dllm.DiffusionModel:
    """A recorded model; cases may have their own end of text, and blocks of their own length where
    attention is causal between blocks."""
    own: dict[str, Any] = {} if eos_id is None else {
        "eos_token_id": eos_id, "pad_token_id": eos_id, "stop_token_ids": (eos_id,),
    }  # fmt: skip
    if block_length is not None:
        own["block_length"] = block_length
    return dllm.load(Path(goldens_dir()) / name, **own)


def _model(case: Case) -> tuple[str, int | None, int | None]:
    """Arguments of `model_of`."""
    blocks = case["block_length"] if case["model"].startswith("llada2") else None
    return case["model"], case.get("eos_id"), blocks


class Together:
    """Results of ``cases``.  ``call_of`` a case is its call, ``prompts_of`` its prompts as ids.

    The first case that is asked for is decoded with all that can join it.  ``draws_of`` a case are
    recorded numbers that it gets in place of this library's noise, None where there are none.
    """

    def __init__(
        self, cases: Iterable[Case], call_of: Callable[[Case], Call],
        prompts_of: Callable[[Case], list[list[int]]] = lambda case: [case["prompt"]],
        draws_of: Callable[[Case], UniformNoise | None] = lambda case: None,
    ) -> None:  # fmt: skip
        self.cases, self.call_of, self.prompts_of = list(cases), call_of, prompts_of
        self.draws = {i: draws for i, case in enumerate(self.cases, 1) if (draws := draws_of(case))}
        self._results: dict[str, list[dllm.Result] | BaseException] = {}
        self.chosen: set[str] = set()  # ids of the cases that this run of pytest has

    def results(self, case: Case, call: Call) -> list[dllm.Result]:
        """What becomes of each prompt of ``case``.  Raises what its decoding raised."""
        if case["id"] not in self._results:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(requests, "uniform", self._uniform)
                self._decode(*_model(case), call.cache)
        result = self._results[case["id"]]
        if isinstance(result, BaseException):
            raise result
        return result

    def _uniform(
        self, seed: int, stream: int, positions: IntArray, step: int, token: int
    ) -> FloatArray:
        """Noise; a case with draws of its own has its number as seed."""
        draws = self.draws.get(seed)
        if draws is None:
            return uniform(seed, stream, positions, step, token)
        return draws(stream, step, positions)

    def group(self, case: Case) -> str:
        """What `case` shares with those that are decoded with it."""
        return f"{_model(case)} {self.call_of(case).cache}"

    def _decode(self, *group: Any) -> None:
        with dllm.Session(model_of(*group[:-1]), cache=group[-1], max_batch_size=ROWS) as session:
            handles: dict[str, list[dllm.Handle]] = {}
            for number, case in enumerate(self.cases, 1):
                call = self.call_of(case)
                if case["id"] not in self.chosen or (*_model(case), call.cache) != group:
                    continue
                seed = {"seed": number} if number in self.draws else {}
                try:
                    handles[case["id"]] = [
                        session.submit(
                            ids, sampler=call.sampler, trace=True, **seed, **call.arguments
                        )
                        for ids in self.prompts_of(case)
                    ]
                except dllm.DllmError as error:
                    self._results[case["id"]] = error
            for case_id, several in handles.items():
                try:
                    self._results[case_id] = [handle.result(timeout=300) for handle in several]
                except Exception as error:
                    self._results[case_id] = error
