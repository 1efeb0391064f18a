"""Indexing of complete shards, each in a separate process, with what its format needs.

`Publisher` has each shard indexed here before it is published. The index says which bytes of the
shard are which members of which sample. It is in the sidecar, a file next to the shard.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from shardcache.cache.fetching.companions import Companions
from shardcache.origin.objects import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.store.indexing.indexer import IndexRequest
from shardcache.store.indexing.indexers import Indexers
from shardcache.store.shard import Facts
from shardcache.store.space import footprint_bytes


class ShardIndexing:
    """Indexes complete shards.

    Args:
        origins: has the settings of each shard's origin, which say how strict the checks are.
        indexers: the processes that read shards and write sidecars.
        companions: files next to shards that some formats need.
    """

    def __init__(self, origins: Origins, indexers: Indexers, companions: Companions) -> None:
        self._origins = origins
        self._indexers = indexers
        self._companions = companions

    async def index(
        self,
        tar: Path,
        sidecar: Path,
        facts: Facts,
        obj: RemoteObject,
        grow: Callable[[int], Awaitable[None]],
    ) -> int:
        """Write the sidecar of a complete shard; return its number of samples.

        Args:
            tar: path of the shard, which may have another format than tar.
            sidecar: path of the sidecar to write.
            facts: facts for the sidecar, still without the number of samples.
            obj: the shard's object in the origin.
            grow: reserves a number of bytes in addition to `allowed_index_bytes`.

        Raises ShardError, the errors of reading the shard's companion, and those of `grow`.
        """
        table = self._origins.table(obj.url)
        request = IndexRequest(
            shard_path=str(tar),
            sidecar_path=str(sidecar),
            header=facts.to_json(),
            url=facts.url,
            require_end=table.require_end,
            allowed_bytes=allowed_index_bytes(obj),
            ignore_trailing_data=table.ignore_trailing_data,
            require_adjacent=table.require_adjacent,
            companion=await self._companions.of(obj.url),
        )
        indexed = await self._indexers.index(request)
        if not indexed.was_written:
            # The index is larger than the space reserved for it, as the shard has many tiny
            # samples. That is rare, so it costs little to reserve more and scan the shard again.
            await grow(indexed.sidecar_bytes - request.allowed_bytes)
            allowed = replace(request, allowed_bytes=indexed.sidecar_bytes)
            indexed = await self._indexers.index(allowed)
        return indexed.samples


def allowed_index_bytes(obj: RemoteObject) -> int:
    """Return how large an index may be without more space than is reserved for its shard."""
    return footprint_bytes(obj.size_bytes) - obj.size_bytes
