"""The status page for people."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from shardcache.cli.status import show_page

PAGE: dict[str, Any] = {
    "version": "1.2.3",
    "uptime_s": 7200.0,
    "pid": 42,
    "cache": {"dir": "/nvme", "capacity_bytes": 2 * 10**12, "used_bytes": 10**12, "free_bytes": 10**12, "shards": 1000},
    "counters": {
        "origin_bytes": 3 * 10**12,
        "origin_requests": 400_000,
        "hits": 90,
        "misses": 10,
        "evictions": 5,
        "retries": 6,
        "corrupt": 7,
    },
    "transfers": [
        {"url": "s3://b/a.tar", "done_bytes": 10**6, "total_bytes": 4 * 10**6, "class": "planned", "waiters": 2},
        {"url": "s3://b/b.tar", "done_bytes": 0, "total_bytes": None, "class": "waiting", "waiters": 1},
    ],
    "jobs": [{"name": "resnet", "uid": 1000, "sessions": 8, "shards_planned": 100, "shards_done": 40, "stall_s": 2.5}],
}


def shown(page: dict[str, Any]) -> str:
    """Return the page as text."""
    console = Console(file=io.StringIO(), width=200)
    show_page(console, page)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line_with(text: str, page: str) -> list[str]:
    """Return the words of the line that contains `text`."""
    [line] = (line for line in page.splitlines() if text in line)
    return line.split()


def test_page_tells_cache_and_counters() -> None:
    """Sizes, rates and counters read as people write them."""
    page = shown(PAGE)
    assert "shardcache 1.2.3 · pid 42 · up 2 hours" in page
    assert "1.0 TB of 2.0 TB · 1,000 shards · 1.0 TB free on the disk" in page
    assert "3.0 TB in 400,000 requests" in page
    assert "90 at once (90%) · 10 after a transfer" in page
    assert "evictions 5 · retries 6 · corrupt 7" in page


def test_transfers_show_how_far_they_are() -> None:
    """A transfer whose size is not known yet has no bar and no end."""
    page = shown(PAGE)
    assert line_with("s3://b/a.tar", page)[-7:] == ["1.0", "MB", "of", "4.0", "MB", "planned", "2"]
    assert line_with("s3://b/b.tar", page)[1:] == ["0", "Bytes", "of", "?", "waiting", "1"]


def test_jobs_show_how_far_they_are_and_how_long_they_waited() -> None:
    """A line a job: who, how many readers, shards read of shards planned, waiting time."""
    assert line_with("resnet", shown(PAGE)) == ["resnet", "1000", "8", "40", "of", "100", "2.5", "s"]


def test_idle_daemon_shows_no_empty_tables() -> None:
    """Without transfers and jobs there are no headings for them; without leases, no share of hits."""
    counters = dict.fromkeys(PAGE["counters"], 0)
    page = shown(PAGE | {"transfers": [], "jobs": [], "counters": counters})
    assert "transfer " not in page.replace("after a transfer", "") and "readers" not in page and "%" not in page
