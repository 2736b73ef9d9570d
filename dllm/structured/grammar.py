"""Grammars in the syntax of Lark, or of GBNF, as parts of a regular language.

Rules that contain themselves are written to a depth; where they do so at an end, as lists and sums
of terms do, without a limit: such a rule is a repetition.  ``%ignore`` lets what it names stand
between two tokens, and has it stand where two words would become one; never at the ends.
"""

import ast
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from ..core.errors import ConfigError, short
from .byte_automaton import EVERYTHING, Budget, Empty, TooLarge, combined
from .expressions import regex_part
from .keywords import Nothing
from .parts import EMPTY, Bytes, Either, Leaf, Part, Repeat, Row, automaton_of, erased, maybe

MOST_RULES = 20_000  # rules that are written, each time anew where it stands less deep
JOINT = 0xFF  # between two tokens: no byte of any text
TOKEN = re.compile(
    r'''(?P<skip>[ \t\r]+|(?://|\#)[^\n]*)|(?P<line>\n)|(?P<text>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[imsxu]*)
    |(?P<name>[?!]?[A-Za-z_][\w-]*(?:\.[A-Za-z_]\w*)*)|(?P<number>\d+)
    |(?P<sign>::=|->|\.\.|%[a-z]+|[][:|()*+?~{},.])''', re.VERBOSE,
)  # fmt: skip
GBNF = re.compile(
    r'''(?P<skip>[ \t\r]+|\#[^\n]*)|(?P<line>\n)|(?P<text>"(?:[^"\\\n]|\\.)*")
    |(?P<regex>\[(?:[^\]\\\n]|\\.)+\]|\.)|(?P<name>[A-Za-z_][\w-]*)|(?P<number>\d+)
    |(?P<sign>::=|[|()*+?{},])''', re.VERBOSE,
)  # fmt: skip
COMMON = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+", "LETTER": "[A-Za-z]", "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]", "WORD": "[A-Za-z]+", "CNAME": r"[A-Za-z_]\w*",
    "NUMBER": r"(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"', "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
    "NEWLINE": r"(?:\r?\n)+", "CR": r"\r", "LF": r"\n", "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
}  # fmt: skip

# A node: ("either", nodes), ("row", nodes), ("repeat", node, least, most), ("name", name),
# ("text", text, whether case counts for nothing), ("regex", expression).
Node = tuple[Any, ...]


class Token(NamedTuple):
    kind: str
    text: str
    line: int


