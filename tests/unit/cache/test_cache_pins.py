"""Concurrent changes of the same pins add up; a damaged line costs no other."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardcache.cache.space.pins import Pins
from shardcache.cache.space.residency import Residency
from shardcache.errors import CapacityError, DiskFullError
from shardcache.store.folder.layout import Layout
from shardcache.store.folder.pins_file import Pin, read_pins, write_pins
from shardcache.store.keys import shard_key, stored_url
from shardcache.store.store import Store
from support.programs.still_loop import turns
from support.shards.stores import Kept, kept_in, open_store, publish

MANY = 600  # more than are changed before others have their turn
SIZE_BYTES = 1_000_000
LIMIT_BYTES = 2 * MANY * SIZE_BYTES


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path)
    yield store
    store.close()


@pytest.fixture
def kept(store: Store) -> Kept:
    """Cached shards in no plan; pins have space for twice as many as a test makes."""
    return kept_in(store, LIMIT_BYTES)


@pytest.fixture
def pins(kept: Kept) -> Pins:
    return kept.pins


@pytest.fixture
def residency(kept: Kept) -> Residency:
    return kept.residency


def made(uid: int, first: int = 0) -> list[Pin]:
    urls = [f"s3://bucket/{number}.tar" for number in range(first, first + MANY)]
    return [Pin(url, shard_key(url, "1"), SIZE_BYTES, frozenset({uid})) for url in urls]


async def test_concurrent_pins_and_unpins_all_count(pins: Pins, store: Store) -> None:
    """In the file, too: no change starts from a state that another has replaced by then."""
    await pins.add(made(7))
    await asyncio.gather(pins.add(made(8)), pins.add(made(9)), pins.remove(made(7), 7))
    assert {pin.uids for pin in pins} == {frozenset({8, 9})}
    assert store.layout.pins.read_text().count("[8, 9]") == MANY


async def test_the_limit_holds_for_concurrent_requests(pins: Pins) -> None:
    """Two that would fit one by one and not together: the second is refused, and leaves nothing."""
    outcomes = await asyncio.gather(
        pins.add(made(7) + made(7, MANY)), pins.add(made(8, 2 * MANY)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [set, CapacityError]
    assert pins.to_json()["size_bytes"] == LIMIT_BYTES


async def test_a_shard_that_arrives_while_its_pin_changes_is_kept(
    pins: Pins, residency: Residency, store: Store
) -> None:
    """The new version stays pinned, and the pin does not fall back to the former one."""
    await pins.add(made(7))
    first = made(8)[0]
    shard = await publish(store, first.url, version="2")
    joining = asyncio.create_task(pins.add(made(8)))
    await asyncio.sleep(0)  # it has looked at the first of them, and changed none
    residency.arrived(shard)
    await joining
    found = pins.get(first.url)
    assert shard.pinned
    assert found is not None
    assert found.key == shard.key
    assert found.uids == {7, 8}
    await pins.save()
    restored = {pin.key: pin.uids for pin in read_pins(store.layout)}
    assert restored[shard.key] == {7, 8}


async def test_last_of_several_pins_on_one_url_counts(
    pins: Pins, residency: Residency, store: Store
) -> None:
    """Whichever versions are cached: the limit is checked with the last one's size."""
    url = "s3://bucket/a.tar"
    shard = await publish(store, url, version="1")
    residency.arrived(shard)
    last = Pin(url, shard_key(url, "2"), SIZE_BYTES, frozenset({7}))
    await pins.add([Pin(url, shard.key, shard.kept_bytes, frozenset({7})), last])
    assert list(pins) == [last]


