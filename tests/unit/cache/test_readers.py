"""cache/readers/readers.py: who is connected in which job, and which past jobs show."""

import gc
from pathlib import Path

import pytest

from shardcache.cache.listings.shard_listing import Listing
from shardcache.errors import ProtocolError
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import MAX_JOB_CHARS, ShardRef
from shardcache.telemetry.bills import Bill
from support.shards.open_cache import ground

PAST_JOBS = 32
URL = "s3://bucket/a.tar"


async def test_readers_of_one_name_and_user_are_one_job(tmp_path: Path) -> None:
    """Another user's job of that name is another; the job that was joined last comes last."""
    async with ground(tmp_path) as here:
        readers = here.parts().requesting.readers
        added = [
            readers.add("train", 7),
            readers.add("eval", 7),
            readers.add("train", 8),
            readers.add("train", 7),
        ]
        jobs = [(job.name, job.uid, job.sessions) for job in readers.jobs()]
        assert set(readers) == set(added)
    assert jobs == [("eval", 7, 1), ("train", 8, 1), ("train", 7, 2)]


async def test_jobs_that_have_ended_are_shown_up_to_a_number(tmp_path: Path) -> None:
    """Readers leave between epochs; jobs with readers stay whatever their number."""
    async with ground(tmp_path) as here:
        readers = here.parts().requesting.readers
        stays = readers.add("stays", 7)
        for number in range(2 * PAST_JOBS):
            await readers.add(f"past-{number}", 7).close()
        readers.add("new", 7)
        names = [job.name for job in readers.jobs()]
        assert stays in set(readers)
    assert names == [
        "stays",
        *(f"past-{number}" for number in range(PAST_JOBS, 2 * PAST_JOBS)),
        "new",
    ]


def count_of_bills() -> int:
    return sum(isinstance(each, Bill) for each in gc.get_objects())


async def test_bills_of_jobs_that_are_forgotten_go_with_them(tmp_path: Path) -> None:
    """Those of the jobs that are still shown stay."""
    async with ground(tmp_path) as here:
        readers = here.parts().requesting.readers
        bills = here.counters.bills
        jobs = []
        for number in range(PAST_JOBS + 1):
            reader = readers.add(f"past-{number}", 7)
            bills.add_read(URL, 1_000, reader.job.key)
            await reader.close()
            jobs.append(reader.job.key)
        assert bills.to_json(jobs[0]) != bills.to_json(("nobody", 7))
        readers.add("new", 7)
        assert bills.to_json(jobs[0]) == bills.to_json(("nobody", 7))
        assert bills.to_json(jobs[1]) != bills.to_json(("nobody", 7))
        before = count_of_bills()
        bills.to_json(("another", 7))
        assert count_of_bills() == before, "asking for a bill makes none that stays"


async def test_reader_that_leaves_takes_its_plan_along(tmp_path: Path) -> None:
    """Nothing is prefetched for it, and its memory is free for others."""
    async with ground(tmp_path) as here:
        parts = here.parts()
        reader = parts.requesting.readers.add("job", 7)
        reader.declare(Listing(Shards.of([ShardRef(URL)])), 1)
        await reader.extend([0])
        planned = parts.core.planner.schedule.next_missing(here.store.shards.__contains__)
        await reader.close()
        left = parts.core.planner.schedule.next_missing(here.store.shards.__contains__)
        assert list(parts.requesting.readers) == []
    assert planned is not None
    assert left is None


async def test_name_that_is_too_long_to_show_is_refused(tmp_path: Path) -> None:
    """It would crowd everything else off the status page; nothing of it stays."""
    async with ground(tmp_path) as here:
        readers = here.parts().requesting.readers
        with pytest.raises(ProtocolError, match=f"{MAX_JOB_CHARS + 1} characters"):
            readers.add("x" * (MAX_JOB_CHARS + 1), 7)
        assert readers.jobs() == []
        assert list(readers) == []
