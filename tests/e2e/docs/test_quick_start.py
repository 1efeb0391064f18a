"""The quick start, the recipes that follow it, and the tutorial, run as a newcomer would."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT
from support.programs.daemon import private_home
from support.programs.pages import Place, blocks, section
from support.stores.buckets import Bucket

pytestmark = pytest.mark.slow


@pytest.fixture
def place() -> Iterator[Place]:
    """An empty folder on a node without a daemon, with the programs of this environment."""
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-quick-") as root,
        private_home(Path(root)) as home,
    ):
        (home.root / "work").mkdir()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        yield Place(home.root / "work", {**os.environ, "PATH": path})


def test_quick_start_and_recipes(place: Place, moto: Bucket) -> None:
    """They print what the pages say, and shards in a bucket give the same samples."""
    _, installed, text = section("README.md", "Quick start").partition("'.[daemon,torch]'\n```\n")
    assert installed
    place.follow(text)
    place.follow((ROOT / "docs" / "recipes.md").read_text())
    for file in (place.folder / "shards").iterdir():
        moto.put(f"shards/{file.name}", file.read_bytes())
    printed = place.run("python read.py")
    script = place.folder / "read.py"
    script.write_text(script.read_text().replace("shards/", f"{moto.url}/shards/"))
    assert place.run("python read.py", moto.env()) == printed


def test_tutorial(place: Place) -> None:
    """Photos become shards. Four ranks are lost, and three read each remaining photo once."""
    pytest.importorskip("lightning", reason="needs pip install lightning")
    page = (ROOT / "docs" / "tutorial.md").read_text()
    before, _, after = page.partition("## Resume it on three ranks")
    place.follow(before.partition("## Get some photos")[2])

    command, expected = list(blocks(after))[:2]
    printed = place.run(command.body)
    assert without_accuracy(printed) == without_accuracy(expected.body)

    place.follow(after.partition("## What ran behind it")[2].partition("\n## ")[0])


def without_accuracy(printed: str) -> str:
    """Return lines whose percentages, which differ from machine to machine, are left out."""
    return re.sub(r"\d+%", "%", printed)


def test_quick_start_in_a_fresh_environment(place: Place) -> None:
    """Every line of README's quick start works in a new virtual environment."""
    probe = f"{sys.executable} -m pip download --quiet --no-deps websockets".split()
    if subprocess.run(probe, cwd=place.folder, capture_output=True, check=False).returncode:
        pytest.skip("needs an index of packages")
    shutil.copytree(
        ROOT,
        place.folder,
        ignore=shutil.ignore_patterns(".*", "build", "tests"),
        dirs_exist_ok=True,
    )
    path = f"{place.folder}/.venv/bin:{sys.base_prefix}/bin:/usr/bin:/bin"
    fresh = Place(place.folder, place.env | {"PATH": path})
    fresh.follow(section("README.md", "Quick start"))
    installed = fresh.run("python -c 'import shardcache_client; print(shardcache_client.__file__)'")
    assert installed.startswith(f"{place.folder}/.venv/")