@pytest.mark.parametrize("url", ["s3://bucket/a.tar.gz", "ftp://user:secret@host/a.tar.gz"])
@pytest.mark.parametrize("version", ["1", "2"])
async def test_a_compressed_file_does_not_take_the_pin_of_its_shard(
    pins: Pins, residency: Residency, store: Store, version: str, url: str
) -> None:
    """A tar read for samples and as a file is cached twice; the pin keeps its own copy."""
    shard = await publish(store, url, version="1")
    assert shard.facts is not None
    shard.facts = replace(shard.facts, url=stored_url(url), origin_bytes=shard.size_bytes // 2)
    residency.arrived(shard)
    await pins.add([Pin(stored_url(url), shard.key, shard.kept_bytes, frozenset({7}))])
    file = await publish(store, url, version=version, is_file=True)
    assert file.facts is not None
    file.facts = replace(file.facts, url=stored_url(url), samples=None)
    residency.arrived(file)
    assert shard.pinned is True
    assert file.pinned is False


async def test_a_cancelled_change_leaves_file_and_memory_equal(pins: Pins, store: Store) -> None:
    """The pins applied until then hold, and are saved."""
    adding = asyncio.create_task(pins.add(made(7)))
    while not list(pins):  # noqa: ASYNC110
        await asyncio.sleep(0)
    adding.cancel()
    await asyncio.gather(adding, return_exceptions=True)
    assert 0 < len(list(pins)) < MANY
    await pins.save()
    assert sorted(pin.url for pin in read_pins(store.layout)) == sorted(pin.url for pin in pins)


async def test_one_writer_at_a_time(pins: Pins, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled save ends before the next begins: both use the same temporary file."""
    begun = []
    leave = asyncio.Event()

    async def write(*_args: object) -> None:
        begun.append(leave.is_set())
        await leave.wait()

    monkeypatch.setattr(asyncio, "to_thread", write)
    pins.schedule_save()
    saving = asyncio.create_task(pins.run())
    await turns()
    saving.cancel()
    await turns()
    leave.set()
    await asyncio.gather(saving, return_exceptions=True)
    assert begun == [False, True]


async def test_a_full_disk_leaves_the_former_pins(pins: Pins, store: Store) -> None:
    """A change that cannot be saved is undone in memory and file; the user gets the error."""
    await pins.add(made(7))
    before = sorted(pins, key=str)
    store.layout.replacement_of(store.layout.pins).symlink_to("/dev/full")
    with pytest.raises(DiskFullError):
        await pins.add(made(8))
    with pytest.raises(DiskFullError):
        await pins.remove(made(7)[1:], None)
    assert sorted(pins, key=str) == sorted(read_pins(store.layout), key=str) == before


async def test_a_version_that_arrives_during_a_write_that_fails_is_pinned(
    pins: Pins, residency: Residency, store: Store
) -> None:
    """The users are the old ones again, after a failed addition or removal."""
    joined, removed = made(7)[:2]
    await pins.add([joined, removed])
    shards = [await publish(store, pin.url, version="2") for pin in (joined, removed)]
    store.layout.replacement_of(store.layout.pins).symlink_to("/dev/full")
    for shard, change in zip(
        shards, (pins.add(made(8)[:1]), pins.remove([removed], 7)), strict=True
    ):
        before = set(pins)
        changing = asyncio.create_task(change)
        while set(pins) == before:  # noqa: ASYNC110
            await asyncio.sleep(0)
        residency.arrived(shard)
        with pytest.raises(DiskFullError):
            await changing
    assert all(shard.pinned for shard in shards)
    assert {(pin.key, pin.uids) for pin in pins} == {
        (shard.key, frozenset({7})) for shard in shards
    }


PINS = [
    Pin(f"s3://bucket/{name}.tar", shard_key(name, "1"), 5, frozenset({0, 1000}))
    for name in ("a", 'b "ü"')
]


@pytest.fixture
def empty(tmp_path: Path) -> Layout:
    """Return the paths of a folder in which there is nothing."""
    empty = Layout(tmp_path)
    empty.partial.mkdir()
    return empty


def test_pins_are_read_as_they_were_written(empty: Layout) -> None:
    """None at first; afterwards those of the last write, and nothing else lies about."""
    assert read_pins(empty) == []
    write_pins(empty, PINS)
    write_pins(empty, reversed(PINS))
    assert read_pins(empty) == PINS[::-1]
    assert {path.name for path in empty.root.rglob("*")} == {"partial", "pins"}
    assert empty.pins.stat().st_mode & 0o007 == 0, "urls are nobody else's business"


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b"[]",
        b"[" * 100_000,
        b'["u", "no key", 1, [0]]',
        b'["u", "' + b"0" * 32 + b'", {}, []]',
    ],
)
def test_a_damaged_line_costs_no_other(empty: Layout, line: bytes) -> None:
    """The others hold, at the next start as well; the file is kept for a look."""
    write_pins(empty, PINS)
    damaged = empty.pins.read_bytes() + line + b"\n"
    empty.pins.write_bytes(damaged)
    for _ in range(2):
        assert read_pins(empty) == PINS
    assert empty.pins.with_name("pins.damaged").read_bytes() == damaged
