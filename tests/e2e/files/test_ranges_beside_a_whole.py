"""Ranges of an object go on while somebody waits for cache space for the whole of it."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import CapacityError, OutdatedError, ShardChangedError
from shardcache_client.files.filesystem import ShardcacheFileSystem
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.stores.canary import Canary, GatedStore

KIB = 1024
PART_BYTES = 64 * KIB
PARTS = 40
BODY = random.Random(7).randbytes(PARTS * PART_BYTES - 100)
OTHER_BODY = random.Random(8).randbytes(PARTS * PART_BYTES - 100)
HELD = random.Random(9).randbytes(32 * PART_BYTES)
# Space for either object as a whole, and for some parts of the one beside the other.
CAPACITY = 56 * PART_BYTES


@pytest.fixture
def store() -> Iterator[Canary]:
    with Canary() as running:
        yield running


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with a small cache."""
    flags = ("--range-part-size", str(PART_BYTES), "--listing-ttl-s", "1000", "--scrub-rate", "0")
    with Daemon(tmp_path, *flags, capacity=str(CAPACITY)) as running:
        yield running
        assert running.status()["cache"]["used_bytes"] <= CAPACITY


def part(number: int) -> tuple[int, int]:
    """Return a few bytes of a part."""
    return number * PART_BYTES + 7, number * PART_BYTES + 107


def files_of(node: Daemon, block_size: int = 1) -> ShardcacheFileSystem:
    """Return the filesystem of the cache, for a reader that gives up before the test does."""
    return ShardcacheFileSystem(
        "http",
        socket=str(node.socket),
        skip_instance_cache=True,
        block_size=block_size,
        timeout_s=60,
    )


def read(node: Daemon, url: str, *numbers: int, is_new: bool = False) -> list[bytes]:
    """Return those bytes of some parts, read by one reader, which does not read ahead of them.

    With `is_new`, they are those of the present version, and not of the last one that the daemon
    has seen.
    """
    files = files_of(node)
    if is_new:
        files.invalidate_cache()
    with files.open(url) as file:
        return [_at(file, *part(number)) for number in numbers]


def _at(file: Any, start: int, end: int) -> bytes:
    file.seek(start)
    found: bytes = file.read(end - start)
    return found


def parts_of(body: bytes, *numbers: int) -> list[bytes]:
    """Return what `read` is to return."""
    return [body[slice(*part(number))] for number in numbers]


@contextmanager
def holding(node: Daemon, store: Canary) -> Iterator[RawSession]:
    """Hold more than half of the cache."""
    url = store.put("held", HELD)
    with RawSession(node, job="holds") as session:
        session.plan([url], [0], wanted="files")
        session.take(0)
        yield session


@contextmanager
def waiting(node: Daemon, url: str, job: str = "waits") -> Iterator[RawSession]:
    """Wait for a whole object, for which there is no space."""
    with RawSession(node, job=job) as session:
        begin_to_wait(node, session, url)
        yield session


def begin_to_wait(node: Daemon, session: RawSession, url: str) -> None:
    """Ask for a whole object; return once that waits for space."""
    session.plan([url], [0], wanted="files")
    session.send(type="lease", id=50, position=0)
    session.send(type="need", of=50)
    eventually(lambda: waits_for_space(node, url))


def waits_for_space(node: Daemon, url: str) -> bool:
    """Return whether somebody waits for the space of an object."""
    stages = {row["url"]: row["stage"] for row in node.status()["transfers"]}
    return str(stages.get(url, "")).startswith("waiting for space")


def bytes_of(granted: dict[str, Any]) -> bytes:
    """Return the file of a grant."""
    return Path(granted["path"]).read_bytes()


