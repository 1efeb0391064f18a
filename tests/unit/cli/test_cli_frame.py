"""Frames of `shardcache top`, built from literal status pages without a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from shardcache.cli.frame import Moment, frame, rates_between, share
from shardcache.cli.page import ahead, needed_in
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
    "paused",
)


def job(name: str = "resnet", **facts: object) -> Page:
    """Return a job that reads well, but for these facts."""
    calm = {
        "uid": 0,
        "sessions": 2,
        "shards_planned": 100,
        "shards_done": 40,
        "shards_per_s": 2.0,
        "ahead_s": 60.0,
        "waited_s": 0.0,
        "waited": {"network_s": 0.0, "disk_s": 0.0, "space_s": 0.0},
        "waiting": 0,
        "waiting_for": None,
    }
    return {"name": name} | calm | facts


def transfer(url: str, **facts: object) -> Page:
    """Return a transfer that is planned, but for these facts."""
    planned = {
        "done_bytes": 10**6,
        "total_bytes": 4 * 10**6,
        "class": "planned",
        "stage": "downloading from the object store",
        "waiters": 0,
        "rate_bytes_per_s": 10**6,
        "needed_in_s": 30.0,
    }
    return {"url": url} | planned | facts


def page(uptime_s: float = 100.0, pid: int = 42, **changes: Any) -> Page:
    """Return a status page; `counters` come on top of zeros."""
    cache = {"dir": "/nvme", "capacity_bytes": 2 * 10**12, "used_bytes": 10**12, "free_bytes": 10**12, "shards": 1000}
    return {
        "version": "1.2.3",
        "uptime_s": uptime_s,
        "pid": pid,
        "cache": cache,
        "counters": dict.fromkeys(COUNTERS, 0) | changes.get("counters", {}),
        "transfers": changes.get("transfers", []),
        "jobs": changes.get("jobs", []),
    }


def lines(moment: Moment, width: int = 200, height: int | None = None) -> list[str]:
    """Return a frame's lines, with single spaces."""
    console = Console(file=io.StringIO(), width=width)
    console.print(frame(moment, width, height))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def first_words(rows: list[str], prefix: str) -> list[str]:
    """Return the first word of each line that begins with `prefix`."""
    return [row.split()[0] for row in rows if row.startswith(prefix)]


# Rates


def test_rates_are_differences_over_the_daemons_own_time() -> None:
    """Bytes, requests and leases per second, however long the question took."""
    counters = {"origin_bytes": 10**9, "origin_requests": 50, "tier_bytes": 0, "hits": 8, "misses": 3}
    later = {"origin_bytes": 3 * 10**9, "origin_requests": 90, "tier_bytes": 10**9, "hits": 28, "misses": 7}
    rates = rates_between(page(10.0, counters=counters), page(12.0, counters=later))
    assert rates is not None
    assert (rates.interval_s, rates.origin_bytes_per_s, rates.origin_requests_per_s) == (2.0, 10**9, 20.0)
    assert rates.tier_bytes_per_s == 5 * 10**8
    assert (rates.hits_per_s, rates.misses_per_s) == (10.0, 2.0)


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
    """The part of the interval in which a job's readers waited, 0 to 1 whatever joins and leaves."""
    rates = rates_between(page(10.0, jobs=former), page(12.0, jobs=[job(waited_s=5.0)]))
    assert rates is not None and rates.waiting_share == {("resnet", 0): share}


def test_job_without_readers_has_no_share() -> None:
    """A job that has ended waits for nothing."""
    rates = rates_between(page(10.0, jobs=[job()]), page(12.0, jobs=[job(sessions=0)]))
    assert rates is not None and rates.waiting_share == {}


@pytest.mark.parametrize("former", [None, page(99.0, pid=41), page(100.0), page(101.0)])
def test_pages_of_two_daemons_have_no_rates(former: Page | None) -> None:
    """After a restart, counters begin anew: no negative rates."""
    assert rates_between(former, page(100.0)) is None


def test_json_is_the_page_with_its_rates() -> None:
    """A script finds the whole page, the rates beside it, and a job by name and uid."""
    now = page(12.0, jobs=[job(waited_s=1.0)], counters={"hits": 20})
    line = Moment(now, rates_between(page(10.0, jobs=[job()]), now)).to_json()
    assert {key: line[key] for key in now} == now
    assert line["rates"] == {
        "interval_s": 2.0,
        "origin_bytes_per_s": 0.0,
        "origin_requests_per_s": 0.0,
        "tier_bytes_per_s": 0.0,
        "hits_per_s": 10.0,
        "misses_per_s": 0.0,
        "jobs": [{"name": "resnet", "uid": 0, "waiting_share": 0.25}],
    }


