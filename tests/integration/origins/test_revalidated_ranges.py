"""Cached ranges of an object are asked for again once the last answer about its version is old."""

from pathlib import Path

import pytest

from campaign.range_reads import Span, read_ranges
from support.programs.daemon import Daemon
from support.stores.canary import Canary

OLD = b"old" * 100_000
NEW = b"new!" * 100_000


@pytest.mark.parametrize(("ttl_s", "expected"), [("0", NEW), ("1000", OLD)])
def test_ranges_of_a_replaced_object_are_those_of_its_version(
    tmp_path: Path, ttl_s: str, expected: bytes
) -> None:
    """As for whole objects, if the reader names no version: after --listing-ttl-s, the new one."""
    flags = ("--range-part-size", "64KiB", "--listing-ttl-s", ttl_s)
    with Canary() as store, Daemon(tmp_path, *flags) as daemon:
        span = Span(store.put("object", OLD), 70_000, 71_000)
        assert read_ranges(daemon, [span]) == [OLD[span.start : span.end]]
        store.put("object", NEW)

        assert read_ranges(daemon, [span]) == [expected[span.start : span.end]]