@pytest.mark.slow
def test_ranges_are_read_while_a_reader_waits_for_the_whole(store: Canary, node: Daemon) -> None:
    """Cached ones and others; once there is space, the whole is made of what is there."""
    url = store.put("table", BODY)
    with holding(node, store) as holder:
        assert read(node, url, 3, 9) == parts_of(BODY, 3, 9)
        with waiting(node, url) as waiter:
            assert read(node, url, 3, 20, 9, 30) == parts_of(BODY, 3, 20, 9, 30)
            assert waits_for_space(node, url)
            holder.close()
            granted = waiter.receive()
            assert granted["type"] == "leased"
            assert bytes_of(granted) == BODY
    assert store.asked_bytes("/table") == len(BODY)


@pytest.mark.slow
def test_read_ahead_takes_no_space_that_the_read_itself_needs(store: Canary, node: Daemon) -> None:
    """A file is read in order where others leave space for one step of it, and not for two."""
    url = store.put("table", BODY)
    step = 14 * PART_BYTES
    with holding(node, store), files_of(node, block_size=step).open(url) as file:
        assert [file.read(step) for _ in range(3)] == [
            BODY[at : at + step] for at in range(0, len(BODY), step)
        ]


@pytest.mark.slow
def test_ranges_come_first_although_the_whole_was_asked_for_before(
    store: Canary, node: Daemon
) -> None:
    """Of an object of which nothing was cached."""
    url = store.put("table", BODY)
    with holding(node, store) as holder, waiting(node, url) as waiter:
        assert read(node, url, 0, 39) == parts_of(BODY, 0, 39)
        holder.close()
        assert bytes_of(waiter.receive()) == BODY
    assert store.asked_bytes("/table") == len(BODY)


@pytest.mark.slow
def test_two_readers_wait_for_the_same_whole(store: Canary, node: Daemon) -> None:
    """Both get it, fetched once."""
    url = store.put("table", BODY)
    with (
        holding(node, store) as holder,
        waiting(node, url) as first,
        waiting(node, url, "other") as second,
    ):
        assert read(node, url, 3, 20) == parts_of(BODY, 3, 20)
        holder.close()
        assert bytes_of(first.receive()) == BODY
        assert bytes_of(second.receive()) == BODY
    assert store.asked_bytes("/table") == len(BODY)


@pytest.mark.slow
def test_two_wholes_wait_while_ranges_of_both_are_read(store: Canary, node: Daemon) -> None:
    """Neither keeps its parts from the other: each gets its space in the end."""
    urls = [store.put("table", BODY), store.put("other", OTHER_BODY)]
    with (
        holding(node, store) as holder,
        waiting(node, urls[0]) as first,
        waiting(node, urls[1], "other") as second,
    ):
        for url, body in zip(urls, (BODY, OTHER_BODY), strict=True):
            assert read(node, url, 3, 20) == parts_of(body, 3, 20)
        holder.close()
        waiters = {first: BODY, second: OTHER_BODY}
        while waiters:  # whoever gets it first makes room for the other
            eventually(lambda: any(session.unread_bytes() for session in waiters))
            served = next(session for session in waiters if session.unread_bytes())
            assert bytes_of(served.receive()) == waiters.pop(served)
            served.close()


WAITER = """
import sys
from shardcache_client import cached_paths
with cached_paths([sys.argv[1]], socket=sys.argv[2]):
    pass
"""


@pytest.mark.slow
def test_killed_waiter_leaves_the_ranges_to_others(store: Canary, node: Daemon) -> None:
    """The whole is wanted no more, and its space is waited for no more."""
    url = store.put("table", BODY)
    with holding(node, store):
        waiter = subprocess.Popen([sys.executable, "-c", WAITER, url, str(node.socket)])
        try:
            eventually(lambda: waiter.poll() is not None or waits_for_space(node, url))
            assert read(node, url, 3) == parts_of(BODY, 3)
        finally:
            os.kill(waiter.pid, signal.SIGKILL)
            waiter.wait()
        eventually(lambda: not waits_for_space(node, url))
        assert read(node, url, 3, 20) == parts_of(BODY, 3, 20)
    assert store.asked_bytes("/table") == 2 * PART_BYTES


