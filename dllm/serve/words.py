"""What the library's parameters are called in a body."""

import re
from collections.abc import Mapping
from functools import cache

from ..core.config import ELSEWHERE, GenerationConfig
from ..core.declared import about_of

# What the library calls it -> what a body does, where a form or another library is meant.
FORMS = {
    "json_schema": "response_format", "regex": 'structured_outputs {"regex": ...}',
    "choice": 'structured_outputs {"choice": ...}',
    "grammar": 'structured_outputs {"grammar": ...}', "top_candidates": "top_logprobs",
}  # fmt: skip


@cache
def library_names() -> tuple[re.Pattern[str], dict[str, str]]:
    """The names of the library that a body has others for."""
    told = wire_names(tuple(GenerationConfig.fields()))
    names = {name: there for there, name in told.items() if name != there}
    names["json_schema"] = FORMS["json_schema"]
    return re.compile(rf"\b({'|'.join(names)})\b"), names


def in_http(text: str) -> str:
    """An error of the library in the words of a body."""
    found, names = library_names()
    return found.sub(lambda match: names[match[1]], text)


def elsewhere(name: str, taken: Mapping[str, str]) -> str | None:
    """What a body has for what is called ``name`` in the library, or in others."""
    if name in FORMS:
        return FORMS[name]
    meant = ELSEWHERE.get(name, name)
    return next((there for there, ours in taken.items() if ours == meant), None)


@cache
def wire_names(names: tuple[str, ...]) -> dict[str, str]:
    """Name in a body -> name here, of the parameters ``names`` that bodies may have."""
    fields = GenerationConfig.fields()
    told = {name: about_of(fields[name]).wire for name in names}
    return {wire or name: name for name, wire in told.items() if wire is not None}
