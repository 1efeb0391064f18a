"""Lists of shards given to users, and their counts (cache/listings, cache/versions)."""

import gzip
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shardcache.access.rules import Peer
from shardcache.cache.versions import history
from shardcache.cache.versions.history import History
from shardcache.cache.waiting.waits import PriorityClass, Wait
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import ShardRef
from support.shards.open_cache import ground
from support.shards.stores import open_store, publish
from support.shards.tars import make_tar, random_samples

ALICE = Peer(1001)
BOB = Peer(1002)


async def test_lists_that_users_share_are_forgotten_for_all_of_them(tmp_path: Path) -> None:
    """Its memory is free only then: half of that of plans is for lists that are in none."""
    async with ground(
        tmp_path,
        plan_memory="1MiB",
        origin=[{"match": "s3://bucket/", "endpoint_url": "http://127.0.0.1:9", "anon": True}],
    ) as here:
        manifests = here.parts().core.manifests
        listing = await manifests.resolve(["s3://bucket/first-{000..999}.tar"], ALICE)
        await manifests.resolve(["s3://bucket/first-{000..999}.tar"], BOB)
        fingerprint = listing.shards.fingerprint
        assert 0.35 * 2**20 / 2 < listing.memory_bytes < 2**20 / 2
        for name in ("second", "third"):
            await manifests.resolve([f"s3://bucket/{name}-{{000..999}}.tar"], ALICE)
        assert await manifests.known([fingerprint], ALICE) is None
        assert await manifests.known([fingerprint], BOB) is None


async def test_lost_counts_are_restored_though_files_were_used_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A url's row has its count, however many sidecars lie between its shard and its file."""
    monkeypatch.setattr(history, "_SIDECARS_AT_ONCE", 1)
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(make_tar(random_samples(7))))
    ref = ShardRef(f"file://{path}")
    async with ground(tmp_path) as here:
        transfers = here.parts().fetching.transfers
        for is_file in (False, True):
            await transfers.wait(
                f"{is_file}", ref._replace(is_file=is_file), PriorityClass.PLANNED, Wait()
            )
    shutil.rmtree(here.store.layout.catalogue)
    store = open_store(here.store.layout.root)
    found = History(store)
    await found.rebuild()
    filled = await found.fill(Shards.of([ref]))
    store.close()
    assert list(filled.samples) == [7]


async def test_shards_that_share_a_row_cause_one_rebuild(tmp_path: Path) -> None:
    """Another follows only if the rows are lost."""

    async def events() -> list[str]:
        """Return the log of a start."""
        store = open_store(tmp_path)
        try:
            with capture_logs() as logs:
                await History(store).rebuild()
        finally:
            store.close()
        return [log["event"] for log in logs]

    store = open_store(tmp_path)
    for version in ("1", "2"):
        await publish(store, "s3://bucket/a.tar", version=version)
    store.close()
    rebuilt = ["rebuilding sample counts from the sidecars"]
    assert [await events(), await events()] == [rebuilt, []]
    shutil.rmtree(store.layout.catalogue)
    assert [await events(), await events()] == [rebuilt, []]
