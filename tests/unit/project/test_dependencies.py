"""The packages that pyproject.toml declares are those that the code imports."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from support import ROOT

OURS = {"shardcache", "shardcache_client"}
# In the standard library of later Pythons.
LATER = {"compression"}
EXTRAS = (
    "daemon",
    "parquet",
    "datasets",
    "azure",
    "gcs",
    "hf",
    "lz4",
    "mds",
    "yaml",
    "cluster",
    "ray",
    "demo",
    "torch",
)


def declared() -> set[str]:
    """Return the names of the packages that the daemon is installed with, its extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"]]
    for extra in EXTRAS:
        requirements += project["optional-dependencies"][extra]
    return {plain(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}


def plain(name: str) -> str:
    """Return a package's name as indices compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(source: Path) -> Iterator[str]:
    """Yield the packages that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module.partition(".")[0]


@pytest.fixture(scope="module")
def installed() -> dict[str, list[str]]:
    return {module: list(map(plain, names)) for module, names in packages_distributions().items()}


def test_every_package_that_the_daemon_imports_is_declared(installed: dict[str, list[str]]) -> None:
    """None comes only with another one, whose next release may do without it."""
    names = declared()
    known = sys.stdlib_module_names | OURS | LATER
    missing = {
        module
        for source in (ROOT / "shardcache").rglob("*.py")
        for module in imported(source)
        if module not in known and names.isdisjoint(installed.get(module, [plain(module)]))
    }
    assert missing == set()
