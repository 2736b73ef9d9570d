"""What users write, as one regular expression."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Sequence

from ..core.errors import ConfigError, one_line, short

NONE = r"\x{10FFFE}\x{10FFFF}"  # characters that stand for the ends of an expression
# What a class of characters is taken without: in a text, and in a string of JSON.
TEXT, STRING = f"[^{NONE}]", rf'[^"\\\x00-\x1f{NONE}]'
# One character of a JSON string as it is written.
CHARACTER = rf'(?:{STRING}|\\["\\/bfnrt])'
# Classes are those of ASCII, as with Python's `re.ASCII`.
ASCII = {
    "d": "[0-9]", "D": "[^0-9]",
    "w": "[A-Za-z0-9_]", "W": "[^A-Za-z0-9_]",
    "s": r"[ \t\n\r\f\v]", "S": r"[^ \t\n\r\f\v]",
}  # fmt: skip
BEYOND = re.compile(r"\(\?(?:[=!]|<[=!]|P=|\()|\\[bBAZ1-9]")
PROPERTY = re.compile(r"\\[pP](?:\{[^}]*\}|\w)")  # of Unicode, which Python's own module lacks
PIECE = re.compile(
    r"(?P<property>\\[pP](?:\{[^}]*\}|\w))|\\(?:u(?P<code>[0-9A-Fa-f]{4})|x(?P<byte>[0-9A-Fa-f]{2}))"
    r"|\\(?P<escaped>.)|(?P<group>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<plain>.)", re.DOTALL,
)  # fmt: skip
SPELT = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
DOTALL = re.compile(r"\(\?[a-z]*s")


def regex_pattern(regex: str) -> str:
    r"""A regular expression of the user, of which a text has to match the whole.

    ``\d``, ``\w`` and ``\s`` are those of ASCII.  Raises `ConfigError` for one that is not well
    formed, and for what no automaton has: look-around, back references, word boundaries.
    """
    return _translated(regex, f"regex {short(regex)}", TEXT, lambda c: literal(c))[1]


def string_pattern(pattern: str, path: str) -> str:
    """The content of a JSON string in which ``pattern``, an expression of a schema, is found.

    Quotes, backslashes and line breaks that the pattern names are written as escapes; classes of
    characters are taken without them.  ``^`` and ``$`` may stand at the ends.
    """
    what = f"{path} of the schema has the pattern {short(pattern)}, which"
    begins, inner, ends = _translated(pattern, what, STRING, in_string)
    around = f"{CHARACTER}*"
    return f"{'' if begins else around}(?:{inner}){'' if ends else around}"


def _translated(
    pattern: str, what: str, allowed: str, spell: Callable[[str], str]
) -> tuple[bool, str, bool]:
    """An expression in the syntax of the automata, without ``^`` at its start and ``$`` at its end,
    and whether it had them.  Classes are taken within ``allowed``, and ``spell`` says how one
    character is written."""
    _check(pattern, what)
    begins, ends = pattern.startswith("^"), bool(re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern))
    inner, result, depth = pattern[begins : len(pattern) - ends], "", 0
    narrower = "&&[ -~]" if allowed == STRING else ""  # schemas differ on what else these are
    line = "" if DOTALL.search(pattern) else r"&&[^\n]"
    for piece in PIECE.finditer(inner):
        escaped, plain = piece["escaped"], piece["plain"]
        depth += {"(": 1, ")": -1}.get(plain or "", 0)
        if plain in ("^", "$") or (plain == "|" and not depth and begins != ends):
            raise ConfigError(
                f"{what} has ^ or $ in its middle: they may stand at its ends, alternatives "
                "between them in a group"
            )
        if piece["code"] or piece["byte"]:
            result += spell(chr(int(piece["code"] or piece["byte"], 16)))
        elif piece["property"]:
            result += f"[{piece[0]}&&{allowed}]"
        elif piece["group"]:
            inside = re.sub(r"\\(.)|[\[&~]", _in_class, piece["group"][1:])
            narrow = narrower if re.search(r"\\[DWS]", piece["group"]) else ""
            result += f"[[{inside}&&{allowed}{narrow}]"
        elif escaped in ASCII:
            result += f"[{ASCII[escaped]}&&{allowed}{narrower if escaped in 'DWS' else ''}]"
        elif escaped:
            result += spell(SPELT.get(escaped, escaped))
        elif plain == ".":
            result += f"[{allowed}{line}]"
        else:
            result += plain if plain in "\\()|*+?{}" or plain.isalnum() else spell(plain)
    return begins, result, ends


def _in_class(match: re.Match[str]) -> str:
    """A part of a class where the syntax of the automata differs: a class by its letter, or a sign
    that stands for itself."""
    return ASCII.get(match[1], match[0]) if match[1] else f"\\{match[0]}"


def _check(pattern: str, what: str) -> None:
    """Raise `ConfigError` for an expression that is not well formed, or no automaton's."""
    if not isinstance(pattern, str):
        raise ConfigError(f"{what} is no text")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of signs that may change their meaning
            re.compile(PROPERTY.sub(".", pattern), re.ASCII)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{what} is not well formed: {one_line(error)}") from None
    beyond = BEYOND.search(re.sub(r"\\.", lambda m: m[0] if BEYOND.match(m[0]) else "x", pattern))
    if beyond:
        raise ConfigError(
            f"{what} has {beyond[0]!r}: look-around, back references and boundaries are not "
            "available in a format; the whole text is matched as it is"
        )
    if any(c in pattern for c in "\U0010fffe\U0010ffff"):
        raise ConfigError(f"{what} has U+10FFFE or U+10FFFF, which are no characters of a text")


def choice_pattern(choices: Sequence[str]) -> str:
    """One of several texts."""
    return "|".join(map(literal, choices))


def literal(text: str) -> str:
    """A text as an expression that matches just it."""
    return re.sub(r"([\\.+*?()|\[\]{}^$#&\-~/])", r"\\\1", text)


def in_string(character: str) -> str:
    """One character as the content of a JSON string, as an expression."""
    return literal(json.dumps(character, ensure_ascii=False)[1:-1])


def either(texts: Iterable[str]) -> str:
    """One of several expressions."""
    each = list(dict.fromkeys(texts))
    return each[0] if len(each) == 1 else "(?:" + "|".join(each) + ")"
