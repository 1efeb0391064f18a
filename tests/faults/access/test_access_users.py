"""Permission to talk to the daemon, and to have shards fetched: with real users and groups."""

import asyncio
import grp
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache.server.audit import Audit
from support.network.other_user import OtherUser, needs_root, open_folder
from support.programs.daemon import Daemon
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples
from support.stores.canary import Canary
from support.stores.faulty_s3 import FaultyS3

pytestmark = [needs_root, pytest.mark.slow]

GROUP = grp.getgrnam("users")
STRANGER = OtherUser(54321)
MEMBER = OtherUser(54322, groups=(GROUP.gr_gid,))
ALICE = OtherUser(54323, groups=(GROUP.gr_gid,))
MODELLER = OtherUser(54324, gid=GROUP.gr_gid, groups=(54399,))

CONFIG = """
[[allow]]
prefix = "{server}/public/"

[[allow]]
prefix = "{server}/alice/"
users = [54323]

[[allow]]
prefix = "{server}/models/"
groups = [54399]
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that everybody may enter."""
    with open_folder() as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[Canary]:
    """A store with a folder for everybody, one for a user and one for a group."""
    with Canary() as running:
        for name in ("public", "alice", "models"):
            running.files[f"/{name}/a.tar"] = make_tar(random_samples(2))
        yield running


@pytest.fixture
def daemon(folder: Path, server: Canary) -> Iterator[Daemon]:
    """A daemon for a group, with rules for some of it."""
    config = folder / "shardcache.toml"
    config.write_text(CONFIG.format(server=server.url("").rstrip("/")))
    with Daemon(folder, "--group", GROUP.gr_name, "--config", str(config)) as running:
        yield running


def warm(user: OtherUser, daemon: Daemon, url: str) -> str:
    """Have a user ask for a url; return the code of the error, or how the shard came."""
    _, lines = user.ask(daemon.socket, "POST", "/v1/warm", {"urls": [url]})
    answers = [line["error"]["code"] if "error" in line else line.get("state") for line in lines]
    return " and ".join(str(answer) for answer in answers if answer is not None)


def seen(user: OtherUser, daemon: Daemon) -> set[str]:
    """Return the urls that a user is told of."""
    _, lines = user.ask(daemon.socket, "GET", "/v1/shards")
    return {line["url"] for line in lines}


def test_only_the_group_may_connect_and_read(daemon: Daemon, server: Canary) -> None:
    """Socket and cache are closed to everybody else by the kernel, whatever the umask."""
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o660
    assert daemon.socket.stat().st_gid == GROUP.gr_gid
    assert STRANGER.ask(daemon.socket, "GET", "/v1/status")[0] == "refused"
    code, answer = STRANGER.command("status", "--socket", daemon.socket)
    assert code == 1
    assert answer["error"]["remedy"].startswith(
        f"join the group that owns it (ls -l {daemon.socket})"
    )
    assert MEMBER.ask(daemon.socket, "GET", "/v1/status")[0] == 200
    assert warm(MEMBER, daemon, server.url("/public/a.tar")) == "fetched"
    (tar,) = (daemon.cache_dir / "shards").rglob("*.tar")
    (database,) = (daemon.cache_dir / "catalogue").glob("*.db")
    assert MEMBER.may_read(tar) is True
    assert STRANGER.may_read(tar) is False
    assert not MEMBER.may_read(database)
    assert not STRANGER.may_read(database)


def test_rules_hold_for_their_users_and_groups(daemon: Daemon, server: Canary) -> None:
    """A uid or a supplementary group is let in, and nobody else gets even cached shards."""
    urls = {name: server.url(f"/{name}/a.tar") for name in ("public", "alice", "models")}
    assert [warm(ALICE, daemon, urls[name]) for name in urls] == [
        "fetched",
        "fetched",
        "not_allowed",
    ]
    assert [warm(MODELLER, daemon, urls[name]) for name in urls] == [
        "cached",
        "not_allowed",
        "fetched",
    ]
    assert [warm(MEMBER, daemon, urls[name]) for name in urls] == [
        "cached",
        "not_allowed",
        "not_allowed",
    ]
    with RawSession(daemon) as root:  # who may do anything on the node may do this as well
        assert root.plan(list(urls.values()), [0, 1, 2])["type"] == "ok"


