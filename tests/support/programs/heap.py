"""The allocator of a process: memory that stays with it once it is freed."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

MB = 1_000_000

glibc_only = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")


def kept_bytes(freed_bytes: int, value_bytes: int) -> int:
    """Make values, free all, and return how much memory the process has more than before.

    What a process freed before changes what its allocator does: call it once per process.
    """
    before_bytes = _anonymous_bytes()
    values = [b"x" * value_bytes for _ in range(freed_bytes // value_bytes)]
    assert _anonymous_bytes() - before_bytes > 0.9 * freed_bytes
    del values
    return _anonymous_bytes() - before_bytes


def _anonymous_bytes() -> int:
    """Return the process's resident memory, pages of files left out."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024
