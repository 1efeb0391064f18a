"""A store that nobody answers for: what users and operators are shown while its requests are repeated."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

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
    folder, env = tmp_path_factory.mktemp("d"), aws_env(f"http://127.0.0.1:{port}")
    with Daemon(folder, "--attempts", str(ATTEMPTS), env=env) as daemon:
        yield daemon


def attempt(port: int) -> str:
    return rf"attempt \d of {ATTEMPTS}: connection refused by 127\.0\.0\.1:{port}"


def attempts_shown(daemon: Daemon, port: int) -> bool:
    """Return True once `status` names the failing request as what holds readers back."""
    limits = {limit["name"]: limit["text"] for limit in daemon.status()["limits"] if limit["holds"]}
    return bool(re.fullmatch(f"requests repeated after errors: 1; {attempt(port)}", limits.get("errors", "")))


@pytest.mark.slow
def test_views_show_the_attempt_and_its_error(daemon: Daemon, port: int) -> None:
    """Status, the reader's explanation, and the log."""
    url, rows = f"http://127.0.0.1:{port}/a.tar", list[dict[str, Any]]()

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
@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/{{1..3}}.tar", "s3://b/folder/", "s3://b/index.json"])
def test_warm_prints_attempts_as_they_fail(url: str, daemon: Daemon, port: int) -> None:
    """Of the shards' sizes, of a listing and of an index file."""
    ran = shardcache("warm", url.format(port=port), socket=daemon.socket)
    assert ran.code == 1
    attempts = re.findall(
        rf"^retrying  \S+: .*(attempt \d of {ATTEMPTS}): .*127\.0\.0\.1:{port}", ran.out, re.MULTILINE
    )
    assert attempts
    assert re.search(rf"127\.0\.0\.1:{port}.*given up after {ATTEMPTS} attempts", ran.out + ran.err)
