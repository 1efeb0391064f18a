"""pins.py: what several people ask of the same pins at the same time adds up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache.cache.catalog.aliases import AliasTable
from shardcache.cache.loop_turns import Turns
from shardcache.cache.planner import Planner
from shardcache.cache.residency.inventory import Inventory
from shardcache.cache.residency.page_advice import Pages
from shardcache.cache.residency.pins import Pins
from shardcache.cache.signal import Signal
from shardcache.config import Amount
from shardcache.errors import CapacityError
from shardcache.store.folder.layout import shard_key
from shardcache.store.pinfile import Pin
from shardcache.store.store import Store
from support.stores import open_store, publish

MANY = 600  # more than are changed before others have their turn
SIZE_BYTES = 1_000_000
LIMIT_BYTES = 2 * MANY * SIZE_BYTES


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty cache."""
    store = open_store(tmp_path)
    yield store
    store.close()


@pytest.fixture
def inventory(store: Store) -> Inventory:
    """What is in the cache, in no plan."""
    aliases, changed = AliasTable(store.shards), Signal()
    planner = Planner(aliases)
    return Inventory(store, planner, Pages(store, planner, aliases, changed), aliases, changed)


@pytest.fixture
def pins(store: Store, inventory: Inventory) -> Pins:
    """Pins that have room for twice as many as there are."""
    return Pins(store, inventory, Turns(), Amount(LIMIT_BYTES))


def made(uid: int, first: int = 0) -> list[Pin]:
    """Return pins of one user."""
    urls = [f"s3://bucket/{number}.tar" for number in range(first, first + MANY)]
    return [Pin(url, shard_key(url, "1"), SIZE_BYTES, frozenset({uid})) for url in urls]


async def test_two_users_pin_and_one_takes_back_at_once(pins: Pins, store: Store) -> None:
    """Each change counts, also on disk: none goes out from what another has replaced by then."""
    await pins.add(made(7))
    await asyncio.gather(pins.add(made(8)), pins.add(made(9)), pins.remove(made(7), 7))
    assert {pin.uids for pin in pins} == {frozenset({8, 9})}
    assert store.layout.pins.read_text().count("[8, 9]") == MANY


async def test_the_limit_holds_for_those_who_ask_at_once(pins: Pins) -> None:
    """Two that would fit one by one and not together: the second is refused, and leaves nothing."""
    outcomes = await asyncio.gather(
        pins.add(made(7) + made(7, MANY)), pins.add(made(8, 2 * MANY)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [set, CapacityError]
    assert pins.to_json()["size_bytes"] == LIMIT_BYTES


async def test_a_shard_that_comes_while_its_pin_changes_is_kept(pins: Pins, inventory: Inventory, store: Store) -> None:
    """The version that arrives between asking and changing stays pinned; the pin does not fall back to the former."""
    await pins.add(made(7))
    first = made(8)[0]
    shard = await publish(store, first.url, version="2")
    joining = asyncio.create_task(pins.add(made(8)))
    await asyncio.sleep(0)  # it has looked at the first of them, and changed none
    inventory.published(shard)
    pins.arrived(shard)
    await joining
    found = pins.get(first.url)
    assert shard.pinned and found is not None and (found.key, found.uids) == (shard.key, {7, 8})
