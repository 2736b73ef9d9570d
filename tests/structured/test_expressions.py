"""Regular expressions that no automaton has are refused with their cause."""

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
        ("(" * 5000 + ")" * 5000, "nested too deeply|not well"),
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


def test_counts_of_nothing_are_counted() -> None:
    with pytest.raises(TooLarge, match="steps to compile"):
        byte_automaton({"regex": "(?:){3000000000}"})
