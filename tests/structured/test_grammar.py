"""Grammars: the texts that are written are the grammar's, as llguidance reads it, too."""

import json
import re

import llguidance
import numpy as np
import pytest

from dllm.core.errors import ConfigError
from dllm.structured import compiling, source
from dllm.structured.byte_automaton import ByteAutomaton, Unfit
from dllm.structured.compiling import byte_automaton

SUM = """
start: expr
expr: expr ("+" | "-") term | term
term: term ("*" | "/") factor | factor
factor: NUMBER | "(" expr ")"
%import common.NUMBER
%ignore " "
"""
PROGRAM = """
start: "BEGIN" stmt* "END"
stmt: assign | cond
assign: NAME ":=" value ";"
cond: "IF" NAME "THEN" stmt+ "FI"  // keywords that names would swallow
value: NAME | NUMBER | value "+" value
NAME: /[a-z]+/
NUMBER: /[0-9]+/
%ignore /[ \\t\\n]+/
"""
VALUE = """
start: value
value: object | array | ESCAPED_STRING | SIGNED_INT | "true" | "false" | "null"
array  : "[" [value ("," value)*] "]"
object : "{" [pair ("," pair)*] "}"
pair   : ESCAPED_STRING ":" value
ESCAPED_STRING: /"[a-z ]*"/
%import common.SIGNED_INT
%import common.WS
%ignore WS
"""
TAGS = """
start: element
element: "<b>" (element | TEXT)* "</b>" | "<i>" (element | TEXT)* "</i>"
TEXT: /[a-z ]+/
"""
LISP = """
start: form
form: ATOM | "(" form* ")"
ATOM: /[a-z]+|[0-9]+/
%ignore / +/
"""
QUERY = """
start: "select" columns "from" NAME ("where" cond)?
columns: "*" | NAME ("," NAME)*
cond: NAME ("=" | "<") (NAME | NUMBER) ("and" cond)?
NAME: /[a-d]+/
NUMBER: "0".."9"~1..3
%ignore " "
"""
CHOICE = """
start: ("a" | "b"i) ~ 2..3 "x"? -> named
"""
GRAMMARS = [SUM, PROGRAM, VALUE, TAGS, LISP, QUERY, CHOICE]


def texts(automaton: ByteAutomaton, count: int) -> list[str]:
    """Random texts, ended as soon as may be behind a random length."""
    far = np.full(len(automaton.edges), 10**6)
    far[np.array(automaton.accepting)] = 0
    for _ in range(len(far)):
        for state, edges in enumerate(automaton.edges):
            far[state] = min([far[state], *(far[t] + 1 for *_, t in edges)])
        if (far < 10**6).all():
            break
    rng, found = np.random.default_rng(0), []
    for _ in range(count):
        state, spelt, most = 0, bytearray(), int(rng.integers(40))
        while not automaton.accepting[state] or (len(spelt) < most and automaton.edges[state]):
            edges = automaton.edges[state]
            if len(spelt) >= most:
                edges = [edge for edge in edges if far[edge[2]] < far[state]]
            low, high, to = edges[rng.integers(len(edges))]
            spelt.append(int(rng.integers(low, high + 1)))
            state = to
        found.append(spelt.decode())
    return found


@pytest.mark.parametrize("number", range(len(GRAMMARS)))
def test_another_library_takes_what_is_written(number: int) -> None:
    automaton, _ = byte_automaton(source.grammar(GRAMMARS[number]))
    tokenizer = llguidance.LLTokenizer("byte")
    for text in texts(automaton, 60):
        matcher = llguidance.LLMatcher(tokenizer, GRAMMARS[number])
        assert not matcher.get_error()
        tokens = tokenizer.tokenize_str(text)
        assert matcher.consume_tokens(tokens) and matcher.is_accepting(), text


@pytest.mark.parametrize(
    ("number", "taken", "refused"),
    [
        (0, ["1+2*3", "( 1 + 2 ) * 3", "1+2+3+4+5+6+7+8*9"], ["1+", "(1", "1 2", ""]),
        (1, ["BEGIN x := 1; IF a THEN y:=x+2; FI END", "BEGIN END"],
         ["BEGINx:=1;END", "BEGIN IFa THEN y:=1;FI END"]),
        (2, ['{"a": [1, {"b": null}]}', "[ ]"], ["[1,]", '{"a"}']),
        (3, ["<b>a<i>b</i></b>"], ["<b></i>", "a"]),
        (5, ["select a,b from c where a<12 and b = d"], ["selecta from b", "select a from"]),
        (6, ["aBx", "baA"[:2] + "b"], ["a", "abab", "Ab"]),
    ],
)  # fmt: skip
def test_texts(number: int, taken: list[str], refused: list[str]) -> None:
    automaton, _ = byte_automaton(source.grammar(GRAMMARS[number]))
    assert all(automaton.accepts(text.encode()) for text in taken)
    assert not any(automaton.accepts(text.encode()) for text in refused)