def test_users_neither_see_nor_remove_shards_that_they_may_not_fetch(
    daemon: Daemon, server: Canary
) -> None:
    """`ls`, `status`, `verify` and `evict` know nothing of it."""
    public = server.url("/public/a.tar")
    hers = server.url("/alice/a.tar")
    assert warm(ALICE, daemon, public) == "fetched"
    assert warm(ALICE, daemon, hers) == "fetched"
    assert seen(ALICE, daemon) == {public, hers}
    assert seen(MEMBER, daemon) == {public}
    _, events = MEMBER.ask(daemon.socket, "POST", "/v1/verify", {"prefix": ""})
    assert {event["url"] for event in events if event["event"] == "shard"} == {public}
    _, (answer,) = MEMBER.ask(
        daemon.socket, "POST", "/v1/evict", {"urls": ["http://**", hers, public]}
    )
    assert answer["evicted"] == [public]
    assert seen(ALICE, daemon) == {hers}


def test_others_get_no_rights_of_the_daemons_place_by_default(folder: Path) -> None:
    """A group member can have neither local files fetched nor this node asked without rules."""
    (folder / "secret.tar").write_bytes(make_tar(random_samples(1)))
    with Canary() as canary, Daemon(folder, "--group", GROUP.gr_name) as daemon:
        canary.files["/a.tar"] = make_tar(random_samples(1))
        hosts = (
            "127.0.0.1",
            "localhost",
            "[::1]",
            "127.1",
            "2130706433",
            "[::ffff:127.0.0.1]",
            "{a,127.0.0.1}",
        )
        urls = [canary.url("/a.tar", host) for host in hosts] + [
            canary.url("/i.json", "{a,localhost}")
        ]
        urls += [
            "http://169.254.169.254/latest/a.tar",
            f"file://{folder}/secret.tar",
            f"{folder}/secret.tar",
        ]
        urls += ["sftp://127.0.0.1/a.tar", "memory://a.tar"]
        assert [warm(MEMBER, daemon, url) for url in urls] == ["not_allowed"] * len(urls)
        assert canary.connections == 0
        assert daemon.shards() == []


async def test_daemon_of_the_node_takes_no_credentials(folder: Path, faulty: FaultyS3) -> None:
    """Those of root, who started it, are refused, so that nobody else reads with them."""
    url = faulty.put("a.tar", make_tar(random_samples(1)))
    faulty.permits = {"root": ""}
    keys = {"AWS_ACCESS_KEY_ID": "root", "AWS_SECRET_ACCESS_KEY": "secret"}

    def answers() -> list[str]:
        with Daemon(folder, "--group", GROUP.gr_name) as daemon:
            _, (refusal,) = OtherUser(0).ask(
                daemon.socket, "POST", "/v1/warm", {"urls": [url], "credentials": keys}
            )
            with RawSession(daemon, credentials=keys) as session:
                refusals = [refusal["error"]["code"], session.welcome["error"]["code"]]
            _, lines = MEMBER.ask(daemon.socket, "POST", "/v1/warm", {"urls": [url]})
            return refusals + [line["error"]["code"] for line in lines if line.get("error")]

    assert await asyncio.to_thread(answers) == ["protocol", "protocol", "access_denied"]
    assert faulty.seen


def test_log_names_the_user_of_each_request(daemon: Daemon, server: Canary) -> None:
    """Sessions and errands leave a line with the user's id; looking at the status leaves none."""
    warm(ALICE, daemon, server.url("/alice/a.tar"))
    with RawSession(daemon) as session:
        session.plan([server.url("/alice/a.tar")], [0])
        MEMBER.ask(daemon.socket, "GET", "/v1/status")
    lines = daemon.tail(50)
    assert re.search(r"request .*uid=54323 .*what=warm", lines)
    assert re.search(r"session started .*uid=0", lines)
    assert "54322" not in lines


def test_log_lines_of_a_user_are_limited_per_minute(capsys: pytest.CaptureFixture[str]) -> None:
    """A user's lines are bounded a minute; others' are still written."""
    audit = Audit()
    for _ in range(10_000):
        audit.note("request", 1, what="warm")
    audit.note("request", 2, what="evict")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 200
    assert "evict" in lines[-1]