def test_object_that_changes_meanwhile_is_never_mixed(store: Canary, node: Daemon) -> None:
    """Its readers get a typed error, while new and waiting ones get the new version."""
    url = store.put("table", BODY)
    with holding(node, store) as holder, waiting(node, url) as waiter:
        assert read(node, url, 3) == parts_of(BODY, 3)
        store.put("table", OTHER_BODY)
        with pytest.raises((OutdatedError, ShardChangedError)):
            read(node, url, 3, 20)
        assert read(node, url, 3, 20, is_new=True) == parts_of(OTHER_BODY, 3, 20)
        holder.close()
        assert bytes_of(waiter.receive()) == OTHER_BODY


def test_whole_larger_than_the_cache_is_the_error_of_who_wants_it(
    store: Canary, node: Daemon
) -> None:
    """Ranges of it go on."""
    body = BODY + OTHER_BODY
    url = store.put("table", body)
    assert read(node, url, 3) == parts_of(body, 3)
    with RawSession(node) as session:
        session.plan([url], [0], wanted="files")
        refused = session.take(0)
        assert refused["error"]["code"] == CapacityError.code
        assert read(node, url, 3, 20, 50) == parts_of(body, 3, 20, 50)
    assert store.asked_bytes("/table") == 3 * PART_BYTES


@pytest.mark.slow
def test_error_of_the_whole_does_not_end_a_range_that_arrives(node: Daemon) -> None:
    """Each of two readers of one transfer gets its own answer."""
    body = BODY + OTHER_BODY
    with (
        GatedStore() as store,
        RawSession(node) as ranged,
        RawSession(node, job="other") as session,
    ):
        url = store.put("table", body)
        store.let("table", 1)  # for its version
        ranged.plan([url], [0], wanted="ranges")
        ranged.send(type="lease", id=70, position=0, start=0, beyond=99, partial=True)
        ranged.send(type="need", of=70)
        eventually(
            lambda: (
                [row["stage"] for row in node.status()["transfers"]]
                == ["downloading from the object store"]
            )
        )
        session.plan([url], [0], wanted="files")
        assert session.take(0)["error"]["code"] == CapacityError.code
        store.let("table")
        granted = ranged.receive()
        assert granted["type"] == "arriving"
        assert bytes_of(granted)[:100] == body[:100]


@pytest.mark.slow
def test_wait_of_a_whole_file_is_explained_without_shards(store: Canary, node: Daemon) -> None:
    """Its reader has no shuffle window."""
    url = store.put("table", BODY)
    with holding(node, store), waiting(node, url) as waiter:
        reason = waiter.ask("explain", of=50)["reason"]
    assert reason.startswith("waiting for space in the cache for a whole file: ")
    assert "(holds of root 2.1 MB)" in reason
    assert "shuffle_window" not in reason


def test_wait_of_a_range_is_explained_by_the_range(store: Canary, node: Daemon) -> None:
    """Its reader is told that it waits for the space of other ranges, not for a shard."""
    # Larger than the cache, so that nobody fetches the whole.
    held = store.put("held", BODY + OTHER_BODY)
    url = store.put("table", OTHER_BODY + BODY)
    span = 30 * PART_BYTES  # more than half of the cache
    with RawSession(node, job="first") as first, RawSession(node, job="second") as second:
        first.plan([held], [0], wanted="ranges")
        granted = first.take(0, start=0, beyond=span - 1, partial=True)
        assert granted["type"] == "arriving"
        second.plan([url], [0], wanted="ranges")
        second.send(type="lease", id=60, position=0, start=0, beyond=span - 1, partial=True)
        second.send(type="need", of=60)

        def reason() -> str:
            return str(second.ask("explain", of=60)["reason"])

        eventually(lambda: "for a range" in reason())
        assert "2.0 MB of ranges in use" in reason()
        assert "shuffle_window" not in reason()
        first.send(type="release", lease=granted["lease"])
        assert second.receive()["type"] == "arriving"
