"""cache/objects/object_reads.py: bytes of objects, of the version that was asked for."""

from pathlib import Path

import pytest

from shardcache.access.rules import Peer
from shardcache.cache.waiting.waits import PriorityClass, Wait
from shardcache.errors import OutdatedError
from shardcache.shared.protocol import ShardRef
from support.shards.open_cache import ground

ROOT = Peer(0)
CLIENT = ("s3", 0)


async def test_a_jobs_reload_changes_nothing_for_who_asked_for_the_former_version(
    tmp_path: Path,
) -> None:
    """The job's name of the object now means the new version, whose bytes are its own."""
    file = tmp_path / "object"
    file.write_bytes(b"former")
    async with ground(tmp_path) as here:
        parts = here.parts()
        objects = parts.requesting.objects
        obj = await objects.stat(f"file://{file}", ROOT)
        async with objects.reads.hold_whole(obj, CLIENT) as held:
            await held.beyond(0)
        file.write_bytes(b"newer!")
        ref = ShardRef(obj.url, obj.version, obj.size_bytes, is_file=True)
        await parts.fetching.leasing.acquire_latest(ref, PriorityClass.PLANNED, Wait())
        assert objects.reads.at_hand(obj, (0, 1)) is None
        with pytest.raises(OutdatedError):
            async with objects.reads.hold_span(obj, (0, 1), CLIENT):
                raise AssertionError("bytes of another version")
