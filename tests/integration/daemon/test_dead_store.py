"""A store that does not answer: what people see while its requests are repeated."""

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import NoDaemonError
from shardcache_client.dataset import ShardDataset
from support.monitoring.dashboard import Page, follow, live
from support.network.ports import free_port
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.stores import aws_env

ATTEMPTS = 5


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("d")
    env = aws_env(f"http://127.0.0.1:{port}")
    with Daemon(folder, "--attempts", str(ATTEMPTS), env=env) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose store takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        env = aws_env(f"http://127.0.0.1:{store.getsockname()[1]}")
        with Daemon(tmp_path_factory.mktemp("silent"), env=env) as daemon:
            yield daemon


LISTING = "listing the shards of s3://bucket"
PATTERNS = ["s3://bucket/train/index.json", "s3://bucket/train-*.tar", "s3://bucket/train/"]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
def test_job_whose_shards_are_being_listed_is_waiting(silent: Daemon, pattern: str) -> None:
    """Status, metrics, dashboard and explanation say for which store it waits, and how long."""
    job = f"job of {pattern}"
    with live(silent) as events, RawSession(silent, job) as session:
        page = Page(events)
        of = session.request("resolve", urls=[pattern])
        page.until(lambda: job in {wait["job"] for wait in page.moment["waits"]})
        (wait,) = (each for each in page.moment["waits"] if each["job"] == job)
        assert wait["url"] == pattern
        assert wait["reason"] == LISTING
        assert wait["readers"] == 1
        page.until(
            lambda: (
                next(each for each in page.moment["waits"] if each["job"] == job)["for_s"]
                > wait["for_s"]
            )
        )
        (row,) = (each for each in silent.status()["jobs"] if each["name"] == job)
        assert row["waiting"] == 1
        assert row["waiting_for"] == LISTING
        assert row["ahead_s"] == 0.0
        assert row["waiting_s"] > 0
        assert row["waited_s"] == row["waited"]["network_s"] > 0
        status = " ".join(shardcache("status", socket=silent.socket).out.split())
        assert re.search(
            rf"{re.escape(job)} .* 0 of 0 .* 1 reader for [\d.]+ m?s: {LISTING}", status
        )
        assert "all cached" not in status
        metrics = silent.request("GET", "/metrics").decode()
        assert re.search(
            rf'job_waiting_sessions{{job_name="{re.escape(job)}",uid="\d+"}} 1\.0', metrics
        )
        assert session.answer(session.request("explain", of=of))["reason"] == LISTING


@pytest.mark.slow
def test_pattern_that_is_being_asked_about_is_named(silent: Daemon) -> None:
    """Of several, whatever their order: those that name their shards themselves ask nothing."""
    with live(silent) as events, RawSession(silent, "several") as session:
        session.request("resolve", urls=["s3://other/{0..9}.tar", "s3://bucket/train/"])
        page = Page(events)
        page.until(lambda: [each["url"] for each in page.moment["waits"]] == ["s3://bucket/train/"])
        assert page.moment["waits"][0]["reason"] == LISTING


def test_job_that_has_its_shards_no_longer_waits(silent: Daemon) -> None:
    """Neither after an answer, nor when its process has ended during the question."""
    with RawSession(silent, "answered") as session:
        session.ask("resolve", urls=["s3://bucket/{0..9}.tar"])
        (row,) = (each for each in silent.status()["jobs"] if each["name"] == "answered")
        assert row["waiting"] == 0
        assert row["waiting_for"] is None
        assert row["ahead_s"] is None
        assert "no plan yet" in shardcache("status", socket=silent.socket).out
    with RawSession(silent, "ended") as session:
        session.request("resolve", urls=["s3://bucket/train/"])
        eventually(
            lambda: (
                [each["waiting"] for each in silent.status()["jobs"] if each["name"] == "ended"]
                == [1]
            )
        )
    eventually(
        lambda: (
            [each["waiting"] for each in silent.status()["jobs"] if each["name"] == "ended"] == [0]
        )
    )


