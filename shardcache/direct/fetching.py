"""Fetching of shards for one process: stat, download, inflate and index, with the daemon's own code."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardcache.access.rules import AllowList, Peer
from shardcache.config import Settings
from shardcache.direct.scratch import Scratch, ScratchFile, ScratchSink
from shardcache.errors import CorruptShardError
from shardcache.fetch.download import Downloader
from shardcache.fetch.priority import WAITING, Priority
from shardcache.fetch.retry import refetch
from shardcache.metrics import Counters
from shardcache.origin.listing import expand
from shardcache.origin.registry import Origins
from shardcache.protocol import Leased, ShardRef
from shardcache.store.indexing import IndexRequest, index_shard
from shardcache.store.shard import Facts

# A node has many reading processes, each with its own: hence few, and half the daemon's memory for parts.
_CONNECTIONS = 4
_NO_LIMIT = 2**62
_AHEAD = WAITING + 1


@dataclass(slots=True, eq=False)
class Wish:
    """A shard that a reader asked for.

    Attributes:
        since_s: time of the request; the earlier goes first.
        needed: True if the reader has nothing to read until the shard is fetched.
        doing: current step, for messages.
        done_bytes, total_bytes: progress and size of the object, once its size is known.
    """

    ref: ShardRef
    since_s: float = field(default_factory=time.monotonic)
    needed: bool = False
    doing: str = "asking the origin for the version"
    done_bytes: int = 0
    total_bytes: int = 0

    def priority(self) -> Priority:
        """Return its priority for connections."""
        return Priority(WAITING if self.needed else _AHEAD, self.since_s)

    def arrived(self, done_bytes: int) -> None:
        """Record the number of bytes on disk."""
        self.done_bytes = done_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A fetched shard, kept as long as this object is referenced.

    Attributes:
        leased: the daemon's message for a leased shard, with paths that are valid only in this process.
        files: the tar and its sidecar.
    """

    leased: Leased
    files: tuple[ScratchFile, ScratchFile]


class DirectFetcher:
    """Fetches shards into nameless files. Runs on one event loop."""

    def __init__(self, settings: Settings, scratch: Scratch) -> None:
        self._settings = settings
        self._scratch = scratch
        self._allow, self._peer = AllowList(settings.allow), Peer(os.getuid(), frozenset(os.getgroups()))
        connections = min(_CONNECTIONS, settings.max_connections)
        self._origins = Origins(settings.origin, max_connections=connections)
        limited = {"max_connections": connections, "shard_connections": min(connections, settings.shard_connections)}
        self._downloader = Downloader(settings.model_copy(update=limited), Counters())

    def __repr__(self) -> str:
        return f"<DirectFetcher {self._scratch!r} {self._downloader!r}>"

    async def close(self) -> None:
        """Close every connection."""
        await self._origins.close()

    async def resolve(self, patterns: Sequence[str]) -> list[ShardRef]:
        """Return the shards that patterns expand to, with the sample counts of index files.

        Raises what `Cache.resolve` raises.
        """
        for pattern in patterns:
            self._allow.check(pattern, self._peer)
        refs = [ref for pattern in patterns for ref in await self._expand(pattern)]
        for ref in refs:
            self._allow.check(ref.url, self._peer)  # an index file may point anywhere
        return refs

    async def _expand(self, pattern: str) -> list[ShardRef]:
        return await self._downloader.ask(pattern, lambda received: expand(pattern, self._origins, received))

    def reconsider(self) -> None:
        """Re-evaluate priorities, after a wish has become `needed`."""
        self._downloader.scheduler.deal()

    @refetch
    async def fetch(self, wish: Wish) -> Held:
        """Fetch the shard in the version that is wished for, or in the origin's current one if none is named.

        Raises every error of the origin and the shard; DiskFullError and CacheDirError of the scratch folder.
        """
        self._allow.check(wish.ref.url, self._peer)
        origin = self._origins.origin(wish.ref.url)
        wish.doing, wish.done_bytes = "asking the origin for the version", 0
        obj = await self._downloader.stat(origin, wish.ref.url, wish.ref.version)
        wish.doing, wish.total_bytes = "downloading", obj.size_bytes
        sink = await asyncio.to_thread(self._scratch.sink, obj, self._settings.part_size)
        try:
            await self._downloader.download(origin, obj, sink, priority=wish.priority, progress=wish.arrived)
            wish.doing = "indexing"
            return await asyncio.to_thread(self._hold, sink)
        except CorruptShardError:
            self._origins.suspect(obj, self._settings.part_size)
            raise

    def _hold(self, sink: ScratchSink) -> Held:
        """Inflate and index the downloaded file. Runs in a thread, which keeps the files open."""
        rule = self._origins.rule(sink.obj.url)
        with self._scratch.errors(sink.obj.url):
            tar, facts = self._plain_tar(sink)
            sidecar = self._scratch.file()
            indexed = index_shard(IndexRequest.of(tar.path, facts, sidecar.path, rule, _NO_LIMIT))
        leased = Leased(
            type="leased", id=0, lease=0, url=facts.url, version=facts.version, path=str(tar.path),
            index_path=str(sidecar.path), size_bytes=facts.size_bytes, samples=indexed.samples,
        )  # fmt: skip
        return Held(leased, (tar, sidecar))

    def _plain_tar(self, sink: ScratchSink) -> tuple[ScratchFile, Facts]:
        codec = sink.codec
        if codec is None:
            return sink.file, sink.facts()
        tar = self._scratch.file()
        return tar, sink.inflate(codec, tar.path, self._scratch.check_room)
