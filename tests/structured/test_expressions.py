"""Regular expressions that no automaton has are refused with their cause."""

from typing import Any

import pytest

from dllm.core.errors import ConfigError
from dllm.structured.byte_automaton import TooLarge
from dllm.structured.compiling import byte_automaton


@pytest.mark.parametrize(
    ("regex", "word"),
    [
        ("a(?=b)", "look-around"), ("a(?!)", "look-around"), ("(?<!a)b", "look-around"),
        ("(?=(?=a)b)", "look-around"), ("(?=a)(?:a*+)", "beside what is possessive"),
        (r"(a)\1", "a back reference"), ("(?P<n>a)(?P=n)", "a back reference"),
        ("(a)?(?(1)b|c)", "a back reference"), (r"\bword", "a word boundary"),
        ("(?:ab)*+", "a possessive quantifier"), ("(?>a|ab)", "an atomic group"),
        ("".join(f"{c}*+" for c in "abcdefghi"), "more than 8 kinds"),
        ("a^b", "in its middle"),
        ("(a$)*", "in its middle"), ("a$b|c", "in its middle"), ("(?u:a)", "the flag u"),
        ("(?u)a", "incompatible"), ("(", "missing"),
        (r"\p{Nope}", r"^regex '\\\\p\{Nope\}' has \\p\{Nope\}: a property is a general category"),
    ],
)  # fmt: skip
def test_what_no_automaton_has(regex: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        byte_automaton({"regex": regex})
    assert "\n" not in str(caught.value)


def test_properties_of_unicode() -> None:
    automaton, _ = byte_automaton({"regex": r"\p{Lu}\p{Ll}+[\p{Nd}_]\P{L}"})
    assert automaton.accepts("Éa٣!".encode()) and automaton.accepts(b"Aa_1")
    assert not automaton.accepts(b"aa_1") and not automaton.accepts(b"Aa_b")
    assert byte_automaton({"regex": r"\p{Uppercase_Letter}\P{digit}"})[0].accepts("Éa".encode())
    latin, _ = byte_automaton({"regex": r"\p{ASCII}\P{ASCII}"})  # as ECMAScript and Java have it
    assert latin.accepts("~é".encode()) and not latin.accepts("é~".encode())


def test_counts_of_nothing_are_counted() -> None:
    with pytest.raises(TooLarge, match="steps to compile"):
        byte_automaton({"regex": "(?:){3000000000}"})


def test_nesting_is_counted_and_no_part_of_it_is_blamed() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(1000):
        schema = {"anyOf": [schema, {"type": "null"}]}
    for source in ({"regex": "(" * 5000 + ")" * 5000}, {"json_schema": schema}):
        with pytest.raises(TooLarge, match=r"^is nested too deeply"):
            byte_automaton(source)


def test_groups_with_a_name_and_code_points_of_javascript() -> None:
    automaton, _ = byte_automaton({"regex": r"(?<year>\d{2})[\u{5D}\u{1F600}]+\u{2e}"})
    assert automaton.accepts("24]😀.".encode())
    assert not automaton.accepts(b"24].x") and not automaton.accepts(b"24]x")
