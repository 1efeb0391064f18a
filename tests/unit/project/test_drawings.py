"""The documentation's drawings, as their scripts draw them, readable in both colours."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support import ROOT

PICTURES = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the script draws now; it fails where a label does not fit."""
    folder = tmp_path_factory.mktemp("drawn")
    subprocess.run([sys.executable, "docs/drawings", folder], cwd=ROOT, check=True)
    return folder


def test_pictures_are_what_the_script_draws(drawn: Path) -> None:
    """A picture that was edited by hand, or not drawn again after a change, differs."""
    names = {path.name for path in drawn.iterdir()}
    simulated = {"hit-rates.svg"}
    assert {path.name for path in PICTURES.glob("*.svg")} == names | simulated
    assert [
        name for name in names if (PICTURES / name).read_text() != (drawn / name).read_text()
    ] == []


@pytest.mark.slow
def test_simulated_figures_are_those_that_the_simulation_gives_now(tmp_path: Path) -> None:
    """The hit rates and the cluster's costs are those that `shardcache simulate` gives now."""
    subprocess.run([sys.executable, "docs/drawings/simulated.py", tmp_path], cwd=ROOT, check=True)
    assert (tmp_path / "hit-rates.svg").read_text() == (PICTURES / "hit-rates.svg").read_text()
    assert (tmp_path / "tier.md").read_text() == (ROOT / "docs" / "tier.md").read_text()


def test_pictures_have_a_title_a_description_and_dark_colours(drawn: Path) -> None:
    """Screen readers read the first two, and a page in the dark has no white sheet on it."""
    for path in drawn.iterdir():
        picture = ElementTree.fromstring(path.read_text())
        texts = [
            picture.findtext(f"{{http://www.w3.org/2000/svg}}{name}") for name in ("title", "desc")
        ]
        assert all(texts), path.name
        assert "prefers-color-scheme: dark" in path.read_text(), path.name


def test_every_drawing_is_on_a_page(drawn: Path) -> None:
    """With words in place of the picture for those who do not see it."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {
        name
        for page in pages
        for name in re.findall(r"!\[[^]]+\]\(\S*pictures/([\w-]+\.svg)\)", page.read_text())
    }
    assert {path.name for path in drawn.iterdir()} - shown == set()
