"""Interrupted downloads go on from their finished parts, and only from sound ones."""

from __future__ import annotations

import os
import random
from pathlib import Path

from awscrt import checksums

from shardcache.origin.base import RemoteObject
from shardcache.store.folder import Layout
from shardcache.store.partial import Partial
from shardcache.transport.parts import write_parts
from support.shards.stores import open_store

PART_BYTES = 4096
DATA = random.Random(7).randbytes(5 * PART_BYTES + 100)
OBJECT = RemoteObject("s3://bucket/shard.tar", '"v1"', len(DATA))


def layout_in(folder: Path) -> Layout:
    """Make the folders of a cache."""
    store = open_store(folder)
    store.close()
    return store.layout


def write_some(partial: Partial, *indices: int) -> None:
    """Write some parts of DATA."""
    for index in indices:
        piece = DATA[index * PART_BYTES : (index + 1) * PART_BYTES]
        for sums in write_parts(partial.parts(index, 1), piece):
            partial.record(sums)


def test_parts_in_any_order_make_the_whole(tmp_path: Path) -> None:
    """Parts land where they belong, and the checksums are those of the pieces."""
    partial = Partial.open(layout_in(tmp_path), OBJECT, PART_BYTES)
    assert partial.missing() == [0, 1, 2, 3, 4, 5]
    write_some(partial, 5, 0, 3, 1, 4, 2)
    assert partial.missing() == []
    assert partial.path.read_bytes() == DATA
    assert partial.crcs() == [checksums.crc32c(DATA[at : at + PART_BYTES]) for at in range(0, len(DATA), PART_BYTES)]


def test_space_is_taken_before_the_first_byte(tmp_path: Path) -> None:
    """The file is preallocated: a disk that fills up later cannot fail a write in the middle."""
    partial = Partial.open(layout_in(tmp_path), OBJECT, PART_BYTES)
    stat = partial.path.stat()
    assert (stat.st_size, stat.st_blocks * 512 >= len(DATA)) == (len(DATA), True)


def test_a_damaged_part_is_fetched_again(tmp_path: Path) -> None:
    """After a power loss the journal may claim more than the disk holds: claimed parts are read and checked."""
    layout = layout_in(tmp_path)
    partial = Partial.open(layout, OBJECT, PART_BYTES)
    write_some(partial, 0, 1, 2)
    with open(partial.path, "r+b") as file:
        os.pwrite(file.fileno(), b"\0" * PART_BYTES, PART_BYTES)
    assert Partial.open(layout, OBJECT, PART_BYTES).missing() == [1, 3, 4, 5]


def test_a_torn_record_is_ignored(tmp_path: Path) -> None:
    """A journal cut in the middle of a record counts only whole ones, and goes on aligned."""
    layout = layout_in(tmp_path)
    partial = Partial.open(layout, OBJECT, PART_BYTES)
    write_some(partial, 0, 1)
    os.truncate(partial.journal_path, partial.journal_path.stat().st_size - 3)
    again = Partial.open(layout, OBJECT, PART_BYTES)
    assert again.missing() == [1, 2, 3, 4, 5]
    write_some(again, 1, 2)
    assert Partial.open(layout, OBJECT, PART_BYTES).missing() == [3, 4, 5]


def test_another_part_size_or_version_starts_over(tmp_path: Path) -> None:
    """Parts of another size or another version are never mixed in."""
    layout = layout_in(tmp_path)
    write_some(Partial.open(layout, OBJECT, PART_BYTES), 0, 1)
    assert len(Partial.open(layout, OBJECT, 2 * PART_BYTES).missing()) == 3
    other = RemoteObject(OBJECT.url, '"v2"', len(DATA))
    assert len(Partial.open(layout, other, PART_BYTES).missing()) == 6
