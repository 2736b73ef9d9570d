"""No sampler, cache or seed leaves a format: what goes together with one is always in it."""

import json
import os
import re
from itertools import product
from typing import Any

import jsonschema
import numpy as np
import pytest

import dllm
from dllm.engine.recipe import check_format
from dllm.samplers import compose

from ..settings import OWN_MODELS, SMALL, every_sampler
from ..thin import some

FORMATS: list[dict[str, Any]] = [
    *({"regex": regex} for regex in (
        r"\d{4}-\d{2}-\d{2}", r"(yes|no)", r"[a-z]{3,9}", r"[A-Z][a-z]*( [A-Z][a-z]*){1,3}",
        r"(a|b)*a(a|b){2}", r"é+你?", r".{5,12}", r"[^a-z]{4}(end)?", r"\d+(\.\d+)? (km|m)",
        r"(\w+, )*\w+\.", r"#[0-9a-f]{6}", r"x*", r"(the|a) (cat|dog) (sat|ran)", r"[01]{8}",
        r"\s*\S+", r"<b>.{0,5}</b>", r"[\x00-\x7f]{3}", r"(ab|ba|aab)*", r"-?\d{1,3}(,\d{3})*",
        r"[😀-😎]{1,2}", r"\(\d{3}\) \d{3}-\d{4}",
    )),
    {"choice": ["yes", "no", "unsure"]}, {"choice": ["a", "ab", "abc"]},
    {"choice": ["Tom, Anna", "Anna, Tom", "neither of them"]},
    *({"json_schema": schema} for schema in (
        {"type": "integer", "minimum": 3, "maximum": 40}, {"enum": ["red", "green", 7]},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "object", "properties": {"n": {"type": "string", "maxLength": 6},
                                          "ok": {"type": "boolean"}}, "required": ["n"]},
        {"type": "object"},
    )),
]  # fmt: skip
PROMPTS = ([5, 9, 17, 40, 3], [7], [100, 23, 54, 54, 61, 9, 33, 200])
CACHES = [spec for name, spec in SMALL.items() if name not in OWN_MODELS]
# Refused in one sentence: what writes tokens of its own, or changes the length.
REFUSED = "proposes tokens of its own|changes the length"


def valid(form: dict[str, Any], text: str) -> bool:
    if "regex" in form:
        return re.fullmatch(form["regex"], text, re.ASCII) is not None
    if "choice" in form:
        return text in form["choice"]
    jsonschema.Draft202012Validator(form["json_schema"]).validate(json.loads(text))
    return True


Case = tuple[dict[str, Any], int, float]  # a format, a seed, a temperature


def check(model: dllm.DiffusionModel, sampler: str, cache: str, cases: list[Case]) -> int:
    """Decode all of them in one session, beside rows without a form; how many were."""
    count = 0
    with dllm.Session(model, cache=cache, max_batch_size=6) as session:
        handles = []
        for i, (form, seed, temperature) in enumerate(cases):
            how = {"sampler": sampler, "max_new_tokens": 22, "seed": seed,
                   "temperature": temperature}  # fmt: skip
            prompt = list(PROMPTS[i % len(PROMPTS)])
            try:
                handles.append((form, session.submit(prompt, **how, **form)))
                if i % 4 == 0:
                    session.submit(prompt, **how)
            except dllm.ConfigError as error:
                if not re.search(REFUSED, str(error)):  # they do not go together at all
                    with pytest.raises(dllm.ConfigError, match=re.escape(str(error))):
                        session.submit(prompt, **how)
        for form, handle in handles:
            out = handle.result(60)
            assert valid(form, out.text), (sampler, cache, form, out.text)
            count += 1
    return count


SAMPLERS = every_sampler()


@pytest.mark.parametrize("i", some(range(len(SAMPLERS)), len(SAMPLERS) // 9), ids=SAMPLERS)
def test_every_sampler(tiny: dllm.DiffusionModel, i: int) -> None:
    forms = [FORMATS[(3 * i + j) % len(FORMATS)] for j in (0, 11)]
    check(tiny, SAMPLERS[i], "none", [(form, i, float(i % 2)) for form in forms])


@pytest.mark.parametrize("i", some(range(len(CACHES)), 4), ids=CACHES)
def test_every_cache(tiny: dllm.DiffusionModel, i: int) -> None:
    sampler = "llada(remasking=random)" if "dkv_greedy" in CACHES[i] else "threshold(0.6)"
    forms = [FORMATS[(5 * i + j) % len(FORMATS)] for j in (0, 13)]
    check(tiny, sampler, CACHES[i], [(form, i, float(i % 2)) for form in forms])


ALL: list[Case] = list(product(FORMATS, range(20), (0.0, 1.0)))
SHARE = int(os.environ.get("DLLM_CASES", "12"))  # of the 1,200 cases of each pair


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_pair(tiny: dllm.DiffusionModel, sampler: str, cache: str) -> None:
    """Twenty seeds and thirty formats, of which each pair that goes together sees its own share."""
    number = SAMPLERS.index(sampler) * len(CACHES) + CACHES.index(cache)
    chosen = np.random.default_rng(number).choice(len(ALL), min(SHARE, len(ALL)), replace=False)
    count = check(tiny, sampler, cache, [ALL[i] for i in chosen])
    if "DLLM_CASES_LOG" in os.environ:
        with open(os.environ["DLLM_CASES_LOG"], "a", encoding="utf-8") as file:
            file.write(f"{sampler}\t{cache}\t{count}\n")


def test_which_samplers_are_refused() -> None:
    """The list in the documentation."""
    refused = []
    for name in [*SAMPLERS, "append", "daedal"]:
        sampler = compose(name, facts={"eos_token_id": 0})
        try:
            check_format(sampler, judged=False)
        except dllm.ConfigError:
            refused.append(name)
    assert {name.split("(")[0].split("+")[0] for name in refused} == {
        "credit", "daedal", "ddim", "dmax", "edit", "entropy_bound", "s2d2",
    }  # fmt: skip
