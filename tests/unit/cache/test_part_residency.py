"""part_residency.py: parts outlive their file's handover, counted as long as they stay."""

import asyncio
import contextlib
import random
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardcache.access.rules import Peer
from shardcache.cache.space.part_residency import PartResidency
from shardcache.errors import ExhaustedError
from shardcache.origin.objects import RemoteObject
from shardcache.store.part_file import JOURNAL_BYTES, PartFile
from shardcache.store.space import Reservation
from shardcache.store.store import Store
from shardcache.transport.between.parts import write_parts
from support.programs.daemon import eventually
from support.shards.open_cache import ground
from support.shards.opening import opening_blocked
from support.shards.stores import kept_in, open_store

PART_BYTES = 4096
# Comparing such a part with its checksum takes many turns of the event loop.
LARGE_PART_BYTES = 32 * 1024 * 1024
OBJECT = RemoteObject("s3://bucket/a.tar", '"1"', 10 * PART_BYTES)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path)
    yield store
    store.close()


@pytest.mark.parametrize("is_held_before", [True, False])
async def test_closed_file_keeps_its_number_until_its_parts_are_released(
    store: Store, is_held_before: bool
) -> None:
    """Readers granted parts may still open it, whether before or after the handover."""
    parts = kept_in(store).residency.parts
    file = await parts.open(OBJECT, PART_BYTES, Reservation(store.space))
    key = file.partial.key
    inode = file.partial.inode
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


async def filled(
    parts: PartResidency,
    store: Store,
    *numbers: int,
    obj: RemoteObject = OBJECT,
    part_bytes: int = PART_BYTES,
) -> PartFile:
    """Return a file with some parts, which are fetched and accounted for as `PartFiller` does."""
    reservation = Reservation(store.space)
    reservation.grow(JOURNAL_BYTES + len(numbers) * part_bytes)
    file = await parts.open(obj, part_bytes, reservation)
    reservation.keep(JOURNAL_BYTES)
    for number in numbers:
        for sums in write_parts(file.partial.parts(number, 1), random.randbytes(part_bytes)):
            file.partial.mark_finished(sums)
        reservation.keep(part_bytes)
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


@pytest.mark.parametrize("failing", [1, 2])
async def test_part_whose_space_cannot_be_freed_is_counted_no_longer_than_its_file(
    store: Store, failing: int
) -> None:
    """The cache would shrink otherwise, after the last part or a later eviction."""
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


async def test_file_without_parts_is_a_leftover_once_its_readers_have_left(store: Store) -> None:
    """An object may be opened and not read. Nothing else would free the space of its journal."""
    parts = kept_in(store).residency.parts
    file = await filled(parts, store)
    for _ in range(2):
        parts.retain(file, [])
    assert store.parts.get(file.partial.key) is file

    for _ in range(2):
        parts.release(file, [])
    assert store.parts.get(file.partial.key) is None
    await remove_leftovers(store)
    assert not file.partial.path.exists()
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


async def test_file_is_counted_whole_if_it_is_handed_over_during_the_check_of_its_parts(
    tmp_path: Path,
) -> None:
    """A transfer of the object may begin while an earlier daemon's part is being checked."""
    earlier = open_store(tmp_path)
    large = RemoteObject("s3://bucket/large.bin", '"1"', 2 * LARGE_PART_BYTES)
    await filled(
        kept_in(earlier).residency.parts, earlier, 0, obj=large, part_bytes=LARGE_PART_BYTES
    )
    earlier.close()

    store = open_store(tmp_path)
    parts = kept_in(store).residency.parts
    [file] = store.parts.files()
    check = asyncio.create_task(parts.check_restored(file, [0]))
    while 0 in file.partial.unchecked:
        assert file.kept_bytes == store.space.used_bytes
        await asyncio.sleep(0)
    parts.hand_over(file)
    assert await check == []

    await remove_leftovers(store)
    assert store.space.used_bytes == 0
    store.close()


async def test_check_may_end_after_its_file_was_handed_over(tmp_path: Path) -> None:
    """The transfer that takes the file over compares the parts itself; nothing is counted twice."""
    earlier = open_store(tmp_path)
    await filled(kept_in(earlier).residency.parts, earlier, 1, 2)
    earlier.close()

    store = open_store(tmp_path)
    parts = kept_in(store).residency.parts
    [file] = store.parts.files()
    with opening_blocked(file.partial.path):
        check = asyncio.create_task(parts.check_restored(file, [1]))
        await asyncio.sleep(0)
        assert file.leases[1], "the part is being checked"
        parts.hand_over(file)
    assert await check == []

    await remove_leftovers(store)
    assert store.space.used_bytes == 0
    store.close()


async def test_cancelled_check_keeps_count_of_the_damaged_parts_that_it_left(
    tmp_path: Path,
) -> None:
    """Otherwise they would stay in the schedule, and be chosen for eviction again and again."""
    earlier = open_store(tmp_path)
    left = await filled(kept_in(earlier).residency.parts, earlier, 1, 2)
    with left.partial.path.open("r+b") as file_on_disk:
        file_on_disk.seek(PART_BYTES)
        file_on_disk.write(bytes(2 * PART_BYTES))
    earlier.close()

    store = open_store(tmp_path)
    kept = kept_in(store)
    parts = kept.residency.parts
    [file] = store.parts.files()
    with opening_blocked(file.partial.journal_path):
        check = asyncio.create_task(parts.check_restored(file, [1, 2]))
        await asyncio.to_thread(eventually, lambda: len(file.kept_parts) == 1)
        check.cancel()
    with pytest.raises(asyncio.CancelledError):
        await check
    assert len(file.kept_parts) == 1
    assert file.kept_bytes == store.space.used_bytes

    parts.hand_over(file)
    assert kept.planner.schedule.victims(1, 0.0, 0.0) is None
    await remove_leftovers(store)
    assert store.space.used_bytes == 0
    store.close()


async def test_verifying_skips_parts_that_go_meanwhile(tmp_path: Path) -> None:
    """They cannot be read any more; that is no damage, nor a failing disk."""
    may_read = threading.Event()
    async with ground(tmp_path) as here:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        found = here.parts()
        file = await filled(found.core.residency.parts, here.store, 1)
        busy = asyncio.get_running_loop().run_in_executor(None, may_read.wait)
        events = found.requesting.inventory.verify("", Peer(0))
        assert (await anext(events))["event"] == "start"
        result = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)  # now the parts are to be read, in the only thread
        file.partial.path.unlink()
        found.core.residency.parts.give_up_if_removed(file)
        may_read.set()
        await busy
        assert (await result)["ok"]
