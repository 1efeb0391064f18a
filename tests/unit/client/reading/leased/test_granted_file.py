"""Spans of the file of a grant."""

import os
from pathlib import Path

import pytest

from shardcache_client.reading.leased.granted_file import read_span

KIB = 1024
# The kernel's symbols: like a file beyond 2 GiB, but with 4 KiB, it gives a read less than was
# asked for.
PIECEMEAL = Path("/proc/kallsyms")


@pytest.mark.skipif(not PIECEMEAL.exists(), reason=f"this kernel has no {PIECEMEAL}")
def test_span_that_takes_several_reads_is_whole() -> None:
    """As that of more than 2 GiB does."""
    known = PIECEMEAL.read_bytes()
    fd = os.open(PIECEMEAL, os.O_RDONLY)
    try:
        assert len(os.pread(fd, 64 * KIB, 0)) < 64 * KIB
        assert read_span(fd, 100, 64 * KIB) == known[100 : 64 * KIB]
    finally:
        os.close(fd)


def test_span_beyond_the_end_has_fewer_bytes(tmp_path: Path) -> None:
    """None at all behind it."""
    path = tmp_path / "small"
    path.write_bytes(b"0123456789")
    fd = os.open(path, os.O_RDONLY)
    try:
        assert read_span(fd, 8, 12) == b"89"
        assert read_span(fd, 10, 12) == b""
        assert read_span(fd, 4, 4) == b""
    finally:
        os.close(fd)
