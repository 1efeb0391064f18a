"""A node without a daemon of its own, whose users have private ones."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.programs.daemon import PrivateHome, private_home
from support.programs.private_readers import SAMPLES, SHARDS
from support.shards.tars import write_shards


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder with a short path, and with shards in `data`."""
    with tempfile.TemporaryDirectory(prefix="shardcache-p-") as name:
        folder = Path(name)
        (folder / "data").mkdir()
        write_shards(folder / "data", SHARDS, SAMPLES, {"bin": 20_000})
        yield folder


@pytest.fixture
def home(root: Path) -> Iterator[PrivateHome]:
    """A node on which nobody set up a daemon."""
    with private_home(root) as home:
        yield home
