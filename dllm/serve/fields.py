"""The fields of requests: which are honoured, which change nothing, which are refused.

A field is in one of three classes.  *Honoured* fields have a check of their value.  *Neutral* ones
are accepted where they change nothing, such as ``frequency_penalty`` 0, and refused elsewhere with
the reason.  Every other field is refused; nothing is ignored silently.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Collection
from typing import Any

from ..errors import UnknownNameError
from .problems import Problem

Check = Callable[[Any], bool]
Checked = tuple[Check, str]  # whether a value will do, and what it must be

LONGEST_QUOTE = 200  # characters of a value in an error message
LONGEST_SPEC = 400  # characters of a sampler's name
MOST_CHOICES = 8
MOST_STOPS = 16
LONGEST_STOP = 1000  # characters
MOST_CONSTRAINTS = 1024
MOST_HOLES = 1024
MOST_TOP_LOGPROBS = 20


def integer(least: int, most: int = 2**31 - 1) -> Checked:
    text = f"a whole number from {least} to {most}"
    return lambda v: type(v) is int and least <= v <= most, text


def number(least: float, most: float = math.inf) -> Checked:
    text = f"a number from {least:g}" + ("" if most == math.inf else f" to {most:g}")
    return lambda v: type(v) in (int, float) and math.isfinite(v) and least <= v <= most, text


def one_of(*values: Any) -> Checked:
    text = " or ".join(map(repr, values))
    return lambda v: any(type(v) is type(known) and v == known for known in values), text


BOOLEAN: Checked = (lambda v: type(v) is bool, "true or false")
TEXT: Checked = (lambda v: isinstance(v, str), "a string")
OBJECT: Checked = (lambda v: isinstance(v, dict), "an object")
ANYTHING: Checked = (lambda v: True, "anything")


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return (
        isinstance(texts, list)
        and len(texts) <= MOST_STOPS
        and all(isinstance(text, str) and 0 < len(text) <= LONGEST_STOP for text in texts)
    )


def _is_sampler(value: Any) -> bool:
    # Some parts read a file that they are told of; a client has none here.
    return (
        isinstance(value, str)
        and 0 < len(value) <= LONGEST_SPEC
        and not any(sign in value for sign in ("/", "\\", ".np"))
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str) or _is_ids(value):
        return True
    return (
        isinstance(value, list)
        and bool(value)
        and (all(isinstance(item, str) for item in value) or all(map(_is_ids, value)))
    )


def _is_constraints(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MOST_CONSTRAINTS
        and all(
            key.isascii() and key.isdigit() and len(key) < 8 and isinstance(text, str | int)
            for key, text in value.items()
        )
    )


HOLED: Checked = (
    lambda v: isinstance(v, str) and v.count("[[") <= MOST_HOLES,
    f"a string with at most {MOST_HOLES} holes",
)
MESSAGES: Checked = (lambda v: isinstance(v, list) and bool(v), "a list of messages")
PROMPT: Checked = (_is_prompt, "a string, token ids, or a list of either")

DECODING: dict[str, Checked] = {
    "model": TEXT,
    "sampler": (
        _is_sampler,
        f"the name of a sampler such as 'threshold(tau=0.8)', of at most {LONGEST_SPEC} characters "
        "and without files",
    ),
    "cache": TEXT,
    "steps": integer(1),
    "block_length": integer(1),
    "cfg_scale": number(0, 100),
    "eos_policy": TEXT,
    "temperature": number(0, 100),
    "top_p": (lambda v: number(0, 1)[0](v) and v > 0, "a number above 0, at most 1"),
    "top_k": integer(-1),
    "seed": integer(0, 2**63 - 1),
    "n": integer(1, MOST_CHOICES),
    "deadline": (lambda v: number(0)[0](v) and v > 0, "a number of seconds above 0"),
    "stream": BOOLEAN,
    "stream_options": OBJECT,
    "return_token_ids": BOOLEAN,
    "trace": BOOLEAN,
}
WRITING: dict[str, Checked] = {
    "max_tokens": integer(1),
    "min_tokens": integer(0),
    "ignore_eos": BOOLEAN,
    "stop": (
        _is_stop,
        f"a string or at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters",
    ),
    "constraints": (
        _is_constraints,
        f'an object of at most {MOST_CONSTRAINTS} texts, {{"0": "The answer"}}',
    ),
    "diffusing": BOOLEAN,
}
HONOURED: dict[str, dict[str, Checked]] = {
    "chat": {
        **DECODING, **WRITING,
        "messages": MESSAGES,
        "max_completion_tokens": integer(1),
        "logprobs": BOOLEAN,
        "top_logprobs": integer(0, MOST_TOP_LOGPROBS),
    },
    "text": {
        **DECODING, **WRITING,
        "prompt": PROMPT,
        "suffix": TEXT,
        "logprobs": integer(0, MOST_TOP_LOGPROBS),
    },
    "infill": {**DECODING, "text": HOLED, "prompt": TEXT, "messages": MESSAGES},
    "score": {
        "model": TEXT,
        "prompt": TEXT,
        "messages": MESSAGES,
        "continuation": (
            lambda v: isinstance(v, str) or (
                isinstance(v, list) and 0 < len(v) <= 64 and all(isinstance(t, str) for t in v)
            ),
            "a string or at most 64 strings",
        ),
        "estimator": TEXT,
        "samples": integer(1, 4096),
        "greedy": BOOLEAN,
        "early_stop": BOOLEAN,
        "cfg_scale": number(0, 100),
        "seed": integer(0, 2**63 - 1),
    },
}  # fmt: skip

# Accepted where the value changes nothing; else refused for the reason.
PENALTIES = "a canvas is not written from left to right, so that there is no past to penalise"
FORMATS = "constrained output does not exist yet: ask for text and parse it"
TOOLS = "tools do not exist here: describe them in the prompt"
OTHER = "it has no meaning for a text model"
NEUTRAL: dict[str, tuple[Checked, str]] = {
    "frequency_penalty": (one_of(0, 0.0), PENALTIES),
    "presence_penalty": (one_of(0, 0.0), PENALTIES),
    "repetition_penalty": (one_of(1, 1.0), PENALTIES),
    "length_penalty": (one_of(1, 1.0), PENALTIES),
    "logit_bias": (one_of({}), "tokens have no bias here"),
    "bad_words": (one_of([]), "words cannot be forbidden"),
    "stop_token_ids": (one_of([]), "stop ids are the model's own: use stop"),
    "min_p": (one_of(0, 0.0), "use top_p or top_k"),
    "typical_p": (one_of(1, 1.0), "use top_p or top_k"),
    "best_of": (one_of(1), "use n"),
    "use_beam_search": (one_of(False), "there are no beams"),
    "echo": (one_of(False), "the prompt is not repeated"),
    "include_stop_str_in_output": (one_of(False), "a stop string is never part of the text"),
    "skip_special_tokens": (one_of(True), "special tokens are not text"),
    "spaces_between_special_tokens": (one_of(True), "special tokens are not text"),
    "add_special_tokens": (one_of(True), "a prompt is encoded as the model expects it"),
    "add_generation_prompt": (one_of(True), "the last message is complete: use /v1/completions"),
    "continue_final_message": (one_of(False), "the last message is complete: use /v1/completions"),
    "detokenize": (one_of(True), "answers are text: return_token_ids adds the ids"),
    "response_format": (one_of({"type": "text"}), FORMATS),
    "structured_outputs": (one_of({}), FORMATS),
    "guided_json": (one_of(), FORMATS),
    "guided_regex": (one_of(), FORMATS),
    "guided_choice": (one_of(), FORMATS),
    "guided_grammar": (one_of(), FORMATS),
    "tools": (one_of([]), TOOLS),
    "tool_choice": (one_of("none", "auto"), TOOLS),
    "functions": (one_of([]), TOOLS),
    "function_call": (one_of("none", "auto"), TOOLS),
    "web_search_options": (one_of(), TOOLS),
    "store": (one_of(False), "nothing is stored"),
    "modalities": (one_of(["text"]), OTHER),
    "audio": (one_of(), OTHER),
    "prediction": (one_of(), "a canvas starts empty: fix parts of it with constraints"),
    "moderation": (one_of(), OTHER),
    "user": (TEXT, ""),
    "metadata": (OBJECT, ""),
    "parallel_tool_calls": (BOOLEAN, ""),
    "service_tier": (TEXT, ""),
    "safety_identifier": (TEXT, ""),
    "prompt_cache_key": (TEXT, ""),
    "prompt_cache_options": (OBJECT, ""),
    "prompt_cache_retention": (TEXT, ""),
    "reasoning_effort": (TEXT, ""),
    "verbosity": (TEXT, ""),
    "priority": (one_of(0), "requests are served in the order they come"),
    "request_id": (TEXT, ""),
}
OPTIONS: dict[str, Checked] = {  # of stream_options
    "include_usage": BOOLEAN,
    "include_drafts": one_of(True, False, "text"),
    "continuous_usage_stats": BOOLEAN,
}


def checked(kind: str, body: Any) -> dict[str, Any]:
    """The honoured fields of ``body`` that have a value; `Problem` for any that will not do."""
    if not isinstance(body, dict):
        raise Problem(400, "the body must be a JSON object", code="invalid_body")
    honoured = HONOURED[kind]
    neutral = NEUTRAL if kind in ("chat", "text") else {}
    result: dict[str, Any] = {}
    for name, value in body.items():
        if not is_unicode([name, value]):
            raise Problem(400, f"{ascii(name)[:80]} is not valid Unicode: it has half a surrogate",
                          name.encode(errors="replace").decode()[:80], "invalid_value")  # fmt: skip
        if name in honoured:
            if value is not None:
                require(name, value, honoured[name])
                result[name] = value
        elif name in neutral:
            (will_do, _), reason = neutral[name]
            if value is not None and not will_do(value):
                raise Problem(400, _refusal(name, value, reason), name, "unsupported_value")
        else:
            raise unknown_field(name, [*honoured, *neutral])
    return result


def is_unicode(value: Any) -> bool:
    """Whether all texts in a JSON value can be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def require(name: str, value: Any, check: Checked) -> None:
    """`Problem` unless ``value`` will do."""
    will_do, text = check
    if not will_do(value):
        raise Problem(400, f"{name} must be {text}, not {shortened(value)}", name, "invalid_value")


def unknown_field(name: str, known: Collection[str]) -> Problem:
    """A field that is in no class."""
    message = str(UnknownNameError("field", name[:80], known))
    return Problem(400, message, name[:80], "unknown_field")


def _refusal(name: str, value: Any, reason: str) -> str:
    return f"{name}={shortened(value)} is not supported: {reason or 'drop it'}"


def shortened(value: Any) -> str:
    """A value in an error message: nobody is sent back megabytes."""
    text = reprlib.repr(value)
    return text if len(text) <= LONGEST_QUOTE else text[:LONGEST_QUOTE] + "..."
