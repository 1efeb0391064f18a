"""The readable part of an arriving shard, its urgency, and turns of long computations."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardcache.cache.readers.leases import Lease
from shardcache.cache.readers.recent_waits import RecentWaits
from shardcache.cache.waiting.arrival import Arrival
from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cache.waiting.stages import Stage
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.turns import Turns
from shardcache.cache.waiting.waits import PriorityClass, Wait
from shardcache.errors import ShardChangedError
from shardcache.fetch.limits.slot_claims import Priority
from shardcache.fetch.reads import PausableRead
from shardcache.origin.objects import RemoteObject
from shardcache.shared.protocol import ShardRef
from shardcache.store.folder.layout import Layout
from shardcache.store.partial import Partial
from shardcache.store.shard import Facts, Shard, UnpublishedFiles
from shardcache.transport.between.parts import PartSums

URL = "s3://bucket/a.tar"
PART = 1000
SIZE = 2500
JOB = ("job", 7)
OTHER = ("other", 7)


@pytest.mark.parametrize(
    ("intervals", "now_s", "total_s"),
    [
        ([], 100.0, 0.0),
        ([(100.25, 100.5), (100.75, 101.5)], 102.0, 1.0),
        ([(0.0, 100.0)], 100.0, 30.0),  # one long wait
        ([(0.0, 60.0)], 80.0, 10.0),  # which is over
        ([(0.0, 60.0)], 95.0, 0.0),
        ([(second + 0.06, second + 1.0) for second in range(40)], 40.0, 30 * 0.94),
    ],
)
def test_recent_waits_are_those_of_the_last_30_seconds(
    intervals: list[tuple[float, float]], now_s: float, total_s: float
) -> None:
    """However long or short each was."""
    recent = RecentWaits()
    for since_s, until_s in intervals:
        recent.add(since_s, until_s)
    assert recent.total_s(now_s) == pytest.approx(total_s)


def read() -> PausableRead:
    return PausableRead(URL, 60.0, size_bytes=PART)


@pytest.fixture
async def transfer() -> Transfer:
    transfer = Transfer(URL, ShardRef(URL), PriorityClass.PLANNED)
    transfer.begin(SIZE)
    return transfer


@pytest.fixture
async def arrival(transfer: Transfer, tmp_path: Path) -> Arrival:
    layout = Layout(tmp_path)
    layout.partial.mkdir(parents=True)
    transfer.stages.enter(Stage.NETWORK)
    return transfer.offer(Partial.open(layout, RemoteObject(URL, "1", SIZE), PART))


def priority(transfer: Transfer) -> Priority:
    """Return the priority of a download whose shard a plan needs at 7 s."""
    return KeyClaim(transfers=[transfer]).priority(lambda: 7.0)


async def test_ready_bytes_grow_with_the_first_unfinished_part(
    transfer: Transfer, arrival: Arrival
) -> None:
    """With what is written of it, whatever becomes of its request."""
    unfinished = transfer.unfinished
    moved = transfer.moved
    first = read()
    again = read()
    second = read()
    last = read()
    assert not arrival.can_serve(Wait(accepts_partial=True))

    unfinished.begin(0, first)
    unfinished.begin(1, second)
    second.written(900)
    assert arrival.ready_bytes == 0, "a later part does not begin the shard"
    first.written(300)
    assert arrival.ready_bytes == 300
    assert arrival.can_serve(Wait(accepts_partial=True)) is True
    assert moved.count == 2

    unfinished.begin(0, again)  # the first request failed
    again.written(100)
    assert arrival.ready_bytes == 300, "the same bytes are written again"
    again.written(400)
    assert arrival.ready_bytes == 400

    unfinished.end(0)
    arrival.partial.mark_finished(PartSums(0, 0, 0))
    assert arrival.ready_bytes == 1900, "the second part has begun"
    unfinished.end(1)
    arrival.partial.mark_finished(PartSums(1, 0, 0))
    unfinished.begin(2, last)
    last.written(500)
    assert arrival.ready_bytes == SIZE
    assert arrival.can_serve(Wait(accepts_partial=True)) is False


async def test_files_without_samples_are_no_whole_shard(arrival: Arrival, tmp_path: Path) -> None:
    """A shard fetched as a file is indexed first; one with samples is given at once."""
    wait = Wait(JOB, idle_since_s=0.0, accepts_partial=True, accepts_unpublished=True)
    lease = Lease(1, 0, wait, granted=arrival, task=None)
    facts = Facts(URL, "1", SIZE, SIZE, PART, (1, 2, 3), samples=None)
    arrival.offer_files(UnpublishedFiles(tmp_path / "tar", tmp_path / "sidecar", 1, facts))
    assert arrival.files_for(wait) is None
    arrival.publish(Shard("key", SIZE, 0, used_at_s=0.0, facts=facts), None)
    assert not lease.is_whole

    indexed = UnpublishedFiles(
        tmp_path / "tar", tmp_path / "sidecar", 1, replace(facts, samples=40)
    )
    arrival.offer_files(indexed)
    assert arrival.files_for(wait) is indexed


async def test_a_failed_arrival_is_not_offered(arrival: Arrival) -> None:
    """A reader that comes after the failure waits for the next attempt."""
    arrival.partial.mark_finished(PartSums(0, 0, 0))
    assert arrival.can_serve(Wait(accepts_partial=True))
    arrival.fail(ShardChangedError("replaced", url=URL))
    assert not arrival.can_serve(Wait(accepts_partial=True))


@pytest.mark.parametrize("url", ["s3://bucket/a.tar.gz", "s3://bucket/a.zip"])
async def test_a_reader_of_a_smaller_copy_waits_for_its_publication(
    tmp_path: Path, url: str
) -> None:
    """A compressed file's cached copy may be smaller than the bytes that have arrived."""
    layout = Layout(tmp_path)
    layout.partial.mkdir(parents=True)
    transfer = Transfer(url, ShardRef(url), PriorityClass.PLANNED)
    transfer.begin(SIZE)
    arrival = transfer.offer(Partial.open(layout, RemoteObject(url, "1", SIZE), PART))
    for part in range(3):
        arrival.partial.mark_finished(PartSums(part, 0, 0))
    assert arrival.ready_bytes == SIZE

    waiting = asyncio.create_task(arrival.wait_beyond(SIZE - 1, Wait(JOB)))
    await asyncio.sleep(0)
    assert not waiting.done()
    arrival.publish(Shard("key", SIZE - 1, 0, 0.0), None)
    await waiting


