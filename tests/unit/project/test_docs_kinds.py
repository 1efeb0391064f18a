"""The documentation's pages have four kinds, each listed, and say first whom they serve."""

import re

import pytest

from support import ROOT
from support.programs.pages import section, without_blocks

DOCS = ROOT / "docs"
KINDS = ("Tutorials", "How-to guides", "Explanation", "Reference", "Contributing")
FROM_ELSEWHERE = {"changelog", "contributing"}  # the files of these names in the root
MAX_WORDS_BESIDE_A_PICTURE = 220  # a laptop's screen
# What is explained with a picture: the page, the section and the drawing.
PICTURED = [
    ("how-it-works", "How a shard passes through a node", "node"),
    ("how-it-works", "How the next fetch is chosen", "next"),
    ("how-it-works", "The life of a shard", "shard"),
    ("how-it-works", "When a process dies", "deaths"),
    ("how-it-works", "Parts and ranges", "parts"),
    ("how-it-works", "Private and shared daemons", "daemons"),
    ("how-it-works", "The tier of a cluster", "tier"),
    ("epochs", "What an epoch is", "epochs"),
    ("epochs", "What a look is", "look"),
    ("epochs", "What a window shuffles, and how random that is", "window"),
    ("workers", "What threads save", "workers"),
    ("tier", "The way of a part", "tier"),
]
COOKBOOK = "cookbook/index"  # and its projects, each with a page of its own
PAGES = sorted({path.stem for path in DOCS.glob("*.md")} - {"index"} | {COOKBOOK})


def lists() -> dict[str, list[str]]:
    """Return the pages of each kind, from the lists of the front page and of the pages on them."""
    front = (DOCS / "index.md").read_text()
    found = re.findall(r"```\{toctree\}\n:caption: (.+)\n(?::.*\n)*\n((?:[\w/-]+\n)+)```", front)
    return {
        kind: [each for page in pages.split() for each in (page, *pages_below(page))]
        for kind, pages in found
    }


def pages_below(page: str) -> list[str]:
    """Return the pages listed by a page of its own, without the cookbook's projects."""
    path = DOCS / f"{page}.md"
    if page == COOKBOOK or not path.exists():
        return []
    found = re.search(r"```\{toctree\}\n:hidden:\n\n((?:[\w-]+\n)+)```", path.read_text())
    return found[1].split() if found else []


def test_each_page_is_of_one_kind() -> None:
    """A page on no list is found by nobody, one on two lists answers two kinds of questions."""
    assert tuple(lists()) == KINDS
    assert sorted(page for pages in lists().values() for page in pages) == PAGES


@pytest.mark.parametrize("page", sorted(set(PAGES) - FROM_ELSEWHERE))
def test_page_says_first_whom_it_is_for(page: str) -> None:
    """Its first paragraph names its readers."""
    first = (DOCS / f"{page}.md").read_text().split("\n\n")[1]
    assert re.match(r"For (anyone|everyone|those|users|maintainers|contributors)\b", first)


@pytest.mark.parametrize("page", [*lists()["Tutorials"], *lists()["How-to guides"]])
def test_guide_says_what_its_reader_can_do_at_its_end(page: str) -> None:
    """In its first paragraph, too."""
    first = " ".join((DOCS / f"{page}.md").read_text().split("\n\n")[1].split())
    assert re.search(
        r"(?:After (?:it|them)|[Aa]t (?:the|its) end|In ten minutes|Each answer|Find the row)\b",
        first,
    )


@pytest.mark.parametrize("page", lists()["Tutorials"])
def test_tutorial_leads_on(page: str) -> None:
    """Its last paragraph links to further pages."""
    last = (DOCS / f"{page}.md").read_text().rstrip().rpartition("\n\n")[2]
    assert re.search(r"\]\([\w-]+\.md\)", last)


@pytest.mark.parametrize(("page", "title", "picture"), PICTURED)
def test_explanation_has_a_picture_and_a_screen_of_words(
    page: str, title: str, picture: str
) -> None:
    """Whoever has looked at the picture reads on without scrolling."""
    text = section(f"docs/{page}.md", title)
    assert f"](pictures/{picture}.svg)" in text
    words = without_blocks(text).split()
    assert 40 < len(words) <= MAX_WORDS_BESIDE_A_PICTURE
