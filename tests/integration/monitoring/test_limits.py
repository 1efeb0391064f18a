"""The limit that holds a reader back has one name in its explanation, status, terminal, dashboard and metrics."""

from pathlib import Path
from typing import Any

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


def test_bandwidth_limit_is_shown_always_and_named_while_it_holds(tmp_path: Path) -> None:
    limit, stage = "--max-bandwidth 70.0 kB/s", "downloading from the object store"
    with GatedStore() as store, Daemon(tmp_path, "--max-bandwidth", "70kB") as daemon, RawSession(daemon) as session:
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
        eventually(lambda: daemon.status()["jobs"][0]["waiting_for"] == f"{stage}, limited by {limit}")
        eventually(lambda: b'shardcache_limit_holding{limit="bandwidth"} 1.0' in daemon.request("GET", "/metrics"))
        with live(daemon) as events:
            page = Page(events)
            page.until(lambda: [wait["reason"] for wait in page.moment["waits"]] == [f"{stage}, limited by {limit}"])
            page.until(lambda: any(each["holds"] for each in page.moment["limits"] if each["name"] == "bandwidth"))


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
