"""The quick start, which README and the first page tell alike, and README's recipes: run as a newcomer runs them."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.programs.daemon import private_home
from support.programs.pages import ROOT, Place, section
from support.stores.buckets import Bucket

pytestmark = pytest.mark.slow


@pytest.fixture
def place() -> Iterator[Place]:
    """An empty folder on a node on which nobody set up a daemon, with the programs of this environment."""
    with tempfile.TemporaryDirectory(prefix="shardcache-quick-") as root, private_home(Path(root)) as home:
        (home.root / "work").mkdir()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        yield Place(home.root / "work", {**os.environ, "PATH": path})


def test_readme_from_top_to_bottom(place: Place, moto: Bucket) -> None:
    """Quick start and recipes print what README says; the same shards in a bucket give the same samples."""
    _, installed, text = section("README.md", "Quick start").partition("'.[daemon,torch]'\n```\n")
    assert installed
    place.follow(text + section("README.md", "Recipes"))
    for file in (place.folder / "shards").iterdir():
        moto.put(f"shards/{file.name}", file.read_bytes())
    printed = place.run("python read.py")
    script = place.folder / "read.py"
    script.write_text(script.read_text().replace("shards/", f"{moto.url}/shards/"))
    assert place.run("python read.py", moto.env()) == printed


def test_first_page_in_a_fresh_environment(place: Place) -> None:
    """Every line of the first page works in a new virtual environment, into which the checkout is installed."""
    probe = f"{sys.executable} -m pip download --quiet --no-deps websockets".split()
    if subprocess.run(probe, cwd=place.folder, capture_output=True, check=False).returncode:
        pytest.skip("needs an index of packages")
    shutil.copytree(ROOT, place.folder, ignore=shutil.ignore_patterns(".*", "build", "tests"), dirs_exist_ok=True)
    path = f"{place.folder}/.venv/bin:{sys.base_prefix}/bin:/usr/bin:/bin"
    fresh = Place(place.folder, place.env | {"PATH": path})
    fresh.follow(section("docs/first-steps.md", "Quick start"))
    installed = fresh.run("python -c 'import shardcache_client; print(shardcache_client.__file__)'")
    assert installed.startswith(f"{place.folder}/.venv/")
