"""What a judge is told of a structure: expressions and grammars in words that it reads as we do.

Raises `Unfit` and `ConfigError` for what has none.
"""

from collections.abc import Mapping
from typing import Any

from ..core.errors import ConfigError
from .byte_automaton import Budget, Unfit
from .expressions import pattern_part, regex_part
from .formats import FORMATS
from .grammar import Grammar, Node
from .keywords import DATA, NAMED
from .parts import Bytes, Either, Letters, Part, Repeat, Row
from .source import Source

EMPTY = '""'


def plain(source: Source) -> Source:
    """The same texts.  A grammar that `Grammar` does not read stays as it is: words such as
    ``%json`` are the judge's own."""
    ((kind, value),) = source.items()
    if kind == "regex":
        return {"regex": plain_regex(regex_part(value))}
    if kind == "grammar":
        try:
            grammar = Grammar(value, Budget())
        except ConfigError:
            return source
        return {"grammar": plain_grammar(grammar)}
    if kind in ("json_schema", "open_schema"):
        return {kind: plain_schema(value)}
    raise Unfit("is of several parts")


def plain_regex(part: Part) -> str:
    """``part`` as a regular expression of numbered characters, groups and counts, which mean the
    same in every dialect.  Raises `Unfit` where some of it is an automaton."""
    if isinstance(part, Bytes):
        return "".join(rf"\x{{{ord(c):x}}}" for c in part.data.decode())
    if isinstance(part, Letters):
        return "[" + "".join(rf"\x{{{a:x}}}-\x{{{b:x}}}" for a, b in part.ranges) + "]"
    if isinstance(part, Row):
        return "".join(map(plain_regex, part.parts))
    if isinstance(part, Either):
        return f"(?:{'|'.join(map(plain_regex, part.parts))})"
    if isinstance(part, Repeat):
        most = "" if part.most is None else part.most
        return f"(?:{plain_regex(part.part)}){{{part.least},{most}}}"
    raise Unfit("is written as an automaton")


def plain_schema(schema: Any) -> Any:
    """A schema with its patterns as expressions of whole strings; formats that we write are such,
    too."""
    if isinstance(schema, list):
        return [plain_schema(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in DATA or (key == "format" and "pattern" in schema):
            result[key] = value
        elif key == "pattern":
            result[key] = _pattern(value)
        elif key == "format" and value in FORMATS:
            result["pattern"] = f"^(?:{plain_regex(regex_part(FORMATS[value]))})$"
        elif key in NAMED:
            named = _pattern if key == "patternProperties" else str
            result[key] = {named(name): plain_schema(each) for name, each in value.items()}
        else:
            result[key] = plain_schema(value)
    return result


def _pattern(pattern: str) -> str:
    return f"^(?:{plain_regex(pattern_part(pattern, 'the schema', decoded=True))})$"


def plain_grammar(grammar: Grammar) -> str:
    """A grammar in the syntax of Lark, its rules by their numbers."""
    names = {
        name: f"{'T' if grammar.is_terminal(name) else 'r'}{i}"
        for i, name in enumerate(grammar.rules)
    }

    def text(node: Node) -> str:
        kind, value = node[0], node[1]
        if kind == "name":
            grammar.rule(value)
            return names[value]
        if kind in ("either", "row"):
            return f"({(' | ' if kind == 'either' else ' ').join(map(text, value)) or EMPTY})"
        if kind == "repeat":
            most = "" if node[3] is None else node[3]
            return f"({text(value)}){{{node[2]},{most}}}"
        return EMPTY if value == "" else f"/{plain_regex(grammar.token(node))}/"

    lines = [f"start: {text(('name', grammar.start))}"]
    lines += [f"{names[name]}: {text(node)}" for name, node in grammar.rules.items()]
    return "\n".join(lines + [f"%ignore {text(node)}" for node in grammar.ignored])
