"""Writing of a whole input to shards, in parallel, so that an interrupted run can be resumed."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardcache.config import OriginTable
from shardcache.errors import InputError, ShardcacheError
from shardcache.origin.base import RemoteObject
from shardcache.tarindex import TokenMember
from shardcache.writing.destination import INDEX, Destination, check_empty
from shardcache.writing.inputs import Reading, open_source, recognize
from shardcache.writing.plan import JOURNAL, Cut, Journal, ShardNames, cut, resume
from shardcache.writing.sample import as_json
from shardcache.writing.source import Input
from shardcache.writing.worker import WritingProcess

CLASSES = "classes.json"
"""Name of the list of classes in the destination."""

Json = dict[str, Any]
Tell = Callable[[Json], object]
"""Called with `done_bytes` of `total_bytes` and `done_shards` of `shards`; the totals grow until all is planned."""


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """Settings that determine the bytes of the shards, together with the input.

    Attributes:
        shard_size_bytes: most bytes of a shard, unless one sample is larger.
        names: names of the shards.
        reading: how the input is read.
        tokens: the member whose tokens to count.
    """

    shard_size_bytes: int
    names: ShardNames = field(default_factory=ShardNames)
    reading: Reading = field(default_factory=Reading)
    tokens: TokenMember | None = None

    def recorded(self, found: Input) -> Json:
        """Return everything that the bytes of the shards depend on, for the journal."""
        settings = {
            "input": f"{found.kind} {found.identity}",
            "shard_size_bytes": self.shard_size_bytes,
            "names": self.names.pattern,
            **asdict(self.reading),
        }
        return settings if self.tokens is None else settings | {"tokens": str(self.tokens)}


async def convert(
    names: Sequence[str],
    destination: str,
    settings: ShardSettings,
    *,
    workers: int,
    tables: Sequence[OriginTable] = (),
    tell: Tell = lambda _event: None,
) -> Json:
    """Write files, folders or a dataset to shards with an index, and return a summary.

    A run that was interrupted is resumed: shards that its journal names are kept if they are still there, in the same
    size and version. The index is written when all shards are there.

    Args:
        names: the input, as for `recognize`.
        workers: number of processes.
        tell: called with the progress.

    Raises:
        ConfigError: an option is wrong, or the destination holds other shards, or those of other input or settings.
        InputError, SampleError: the input cannot be read or written.
        OriginError, DiskError: a shard cannot be stored.
    """
    with tempfile.TemporaryDirectory(prefix="shardcache-listing-") as scratch:
        async with Destination(destination, tables) as target:
            found = await asyncio.to_thread(recognize, names, settings.reading, Path(scratch))
            processes = [WritingProcess(found, target.url, tables, settings.tokens) for _ in range(workers)]
            return await _Conversion(found, target, settings, tell).run(processes)


class _Conversion:
    """One run: a task that plans shards, and one per process that writes them."""

    def __init__(self, found: Input, target: Destination, settings: ShardSettings, tell: Tell) -> None:
        self._input = found
        self._target = target
        self._settings = settings
        self._tell = tell
        self._journal = Journal({})
        self._objects: dict[str, RemoteObject] = {}
        self._queue: asyncio.Queue[tuple[str, Cut] | None] = asyncio.Queue()
        self._planned: list[str] = []
        self._planned_bytes = 0
        self._done = {"written": 0, "kept": 0}
        self._done_bytes = 0
        self._saving = asyncio.Lock()
        self._unsaved = 0
        self._failure: ShardcacheError | None = None

    async def run(self, processes: Sequence[WritingProcess]) -> Json:
        """Write what is missing; return the summary. After a failure, only the shards in progress are completed."""
        await self._begin()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._plan())
            for process in processes:
                group.create_task(self._write(process))
        if self._failure is not None:
            raise self._failure
        return await self._finish()

    async def _begin(self) -> None:
        """Read the journal of an interrupted run, or begin one."""
        self._objects = await self._target.objects()
        settings = self._settings.recorded(self._input)
        if JOURNAL in self._objects:
            self._journal = resume(await self._target.read(JOURNAL), settings, self._target.url)
            check_empty(self._settings.names.foreign(self._objects), self._target.url)
        else:
            check_empty(self._objects, self._target.url)
            self._journal = Journal(settings)
            await self._target.store_bytes(self._journal.to_json(), JOURNAL)

    async def _plan(self) -> None:
        """Cut the input into shards, ahead of the writing: a planned shard takes next to no memory."""
        try:
            source = await asyncio.to_thread(open_source, self._input.kind, self._input.arguments)
            cuts = cut(source.positions(), self._settings.shard_size_bytes)
            while self._failure is None and (shard := await asyncio.to_thread(next, cuts, None)) is not None:
                name = self._settings.names.name(len(self._planned))
                self._planned.append(name)
                self._planned_bytes += shard.size_bytes
                self._queue.put_nowait((name, shard))
                self._show()
            if not self._planned:
                raise InputError("there is no sample in the input", remedy="check the path")
        except ShardcacheError as exn:
            self._failure = self._failure or exn
        self._queue.put_nowait(None)

    async def _write(self, process: WritingProcess) -> None:
        async with process:
            while (planned := await self._queue.get()) is not None and self._failure is None:
                name, shard = planned
                try:
                    if self._is_complete(name, shard):
                        self._done["kept"] += 1
                    else:
                        self._journal.shards[name] = await process.write(name, shard)
                        self._done["written"] += 1
                        self._unsaved += 1
                        await self._save()
                except ShardcacheError as exn:
                    self._failure = self._failure or exn
                self._done_bytes += shard.size_bytes
                self._show()
            self._queue.put_nowait(None)  # for the next that waits

    def _is_complete(self, name: str, shard: Cut) -> bool:
        found, recorded = self._objects.get(name), self._journal.shards.get(name)
        if found is None or recorded is None:
            return False
        return recorded[:3] == (found.size_bytes, found.version, shard.samples)

    async def _save(self) -> None:
        """Store the journal, once for all shards that were completed while it was stored the last time."""
        async with self._saving:
            if self._unsaved:
                self._unsaved = 0
                await self._target.store_bytes(self._journal.to_json(), JOURNAL)

    def _show(self) -> None:
        done, planned = sum(self._done.values()), len(self._planned)
        sizes = {"done_bytes": self._done_bytes, "total_bytes": self._planned_bytes}
        self._tell({**sizes, "done_shards": done, "shards": planned})

    async def _finish(self) -> Json:
        """Store the index, which readers take for the end; return the summary."""
        shards = {name: self._journal.shards[name] for name in self._planned}
        if self._input.classes:
            await self._target.store_bytes(as_json(self._input.classes), CLASSES)
        await self._target.store_index(shards.items())
        tokens = sum(shard.tokens or 0 for shard in shards.values())
        return {
            "index": self._target.url + INDEX,
            "shards": len(shards),
            **self._done,
            "samples": sum(shard.samples for shard in shards.values()),
            **({} if self._settings.tokens is None else {"tokens": tokens}),
            "bytes": sum(shard.size_bytes for shard in shards.values()),
            "skipped_files": self._input.skipped,
        }
