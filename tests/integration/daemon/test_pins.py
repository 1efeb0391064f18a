"""Pinned shards stay, whatever is read, for those who may pin them, until they take it back."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache.shared.units import user_name
from shardcache_client.dataset import ShardDataset
from support.network.other_user import OtherUser, needs_root, open_folder
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples, write_shards

SHARDS = 6
SIZES = {"bin": 40_000}
ROOM_FOR_FOUR = "2000000"
FLAGS = ("--scrub-rate", "0", "--listing-ttl-s", "0")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("d"), *FLAGS, capacity=ROOM_FOR_FOUR) as daemon:
        yield daemon


@pytest.fixture
def daemon(running: Daemon) -> Iterator[Daemon]:
    yield running
    unpin(running, ["file:///**"])
    running.empty()


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """Return shards of some 420 kB each, of which the daemon has room for four."""
    return make_shards(tmp_path)


def make_shards(folder: Path) -> list[str]:
    """Write the shards below a folder and return their urls."""
    (folder / "data").mkdir()
    return [f"file://{path}" for path in write_shards(folder / "data", SHARDS, 10, SIZES)]


def pin(daemon: Daemon, urls: Iterable[str]) -> list[dict[str, Any]]:
    answer = daemon.request("POST", "/v1/pin", {"urls": list(urls)})
    return [json.loads(line) for line in answer.splitlines()]


def unpin(daemon: Daemon, urls: Iterable[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(daemon.request("POST", "/v1/unpin", {"urls": list(urls)}))
    return answer


def pins(daemon: Daemon) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.request("GET", "/v1/pins").splitlines()]


def pinned(daemon: Daemon) -> set[str]:
    """Return the urls of the cached shards that are pinned."""
    return {row["url"] for row in daemon.shards() if row["pinned"]}


def read(daemon: Daemon, urls: list[str]) -> None:
    assert len(list(ShardDataset(urls, socket=daemon.socket))) == 10 * len(urls)
    daemon.await_publication()


def test_pinned_shards_stay_until_they_are_unpinned(daemon: Daemon, urls: list[str]) -> None:
    """Others come and go next to it, and `evict` leaves it and says why."""
    assert pin(daemon, urls[:2])[-1]["fetched"] == 2
    for _ in range(2):
        read(daemon, urls)
        assert pinned(daemon) == set(urls[:2])
    assert daemon.status()["counters"]["evictions"] >= 4, (
        "those that are not pinned had to go in turn"
    )
    assert pin(daemon, urls[:2])[-1]["cached"] == 2, "twice is once"
    kept = json.loads(daemon.request("POST", "/v1/evict", {"urls": urls}))["kept"]
    assert {row["url"] for row in kept} == set(urls[:2])
    assert all("pinned by" in row["reason"] for row in kept)
    assert daemon.status()["pins"]["shards"] == 2
    assert unpin(daemon, urls) == {"unpinned": urls[:2], "kept": []}
    daemon.empty()
    assert daemon.status()["cache"]["used_bytes"] == 0


def test_pin_has_room_next_to_a_plan_that_fills_the_cache(daemon: Daemon, urls: list[str]) -> None:
    """A job that goes round more shards than fit gives way to a pin, not to a mere warm."""
    with RawSession(daemon) as session:
        session.plan(urls[:5], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4])
        session.take(0)
        eventually(lambda: len(daemon.shards()) == 4)
        assert pin(daemon, urls[5:])[-1]["fetched"] == 1
        assert pinned(daemon) == {urls[5]}
        assert len(daemon.shards()) == 4


@pytest.mark.slow
def test_pins_outlive_a_kill_and_a_lost_catalogue(daemon: Daemon, urls: list[str]) -> None:
    """After both, they are pinned as before, whatever is read, and in the hands of readers, too."""
    pin(daemon, urls[2:4])
    daemon.kill()
    shutil.rmtree(daemon.cache_dir / "catalogue")
    daemon.start()
    before = pins(daemon)
    read(daemon, urls)
    assert pinned(daemon) == set(urls[2:4])
    assert pins(daemon) == before
    unpin(daemon, urls[2:3])
    daemon.restart()
    assert [row["url"] for row in pins(daemon)] == urls[3:4]


def test_pins_that_would_fill_the_cache_are_refused(daemon: Daemon, urls: list[str]) -> None:
    """Four shards of four: the error says what to do, and nothing has been pinned or fetched."""
    (answer,) = pin(daemon, urls[:4])
    assert answer["error"]["code"] == "capacity"
    assert "--max-pinned" in answer["error"]["remedy"]
    assert "their limit is 1.6 MB" in answer["error"]["message"]
    assert not pins(daemon)
    assert not daemon.shards()


def test_a_shard_that_cannot_be_fetched_is_not_pinned(
    daemon: Daemon, urls: list[str], tmp_path: Path
) -> None:
    """A url of nothing and a truncated tar are errors, and take no room from pins."""
    cut = tmp_path / "data" / "cut.tar"
    cut.write_bytes(make_tar(random_samples(5, SIZES))[:100_000])
    events = pin(daemon, [urls[0], urls[0] + "x", f"file://{cut}"])
    codes = {event["error"]["code"] for event in events if event["event"] == "error"}
    assert codes == {"not_found", "truncated"}
    assert events[-1]["failed"] == 2
    assert [row["url"] for row in pins(daemon)] == [urls[0]]


def test_another_version_stays_in_place_of_the_former(daemon: Daemon, urls: list[str]) -> None:
    """A pin is of the url: the store's new version is kept, and the old one may go."""
    pin(daemon, urls[:1])
    (former,) = pins(daemon)
    path = Path(urls[0].removeprefix("file://"))
    path.write_bytes(make_tar(random_samples(9, SIZES, seed=1)))
    assert pin(daemon, urls[:1])[-1]["fetched"] == 1
    (present,) = pins(daemon)
    assert present["cached"] is True
    assert (present["size_bytes"] < former["size_bytes"]) is True
    assert sorted((row["samples"], row["pinned"]) for row in daemon.shards()) == [
        (9, True),
        (10, False),
    ]
    eventually(lambda: str(present["size_bytes"]) in (daemon.cache_dir / "pins").read_text())
    path.write_bytes(make_tar(random_samples(8, SIZES, seed=2)))
    assert pin(daemon, urls[:1])[-1]["fetched"] == 1
    daemon.restart()
    assert [row["samples"] for row in daemon.shards() if row["pinned"]] == [8], (
        "what `pin` has told holds"
    )


