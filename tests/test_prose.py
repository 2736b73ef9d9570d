"""The documentation keeps its size and its words."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SITE = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [
    ROOT / "docs" / f"{name}.md"
    for name in ("quickstart", "coming-from", "choose-a-sampler", "choose-a-cache",
                 "output-length", "infill-and-edit", "structured-output", "speculative-decoding",
                 "serving", "hardware", "training", "evaluation", "extend")
]  # fmt: skip
LONGER = {"extend": 1250}
# What this project once called things that the field has words for.
HOUSE_WORDS = (
    "answer with a form", "answers with a form", "in the mean", "processor time", "in turns",
    "to the bit", "takes nobody", "somebody", "nobody", "twin", "roof", "surest", "knob",
)  # fmt: skip


def text_of(page: Path) -> str:
    """The sentences of a page: without code, tables, links and headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    lines = [line for line in text.splitlines() if not re.match(r"\s*(\||#|!|<|=== )", line)]
    return "\n".join(lines)


def sentences(page: Path) -> list[str]:
    paragraphs = re.split(r"\n\s*\n|\n\s*[-*] |\n\s*\d+\. ", text_of(page))
    return [s for p in paragraphs for s in re.split(r"(?<=[.:;?!])\s+", " ".join(p.split())) if s]


def words(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").split())


def test_the_readme_is_read_in_a_minute() -> None:
    readme = ROOT / "README.md"
    assert words(readme) <= 900
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= 110


def test_the_site_has_at_most_31000_words() -> None:
    assert sum(map(words, SITE)) <= 31_000


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_is_short_and_so_are_its_sentences(page: Path) -> None:
    assert words(page) <= LONGER.get(page.stem, 900)
    long = [s for s in sentences(page) if len(s.split()) > 35]
    assert not long, long


@pytest.mark.parametrize("page", SITE, ids=lambda page: str(page.relative_to(ROOT)))
def test_words_are_those_of_the_field(page: Path) -> None:
    text = " ".join(text_of(page).lower().split())
    assert [word for word in HOUSE_WORDS if re.search(rf"\b{word}\b", text)] == []


def test_the_changelog_says_what_a_first_release_is() -> None:
    assert words(ROOT / "CHANGELOG.md") <= 400
