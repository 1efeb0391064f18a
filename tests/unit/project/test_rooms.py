"""CONTRIBUTING.md says which tests test what: each package has a row, and all names exist."""

import re
from pathlib import Path

import pytest

from support import ROOT

TABLE = (ROOT / "CONTRIBUTING.md").read_text().partition("## Which tests test what")[2]


def table_rows() -> dict[str, str]:
    """Return the tests of each package, and of each module that has a row of its own."""
    found = {}
    for sources, tests in re.findall(r"^\| (`.+?) \| (.+) \|$", TABLE, re.MULTILINE):
        for source in re.findall(r"`([\w/.]+)`", sources):
            assert source not in found, f"{source} has two rows"
            found[source] = tests
    return found


ROWS = table_rows()


def packages() -> list[str]:
    """Return all packages of daemon and client, however deep."""
    found = []
    for tree in ("shardcache", "client/shardcache_client"):
        found += [str(path.parent.relative_to(ROOT)) for path in (ROOT / tree).rglob("__init__.py")]
    found.remove("shardcache")  # it has only packages, and `errors.py`, which has a row
    return sorted(found)


@pytest.mark.parametrize("package", packages())
def test_each_package_names_its_tests(package: str) -> None:
    """A new package has a row, with a path of its tests."""
    assert "`tests/" in ROWS[package]


@pytest.mark.parametrize("source", ROWS)
def test_names_of_the_table_exist(source: str) -> None:
    """Sources and tests exist after each move.

    The name of a test file without a folder is in the folder that is named before it. Any other
    name of a file is a module of the package.
    """
    assert (ROOT / source).exists()
    folder = ROOT
    for name in re.findall(r"`([\w./]+)`", ROWS[source]):
        if name.startswith("tests/"):
            folder = ROOT / name
            assert folder.exists(), name
        elif Path(name).name.startswith("test_"):
            assert (folder / name).is_file(), name
        elif name.endswith(".py"):
            assert (ROOT / source / name).is_file(), name
