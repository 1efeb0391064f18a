"""Servers and helpers that several tests share."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
"""Folder of the checkout."""
