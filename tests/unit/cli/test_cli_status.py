"""The status page for people."""

from __future__ import annotations

import io
import time
from typing import Any

from rich.console import Console

from shardcache.cli.page import show_page

PAGE: dict[str, Any] = {
    "version": "1.2.3",
    "uptime_s": 7200.0,
    "pid": 42,
    "cache": {
        "dir": "/nvme",
        "capacity_bytes": 2 * 10**12,
        "used_bytes": 10**12,
        "free_bytes": 10**12,
        "shards": 1000,
        "leased_bytes": 3 * 10**10,
        "reserved_bytes": 0,
    },
    "counters": {
        "origin_bytes": 3 * 10**12,
        "origin_requests": 400_000,
        "hits": 90,
        "misses": 10,
        "evictions": 5,
        "refetches": 1,
        "retries": 6,
        "corrupt": 7,
        "paused": 8,
    },
    "transfers": [
        {
            "url": "s3://b/a.tar",
            "done_bytes": 10**6,
            "total_bytes": 4 * 10**6,
            "class": "planned",
            "stage": "downloading from the object store",
            "waiters": 2,
            "rate_bytes_per_s": 5 * 10**6,
            "needed_in_s": 30.0,
        },
        {
            "url": "s3://b/b.tar",
            "done_bytes": 0,
            "total_bytes": None,
            "class": "waiting",
            "stage": "asking the object store for the shard's version",
            "waiters": 1,
            "rate_bytes_per_s": 0.0,
            "needed_in_s": None,
        },
    ],
    "jobs": [
        {
            "name": "resnet",
            "uid": 0,
            "sessions": 8,
            "shards_planned": 100,
            "shards_done": 40,
            "shards_per_s": 2.125,
            "ahead_s": 12.0,
            "waited_s": 2.5,
            "waited": {"network_s": 2.0, "disk_s": 0.5, "space_s": 0.0},
            "waiting": 3,
            "waiting_for": "downloading from the object store",
        }
    ],
}


def shown(page: dict[str, Any]) -> str:
    """Return the page as text."""
    console = Console(file=io.StringIO(), width=300)
    show_page(console, page)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line_with(text: str, page: str) -> str:
    """Return the line that contains `text`, with single spaces."""
    [line] = (line for line in page.splitlines() if text in line)
    return " ".join(line.split())


def job(**changes: object) -> dict[str, Any]:
    """Return a page whose job differs so."""
    return PAGE | {"jobs": [PAGE["jobs"][0] | changes]}


def test_the_page_shows_cache_and_counters() -> None:
    """Sizes, rates and counters read as people write them; what is nothing is left out."""
    page = shown(PAGE)
    assert "shardcache 1.2.3 · pid 42 · up 2 hours" in page
    assert "1.0 TB of 2.0 TB · 1,000 shards · 30.0 GB leased · 1.0 TB free on disk" in page
    assert "3.0 TB in 400,000 requests" in page
    assert "90 hits (90%) · 10 misses" in page
    assert "corrupt 7 · evictions 5 · re-fetched 1 · retries 6 · parts paused 8" in page


def test_the_page_shows_a_configured_tier() -> None:
    """Delivered bytes, failures, and whether it is bypassed."""
    tier = {"tier_bytes": 10**12, "tier_requests": 1000, "tier_failures": 3}
    page = PAGE | {"counters": PAGE["counters"] | tier, "tiers": [{"address": "127.0.0.1:9080", "failing": True}]}
    assert line_with("tier", shown(page)) == "tier 1.0 TB in 1,000 requests · 3 failed · failing, bypassed"
    assert "tier" not in shown(PAGE | {"tiers": []})
    troubled = {
        "address": "127.0.0.1:9080",
        "failing": False,
        "stale": True,
        "certificate_expires_s": time.time() + 9e4,
    }
    line = line_with("tier", shown(page | {"tiers": [troubled]}))
    assert "a former list of nodes" in line and line.endswith("certificate expires in a day")


def test_a_bad_disk_is_shown_with_its_cause_and_remedy() -> None:
    """Whoever looks at the page sees it at once; what cannot be known of the disk then is left out."""
    error = {"code": "disk_failed", "message": "the disk under /nvme fails", "url": None, "remedy": "see dmesg"}
    ill = {"state": "disk_failed", "error": error, "since_s": 7200.0, "short_bytes": 0}
    page = shown(PAGE | {"disk": ill, "cache": PAGE["cache"] | {"free_bytes": None}})
    assert "disk         the disk under /nvme fails, for 2 hours: see dmesg" in page
    assert "free on disk" not in page


