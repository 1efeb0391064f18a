"""CONTRIBUTING.md says which tests test what: every room and all names in it exist."""

import re

import pytest

from support import ROOT

TABLE = (ROOT / "CONTRIBUTING.md").read_text().partition("## Which tests test what")[2]
ROWS = dict(re.findall(r"^\| `([\w/]+)` \| (.+) \|$", TABLE, re.MULTILINE))


def rooms() -> list[str]:
    """Return the packages of daemon and client, and those within the cache."""
    found = []
    for folder in ("shardcache", "shardcache/cache", "client/shardcache_client"):
        found += [
            str(path.parent.relative_to(ROOT)) for path in (ROOT / folder).glob("*/__init__.py")
        ]
    return sorted(found)


@pytest.mark.parametrize("room", rooms())
def test_each_room_names_its_tests(room: str) -> None:
    """A new package has a row, with a path of its tests."""
    assert "`tests/" in ROWS[room]


@pytest.mark.parametrize("room", ROWS)
def test_names_of_the_table_exist(room: str) -> None:
    """Rooms and tests exist after each move; names in a folder are below the one before."""
    assert (ROOT / room).is_dir()
    folder = ROOT
    for name in re.findall(r"`([\w./]+)`", ROWS[room]):
        if name.startswith("tests/"):
            folder = ROOT / name
            assert folder.exists(), name
        elif name.endswith(".py") and name.rpartition("/")[2].startswith("test_"):
            assert (folder / name).is_file(), name
