"""Parameters in bodies: their names, and what JSON and a public server ask beyond the library."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.config import GenerationConfig
from ..core.declared import about_of
from ..core.errors import DllmError
from .problems import invalid, shortened
from .words import in_http, wire_names

MOST_ITEMS, MOST_STOPS, MOST_HOLES = 1024, 16, 1024
MOST_GUIDANCE = 100
LONGEST_SPEC, LONGEST_STOP = 400, 1000  # characters


def is_spec(value: Any) -> bool:
    # Some parts read a file that they are told of; a client has none here.
    return (
        isinstance(value, str)
        and 0 < len(value) <= LONGEST_SPEC
        and not any(sign in value for sign in ("/", "\\", ".np"))
    )


def _is_stop(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return len(texts) <= MOST_STOPS and all(
        isinstance(text, str) and 0 < len(text) <= LONGEST_STOP for text in texts
    )


def _by_number(*kinds: type, most: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and len(value) <= MOST_ITEMS and all(
        re.fullmatch("[0-9]{1,7}", key) and type(item) in kinds
        and (isinstance(item, str) or abs(item) <= most) for key, item in value.items()
    )  # fmt: skip


def _is_draft(value: Any) -> bool:
    return (isinstance(value, str) and value.count("[[") <= MOST_HOLES) or (
        isinstance(value, list) and all(type(item) is int for item in value)
    )


def _keys(value: dict[str, Any]) -> dict[int, Any]:
    return {int(key): item for key, item in value.items()}


@dataclass(frozen=True)
class Rule:
    """What a value is in a body, whether one will do, and what the library gets of it."""

    kind: str
    accepts: Callable[[Any], bool]
    read: Callable[[Any], Any] = lambda value: value


SPEC = Rule(f"a name such as 'threshold(tau=0.8)', of at most {LONGEST_SPEC} characters and "
            "without files", is_spec)  # fmt: skip
RULES = {
    "length": SPEC,
    "seed": Rule("a whole number from -1 (draw one)", lambda v: type(v) is int and v >= -1,
                 lambda v: None if v == -1 else v),
    "cfg_scale": Rule(f"a number from 0 to {MOST_GUIDANCE}",
                      lambda v: type(v) in (int, float) and 0 <= v <= MOST_GUIDANCE),
    "top_k": Rule("a whole number from -1", lambda v: type(v) is int and v >= -1,
                  lambda v: max(0, v)),  # vLLM's clients say -1 for none
    "stop_strings": Rule(f"a string or at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} "
                         "characters", _is_stop),
    "constraints": Rule(f"an object of at most {MOST_ITEMS} texts by their offset, "
                        '{"0": "The answer"}', _by_number(str, int), _keys),
    "logit_bias": Rule(f"an object of at most {MOST_ITEMS} numbers from -100 to 100 by token id, "
                       '{"17": -2.5}', _by_number(int, float, most=100), _keys),
    "initial_text": Rule("a string, in which [[8]] stands for 8 open tokens, or token ids with -1",
                      _is_draft),
    "remask": Rule(f"a list of at most {MOST_HOLES} positions and [first, past the last] pairs",
                   lambda v: isinstance(v, list) and len(v) <= MOST_HOLES),
}  # fmt: skip


def parameters(sent: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """What was ``sent`` by its ``names`` there, as the library's arguments; or a `Problem`."""
    given: dict[str, Any] = {}
    for called, value in sent.items():
        rule = RULES.get(names[called])
        if rule is not None and not rule.accepts(value):
            raise invalid(called, f"{called} must be {rule.kind}, not {shortened(value)}")
        if (read := value if rule is None else rule.read(value)) is not None:
            given[names[called]] = read
    try:
        config = GenerationConfig(**given)
    except DllmError as error:
        blamed = next((there for there, name in names.items() if name == error.field), None)
        raise invalid(blamed, in_http(str(error))) from None
    return {name: getattr(config, name) for name in given}


def listed(takes: Collection[str]) -> dict[str, Any]:
    """Properties of a JSON schema, for the page of the API."""
    fields, typed = GenerationConfig.fields(), GenerationConfig.model_json_schema()["properties"]
    return {
        called: {"description": RULES[name].kind} if name in RULES
        else typed[name] | {"description": about_of(fields[name]).says}
        for called, name in wire_names(tuple(takes)).items()
    }  # fmt: skip