class Grammar:
    """A grammar, whose first rule is ``start``, or ``root`` in GBNF.  How often a rule may stand
    within itself is the depth of the ``budget``."""

    def __init__(self, text: str, budget: Budget) -> None:
        self.budget = budget
        self.rules: dict[str, Node] = {}
        self.ignored: list[Node] = []
        self.gbnf = re.search(r"^[ \t]*[\w-]+\s*::=", text, re.MULTILINE) is not None
        self.start = "root" if self.gbnf else "start"
        self.open: list[str] = []
        self._count = 0
        self._built: dict[Any, Part | Nothing] = {}
        self._terminals: dict[str, Part] = {}
        self._read(text)

    def part(self) -> Part:
        """All texts.  Raises `ConfigError`, `Unfit`."""
        try:
            if not self.ignored:
                return self._rule(self.start)
            joined = automaton_of(self._rule(self.start), self.budget)
            joint, word, anything = Bytes(bytes([JOINT])), regex_part(r"\w"), Leaf(EVERYTHING)
            ends = automaton_of(maybe(Row((anything, joint))), self.budget)
            several = Repeat(joint, 1, None)
            clash = automaton_of(Row((anything, word, several, word, anything)), self.budget)
            apart = combined(combined(joined, ends, self.budget), clash, self.budget, without=True)
            return Leaf(erased(apart, JOINT, self.budget))
        except Nothing:
            raise Empty("contains itself without end") from None

    # -- the syntax ------------------------------------------------------------------------------

    def _tokens(self, text: str) -> list[Token]:
        pattern, at, line = GBNF if self.gbnf else TOKEN, 0, 1
        found: list[Token] = []
        while at < len(text):
            match = pattern.match(text, at)
            if match is None:
                raise ConfigError(f"line {line} of the grammar has {short(text[at : at + 20])}")
            kind = str(match.lastgroup)
            if kind != "skip":
                found.append(Token(kind, match[0], line))
            line += match[0].count("\n")
            at = match.end()
        return [*found, Token("line", "\n", line)]

    def _statements(self, text: str) -> Iterator[list[Token]]:
        """The tokens of a rule or a directive each."""
        here, depth = list[Token](), 0
        tokens = self._tokens(text)
        for i, token in enumerate(tokens):
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(token.text, 0)
            if token.kind != "line":
                here.append(token)
                continue
            after = next((t.text for t in tokens[i:] if t.kind != "line"), "")
            before = here[-1].text if here else ""
            if not depth and after != "|" and before not in ("|", ":", "::=") and here:
                yield here
                here = []
        if here:
            yield here

    def _read(self, text: str) -> None:
        for tokens in self._statements(text):
            first, rest = tokens[0], tokens[1:]
            if first.text == "%ignore":
                self.ignored.append(self._whole(rest))
            elif first.text == "%import":
                self._import(first, [token.text for token in rest])
            elif first.kind != "name":
                self._wrong(first)
            else:
                name = first.text.lstrip("?!")
                while rest and rest[0].text == "." and rest[1:2] and rest[1].kind == "number":
                    rest = rest[2:]  # a priority
                if not rest or rest[0].text != ("::=" if self.gbnf else ":"):
                    self._wrong(rest[0] if rest else first)
                if name in self.rules:
                    raise ConfigError(f"the grammar has the rule {name} twice")
                self.rules[name] = self._whole(rest[1:])

    def _import(self, first: Token, rest: list[str]) -> None:
        names = [name.removeprefix("common.") for name in rest if name not in "(),->"]
        if rest[:1] == ["common"]:  # %import common (A, B)
            names = names[1:]
        alias = names.pop() if "->" in rest else names[0] if names else ""
        for name in names:
            if name not in COMMON:
                raise ConfigError(
                    f"line {first.line} of the grammar imports {short(name)}; known are those of "
                    f"common: {', '.join(COMMON)}"
                )
            self.rules[alias if len(names) == 1 else name] = ("regex", COMMON[name])

    def _whole(self, tokens: list[Token]) -> Node:
        rest = tokens[::-1]  # the next one is the last
        node = self._either(rest)
        if rest:
            self._wrong(rest[-1])
        return node

    def _either(self, rest: list[Token]) -> Node:
        ways = [self._row(rest)]
        while rest and rest[-1].text == "|":
            rest.pop()
            ways.append(self._row(rest))
        return ways[0] if len(ways) == 1 else ("either", ways)

    def _row(self, rest: list[Token]) -> Node:
        nodes: list[Node] = []
        while rest and rest[-1].text not in ("|", ")", "]", "->"):
            nodes.append(self._repeated(rest))
        if rest and rest[-1].text == "->":
            del rest[-2:]  # what a tree would call it
        return nodes[0] if len(nodes) == 1 else ("row", nodes)

    def _repeated(self, rest: list[Token]) -> Node:
        node = self._atom(rest)
        while rest and rest[-1].text in ("*", "+", "?", "~", "{"):
            sign = rest.pop().text
            if sign in "*+?":
                node = ("repeat", node, int(sign == "+"), 1 if sign == "?" else None)
                continue
            between = ".." if sign == "~" else ","
            least = most = self._number(rest)
            if rest and rest[-1].text == between:
                rest.pop()
                least, most = least or 0, self._number(rest)
            if least is None or (most is not None and most < least):
                raise ConfigError(
                    f"a {sign!r} of the grammar is without a count, or falls; templates are not "
                    "supported: write their rules out"
                )
            if sign == "{":
                self._expect(rest, "}")
            node = ("repeat", node, least, most)
        return node

    def _atom(self, rest: list[Token]) -> Node:
        token = rest.pop()
        if token.text in ("(", "["):
            node = self._either(rest)
            self._expect(rest, ")" if token.text == "(" else "]")
            return node if token.text == "(" else ("repeat", node, 0, 1)
        if token.kind == "name":
            return ("name", token.text)
        if token.kind == "regex" and self.gbnf:
            return ("regex", token.text if token.text != "." else r"[\s\S]")
        if token.kind == "regex":
            body, _, flags = token.text[1:].rpartition("/")
            body, flags = body.replace("\\/", "/"), flags.replace("u", "")
            return ("regex", f"(?{flags}:{body})" if flags else body)
        if token.kind != "text":
            self._wrong(token)
        text = self._text(token)
        if rest and rest[-1].text == ".." and rest[-2:-1] and rest[-2].kind == "text":
            rest.pop()
            last = self._text(rest.pop())
            if len(text) != 1 or len(last) != 1 or last < text:
                self._wrong(token)
            return ("regex", f"[{re.escape(text)}-{re.escape(last)}]")
        return ("text", text, token.text.endswith("i"))

    def _text(self, token: Token) -> str:
        text = token.text.removesuffix("i")
        if self.gbnf:  # escapes that Python has not
            text = re.sub(r"\\([][\\])", lambda m: m[0] if m[1] == "\\" else m[1], text)
        try:
            return str(ast.literal_eval(text))
        except (SyntaxError, ValueError):
            self._wrong(token)

    def _number(self, rest: list[Token]) -> int | None:
        return int(rest.pop().text) if rest and rest[-1].kind == "number" else None

    def _expect(self, rest: list[Token], sign: str) -> None:
        if not rest or rest[-1].text != sign:
            raise ConfigError(f"the grammar lacks a {sign!r}")
        rest.pop()

    def _wrong(self, token: Token) -> NoReturn:
        raise ConfigError(f"line {token.line} of the grammar has {short(token.text)} there")

    # -- the texts -------------------------------------------------------------------------------

    def _rule(self, name: str) -> Part:
        """The texts of a rule, at this depth."""
        self._count += 1
        self.budget.spend(10)
        if self._count > MOST_RULES:
            raise TooLarge("has too many rules within rules: allow less")
        key = name, *sorted(self.open)
        if key not in self._built:
            if self.open.count(name) > self.budget.depth:
                self.budget.cut = True
                raise Nothing(name)
            self.open.append(name)
            try:
                self._built[key] = self._looped(name)
            except Nothing as error:
                self._built[key] = error
            finally:
                self.open.pop()
        found = self._built[key]
        if isinstance(found, Nothing):
            raise found
        return found

    def _looped(self, name: str) -> Part:
        """A rule whose alternatives begin or end with itself as a repetition."""
        node = self.rule(name)
        ways = node[1] if node[0] == "either" else [node]
        own: Node = ("name", name)
        kinds: dict[tuple[bool, bool], list[Node]] = {}
        for way in ways:
            items = way[1] if way[0] == "row" else [way]
            begins, ends = items[:1] == [own], items[-1:] == [own]
            if len(items) == 1 and begins:
                continue  # itself
            inner = ("row", items[begins : len(items) - ends])
            kinds.setdefault((begins, ends), []).append(inner)
        parts = {key: self._ways(nodes) for key, nodes in kinds.items()}
        base = parts.get((False, False))
        if base is None:
            raise Nothing(name)
        before, behind, between = (
            parts.get(key) for key in ((False, True), (True, False), (True, True))
        )
        one = Row(tuple(
            Repeat(part, 0, None) if part is not base else part
            for part in (before, base, behind) if part is not None
        ))  # fmt: skip
        return one if between is None else Row((one, Repeat(Row((between, one)), 0, None)))

    def _ways(self, nodes: list[Node]) -> Part | None:
        """Alternatives, without those that are too deep."""
        found: list[Part] = []
        for node in nodes:
            try:
                found.append(self._node(node))
            except Nothing:
                continue
        return Either(tuple(found)) if found else None

    def _node(self, node: Node) -> Part:
        kind = node[0]
        if kind == "either":
            found = self._ways(node[1])
            if found is None:
                raise Nothing("every way")
            return found
        if kind == "row":
            return Row(tuple(map(self._node, node[1])))
        if kind == "repeat":
            try:
                return Repeat(self._node(node[1]), node[2], node[3])
            except Nothing:
                if node[2]:
                    raise
                return EMPTY
        if kind == "name" and not self.is_terminal(node[1]):
            return self._rule(node[1])
        token = self._terminal(node)
        if not self.ignored:
            return token
        joint = Bytes(bytes([JOINT]))
        ignored = Repeat(Either(tuple(map(self._terminal, self.ignored))), 1, None)
        return Row((token, Either((joint, ignored))))

    def _terminal(self, node: Node) -> Part:
        """The texts of a token, within which nothing is ignored."""
        kind = node[0]
        if kind in ("regex", "text"):
            return self.token(node)
        if kind in ("either", "row"):
            parts = tuple(map(self._terminal, node[1]))
            return Either(parts) if kind == "either" else Row(parts)
        if kind == "repeat":
            return Repeat(self._terminal(node[1]), node[2], node[3])
        name = node[1]
        if self.open.count(name):
            raise ConfigError(f"the terminal {name} of the grammar contains itself")
        if name not in self._terminals:
            self.open.append(name)
            try:
                self._terminals[name] = self._terminal(self.rule(name))
            finally:
                self.open.pop()
        return self._terminals[name]

    def token(self, node: Node) -> Part:
        """The texts of an expression or of a text in quotes."""
        if node[0] == "regex":
            return regex_part(node[1])
        return regex_part(f"(?i:{re.escape(node[1])})" if node[2] else re.escape(node[1]))

    def rule(self, name: str) -> Node:
        if name not in self.rules:
            raise ConfigError(f"the grammar has no rule {name}")
        return self.rules[name]

    def is_terminal(self, name: str) -> bool:
        """Whether nothing is ignored within a rule."""
        return not self.gbnf and name.lstrip("_")[:1].isupper()
