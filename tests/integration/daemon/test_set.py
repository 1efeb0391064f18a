"""Settings of a running daemon: capacity, rate, log level; and the contents of its log lines."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache_client import ShardDataset
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import write_shards

SHARDS = 4
SIZES = {"bin": 40_000}  # ten samples make a shard of some 420 kB


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon for all tests here."""
    with Daemon(tmp_path_factory.mktemp("d"), "--scrub-rate", "0", "--log-format", "json") as daemon:
        yield daemon


@pytest.fixture
def daemon(running: Daemon) -> Daemon:
    """Lend it empty, with room for all."""
    assert put(running, "capacity", "1GB")["value"] == 10**9
    running.empty()
    return running


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """Return the urls of some shards."""
    return [f"file://{path}" for path in write_shards(tmp_path, SHARDS, 10, SIZES)]


def put(daemon: Daemon, name: str, value: str) -> dict[str, Any]:
    """Set something and return the answer."""
    answer: dict[str, Any] = json.loads(daemon.request("POST", "/v1/settings", {"name": name, "value": value}))
    return answer


def lines(daemon: Daemon) -> list[dict[str, Any]]:
    """Return the log."""
    return [json.loads(line) for line in daemon.log.read_text().splitlines()]


def test_a_smaller_capacity_evicts_down_to_it(daemon: Daemon, urls: list[str]) -> None:
    """Evictable shards go, the leased one does not; below that the change is refused, with what stays."""
    daemon.request("POST", "/v1/warm", {"urls": urls})
    with RawSession(daemon) as session:
        session.plan(urls[:1], [0])
        session.take(0)
        answer = put(daemon, "capacity", "900KB")
        assert (answer["former"], answer["value"]) == (10**9, 900_000)
        assert answer["freed_bytes"] > 2 * 400_000
        cached = [row["url"] for row in daemon.shards()]
        assert urls[0] in cached and len(cached) == 2
        refused = put(daemon, "capacity", "300KB")["error"]
        assert refused["code"] == "capacity" and " leased" in refused["message"] and refused["remedy"]
        assert len(daemon.shards()) == 2, "what is refused evicts nothing"
    assert daemon.status()["cache"]["capacity_bytes"] == 900_000


def test_a_larger_capacity_lets_go_on_who_waits_for_room(daemon: Daemon, urls: list[str]) -> None:
    """A reader that found no room beside another's shard reads on at once."""
    assert put(daemon, "capacity", "700KB")["value"] == 700_000
    with RawSession(daemon) as session:
        session.plan(urls[:1], [0])
        session.take(0)
        found: list[int] = []
        dataset = ShardDataset(urls[1], socket=daemon.socket, job="second")
        thread = threading.Thread(target=lambda: found.append(len(list(dataset))))
        thread.start()
        eventually(
            lambda: any(job["waiting_for"] == "waiting for space in the cache" for job in daemon.status()["jobs"])
        )
        put(daemon, "capacity", "1GB")
        thread.join()
        assert found == [10]


def test_pins_are_not_left_without_room(daemon: Daemon, urls: list[str]) -> None:
    """A capacity of which pins would be more than their share is refused."""
    daemon.request("POST", "/v1/pin", {"urls": urls[:2]})
    refused = put(daemon, "capacity", "900KB")["error"]
    daemon.request("POST", "/v1/unpin", {"urls": urls[:2]})
    assert "pins would take" in refused["message"] and len(daemon.shards()) == 2
    assert put(daemon, "capacity", "900KB")["value"] == 900_000


def test_lines_name_job_and_shard(daemon: Daemon, urls: list[str]) -> None:
    """From the moment at which the level is lowered, each fetch is told, with the job and the shard that it is for."""
    assert len(list(ShardDataset(urls[0], socket=daemon.socket, job="quiet"))) == 10
    assert put(daemon, "log_level", "debug")["former"] == "info"
    assert len(list(ShardDataset(urls[1], socket=daemon.socket, job="loud"))) == 10
    assert put(daemon, "log_level", "info")["former"] == "debug"
    assert len(list(ShardDataset(urls[2], socket=daemon.socket, job="quiet"))) == 10
    fetched = [(line["job"], line["shard"]) for line in lines(daemon) if line["event"] == "fetched"]
    assert fetched == [("loud", urls[1])]
    begun = [(line["job"], line["uid"]) for line in lines(daemon) if line["event"] == "session started"]
    assert ("loud", 0) in begun and ("quiet", 0) in begun


def test_an_error_names_job_and_shard(daemon: Daemon, urls: list[str], tmp_path: Path) -> None:
    """A shard that could not be fetched ahead is told with whose it is, its url without its secrets."""
    cut = tmp_path / "cut.tar"
    cut.write_bytes(Path(urls[0].removeprefix("file://")).read_bytes()[:100_000])
    url = f"file://{cut}"
    with RawSession(daemon, job="unlucky") as session:
        session.plan([urls[0], url], [0, 1])
        session.take(0)
        eventually(lambda: any(line["event"] == "prefetch failed" for line in lines(daemon)))
    (line,) = [line for line in lines(daemon) if line["event"] == "prefetch failed"]
    assert (line["job"], line["shard"], line["level"]) == ("unlucky", url, "warning")
    assert "url" not in line and line["cause"]


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [("capacity", "much", "config"), ("attempts", "3", "config"), ("log_level", "loud", "config"), ("", "", "config")],
)
def test_what_makes_no_sense_is_refused(daemon: Daemon, name: str, value: str, code: str) -> None:
    """The error names what can be set, or which values there are."""
    error = put(daemon, name, value)["error"]
    assert error["code"] == code and error["remedy"]


def test_the_command(daemon: Daemon) -> None:
    """Alone it shows what can be set; with a value it says what was before, and that it does not last."""
    shown = shardcache("set", socket=daemon.socket)
    assert shown.code == 0 and [name in shown.out for name in ("capacity", "max-bandwidth", "log-level")] == [True] * 3
    changed = shardcache("set", "max-bandwidth", "200MB/s", socket=daemon.socket)
    assert "max-bandwidth: no limit → 200.0 MB/s" in changed.out and "until the daemon stops" in changed.out
    assert shardcache("set", "--json", "max-bandwidth", "none", socket=daemon.socket).json["value"] is None
    assert shardcache("set", "capacity", socket=daemon.socket).code == 2
