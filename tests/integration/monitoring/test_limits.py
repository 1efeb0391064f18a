"""The limit that holds a reader back has one name in explanation, status and metrics."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import ShardcacheError
from shardcache_client.dataset import ShardDataset
from support.monitoring.dashboard import Page, live
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples, write_shards
from support.stores.canary import GatedStore


def limits(daemon: Daemon) -> dict[str, Any]:
    """Return the limits by name."""
    return {limit["name"]: limit for limit in daemon.status()["limits"]}


def waits_for(session: RawSession, position: int) -> int:
    """Request a shard and say that it is needed; return the number of the request."""
    of = session.request("lease", position=position)
    session.need(of)
    return of


def reason_of(session: RawSession, of: int) -> str:
    return str(session.answer(session.request("explain", of=of))["reason"])


@pytest.mark.slow
def test_bandwidth_limit_is_shown_always_and_named_while_it_holds(tmp_path: Path) -> None:
    limit = "--max-bandwidth 70.0 kB/s"
    stage = "downloading from the object store"
    with (
        GatedStore() as store,
        Daemon(tmp_path, "--max-bandwidth", "70kB") as daemon,
        RawSession(daemon) as session,
    ):
        url = store.put("a.tar", make_tar(random_samples(10, {"bin": 200_000})))
        store.let("a.tar")
        assert limits(daemon)["bandwidth"] == {"name": "bandwidth", "text": limit, "holds": False}
        assert f"limits {limit} · 0 of 16 connections" in " ".join(
            shardcache("status", socket=daemon.socket).out.split()
        )
        session.plan([url], [0])
        of = waits_for(session, 0)
        eventually(lambda: reason_of(session, of) == f"{stage}, limited by {limit}")
        eventually(lambda: limits(daemon)["bandwidth"]["holds"])
        eventually(
            lambda: daemon.status()["jobs"][0]["waiting_for"] == f"{stage}, limited by {limit}"
        )
        eventually(
            lambda: (
                b'shardcache_limit_holding{limit="bandwidth"} 1.0'
                in daemon.request("GET", "/metrics")
            )
        )
        with live(daemon) as events:
            page = Page(events)
            page.until(
                lambda: (
                    [wait["reason"] for wait in page.moment["waits"]]
                    == [f"{stage}, limited by {limit}"]
                )
            )
            page.until(
                lambda: any(
                    each["holds"] for each in page.moment["limits"] if each["name"] == "bandwidth"
                )
            )


@pytest.mark.slow
def test_jobs_that_a_limit_starves_are_short_of_data_in_every_moment(tmp_path: Path) -> None:
    """The share of the last 30 s tells, as their short waits are rarely under way."""
    urls = [f"file://{path}" for path in write_shards(tmp_path, 256, 10, {"bin": 10_000})]
    with (
        Daemon(tmp_path, "--max-bandwidth", "1MB", "--part-size", "65536") as daemon,
        live(daemon) as events,
    ):
        page = Page(events)
        threads = [
            threading.Thread(target=read, args=(daemon, name, urls), daemon=True)
            for name in ("one", "two")
        ]
        for thread in threads:
            thread.start()

        def shares() -> dict[str, float]:
            return {
                job["name"]: job["waiting_share"] for job in page.moment["jobs"] if job["sessions"]
            }

        page.until(lambda: len(shares()) == 2 and min(shares().values()) > 0.1)
        seen = []
        for _ in range(4):
            page.hear()
            seen.append(shares())
        assert [set(each) for each in seen] == [{"one", "two"}] * 4
        assert [each for each in seen if min(each.values()) <= 0.1] == []
        assert seen[-1]["one"] > seen[0]["one"]


def read(daemon: Daemon, job: str, urls: list[str]) -> None:
    """Read shards twice, until the daemon ends."""
    with suppress(ShardcacheError):
        for _ in ShardDataset(
            urls, socket=daemon.socket, job=job, timeout_s=10, partial_reads=False
        ):
            pass


def test_jobs_that_hold_the_space_are_named(tmp_path: Path) -> None:
    """With what each holds of it, the largest first."""
    urls = [f"file://{path}" for path in write_shards(tmp_path, 2, 4, {"bin": 100_000})]
    with Daemon(tmp_path, capacity="500kB") as daemon, RawSession(daemon, "holder") as holder:
        holder.plan(urls, [0, 1])
        holder.take(0)
        held = daemon.status()["cache"]["leased_bytes"]
        assert not limits(daemon)["space"]["holds"]
        with RawSession(daemon, "waiter") as waiter:
            waiter.plan(urls, [1])
            of = waits_for(waiter, 0)
            eventually(lambda: "waiting for space" in reason_of(waiter, of))
            assert limits(daemon)["space"]["holds"]
            assert f"leased (holder of root {held / 1000:.1f} kB)" in reason_of(waiter, of)