def test_gbnf() -> None:
    rules = r"""
    root ::= "(" [a-z]+ ("," ws root)* ")" | number
    number ::= "-"? ("0" | [1-9] [0-9]{0,5}) # a comment
    ws ::= [ \t\n]*
    """
    automaton, _ = byte_automaton(source.grammar(rules))
    assert automaton.accepts(b"(ab, (c), 12)") and automaton.accepts(b"-5")
    assert not automaton.accepts(b"()") and not automaton.accepts(b"01")
    escaped, _ = byte_automaton(source.grammar(r'root ::= "\[\]\\[\x41"'))
    assert escaped.accepts(b"[]\\[A")
    lark, _ = byte_automaton(source.grammar('start: "x" A  # a comment\nA: " ::= #"  // "a"\n'))
    assert lark.accepts(b"x ::= #")
    flags, _ = byte_automaton(source.grammar("start: /a.c/isu"))
    assert flags.accepts(b"A\nC")


@pytest.mark.parametrize(
    ("rules", "word"),
    [
        ("start: foo", "no rule foo"), ('rule: "a"', "no rule start"), ("start: (", "lacks a ')'"),
        ('start: "a"~2..1', "or falls"), ('start: a{"b"}\na{x}: x', "templates are not supported"),
        ('start: "a"{}', "without a count"),
        ('start: "a" start', "without end"), ('start: "a"\nstart: "b"', "start twice"),
        ("start: )", "line 1"), ("start: A\nA: A", "contains itself"), ("start: \x00", "line 1"),
        ("%import common.NOPE\nstart: NOPE", "imports 'NOPE'"), ("start: /(/", "not well formed"),
        ("%declare A\nstart: A", "line 1"), ("start: /a(?=b)/", "look-around"),
    ],
)  # fmt: skip
def test_what_is_refused(rules: str, word: str) -> None:
    with pytest.raises((ConfigError, Unfit), match=re.escape(word)) as caught:
        byte_automaton(source.grammar(rules))
    assert "\n" not in str(caught.value)


def test_terminals_within_terminals_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MOST_STEPS", 10_000)
    rules = [f"T{i}: T{i + 1} T{i + 1}" for i in range(60)]
    with pytest.raises(Unfit, match="allow less"):
        byte_automaton(source.grammar("\n".join(["start: T0", *rules, 'T60: "a" | "b"'])))


def test_structures_within_free_text() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    wanted = {"triggers": ["<tool"], "structures": [
        {"begin": "<tool=add>", "schema": schema, "end": "</tool>"},
        {"begin": "<tool=now>", "schema": {"const": None}, "end": "</tool>"},
    ]}  # fmt: skip
    automaton, _ = byte_automaton(source.structural_tag(wanted))
    for text in ("free", "", 'I add. <tool=add>{"x": 3}</tool> <<tool=now>null</tool>.'):
        assert automaton.accepts(text.encode())
    for text in ("<tool", "a <tool=add>{}</tool>", '<tool=now>{"x": 3}</tool>', "<tool=nope>"):
        assert not automaton.accepts(text.encode())
    with pytest.raises(ConfigError, match="a JSON schema is an object, not False"):
        tag = {"begin": "<a", "schema": False, "end": "b"}
        source.structural_tag({"triggers": ["<"], "structures": [tag]})
    for structures in ([], [1], [{"begin": "a", "end": "b"}], "x"):
        broken = {"triggers": ["<"], "structures": structures}
        with pytest.raises(ConfigError, match="structural_tag"):
            source.structural_tag(broken)


def test_json_in_a_tag_is_json() -> None:
    wanted = {"triggers": ["["], "structures": [{"begin": "[", "schema": {"type": "string"},
                                                 "end": "]"}]}  # fmt: skip
    automaton, _ = byte_automaton(source.structural_tag(wanted))
    for text in texts(automaton, 40):
        for inner in re.findall(r'\["(?:[^"\\]|\\.)*"\]', text):
            assert isinstance(json.loads(inner), list)
