"""Random regular expressions mean what they mean in Python."""

import random
import re
import warnings

import pytest

from dllm.core.errors import ConfigError
from dllm.structured.byte_automaton import TooLarge, Unfit
from dllm.structured.compiling import byte_automaton

from .seeds import case_of

ATOMS = [
    "a", "b", ".", "[ab]", "[^a]", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"\a", r"\07", r"\x41",
    r"\u00e9", r"\U0001F600", "é", "ß", "[a-c]", "[^\\d]", r"[\w-]", "[]a]", "[&&~]", "[[a]",
    r"[\0]",
    "#", " ", "-", "&", "~", "a{", "{", "}", "a{,", "[é-ü]", "(?i:K)", "(?s:.)", r"\-", r"\.", "A",
    "(?#note)", "[\\]\\-a]",
]  # fmt: skip
LOOKS = ["(?=a)", "(?!ab)", "(?=.*[ab])", "(?!.?b)", "(?=)", "(?:(?=a).|b)", "(?!\\d)(?=.{2})"]
COUNTS = ["*", "+", "?", "{2}", "{,2}", "{1,}", "{1,3}", "*?", "+?", "??", "{1,2}?"]
POSSESSIVE = ["(?>{}*)", "(?>{}{{1,2}})", "{}*+", "{}?+", "{}{{1,3}}+", "(?>{})", "{}++"]
SINGLES = ["a", "b", "[ab]", "[^a]", r"\d", ".", "é"]
LETTERS = "abcABKk019_ -#\n\t\a\x07éü😀ſß{}[]&~.,\0\u212a"


def expression(rng: random.Random, depth: int = 2) -> str:
    """A random expression."""
    parts = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.random()
        if depth and kind < 0.3:
            inner = expression(rng, depth - 1)
            part = rng.choice(["({})", "(?:{})", f"(?P<n{rng.randint(0, 10**9)}>{{}})"])
            part = part.replace("{}", inner)
        elif depth and kind < 0.45:
            part = f"(?:{expression(rng, depth - 1)}|{expression(rng, depth - 1)})"
        elif kind < 0.5:
            parts.append(rng.choice(POSSESSIVE).format(rng.choice(SINGLES)))
            continue
        elif kind < 0.55:
            parts.append(rng.choice(LOOKS))
            continue
        else:
            part = rng.choice(ATOMS)
        parts.append(part + (rng.choice(COUNTS) if rng.random() < 0.3 else ""))
    return "".join(parts)


def texts(rng: random.Random, regex: str) -> list[str]:
    """Texts near an expression: of its own characters, and of others."""
    own = [c for c in regex if c.isprintable()] + list(LETTERS)
    return ["".join(rng.choices(own, k=rng.randint(0, 4))) for _ in range(60)]


def compare(rng: random.Random, regex: str) -> None:
    """What is accepted of texts near an expression."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted = re.compile(regex, re.ASCII)
        except (re.error, OverflowError):
            with pytest.raises(ConfigError, match="not well formed"):
                byte_automaton({"regex": regex})
            return
    try:
        automaton, _ = byte_automaton({"regex": regex})
    except TooLarge:  # marks of what is possessive multiply the states of loops
        assert re.search(r"\(\?>|[*+?}]\+", regex), regex
        return
    except ConfigError as error:
        assert "look-around" in str(error) and re.search(r"\(\?[=!]", regex), regex
        return
    except Unfit:  # allows no text
        assert not any(wanted.fullmatch(text) for text in texts(rng, regex))
        return
    for text in texts(rng, regex):
        found = automaton.accepts(text.encode())
        assert found == (wanted.fullmatch(text) is not None), (regex, text)


@pytest.mark.fuzz(40)
def test_as_python(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        flags = rng.choice(["", "", "", "(?i)", "(?s)", "(?x)", "(?m)", "(?a)"])
        look = rng.choice(["", "", "", "(?={})", "(?!{})"]).format(expression(rng, 1))
        ends = rng.choice(["", "", "^"]), rng.choice(["", "", "$"])
        regex = flags + ends[0] + look + expression(rng) + ends[1]
        with case_of(seed, repr(regex)):
            compare(rng, regex)
