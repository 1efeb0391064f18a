"""The documents name what exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_test_that_a_promise_names_exists() -> None:
    """A promise whose test was renamed or dropped is a promise without a test."""
    pages = (ROOT / "docs" / name for name in ("semantics.md", "features.md"))
    named = {test for page in pages for test in re.findall(r"`(test_\w+)`", page.read_text())}
    tests = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    written = {name for text in tests for name in re.findall(r"def (test_\w+)\(", text)}
    assert len(named) > 30
    assert named - written == set()
