"""Indexing of one complete shard, in a process of its own, by what its format needs."""

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
    """Indexes complete shards."""

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
            tar: path of the shard, whatever its format.
            sidecar: path of the sidecar.
            facts: facts for the sidecar, still without the number of samples.
            obj: the shard's object.
            grow: reserves a number of bytes in addition to `allowed_index_bytes`.

        Raises ShardError, the errors of reading the shard's companion, and those of `grow`.
        """
        table = self._origins.table(obj.url)
        request = IndexRequest(
            tar=str(tar),
            sidecar=str(sidecar),
            header=facts.to_json(),
            url=facts.url,
            require_end=table.require_end,
            allowed_bytes=allowed_index_bytes(obj),
            ignore_trailing_data=table.ignore_trailing_data,
            require_adjacent=table.require_adjacent,
            companion=await self._companions.of(obj.url),
        )
        indexed = await self._indexers.index(request)
        if not indexed.written:
            # An index this large, of many tiny samples, is rare enough to scan twice.
            await grow(indexed.sidecar_bytes - request.allowed_bytes)
            allowed = replace(request, allowed_bytes=indexed.sidecar_bytes)
            indexed = await self._indexers.index(allowed)
        return indexed.samples


def allowed_index_bytes(obj: RemoteObject) -> int:
    """Return the size of an index that the reservation for its shard has space for."""
    return footprint_bytes(obj.size_bytes) - obj.size_bytes