def test_listing_of_urls_that_one_may_not_see_is_shown_without_its_store(tmp_path: Path) -> None:
    """TCP without a token shows only that the job waits, unless everybody may fetch the urls."""
    port = free_port()
    rule = f'[[allow]]\nprefix = "s3://bucket/"\nusers = [{os.getuid()}]\n'
    (tmp_path / "conf.toml").write_text(rule)
    flags = ("--http", f"127.0.0.1:{port}", "--config", str(tmp_path / "conf.toml"))
    with socket.create_server(("127.0.0.1", 0)) as store:
        env = aws_env(f"http://127.0.0.1:{store.getsockname()[1]}")
        with Daemon(tmp_path, *flags, env=env) as daemon, RawSession(daemon, "secret") as session:
            session.request("resolve", urls=["s3://bucket/train/"])
            with closing(follow(lambda: HTTPConnection("127.0.0.1", port))) as events:
                page = Page(events)
                page.until(lambda: bool(page.moment["waits"]))
    (wait,) = page.moment["waits"]
    (row,) = page.moment["jobs"]
    assert wait["job"] == "secret"
    assert wait["reason"] == "listing the shards"
    assert row["waiting_for"] == "listing the shards"
    assert "bucket" not in str([wait, row])


@pytest.mark.slow
def test_training_log_names_the_silent_store(
    silent: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """It does so after ten seconds and at the end, though the daemon answers all along."""
    with (
        caplog.at_level(logging.WARNING, "shardcache"),
        pytest.raises(NoDaemonError, match=LISTING),
    ):
        ShardDataset(PATTERNS[0], socket=silent.socket, timeout_s=12)
    assert re.search(rf"waiting for 10 s: {LISTING}", caplog.text)
    assert "waiting for the daemon" not in caplog.text


def attempt(port: int) -> str:
    return rf"attempt \d of {ATTEMPTS}: connection refused by 127\.0\.0\.1:{port}"


def attempts_shown(daemon: Daemon, port: int) -> bool:
    """Return True once `status` names the failing request as what holds readers back."""
    limits = {limit["name"]: limit["text"] for limit in daemon.status()["limits"] if limit["holds"]}
    return bool(
        re.fullmatch(
            f"requests repeated after errors: 1; {attempt(port)}", limits.get("errors", "")
        )
    )


@pytest.mark.slow
def test_views_show_the_attempt_and_its_error(daemon: Daemon, port: int) -> None:
    """Status, the reader's explanation, and the log."""
    url = f"http://127.0.0.1:{port}/a.tar"
    rows = list[dict[str, Any]]()

    def is_failing() -> bool:
        rows.extend(row for row in daemon.status()["transfers"] if row["last_error"])
        return bool(rows)

    with RawSession(daemon) as session:
        session.plan([url], [0])
        session.send(type="lease", id=50, position=0)
        session.send(type="need", of=50)
        eventually(is_failing)
        eventually(lambda: attempts_shown(daemon, port))
        session.send(type="explain", id=51, of=50)
        answers = {answer["id"]: answer for answer in (session.receive(), session.receive())}
    assert rows[0]["url"] == url
    assert re.fullmatch(attempt(port), rows[0]["last_error"])
    stage = "asking the object store for the shard's version; "
    assert re.fullmatch(stage + attempt(port), answers[51]["reason"])
    assert f"given up after {ATTEMPTS} attempts" in answers[50]["error"]["message"]
    assert re.search(rf"retrying.*attempt 2 of {ATTEMPTS}", daemon.log.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{port}/{{1..3}}.tar", "s3://b/folder/", "s3://b/index.json"]
)
def test_warm_prints_attempts_as_they_fail(url: str, daemon: Daemon, port: int) -> None:
    """Of the shards' sizes, of a listing and of an index file."""
    ran = shardcache("warm", url.format(port=port), socket=daemon.socket)
    assert ran.code == 1
    attempts = re.findall(
        rf"^retrying  \S+: .*(attempt \d of {ATTEMPTS}): .*127\.0\.0\.1:{port}",
        ran.out,
        re.MULTILINE,
    )
    assert attempts
    assert re.search(rf"127\.0\.0\.1:{port}.*given up after {ATTEMPTS} attempts", ran.out + ran.err)
