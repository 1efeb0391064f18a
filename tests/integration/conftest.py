"""A daemon for the tests of a module, and fixtures for tests of downloads."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.programs.daemon import Daemon
from support.programs.downloads import Rig


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon for the whole module; each test has urls of its own."""
    with Daemon(tmp_path_factory.mktemp("d")) as running:
        yield running


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A rig of its own for each test."""
    found = Rig(tmp_path / "cache")
    yield found
    await found.origins.close()