def test_a_damaged_shard_is_pinned_again_once_it_came_again(
    daemon: Daemon, urls: list[str]
) -> None:
    """Its pin says meanwhile that it is not here; whoever reads it next brings it back."""
    pin(daemon, urls[:1])
    (tar,) = daemon.cache_dir.glob("shards/*/*.tar")
    tar.chmod(0o640)
    with tar.open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff\x00")
    daemon.request("POST", "/v1/verify", {"prefix": ""})
    assert [row["cached"] for row in pins(daemon)] == [False]
    assert daemon.status()["pins"]["missing"] == 1
    read(daemon, urls[:1])
    assert pinned(daemon) == {urls[0]}


def test_shards_without_room_because_of_pins_say_so(
    daemon: Daemon, urls: list[str], tmp_path: Path
) -> None:
    """A shard larger than what pins leave is an error that names them, not a wait without end."""
    big = tmp_path / "data" / "big.tar"
    big.write_bytes(make_tar(random_samples(30, SIZES)))
    pin(daemon, urls[:2])
    answer = daemon.request("POST", "/v1/warm", {"urls": [f"file://{big}"]})
    events = map(json.loads, answer.splitlines())
    error = next(event["error"] for event in events if "error" in event)
    assert error["code"] == "capacity"
    assert "is not pinned" in error["message"]
    assert "unpin" in error["remedy"]


@needs_root
@pytest.mark.slow
def test_only_a_pins_users_and_root_may_unpin() -> None:
    """Pins are for permitted urls, and only their owners and root remove or see them."""
    owner = OtherUser(12345)
    other = OtherUser(12346)
    with open_folder() as root:
        urls = make_shards(root)
        config = root / "shardcache.toml"
        config.write_text(f'[[allow]]\nprefix = "file://{root}/data/"\nusers = [{owner.uid}]\n')
        with Daemon(root, *FLAGS, "--config", str(config)) as daemon:
            daemon.socket.chmod(0o666)
            pin(daemon, urls[:2])
            assert owner.ask(daemon.socket, "POST", "/v1/pin", {"urls": urls[:1]})[0] == 200
            assert other.ask(daemon.socket, "POST", "/v1/pin", {"urls": urls[:1]})[0] == 403
            assert other.ask(daemon.socket, "GET", "/v1/pins") == (200, [])
            _, (answer,) = other.ask(daemon.socket, "POST", "/v1/unpin", {"urls": urls})
            assert answer == {"unpinned": [], "kept": []}
            _, (answer,) = owner.ask(daemon.socket, "POST", "/v1/unpin", {"urls": urls})
            assert [row["reason"].partition(";")[0] for row in answer["kept"]] == [
                "pinned by user root"
            ] * 2
            owner.ask(daemon.socket, "POST", "/v1/pin", {"urls": urls[:1]})
            assert unpin(daemon, urls)["unpinned"] == urls[:2], "root takes back everybody's"


@pytest.mark.slow
def test_the_commands(daemon: Daemon, urls: list[str]) -> None:
    """They tell what is pinned and what is not, list it, and exit 1 where nothing is taken back."""
    ran = shardcache("pin", *urls[:2], socket=daemon.socket)
    assert ran.code == 0
    assert "2 shards pinned: 2 fetched" in ran.out
    assert "of at most 1.6 MB" in ran.out
    listed = shardcache("pin", "--json", socket=daemon.socket)
    assert [(row["url"], row["cached"]) for row in listed.events] == [
        (url, True) for url in urls[:2]
    ]
    listed = shardcache("pin", socket=daemon.socket)
    assert urls[0] in listed.out
    assert [
        line.rstrip().endswith(f" {user_name(os.getuid())}") for line in listed.out.splitlines()[1:]
    ] == [True] * 2
    assert shardcache("ls", socket=daemon.socket).out.count("pinned") == 1 + 2
    assert "2 shards" in shardcache("status", socket=daemon.socket).out
    ran = shardcache("evict", urls[0], socket=daemon.socket)
    assert ran.code == 1
    assert f"kept  {urls[0]}: pinned by user {user_name(os.getuid())}" in ran.out
    assert "2 shards unpinned" in shardcache("unpin", f"{urls[0][:-10]}*", socket=daemon.socket).out
    ran = shardcache("unpin", urls[0], socket=daemon.socket)
    assert ran.code == 1
    assert "no pinned shard matches" in ran.out
