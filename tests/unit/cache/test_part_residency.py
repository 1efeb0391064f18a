"""part_residency.py: parts outlive the handing over of their file, and their bytes are counted as long as they stay."""

import asyncio
import contextlib
import fcntl
import os
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache.cache.space.part_residency import PartResidency
from shardcache.errors import ExhaustedError
from shardcache.origin.objects import RemoteObject
from shardcache.store.part_file import JOURNAL_BYTES, PartFile
from shardcache.store.space import Reservation
from shardcache.store.store import Store
from shardcache.transport.between.parts import write_parts
from support.shards.stores import kept_in, open_store

PART_BYTES = 4096
OBJECT = RemoteObject("s3://bucket/a.tar", '"1"', 10 * PART_BYTES)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path)
    yield store
    store.close()


@pytest.mark.parametrize("is_held_before", [True, False])
async def test_closed_file_keeps_its_number_until_its_parts_are_released(store: Store, is_held_before: bool) -> None:
    """Readers that were granted parts may still open it, whether they got them before or after it was handed over."""
    parts = kept_in(store).residency.parts
    file = await parts.open(OBJECT, PART_BYTES, Reservation(store.space))
    key, inode = file.partial.key, file.partial.inode
    for part in (3, 4):
        file.partial.done[part] = 0
        parts.arrived(file, part)
    if is_held_before:
        parts.retain(file, [3])
    parts.hand_over(file)
    if not is_held_before:
        parts.retain(file, [3])
    parts.retain(file, [3, 4])
    assert store.parts.granted.inodes(key) == {inode}

    file.partial.path.unlink()  # as when it was published, and evicted
    again = await parts.open(OBJECT, PART_BYTES, Reservation(store.space))
    assert again.partial.inode != inode

    parts.release(file, [3])
    assert store.parts.granted.inodes(key) == {inode}
    parts.release(file, [3, 4])
    assert store.parts.granted.inodes(key) == set()


async def filled(parts: PartResidency, store: Store, *numbers: int) -> PartFile:
    """Return a file with some parts, which are fetched and accounted for as `PartFiller` does."""
    reservation = Reservation(store.space)
    reservation.grow(JOURNAL_BYTES + len(numbers) * PART_BYTES)
    file = await parts.open(OBJECT, PART_BYTES, reservation)
    reservation.keep(JOURNAL_BYTES)
    for number in numbers:
        for sums in write_parts(file.partial.parts(number, 1), random.randbytes(PART_BYTES)):
            file.partial.record(sums)
        reservation.keep(PART_BYTES)
        parts.arrived(file, number)
    reservation.close()
    return file


async def remove_leftovers(store: Store) -> None:
    for key in list(store.leftovers.by_key):
        assert await store.leftovers.remove(key)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open no file during the block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def opening_blocked(path: Path) -> Iterator[None]:
    """Have everybody who opens a file wait until the end of the block, by a lease on it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # ignored by default
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(fd)


@pytest.mark.parametrize("failing", [1, 2])
async def test_part_whose_space_cannot_be_freed_is_counted_no_longer_than_its_file(store: Store, failing: int) -> None:
    """Neither if it is the file's last part nor if another is evicted after it: otherwise, the cache would shrink."""
    parts = kept_in(store).residency.parts
    file = await filled(parts, store, 1, 2)
    key = file.partial.key
    if failing == 2:
        assert await parts.evict(key, 1)
    with no_descriptors(), pytest.raises(ExhaustedError):
        await parts.evict(key, failing)
    if failing == 1:
        assert store.space.kept_bytes == file.kept_bytes
        assert await parts.evict(key, 2)

    await remove_leftovers(store)
    assert store.space.used_bytes == 0


async def test_cancelled_eviction_of_a_part_ends_after_its_hole(store: Store) -> None:
    """A thread that punched it later would remove the bytes of a part that was fetched again."""
    parts = kept_in(store).residency.parts
    file = await filled(parts, store, 1)
    with opening_blocked(file.partial.journal_path):
        eviction = asyncio.create_task(parts.evict(file.partial.key, 1))
        for _ in range(10):  # the thread has been started, and a cancelled task would have ended
            await asyncio.sleep(0)
            eviction.cancel()
        assert not eviction.done()
    with pytest.raises(asyncio.CancelledError):
        await eviction
    assert file.partial.path.stat().st_blocks == 0

    await remove_leftovers(store)
    assert store.space.used_bytes == 0
