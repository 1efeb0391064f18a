"""The page of `status` and `top`, drawn from literal status pages without a terminal."""

import io
import itertools
import time
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from shardcache.cli.monitoring.status_frame import StatusFrame, rates_between
from shardcache.cli.monitoring.status_text import draw, time_ahead
from shardcache.errors import NoDaemonError

Page = dict[str, Any]

COUNTERS = (
    "origin_bytes",
    "origin_requests",
    "hits",
    "misses",
    "evictions",
    "refetches",
    "retries",
    "corrupt",
)


def job(name: str = "resnet", **facts: object) -> Page:
    """Return a job that reads well, but for these facts."""
    reads = {
        "uid": 0,
        "sessions": 2,
        "shards_planned": 100,
        "shards_done": 40,
        "shards_per_s": 2.0,
        "ahead_s": 60.0,
    }
    waits = {"waited_s": 0.0, "waited": dict.fromkeys(("network_s", "disk_s", "space_s"), 0.0)}
    calm = reads | waits | {"waiting": 0, "waiting_for": None}
    return {"name": name} | calm | facts


def transfer(url: str, **facts: object) -> Page:
    """Return a transfer that is planned, but for these facts."""
    done = {"done_bytes": 10**6, "total_bytes": 4 * 10**6, "rate_bytes_per_s": 10**6}
    planned = {
        "class": "planned",
        "stage": "downloading from the object store",
        "waiters": 0,
        "needed_in_s": 30.0,
    }
    return {"url": url} | done | planned | facts


def page(uptime_s: float = 100.0, pid: int = 42, **changes: Any) -> Page:
    """Return a status page; `counters` come on top of zeros."""
    cache = {
        "dir": "/nvme",
        "capacity_bytes": 2 * 10**12,
        "used_bytes": 10**12,
        "free_bytes": 10**12,
        "shards": 1000,
    }
    head = {
        "version": "1.2.3",
        "uptime_s": uptime_s,
        "pid": pid,
        "cache": cache,
        "transfers": [],
        "jobs": [],
    }
    return head | changes | {"counters": dict.fromkeys(COUNTERS, 0) | changes.get("counters", {})}


