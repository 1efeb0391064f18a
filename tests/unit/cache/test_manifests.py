"""cache/listings/manifests.py: lists of shards that users were given."""

from pathlib import Path

from shardcache.access.rules import Peer
from support.shards.open_cache import ground

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