def test_a_crowded_disk_is_shown() -> None:
    """Others fill it, and the cache has nothing to give."""
    crowded = {"state": "ok", "error": None, "since_s": 1.0, "short_bytes": PAGE["cache"]["capacity_bytes"] - 10**9}
    assert "other files on the disk limit the cache to 1.0 GB" in shown(PAGE | {"disk": crowded})


def test_the_scrub_is_shown() -> None:
    """Bytes verified again, damage found, progress of the round; nothing if it is turned off."""
    scrub = {"rate_bytes_per_s": 10**7, "scrubbed_bytes": 10**12, "corrupt": 1, "round_share": 0.25}
    assert "1.0 TB checked since start, 1 corrupt · 25% of this round" in shown(PAGE | {"scrub": scrub})
    assert "checked since" not in shown(PAGE | {"scrub": scrub | {"rate_bytes_per_s": 0}})


def test_transfers_show_how_far_they_are() -> None:
    """Rate and time of need; without a known size there is no bar and no end."""
    page = shown(PAGE)
    assert line_with("s3://b/a.tar", page).endswith("1.0 MB of 4.0 MB 5.0 MB/s planned 30.0 s 2")
    assert line_with("s3://b/b.tar", page) == "s3://b/b.tar 0 Bytes of ? 0 Bytes/s waiting 1"


def test_jobs_show_how_far_they_are_and_how_long_they_waited() -> None:
    """A line a job: who, how many readers, progress, pace, seconds ahead, waiting time, its causes, who waits now."""
    waited = "2.5 s: network 2.0 s, disk 500 ms"
    now = "3 readers: downloading from the object store"
    assert line_with("resnet", shown(PAGE)) == f"resnet root 8 40 of 100 2.1 12.0 s {waited} {now}"


def test_job_without_waiting_readers_shows_none() -> None:
    """A job that has all it planned and never waited."""
    calm = job(ahead_s=None, waited_s=0.0, waited={"network_s": 0.0, "disk_s": 0.0}, waiting=0, waiting_for=None)
    assert line_with("resnet", shown(calm)) == "resnet root 8 40 of 100 2.1 all cached 0 ms"


def test_reader_that_waits_for_no_transfer_is_counted() -> None:
    """A reader may wait for what has no name yet."""
    assert line_with("resnet", shown(job(waiting=1, waiting_for=None))).endswith(" 1 reader")


def test_names_are_shown_as_they_are() -> None:
    """Brackets in a job's name, url or folder are not taken for markup."""
    page = job(name="[red]x[/]") | {"cache": PAGE["cache"] | {"dir": "/nvme/[bold]"}}
    page["transfers"] = [PAGE["transfers"][0] | {"url": "s3://b/[/0-9].tar"}]
    assert all(name in shown(page) for name in ("[red]x[/]", "/nvme/[bold]", "s3://b/[/0-9].tar"))


def test_idle_daemon_shows_no_empty_tables() -> None:
    """Without transfers and jobs there are no headings for them; without leases, no share of hits."""
    counters = dict.fromkeys(PAGE["counters"], 0)
    page = shown(PAGE | {"transfers": [], "jobs": [], "counters": counters})
    assert "transfer " not in page and "readers " not in page and "%" not in page


def test_pages_with_fewer_fields_are_shown() -> None:
    """The node's daemon may be older than the command: what it does not tell is left blank."""
    told = {"name", "uid", "sessions", "shards_planned", "shards_done", "waited_s"}
    older = PAGE | {"jobs": [{key: value for key, value in PAGE["jobs"][0].items() if key in told}]}
    older["transfers"] = [
        {key: value for key, value in row.items() if key not in ("rate_bytes_per_s", "needed_in_s")}
        for row in PAGE["transfers"]
    ]
    older["counters"] = {key: value for key, value in PAGE["counters"].items() if key not in ("refetches", "paused")}
    page = shown(older)
    assert line_with("resnet", page) == "resnet root 8 40 of 100 2.5 s"
    assert line_with("s3://b/a.tar", page).endswith("1.0 MB of 4.0 MB planned 2")
    assert "corrupt 7 · evictions 5 · retries 6" in page
