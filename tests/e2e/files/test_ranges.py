"""Ranges of objects: only their parts are fetched, once per node, and kept one by one."""

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import OutdatedError, ShardChangedError
from shardcache.store.part_file import JOURNAL_BYTES
from shardcache_client.files.filesystem import ShardcacheFileSystem
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.stores.canary import Canary

KIB = 1024
PART_BYTES = 64 * KIB
PARTS = 40
BODY = random.Random(3).randbytes(PARTS * PART_BYTES - 100)


@pytest.fixture
def store() -> Iterator[Canary]:
    with Canary() as running:
        yield running


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with a cache of its own."""
    flags = ("--range-part-size", str(PART_BYTES), "--listing-ttl-s", "1000", "--scrub-rate", "0")
    with Daemon(tmp_path, *flags) as running:
        yield running


def files(node: Daemon) -> ShardcacheFileSystem:
    """Return the filesystem of the cache; what a file reads ahead is less than a part."""
    return ShardcacheFileSystem(
        "http", socket=str(node.socket), skip_instance_cache=True, block_size=KIB
    )


def read(node: Daemon, url: str, *spans: tuple[int, int]) -> list[bytes]:
    """Return spans of an object, read by one reader."""
    with files(node).open(url) as file:
        return [at(file, *span) for span in spans]


def cached(node: Daemon) -> dict[str, int]:
    """Return how many bytes of each object are cached, by url."""
    return {row["url"]: row["cached_bytes"] for row in node.shards()}


def damage(part_file: Path, part: int) -> None:
    """Write other bytes into a part."""
    with part_file.open("r+b") as damaged:
        damaged.seek(part * PART_BYTES + 5)
        damaged.write(b"damage")


def at(file: Any, start: int, end: int) -> bytes:
    """Return a span of an open file."""
    file.seek(start)
    found: bytes = file.read(end - start)
    return found


@pytest.mark.slow
def test_end_of_an_object_is_fetched_alone(store: Canary, node: Daemon) -> None:
    """One part of forty, and no other is in the cache."""
    url = store.put("table", BODY)

    assert read(node, url, (len(BODY) - 8, len(BODY))) == [BODY[-8:]]

    assert store.ranges() == [((PARTS - 1) * PART_BYTES, len(BODY))]
    cache = node.status()["cache"]
    assert cache["used_bytes"] == PART_BYTES - 100 + JOURNAL_BYTES
    assert cache["parts_bytes"] == cache["used_bytes"]
    assert "in parts" in shardcache("status", socket=node.socket).out


def test_range_is_fetched_once_for_all_readers(store: Canary, node: Daemon) -> None:
    """Of what others have read, nothing is asked for again; of neighbours, only what is missing."""
    url = store.put("table", BODY)
    third = (2 * PART_BYTES, 3 * PART_BYTES - 2 * KIB)  # as fsspec reads a block ahead
    wider = (2 * PART_BYTES - 10, 3 * PART_BYTES + 10)

    assert read(node, url, third) == [BODY[slice(*third)]]
    assert read(node, url, third, wider) == [BODY[slice(*third)], BODY[slice(*wider)]]

    assert sorted(store.ranges()) == [
        (PART_BYTES, 2 * PART_BYTES),
        (2 * PART_BYTES, 3 * PART_BYTES),
        (3 * PART_BYTES, 4 * PART_BYTES),
    ]


@pytest.mark.slow
def test_many_readers_at_once_fetch_each_part_once(store: Canary, node: Daemon) -> None:
    """Each reads other ranges of the same object, in an order of its own, and gets its bytes."""
    url = store.put("table", BODY)
    wrong: list[int] = []

    def read_some(seed: int) -> None:
        starts = [part * PART_BYTES + 7 for part in range(12)]
        random.Random(seed).shuffle(starts)
        spans = [(start, start + 100) for start in starts]
        if read(node, url, *spans) != [BODY[slice(*span)] for span in spans]:
            wrong.append(seed)

    threads = [threading.Thread(target=read_some, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert store.asked_bytes() == 12 * PART_BYTES


@pytest.mark.slow
def test_object_that_is_read_through_becomes_a_whole_file(store: Canary, node: Daemon) -> None:
    """From half of its parts on, the rest is fetched as well; nothing twice."""
    url = store.put("table", BODY)

    assert read(node, url, (0, 10), (len(BODY) - 10, len(BODY)), (0, len(BODY)))[2] == BODY

    eventually(lambda: cached(node) == {url: len(BODY)})
    assert store.asked_bytes() == len(BODY)


def test_whole_file_is_made_of_the_parts_that_are_there(store: Canary, node: Daemon) -> None:
    """`warm` fetches only what is missing."""
    url = store.put("table.bin", BODY)
    read(node, url, (5 * PART_BYTES, 6 * PART_BYTES))

    with files(node).open(url) as file:
        at(file, 0, 1)
        node.request("POST", "/v1/warm", {"urls": [url], "wanted": "files"})
        eventually(lambda: cached(node) == {url: len(BODY)})
        assert at(file, 5 * PART_BYTES, 6 * PART_BYTES) == BODY[5 * PART_BYTES : 6 * PART_BYTES]

    assert store.asked_bytes() == len(BODY)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sign", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_parts_are_found_again_after_a_restart(
    store: Canary, node: Daemon, tmp_path: Path, sign: signal.Signals
) -> None:
    """However the daemon ended; those whose bytes are damaged are fetched again."""
    url = store.put("table", BODY)
    spans = [(part * PART_BYTES, part * PART_BYTES + 9) for part in (3, 8, 13)]
    wanted = [BODY[slice(*span)] for span in spans]
    assert read(node, url, *spans) == wanted
    before = node.status()["cache"]["used_bytes"]

    os.kill(node.pid, sign)
    node.wait()
    (part_file,) = (tmp_path / "cache" / "partial").glob("*.part")
    with part_file.open("r+b") as damaged:
        damaged.seek(8 * PART_BYTES + 5)
        damaged.write(b"damage")
    node.start()

    assert read(node, url, *spans) == wanted
    assert store.ranges()[3:] == [(8 * PART_BYTES, 9 * PART_BYTES)]
    assert node.status()["cache"]["used_bytes"] == before


@pytest.mark.slow
def test_object_larger_than_the_cache_is_read_by_ranges(store: Canary, tmp_path: Path) -> None:
    """Parts make room for others, within the capacity; each read has the right bytes."""
    url = store.put("table", BODY)
    flags = (
        "--range-part-size",
        str(PART_BYTES),
        "--capacity",
        str(10 * PART_BYTES),
        "--listing-ttl-s",
        "1000",
    )
    numbers = random.Random(5)
    with Daemon(tmp_path, *flags) as node, files(node).open(url) as file:
        for _ in range(120):
            start = numbers.randrange(len(BODY) - 3 * PART_BYTES)
            end = start + numbers.randrange(1, 3 * PART_BYTES)
            assert at(file, start, end) == BODY[start:end]
            assert node.status()["cache"]["used_bytes"] <= 10 * PART_BYTES
        assert node.status()["counters"]["evictions"] > 0


def small(folder: Path, parts: int) -> Daemon:
    """Return a daemon whose cache has space for so many parts."""
    capacity = str(parts * PART_BYTES)
    return Daemon(
        folder,
        "--range-part-size",
        str(PART_BYTES),
        "--capacity",
        capacity,
        "--listing-ttl-s",
        "1000",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        KIB,
        pytest.param(PART_BYTES + 11, marks=pytest.mark.slow),
        pytest.param(3 * PART_BYTES, marks=pytest.mark.slow),
    ],
)
def test_object_larger_than_the_cache_is_read_through(
    store: Canary, tmp_path: Path, step: int
) -> None:
    """Fetching ahead never takes the space that is needed, for steps of any size."""
    url = store.put("table", BODY)
    with small(tmp_path, 12) as node, files(node).open(url) as file:
        body = b"".join(iter(lambda: file.read(step), b""))
        assert node.status()["cache"]["used_bytes"] <= 12 * PART_BYTES
    assert body == BODY


@pytest.mark.slow
def test_part_that_was_evicted_is_not_read_from_its_hole(store: Canary, tmp_path: Path) -> None:
    """A reader that was granted the part before asks again, also after a restart."""
    url = store.put("table", BODY)
    with small(tmp_path, 12) as node, files(node).open(url) as file:
        for restarts in (False, True):
            assert at(file, 0, 1000) == BODY[:1000]
            if restarts:
                node.kill()
                node.start()
            for part in range(5, 30):
                read(node, url, (part * PART_BYTES, part * PART_BYTES + 5))
            assert at(file, 500, 1500) == BODY[500:1500]


@pytest.mark.slow
def test_failed_read_leaves_no_grant_behind(store: Canary, tmp_path: Path) -> None:
    """After an error, what was granted before is asked for again, as others may have evicted it."""
    url = store.put("table", BODY)
    with small(tmp_path, 12) as node, files(node).open(url) as file:
        assert at(file, 0, 1000) == BODY[:1000]
        del store.files["/table"]
        with pytest.raises(FileNotFoundError):
            at(file, 20 * PART_BYTES, 20 * PART_BYTES + 5)
        store.put("table", BODY)
        for part in range(5, 30):
            read(node, url, (part * PART_BYTES, part * PART_BYTES + 5))
        assert at(file, 500, 1500) == BODY[500:1500]
        found = at(file, 20 * PART_BYTES, 20 * PART_BYTES + 5)
        assert found == BODY[20 * PART_BYTES : 20 * PART_BYTES + 5]


@pytest.mark.slow
def test_open_files_hold_no_space(store: Canary, tmp_path: Path) -> None:
    """More files than the cache has parts are open, and each is read again."""
    urls = [store.put(f"table-{number}", BODY) for number in range(20)]
    with small(tmp_path, 12) as node, ExitStack() as opened:
        some = [opened.enter_context(files(node).open(url)) for url in urls]
        for start in (0, 7 * PART_BYTES):
            assert [at(file, start, start + 9) for file in some] == [BODY[start : start + 9]] * len(
                some
            )
        assert node.status()["cache"]["leases"] == 0


@pytest.mark.slow
def test_deleted_part_file_is_fetched_again(store: Canary, node: Daemon, tmp_path: Path) -> None:
    """By readers that have it open, and by new ones."""
    url = store.put("table", BODY)
    with files(node).open(url) as file:
        assert at(file, 0, 9) == BODY[:9]
        (part_file,) = (tmp_path / "cache" / "partial").glob("*.part")
        part_file.unlink()
        assert read(node, url, (0, 9)) == [BODY[:9]]
        found = at(file, 9 * PART_BYTES, 9 * PART_BYTES + 9)
        assert found == BODY[9 * PART_BYTES : 9 * PART_BYTES + 9]


def test_parts_are_evicted_by_their_url(store: Canary, node: Daemon) -> None:
    """Those of the other object stay."""
    urls = [store.put(name, BODY) for name in ("one", "other")]
    for url in urls:
        read(node, url, (0, 9))

    evicted = json.loads(node.request("POST", "/v1/evict", {"urls": [urls[0]]}))

    assert evicted["evicted"] == [urls[0]]
    assert read(node, urls[1], (0, 9)) == [BODY[:9]]
    assert store.asked_bytes() == 2 * PART_BYTES


@pytest.mark.slow
def test_listing_says_how_much_of_an_object_is_cached(store: Canary, node: Daemon) -> None:
    """As soon as a range of it was read; of a shorter last part, its own bytes."""
    url = store.put("table", BODY)
    read(node, url, (0, 9), (len(BODY) - 9, len(BODY)))

    (row,) = shardcache("ls", "--json", url, socket=node.socket).events

    cached_bytes = 2 * PART_BYTES - 100
    assert row["url"] == url
    assert row["size_bytes"] == len(BODY)
    assert row["cached_bytes"] == cached_bytes
    assert "5.0%" in shardcache("ls", socket=node.socket).out


@pytest.mark.slow
def test_evict_command_removes_the_parts_of_an_object(store: Canary, node: Daemon) -> None:
    """They are neither listed nor counted any more, and are fetched again when they are read."""
    url = store.put("table", BODY)
    read(node, url, (0, 9))

    assert shardcache("evict", url, socket=node.socket).code == 0

    assert cached(node) == {}
    assert node.status()["cache"]["used_bytes"] == 0
    assert read(node, url, (0, 9)) == [BODY[:9]]
    assert store.asked_bytes() == 2 * PART_BYTES


@pytest.mark.slow
def test_verify_command_drops_a_damaged_part(store: Canary, node: Daemon, tmp_path: Path) -> None:
    """It names the part and exits 1; that part alone is fetched again when it is read next."""
    url = store.put("table", BODY)
    spans = [(part * PART_BYTES, part * PART_BYTES + 9) for part in (3, 8)]
    read(node, url, *spans)
    before = node.status()["cache"]["used_bytes"]
    assert shardcache("verify", socket=node.socket).code == 0
    (part_file,) = (tmp_path / "cache" / "partial").glob("*.part")
    with part_file.open("r+b") as damaged:
        damaged.seek(8 * PART_BYTES + 5)
        damaged.write(b"damage")

    ran = shardcache("verify", "--json", url, socket=node.socket)

    (found,) = [event for event in ran.events if event["event"] == "shard"]
    assert ran.code == 1
    assert found["url"] == url
    assert found["ok"] is False
    assert "parts 8 of" in found["error"]["message"]
    assert cached(node) == {url: PART_BYTES}
    assert read(node, url, *spans) == [BODY[slice(*span)] for span in spans]
    assert store.ranges()[2:] == [(8 * PART_BYTES, 9 * PART_BYTES)]
    assert node.status()["cache"]["used_bytes"] == before
    assert shardcache("verify", socket=node.socket).code == 0


def left_by_a_killed_daemon(store: Canary, node: Daemon, folder: Path) -> tuple[str, Path]:
    """Return the url of an object of which a killed daemon has left two parts, and their file."""
    url = store.put("table", BODY)
    read(node, url, (3 * PART_BYTES, 3 * PART_BYTES + 9), (8 * PART_BYTES, 8 * PART_BYTES + 9))
    node.kill()
    (part_file,) = (folder / "cache" / "partial").glob("*.part")
    return url, part_file


@pytest.mark.slow
def test_parts_of_an_earlier_daemon_are_listed_and_evicted(
    store: Canary, node: Daemon, tmp_path: Path
) -> None:
    """Also if nobody has read any of them since; what they take is as it was."""
    url, _ = left_by_a_killed_daemon(store, node, tmp_path)
    node.start()

    assert cached(node) == {url: 2 * PART_BYTES}
    assert node.status()["cache"]["parts_bytes"] == 2 * PART_BYTES + JOURNAL_BYTES
    assert shardcache("evict", url, socket=node.socket).code == 0
    assert cached(node) == {}
    assert node.status()["cache"]["used_bytes"] == 0


@pytest.mark.slow
def test_verify_reads_parts_of_an_earlier_daemon(
    store: Canary, node: Daemon, tmp_path: Path
) -> None:
    """A damaged one is dropped; the other is there still, and right."""
    url, part_file = left_by_a_killed_daemon(store, node, tmp_path)
    damage(part_file, 8)
    node.start()

    assert shardcache("verify", socket=node.socket).code == 1
    assert cached(node) == {url: PART_BYTES}
    assert read(node, url, (3 * PART_BYTES, 3 * PART_BYTES + 9)) == [
        BODY[3 * PART_BYTES : 3 * PART_BYTES + 9]
    ]
    assert len(store.ranges()) == 2


@pytest.mark.slow
def test_parts_that_were_being_written_take_no_space_after_a_restart(
    store: Canary, node: Daemon, tmp_path: Path
) -> None:
    """The journal of the killed daemon does not name them."""
    url, part_file = left_by_a_killed_daemon(store, node, tmp_path)
    damage(part_file, 20)
    node.start()

    assert cached(node) == {url: 2 * PART_BYTES}
    assert part_file.stat().st_blocks * 512 <= 2 * PART_BYTES


@pytest.mark.slow
def test_scrubber_drops_damaged_parts(store: Canary, tmp_path: Path) -> None:
    """Those are fetched again when they are read next, and no others."""
    flags = ("--range-part-size", str(PART_BYTES), "--listing-ttl-s", "1000", "--scrub-rate", "1GB")
    with Daemon(tmp_path, *flags, "--scrub-pause-s", "0") as node:
        url = store.put("table", BODY)
        spans = [(part * PART_BYTES, part * PART_BYTES + 9) for part in (3, 8)]
        read(node, url, *spans)
        (part_file,) = (tmp_path / "cache" / "partial").glob("*.part")
        damage(part_file, 8)

        eventually(lambda: cached(node) == {url: PART_BYTES})
        eventually(lambda: node.status()["scrub"]["corrupt"] == 1)
        assert read(node, url, *spans) == [BODY[slice(*span)] for span in spans]
        assert store.ranges()[2:] == [(8 * PART_BYTES, 9 * PART_BYTES)]


@pytest.mark.slow
def test_pinned_object_is_completed_from_its_parts(store: Canary, node: Daemon) -> None:
    """`pin` returns once the whole is cached, and asks only for what is missing."""
    url = store.put("table.bin", BODY)
    read(node, url, (5 * PART_BYTES, 5 * PART_BYTES + 9))

    assert shardcache("pin", url, socket=node.socket).code == 0

    (row,) = node.shards()
    assert row["cached_bytes"] == len(BODY)
    assert row["pinned"] is True
    assert store.asked_bytes() == len(BODY)


def test_replaced_object_is_not_mixed_with_the_new_one(store: Canary, node: Daemon) -> None:
    """A reader of the old version gets its cached parts or an error, never the new version."""
    url = store.put("table", BODY)
    new = BODY[::-1]
    cache = files(node)
    with cache.open(url) as file:
        assert at(file, 0, 5) == BODY[:5]
        store.put("table", new)
        with pytest.raises((ShardChangedError, OutdatedError)):
            at(file, 20 * PART_BYTES, 20 * PART_BYTES + 5)

    with cache.open(url) as file:
        found = at(file, 20 * PART_BYTES, 20 * PART_BYTES + 5)
        assert found == new[20 * PART_BYTES : 20 * PART_BYTES + 5]
        assert at(file, 0, 5) == new[:5]