def drawn(page: Page | StatusFrame, width: int = 200, height: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(draw(page if isinstance(page, StatusFrame) else StatusFrame(page), width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def lines(page: Page | StatusFrame, width: int = 200, height: int | None = None) -> list[str]:
    """Return the lines of a page, with single spaces."""
    return [" ".join(line.split()) for line in drawn(page, width, height)]


def line(prefix: str, page: Page | StatusFrame, width: int = 200) -> str:
    """Return the line that begins with `prefix`; an empty string if there is none."""
    return next((line for line in lines(page, width) if line.startswith(prefix)), "")


# Rates


def test_rates_are_differences_over_the_daemons_own_time() -> None:
    """Bytes, requests and leases per second, however long the question took."""
    counters = {
        "origin_bytes": 10**9,
        "origin_requests": 50,
        "tier_bytes": 0,
        "hits": 8,
        "misses": 3,
    }
    later = {
        "origin_bytes": 3 * 10**9,
        "origin_requests": 90,
        "tier_bytes": 10**9,
        "hits": 28,
        "misses": 7,
    }
    assert rates_between(page(10.0, counters=counters), page(12.0, counters=later)) == {
        "interval_s": 2.0,
        "origin_bytes_per_s": 10**9,
        "origin_requests_per_s": 20.0,
        "tier_bytes_per_s": 5 * 10**8,
        "hits_per_s": 10.0,
        "misses_per_s": 2.0,
        "jobs": [],
    }


@pytest.mark.parametrize(
    ("former", "share"),
    [
        ([job(waited_s=4.0)], 0.25),  # two readers, each waited half a second of two
        ([], 1.0),  # all five seconds are new: no more than the whole
        ([job(waited_s=9.0)], 0.0),
        ([job(waited_s=4.0, uid=1000)], 1.0),  # another user's job of that name
    ],
)
def test_waiting_share_is_of_all_readers_time(former: list[Page], share: float) -> None:
    """The share is 0 to 1 whatever readers join and leave, and none without readers."""
    rates = rates_between(
        page(10.0, jobs=former), page(12.0, jobs=[job(waited_s=5.0), job("ended", sessions=0)])
    )
    assert rates is not None
    assert rates["jobs"] == [{"name": "resnet", "uid": 0, "waiting_share": share}]


@pytest.mark.parametrize("former", [page(99.0, pid=41), page(100.0), page(101.0)])
def test_pages_of_two_daemons_have_no_rates(former: Page) -> None:
    """After a restart, counters start from zero: no negative rates."""
    assert rates_between(former, page(100.0)) is None


# Facts


def test_page_shows_the_cache_and_its_counters() -> None:
    """Sizes and counters read as people write them, without zeros; one page has no rates."""
    counters = {
        "origin_bytes": 3 * 10**12,
        "origin_requests": 400_000,
        "hits": 90,
        "misses": 10,
        "evictions": 5,
    }
    counters |= {"refetches": 1, "retries": 6, "corrupt": 7, "paused": 8}
    shown = page(7200.0, counters=counters)
    shown["cache"] = shown["cache"] | {"leased_bytes": 3 * 10**10, "reserved_bytes": 0}
    head, cache, _, *facts = lines(shown)
    assert head == "shardcache 1.2.3 · pid 42 · up 2 hours"
    assert cache == "cache /nvme"
    assert facts == [
        "1.0 TB of 2.0 TB · 1,000 shards · 30.0 GB leased · 1.0 TB free on disk",
        "origin 3.0 TB in 400,000 requests since start",
        "leases 90 hits (90%) · 10 misses",
        "since start corrupt 7 · evictions 5 · re-fetched 1 · retries 6 · parts paused 8",
    ]


def test_rates_come_before_totals() -> None:
    """The origin's and the leases' present rates are shown with the totals since the start."""
    counters = {"origin_bytes": 10**12, "origin_requests": 8, "hits": 90, "misses": 10}
    former = page(
        98.0, counters=counters | {"origin_bytes": 10**12 - 10**9, "origin_requests": 0, "hits": 70}
    )
    now = page(100.0, counters=counters)
    moment = StatusFrame(now, rates_between(former, now))
    origin = line("origin", moment)
    assert origin == "origin 500.0 MB/s · 4.0 requests/s · 1.0 TB in 8 requests since start"
    assert line("leases", moment) == "leases 10.0/s · 90 hits (90%) · 10 misses"


def test_page_shows_a_configured_tier() -> None:
    """Delivered bytes, failures, and whether it is bypassed, outdated or about to expire."""
    counters = {"tier_bytes": 10**12, "tier_requests": 1000, "tier_failures": 3}
    state = {"address": "/run/tier/front.sock", "failing": True}
    shown = line("tier", page(counters=counters, tiers=[state]))
    assert shown == "tier 1.0 TB in 1,000 requests · 3 failed · failing, bypassed"
    assert not line("tier", page(tiers=[]))
    troubled = state | {"failing": False, "stale": True, "certificate_expires_s": time.time() + 9e4}
    shown = line("tier", page(counters=counters, tiers=[troubled]))
    assert "an old list of nodes" in shown
    assert shown.endswith("certificate expires in a day")


def test_bad_disk_is_shown_with_its_cause_and_remedy() -> None:
    """Facts that cannot be known of such a disk are left out."""
    error = {
        "code": "disk_failed",
        "message": "the disk under /nvme fails",
        "url": None,
        "remedy": "see dmesg",
    }
    shown = page(disk={"state": "disk_failed", "error": error, "since_s": 7200.0, "short_bytes": 0})
    shown["cache"] = shown["cache"] | {"free_bytes": None}
    assert line("disk", shown) == "disk the disk under /nvme fails, for 2 hours: see dmesg"
    assert "free on disk" not in "".join(lines(shown))
    crowded = {"state": "ok", "error": None, "since_s": 1.0, "short_bytes": 2 * 10**12 - 10**9}
    disk = line("disk", page(disk=crowded))
    assert disk == "disk other files on the disk limit the cache to 1.0 GB"


def test_savings_scrub_and_pins_are_shown_where_there_are_any() -> None:
    """Savings, bytes verified again, damage, and pinned bytes of their limit are shown."""
    bill = line("bill", page(bill={"text": "saved 3.0 GB in 6 requests"}))
    assert bill == "bill saved 3.0 GB in 6 requests"
    assert not line("bill", page())
    scrub = {"rate_bytes_per_s": 10**7, "scrubbed_bytes": 10**12, "corrupt": 1, "round_share": 0.25}
    scrub_line = line("scrub", page(scrub=scrub))
    assert scrub_line == "scrub 1.0 TB checked since start, 1 corrupt · 25% of this round"
    assert not line("scrub", page(scrub=scrub | {"rate_bytes_per_s": 0}))
    pins = {"shards": 2, "missing": 1, "size_bytes": 10**9, "limit_bytes": 10**12}
    pinned = line("pinned", page(pins=pins))
    assert pinned == "pinned 2 shards, 1 of them missing · 1.0 GB of at most 1.0 TB"
    assert not line("pinned", page(pins=pins | {"shards": 0}))


def test_last_page_stays_while_the_daemon_is_away() -> None:
    """A line says why there is none newer; as JSON it is the error."""
    lost = StatusFrame(
        page(jobs=[job()]),
        error=NoDaemonError("no daemon listens at the socket", url="/run/s.sock"),
    )
    assert line("daemon", lost) == "daemon no daemon listens at the socket; retrying"
    assert line("resnet", lost)
    assert lost.to_json()["error"]["code"] == "no_daemon"


# Jobs and transfers


def test_job_row_shows_progress_pace_and_waiting() -> None:
    """Shards read of planned, pace, lead, share and causes of waiting, and current waits."""
    waited = {"network_s": 2.5, "disk_s": 0.5, "space_s": 0.0}
    waiting = job(
        ahead_s=0.0,
        waited_s=3.0,
        waited=waited,
        waiting=1,
        waiting_for="downloading from the object store",
    )
    now = page(100.0, jobs=[waiting])
    row = line("resnet", StatusFrame(now, rates_between(page(98.0, jobs=[job(waited_s=2.0)]), now)))
    assert row.startswith("resnet root 2 ━")
    assert " 40 of 100 2 0 s 25% " in row
    assert row.endswith(
        " 3.0 s: network 2.5 s, disk 500 ms 1 reader: downloading from the object store"
    )
    assert line("resnet", page(jobs=[job(waiting=1)])).endswith(" 1 reader")
    assert "job user readers shards read shards/s ahead waits waited waiting now" in lines(now, 160)


@pytest.mark.parametrize(
    ("facts", "text", "colour"),
    [
        ({"ahead_s": 0.0, "waiting": 1}, "0 s", "red"),
        ({"ahead_s": 0.0, "waiting": 0}, "0 s", "yellow"),
        ({"ahead_s": 9.9}, "9.9 s", "yellow"),
        ({"ahead_s": 10.0}, "10.0 s", "green"),
        ({"ahead_s": None}, "all cached", "green"),
    ],
)
def test_colour_shows_how_far_ahead_a_job_is(facts: Page, text: str, colour: str) -> None:
    """Red where readers wait and nothing is cached, yellow where that is near, green else."""
    found = time_ahead(job(**facts))
    assert found.plain == text
    assert found.style == colour


def test_waiting_job_shows_for_how_long_and_its_share() -> None:
    """The longest present wait, and the last 30 s, in a single page; not that all is cached."""
    listing = {
        "waiting": 1,
        "waiting_for": "listing the shards of s3://b",
        "waiting_s": 12.0,
        "waiting_share": 0.94,
    }
    row = line("resnet", page(jobs=[job(ahead_s=0.0, shards_planned=0, shards_done=0, **listing)]))
    assert " 0 of 0 2 0 s 94% " in row
    assert row.endswith(" 1 reader for 12.0 s: listing the shards of s3://b")


def test_job_without_a_plan_has_nothing_cached() -> None:
    """It has just connected."""
    found = time_ahead(job(ahead_s=None, shards_planned=0))
    assert found.plain == "no plan yet"
    assert found.style == "dim"


def test_transfers_show_how_far_they_are() -> None:
    """Rate and time of need are shown; an unknown size gives neither a bar nor an end."""
    unknown = {
        "done_bytes": 0,
        "total_bytes": None,
        "class": "waiting",
        "waiters": 1,
        "needed_in_s": None,
    }
    shown = page(
        transfers=[transfer("s3://b/a.tar", waiters=2), transfer("s3://b/b.tar", **unknown)]
    )
    late = page(transfers=[transfer("s3://b/c.tar", needed_in_s=-1.0)])
    assert line("s3://b/a.tar", shown).endswith("1.0 MB of 4.0 MB 1.0 MB/s planned 30.0 s 2")
    assert line("s3://b/b.tar", shown) == "s3://b/b.tar 0 Bytes of ? 1.0 MB/s waiting 1"
    assert line("s3://b/c.tar", late).endswith(" planned now 0")


def test_most_urgent_rows_come_first() -> None:
    """Waiting jobs come first, then by least ahead; transfers come by class and need."""
    jobs = [
        job("ended", sessions=0, ahead_s=0.0),
        job("calm", ahead_s=None),
        job("soon", ahead_s=5.0),
        job("waits", ahead_s=0.0, waiting=1),
    ]
    transfers = [
        transfer("s3://warm", **{"class": "warm", "needed_in_s": None}),
        transfer("s3://later"),
        transfer("s3://sooner", needed_in_s=3.0),
        transfer("s3://waiting", **{"class": "waiting", "needed_in_s": 0.0}),
    ]
    rows = lines(page(jobs=jobs, transfers=transfers))
    heading = next(number for number, row in enumerate(rows) if row.startswith("job "))
    assert [row.split()[0] for row in rows[heading + 1 : heading + 4]] == ["waits", "soon", "calm"]
    assert rows[heading + 4] == "1 job without readers: ended"
    urls = [row.split()[0] for row in rows if row.startswith("s3://")]
    assert urls == ["s3://waiting", "s3://sooner", "s3://later", "s3://warm"]


def test_names_are_shown_as_they_are() -> None:
    """Brackets in names, urls or folders are not markup; an unknown user has its id."""
    shown = page(jobs=[job("[red]x[/]", uid=987654)], transfers=[transfer("s3://b/[/0-9].tar")])
    shown["cache"] = shown["cache"] | {"dir": "/nvme/[bold]"}
    assert line("cache", shown) == "cache /nvme/[bold]"
    assert line("s3://b/[/0-9].tar ", shown)
    assert line("[red]x[/] 987654 ", shown)


def test_pages_with_fewer_fields_are_shown() -> None:
    """The node's daemon may be older than the command: what it does not report is left blank."""
    known = ("name", "uid", "sessions", "shards_planned", "shards_done", "waited_s")
    older = page(jobs=[{name: job()[name] for name in known}])
    row = transfer("s3://b/a.tar")
    older["transfers"] = [
        {name: row[name] for name in row if name not in ("rate_bytes_per_s", "needed_in_s")}
    ]
    older["counters"] = {
        "origin_bytes": 0,
        "origin_requests": 0,
        "hits": 0,
        "misses": 0,
        "corrupt": 7,
    }
    assert line("resnet", older).startswith("resnet root 2 ━")
    assert line("resnet", older).endswith(" 40 of 100 0 ms")
    assert line("s3://b/a.tar", older).endswith("1.0 MB of 4.0 MB planned 0")
    assert line("since start", older) == "since start corrupt 7"


# The screen

NAMES = ("resnet50-imagenet21k-482113", "a-name-of-the-scheduler-" * 4, "eval")


@pytest.mark.parametrize("width", [72, 80, 100, 140, 200])
def test_names_of_jobs_are_whole_in_any_width(width: int) -> None:
    """A usual name is on its line, and one too long for any column is folded."""
    waiting = {"ahead_s": 0.0, "waiting": 1, "waiting_for": "downloading from the object store"}
    jobs = [job(name, waited_s=3600.0, shards_planned=10**6, **waiting) for name in NAMES]
    rows = drawn(page(jobs=jobs), width, 40)
    heading = next(number for number, row in enumerate(rows) if row.startswith("job "))
    columns = rows[heading].index("user")
    assert all(cell_len(row) <= width for row in rows)
    assert "".join(row[:columns].strip() for row in rows[heading + 1 :]) == "".join(sorted(NAMES))
    for name in ("resnet50-imagenet21k-482113", "eval"):
        assert any(row.startswith(f"{name} ") for row in rows)
    for kept in ("user", "shards read", "ahead", "waiting now"):
        assert kept in rows[heading]


def test_jobs_without_readers_are_one_line() -> None:
    """The line has as many names as fit."""
    ended = [job(f"old{number:02d}", sessions=0) for number in range(40)]
    row = line("40 jobs without readers: old00, old01,", page(jobs=[job(), *ended]), 80)
    assert len(row) == 80
    assert row.endswith("…")


@pytest.mark.parametrize(
    ("height", "width", "jobs", "transfers"),
    [
        *itertools.product((24, 80), (80, 120, 200), (64,), (40,)),
        (24, 120, 3, 40),
        (24, 120, 64, 3),
    ],
)
def test_many_jobs_and_transfers_fit_the_screen(
    height: int, width: int, jobs: int, transfers: int
) -> None:
    """Both are cut to the height, one line each in any width, and what is missing is counted.

    Lines that one list does not need go to the other.
    """
    urls = [
        f"s3://bucket/a/long/prefix/of/shards/train-{number:06d}.tar" for number in range(transfers)
    ]
    full = page(
        jobs=[job(f"job{number:02d}") for number in range(jobs)],
        transfers=list(map(transfer, urls)),
    )
    rows = lines(full, width, height)
    assert height - 2 <= len(rows) <= height
    hidden = [int(row.split()[2]) for row in rows if row.startswith("… and")]
    jobs_shown = sum(row.startswith("job") for row in rows) - 1
    missing = [jobs - jobs_shown, transfers - sum(".tar" in row for row in rows)]
    assert hidden == [count for count in missing if count]


def test_jobs_without_readers_take_no_lines_from_transfers() -> None:
    """They have one line together, however many they are: transfers get the other lines."""
    ended = [job(f"old{number:02d}", sessions=0) for number in range(64)]
    urls = [f"s3://bucket/train-{number:06d}.tar" for number in range(40)]
    full = page(jobs=[job(), *ended], transfers=list(map(transfer, urls)))
    assert 24 - 2 <= len(lines(full, 120, 24)) <= 24
