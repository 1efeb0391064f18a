"""The checks of `shardcache doctor` and the table of them in docs/doctor.md."""

from __future__ import annotations

import re
from pathlib import Path

from shardcache.cli.doctor.runner import CHECKS

DOCS = Path(__file__).parents[3] / "docs" / "doctor.md"
# Findings of checks that have several, after the first; the probe names those of the object stores.
FURTHER = {"disk.read", "origin.credentials", "origin.speed"}


def test_the_docs_list_every_check() -> None:
    """The table in the docs has each check's name, in the order of the report."""
    rows = re.findall(r"^\| (`[a-z]+\.[a-z_]+`.*?) \|", DOCS.read_text(), re.MULTILINE)
    documented = [name for row in rows for name in re.findall(r"`(.*?)`", row)]
    assert [name for name in documented if name not in FURTHER] == list(dict.fromkeys(name for name, _ in CHECKS))
    assert set(documented) >= FURTHER
