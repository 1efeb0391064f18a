"""Readers announce the order of their ranges: the cache then keeps the parts needed soonest."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardcache.shared.announced_range import MAX_ANNOUNCED
from shardcache.shared.protocol import ShardRef
from support.programs.daemon import Daemon
from support.programs.raw_session import RawSession
from support.stores.canary import Canary

KIB = 1024
PART_BYTES = 64 * KIB
OBJECTS = 4
PARTS = 40  # of each object
ALL_PARTS = OBJECTS * PARTS
CACHED_PARTS = ALL_PARTS // 2
EPOCHS = 3

Part = tuple[int, int]  # numbers of the object, and of the part in it


@pytest.fixture(scope="module")
def store() -> Iterator[Canary]:
    rng = random.Random(5)
    with Canary() as running:
        running.etag = '"1"'
        for number in range(OBJECTS):
            running.files[f"/{number}.bin"] = rng.randbytes(PARTS * PART_BYTES)
        yield running


def permuted(seed: int) -> list[Part]:
    """Return the parts of all objects in the orders of some epochs, one after another."""
    rng = random.Random(seed)
    parts = [(number, part) for number in range(OBJECTS) for part in range(PARTS)]
    return [part for _ in range(EPOCHS) for part in rng.sample(parts, ALL_PARTS)]


def fields_of(part: Part) -> dict[str, int]:
    """Return the fields of a message by which a part is meant."""
    number, index = part
    start = index * PART_BYTES
    return {"position": number, "start": start, "beyond": start + PART_BYTES - 1}


class PartReader:
    """Reads parts one by one over a session of its own."""

    def __init__(self, daemon: Daemon, store: Canary, order: Sequence[Part]) -> None:
        self._order = order
        self._session = RawSession(daemon, bundles=True)
        assert self._session.welcome["range_plans"]
        size_bytes = PARTS * PART_BYTES
        refs = [
            ShardRef(store.url(f"/{number}.bin"), '"1"', size_bytes) for number in range(OBJECTS)
        ]
        answer = self._session.plan(refs, list(range(OBJECTS)), wanted="ranges")
        assert answer["type"] == "ok"

    def announce(self, first: int, stop: int, **fields: Any) -> None:
        """Announce the parts from one number to another."""
        ranges: list[int] = []
        for number in range(first, stop):
            ranges += (number, *fields_of(self._order[number]).values())
        self._session.send(type="plan_ranges", ranges=ranges, **fields)
        self._session.settle()

    def read(self, number: int) -> None:
        """Read the part of a number."""
        part = self._order[number]
        granted = self._session.ask("lease", **fields_of(part), needed=True, number=number)
        assert granted["type"] == "arriving", granted
        self._session.send(type="release", lease=granted["lease"])

    def close(self) -> None:
        self._session.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with space for half of the parts, which fetches no object as a whole."""
    flags = ("--range-part-size", str(PART_BYTES), "--whole-from-percent", "100")
    capacity = str(CACHED_PARTS * PART_BYTES)
    with Daemon(tmp_path, *flags, capacity=capacity) as running:
        yield running


def fetched_parts(store: Canary) -> int:
    return store.asked_bytes(".bin") // PART_BYTES


def test_announced_order_keeps_the_parts_that_are_needed_soonest(
    store: Canary, node: Daemon
) -> None:
    """Of three permutations, a cache of half serves far more than without the announcement."""
    fetched = []
    for has_announced in (False, True):
        node.evict(store.url("/*.bin"))
        store.requests.clear()
        order = permuted(seed=1)
        reader = PartReader(node, store, order)
        if has_announced:
            reader.announce(0, len(order), begins=True)
        for number in range(len(order)):
            reader.read(number)
        reader.close()
        fetched.append(fetched_parts(store))

    unannounced, announced = fetched
    assert unannounced > ALL_PARTS * 2
    assert announced < unannounced * 0.8


def test_readers_announce_piece_by_piece_and_share_the_cache(store: Canary, node: Daemon) -> None:
    """Two orders, a quarter of an epoch ahead, keep what either needs soon."""
    fetched = []
    for has_announced in (False, True):
        node.evict(store.url("/*.bin"))
        store.requests.clear()
        orders = [permuted(seed) for seed in (2, 3)]
        readers = [PartReader(node, store, order) for order in orders]
        ahead = ALL_PARTS // 2
        for number in range(len(orders[0])):
            for reader in readers:
                if has_announced and number % ahead == 0:
                    stop = min(number + 2 * ahead, len(orders[0]))
                    first = number + ahead if number else 0
                    reader.announce(first, stop, begins=number == 0)
                reader.read(number)
        for reader in readers:
            reader.close()
        fetched.append(fetched_parts(store))

    unannounced, announced = fetched
    assert announced < unannounced * 0.9


def test_announcement_that_is_wrong_loses_nothing(store: Canary, node: Daemon) -> None:
    """Ranges beyond the end, of another order and of no end are advice that is not followed."""
    reader = PartReader(node, store, permuted(seed=4))
    session = reader._session
    huge = 2**63 - 1
    session.send(type="plan_ranges", ranges=[0, 0, 0, huge, 1, 1, huge, huge], begins=True)
    reader.announce(5, 9)
    reader.announce(2, 4, begins=True)
    for number in range(20):
        reader.read(number)

    too_many = [0, 0, 0, 0] * (MAX_ANNOUNCED + 1)
    for wrong in ([1], [0, OBJECTS, 0, 1], [0, 0, 0, "a"], [4, 0, 0, 1, 3, 0, 0, 1], too_many):
        session.send(type="plan_ranges", ranges=wrong)
        assert session.receive()["error"]["code"] == "protocol"
    reader.read(20)
    reader.close()


def test_plan_of_shards_takes_no_announcement(store: Canary, node: Daemon) -> None:
    with RawSession(node) as session:
        session.send(type="plan_ranges", ranges=[])
        assert session.receive()["error"]["code"] == "protocol"