# Frames


def test_head_shows_what_happens_now_and_what_happened() -> None:
    """The cache, the origin's rate and total, leases, evictions and re-fetched shards."""
    counters = {"origin_bytes": 10**12, "origin_requests": 8, "hits": 90, "misses": 10, "evictions": 5, "refetches": 1}
    former = page(98.0, counters=counters | {"origin_bytes": 10**12 - 10**9, "origin_requests": 0, "hits": 70})
    now = page(100.0, counters=counters)
    rows = lines(Moment(now, rates_between(former, now)))
    assert rows[0].startswith("shardcache 1.2.3 · pid 42 · up ") and rows[1] == "cache /nvme"
    assert rows[3].startswith("1.0 TB of 2.0 TB · 1,000 shards")
    assert rows[4] == "origin 500.0 MB/s · 4.0 requests/s · 1.0 TB since start"
    assert rows[5] == "leases 10.0/s · 90 hits (90%) · 10 misses"
    assert rows[2].endswith(" 1.0 TB free on disk")
    assert rows[6] == "since start evictions 5 · re-fetched 1"


def test_first_frame_has_no_rates() -> None:
    """One page alone shows totals, and invents no rate."""
    assert "/s" not in "".join(lines(Moment(page())))


def test_job_row_shows_progress_pace_and_waiting() -> None:
    """Shards read of planned, shards per second, ahead of need, share of waiting, its causes, who waits now."""
    waiting = job(
        ahead_s=0.0,
        waited_s=3.0,
        waited={"network_s": 2.5, "disk_s": 0.5, "space_s": 0.0},
        waiting=1,
        waiting_for="downloading from the object store",
    )
    now = page(100.0, jobs=[waiting])
    [row] = [
        row for row in lines(Moment(now, rates_between(page(98.0, jobs=[job(waited_s=2.0)]), now))) if "resnet" in row
    ]
    assert row.startswith("resnet root 2 ━") and " 40 of 100 2 0 s 25% " in row
    assert row.endswith(" 3.0 s: network 2.5 s, disk 500 ms 1 reader: downloading from the object store")


@pytest.mark.parametrize(
    ("facts", "text", "colour"),
    [
        ({"ahead_s": 0.0, "waiting": 1}, "0 s", "red"),
        ({"ahead_s": 0.0, "waiting": 0}, "0 s", "yellow"),
        ({"ahead_s": 9.9}, "9.9 s", "yellow"),
        ({"ahead_s": 10.0}, "10.0 s", "green"),
        ({"ahead_s": None}, "all cached", "green"),
        ({"ahead_s": None, "sessions": 0}, "", ""),
    ],
)
def test_the_colour_shows_how_far_ahead_a_job_is(facts: Page, text: str, colour: str) -> None:
    """Red where readers wait and nothing is here, yellow where that is near, green else."""
    assert ahead(job(**facts)) == Text(text, colour)
    assert ahead(job(**facts)).style == colour


@pytest.mark.parametrize(("needed_in_s", "text"), [(None, ""), (-1.0, "now"), (0.0, "now"), (2.5, "2.5 s")])
def test_a_transfer_shows_when_it_is_needed(needed_in_s: float | None, text: str) -> None:
    """Nothing where nobody plans it; what is late is needed now."""
    assert needed_in(transfer("s3://b/a.tar", needed_in_s=needed_in_s)) == text


def test_the_most_urgent_rows_come_first() -> None:
    """Jobs that wait, then those with least ahead, ended ones in a line below; transfers by class and by need."""
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
    rows = lines(Moment(page(jobs=jobs, transfers=transfers)))
    heading = next(number for number, row in enumerate(rows) if row.startswith("job "))
    assert [row.split()[0] for row in rows[heading + 1 : heading + 4]] == ["waits", "soon", "calm"]
    assert rows[heading + 4] == "1 job without readers: ended"
    assert first_words(rows, "s3://") == ["s3://waiting", "s3://sooner", "s3://later", "s3://warm"]


NAMES = ("resnet50-imagenet21k-482113", "a-name-of-the-scheduler-" * 4, "eval")


