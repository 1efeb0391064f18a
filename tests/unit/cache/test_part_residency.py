"""part_residency.py: parts in use outlive the file's handing over, and no later file is taken for theirs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache.errors import DiskError
from shardcache.origin.objects import RemoteObject
from shardcache.store.part_file import JOURNAL_BYTES
from shardcache.store.space import Reservation
from shardcache.store.store import Store
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


async def test_a_failed_eviction_of_a_part_takes_no_space_for_ever(store: Store) -> None:
    """Its bytes are on the disk as long as its file, and count no longer than that."""
    parts = kept_in(store).residency.parts
    reservation = Reservation(store.space)
    reservation.grow(JOURNAL_BYTES + PART_BYTES)
    file = await parts.open(OBJECT, PART_BYTES, reservation)
    file.partial.done[3] = 0
    reservation.keep(JOURNAL_BYTES + PART_BYTES)
    parts.arrived(file, 3)

    aside = file.partial.journal_path.rename(file.partial.journal_path.with_suffix(".aside"))
    file.partial.journal_path.mkdir()  # a file that cannot be opened, as on a disk that fails
    with pytest.raises(DiskError):
        await parts.evict(file.partial.key, 3)
    file.partial.journal_path.rmdir()
    aside.rename(file.partial.journal_path)

    parts.hand_over(file)
    assert await store.leftovers.remove(file.partial.key)
    assert store.space.used_bytes == 0