async def test_a_reader_of_an_arriving_shard_keeps_its_connections(
    transfer: Transfer, arrival: Arrival
) -> None:
    """The shard comes first until it is whole, during reads and the waits between them.

    A reader that asks ahead makes a download no more urgent; one that waits for the whole shard
    pauses no other.
    """
    ahead = Wait(JOB)
    whole = Wait(JOB, 5.0)
    other = Wait(OTHER, 6.0)
    more = Wait(JOB, 5.0)
    transfer.waits = {ahead}
    assert priority(transfer) == Priority(PriorityClass.PLANNED, 7.0)
    transfer.waits = {whole, other}
    assert priority(transfer) == Priority(PriorityClass.WAITING, 5.0, JOB)
    transfer.waits = set()
    arrival.readers.append(JOB)
    reading = priority(transfer)
    assert reading.priority_class == PriorityClass.WAITING
    assert reading.streamed is True
    transfer.waits = {more}  # as `Reader.more` waits
    assert priority(transfer) == Priority(PriorityClass.WAITING, 5.0, JOB, streamed=True)


LONG = list(range(10_000))


def fill_a_turn() -> None:
    until_s = time.perf_counter() + 0.0015
    while time.perf_counter() < until_s:
        pass


async def test_the_loop_runs_between_any_two_turns() -> None:
    """However many have long lists at the same moment, and however long their items take."""
    turns = Turns()
    done = 0
    most_between = 0

    def work(_piece: object) -> None:
        nonlocal done
        done += 1
        fill_a_turn()

    async def others() -> None:
        nonlocal most_between
        while True:
            before = done
            await asyncio.sleep(0)
            most_between = max(most_between, done - before)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(others())
        async with asyncio.TaskGroup() as workers:
            for _ in range(8):
                workers.create_task(turns.take(LONG[:320], work))
        watching.cancel()
    assert done == 8 * 10
    assert most_between == 1


async def test_a_short_list_does_not_wait_for_the_end_of_a_long_one() -> None:
    """A late caller has its turn after one of the others, not after all of them."""
    turns = Turns()
    order = []

    def work(_piece: object) -> None:
        order.append("long")
        fill_a_turn()

    async with asyncio.TaskGroup() as group:
        group.create_task(turns.take(LONG[:320], work))
        group.create_task(turns.take([1], lambda _: order.append("short")))
    assert order.index("short") == 1