@pytest.mark.parametrize("width", [72, 80, 100, 140, 200])
def test_names_of_jobs_are_whole_in_any_width(width: int) -> None:
    """A usual name on its line, one too long for any column folded; no line is wider than the screen."""
    waiting = {"ahead_s": 0.0, "waiting": 1, "waiting_for": "downloading from the object store"}
    jobs = [job(name, waited_s=3600.0, shards_planned=10**6, **waiting) for name in NAMES]
    console = Console(file=io.StringIO(), width=width)
    console.print(frame(Moment(page(jobs=jobs)), width, 40))
    assert isinstance(console.file, io.StringIO)
    rows = console.file.getvalue().splitlines()
    heading = next(number for number, row in enumerate(rows) if row.startswith("job "))
    columns = rows[heading].index("user")
    assert all(cell_len(row) <= width for row in rows)
    assert "".join(row[:columns].strip() for row in rows[heading + 1 :]) == "".join(sorted(NAMES))
    for name in ("resnet50-imagenet21k-482113", "eval"):
        assert any(row.startswith(f"{name} ") for row in rows)
    for kept in ("user", "shards read", "ahead", "waiting now"):
        assert kept in rows[heading]


def test_a_wide_screen_shows_all_columns() -> None:
    """Nothing is given up where there is room."""
    rows = lines(Moment(page(jobs=[job()])), 160)
    assert "job user readers shards read shards/s ahead waits waited waiting now" in rows


def test_folded_names_count_as_lines() -> None:
    """A frame with them is still no longer than the screen."""
    rows = lines(Moment(page(jobs=[job("x" * 200) for _ in range(20)])), 80, 24)
    assert len(rows) <= 24 and any(row.startswith("… and ") for row in rows)


@pytest.mark.parametrize(("width", "end"), [(80, "old04, old05 and 34 more"), (400, "old38, old39")])
def test_jobs_without_readers_are_one_line(width: int, end: str) -> None:
    """With as many whole names as fit."""
    ended = [job(f"old{number:02d}", sessions=0) for number in range(40)]
    [row] = [row for row in lines(Moment(page(jobs=[job(), *ended])), width, 40) if "old" in row]
    assert row.startswith("40 jobs without readers: old00, old01,") and len(row) <= width
    assert row.endswith(end)


def test_a_job_has_its_users_name() -> None:
    """The id, where this node does not know the user."""
    rows = lines(Moment(page(jobs=[job("known"), job("foreign", uid=987654)])))
    assert any(row.startswith("known root ") for row in rows)
    assert any(row.startswith("foreign 987654 ") for row in rows)


@pytest.mark.parametrize("height", [13, 24, 40, 80])
@pytest.mark.parametrize("width", [80, 120, 200])
def test_many_jobs_and_transfers_fit_the_screen(height: int, width: int) -> None:
    """64 jobs and 40 transfers are cut to the height, one line each in any width, and what is missing is counted."""
    full = page(
        jobs=[job(f"job{number:02d}") for number in range(64)],
        transfers=[transfer(f"s3://bucket/a/long/prefix/of/shards/train-{number:06d}.tar") for number in range(40)],
    )
    rows = lines(Moment(full), width, height)
    assert len(rows) == height
    hidden = [int(row.split()[2]) for row in rows if row.startswith("… and")]
    jobs_shown, transfers_shown = len(first_words(rows, "job")) - 1, sum(".tar" in row for row in rows)
    assert hidden == [64 - jobs_shown, 40 - transfers_shown]


def test_frames_without_a_screen_are_not_cut() -> None:
    """In a pipe nothing is cut."""
    full = page(jobs=[job(f"job{number:02d}") for number in range(64)])
    assert len(first_words(lines(Moment(full)), "job")) == 65


@pytest.mark.parametrize(
    ("room", "jobs", "transfers", "given"),
    [
        (None, 64, 40, (64, 40)),
        (20, 64, 40, (10, 10)),
        (20, 3, 40, (3, 17)),
        (20, 64, 3, (17, 3)),
        (20, 4, 3, (4, 3)),
        (1, 4, 3, (0, 1)),
        (0, 4, 3, (0, 0)),
    ],
)
def test_lines_that_one_list_does_not_need_go_to_the_other(
    room: int | None, jobs: int, transfers: int, given: tuple[int, int]
) -> None:
    """Half each, and never more than there is."""
    assert share(room, jobs, transfers) == given


def test_the_last_page_stays_while_the_daemon_is_away() -> None:
    """The last page stays, with a line that says why there is none newer; as JSON it is the error."""
    lost = Moment(page(jobs=[job()]), trouble=NoDaemonError("no daemon listens at the socket", url="/run/s.sock"))
    rows = lines(lost)
    assert "daemon no daemon listens at the socket; retrying" in rows
    assert first_words(rows, "resnet") == ["resnet"]
    assert lost.to_json()["error"]["code"] == "no_daemon"
