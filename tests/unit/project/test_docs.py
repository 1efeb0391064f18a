"""The documents and the table of promises name tests that exist."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def written() -> set[str]:
    """Return the names of all tests, and of the classes of those that hypothesis writes."""
    texts = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return {name for text in texts for name in re.findall(r"(?:def|class) (test_\w+|Any\w+)\(", text)}


def test_each_promise_has_a_test() -> None:
    """A promise whose tests were renamed or dropped is a promise without a test."""
    table = tomllib.loads((ROOT / "tests" / "promises.toml").read_text())
    promises = {promise: tests for section in table.values() for promise, tests in section.items()}
    assert len(promises) > 200
    assert [promise for promise, tests in promises.items() if not tests] == []
    assert {name for tests in promises.values() for name in tests} - written() == set()


def test_tests_that_a_page_names_exist() -> None:
    """A page that names a test as its proof has one."""
    pages = (path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert {name for page in pages for name in re.findall(r"`(test_\w+)`", page)} - written() == set()
