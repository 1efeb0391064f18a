"""Writing of a whole input to shards, in parallel, so that an interrupted run can be resumed."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardcache.config import OriginTable
from shardcache.errors import InputError, ShardcacheError
from shardcache.origin.base import RemoteObject
from shardcache.tarindex import TokenMember
from shardcache.writing.destination import INDEX, Destination, check_empty
from shardcache.writing.plan.cutting import Cut, ShardNames, cut
from shardcache.writing.plan.journal import JOURNAL, Journal, resume
from shardcache.writing.plan.samples import as_json
from shardcache.writing.processes import WritingProcess
from shardcache.writing.sources.opening import Input, Reading, recognize
from shardcache.writing.writer_process import Task, WriterSetup

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
            conversion = _Conversion(found, target, settings, tell)
            tokens = None if settings.tokens is None else str(settings.tokens)
            setup = WriterSetup(
                found.kind, found.arguments, target.url, [table.model_dump() for table in tables], tokens
            )
            return await conversion.run(setup, workers)


class _Conversion:
    """One run: a task that plans shards, and one per process that writes them."""

    def __init__(self, found: Input, target: Destination, settings: ShardSettings, tell: Tell) -> None:
        self._input = found
        self._target = target
        self._settings = settings
        self._tell = tell
        self._journal = Journal({})
        self._objects: dict[str, RemoteObject] = {}
        self._queue: asyncio.Queue[tuple[str, Cut[Any]] | None] = asyncio.Queue()
        self._planned: list[str] = []
        self._planned_bytes = 0
        self._done = {"written": 0, "kept": 0}
        self._done_bytes = 0
        self._saving = asyncio.Lock()
        self._unsaved = 0
        self._failure: ShardcacheError | None = None

    async def run(self, setup: WriterSetup, workers: int) -> Json:
        """Write what is missing; return the summary. After a failure, only the shards in progress are completed.

        Raises as `convert`.
        """
        await self._begin()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._plan(workers))
            for _ in range(workers):
                group.create_task(self._write(setup, workers))
        if self._failure is not None:
            raise self._failure
        return await self._finish()

    async def _begin(self) -> None:
        """Read the journal of an interrupted run, or begin one."""
        self._objects = await self._target.objects()
        settings = _told(self._input, self._settings)
        if JOURNAL in self._objects:
            self._journal = resume(await self._target.read(JOURNAL), settings, self._target.url)
            check_empty(self._settings.names.foreign(self._objects), self._target.url)
        else:
            check_empty(self._objects, self._target.url)
            self._journal = Journal(settings)
            await self._target.store_bytes(self._journal.to_json(), JOURNAL)

    async def _plan(self, workers: int) -> None:
        """Cut the input into shards, ahead of the writing: a planned shard takes next to no memory."""
        try:
            source = await asyncio.to_thread(self._input.open)
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
        self._end(workers)

    async def _write(self, setup: WriterSetup, workers: int) -> None:
        async with WritingProcess(setup) as process:
            while (planned := await self._queue.get()) is not None and self._failure is None:
                name, shard = planned
                try:
                    if self._is_complete(name, shard):
                        self._done["kept"] += 1
                    else:
                        self._journal.shards[name] = await process.write(Task(name, shard.first, shard.last))
                        self._done["written"] += 1
                        self._unsaved += 1
                        await self._save()
                except ShardcacheError as exn:
                    self._failure = self._failure or exn
                    self._end(workers)
                self._done_bytes += shard.size_bytes
                self._show()

    def _end(self, workers: int) -> None:
        """Wake the tasks that wait for a shard."""
        for _ in range(workers):
            self._queue.put_nowait(None)

    def _is_complete(self, name: str, shard: Cut[Any]) -> bool:
        found, recorded = self._objects.get(name), self._journal.shards.get(name)
        return (
            found is not None
            and recorded is not None
            and recorded[:3] == (found.size_bytes, found.version, shard.samples)
        )

    async def _save(self) -> None:
        """Store the journal, once for all shards that were completed while it was stored the last time."""
        async with self._saving:
            if self._unsaved:
                self._unsaved = 0
                await self._target.store_bytes(self._journal.to_json(), JOURNAL)

    def _show(self) -> None:
        self._tell(
            {
                "done_bytes": self._done_bytes,
                "total_bytes": self._planned_bytes,
                "done_shards": sum(self._done.values()),
                "shards": len(self._planned),
            }
        )

    async def _finish(self) -> Json:
        """Store the index, which readers take for the end; return the summary."""
        shards = [self._journal.shards[name] for name in self._planned]
        objects = [
            RemoteObject(self._target.url + name, shard.version, shard.size_bytes)
            for name, shard in zip(self._planned, shards, strict=True)
        ]
        if self._input.classes:
            await self._target.store_bytes(as_json(self._input.classes), CLASSES)
        counts = ((shard.samples, shard.tokens) for shard in shards)
        await self._target.store_index((obj, *numbers) for obj, numbers in zip(objects, counts, strict=True))
        return {
            "index": self._target.url + INDEX,
            "shards": len(shards),
            **self._done,
            "samples": sum(shard.samples for shard in shards),
            **({} if self._settings.tokens is None else {"tokens": sum(shard.tokens or 0 for shard in shards)}),
            "bytes": sum(shard.size_bytes for shard in shards),
            "skipped_files": self._input.skipped,
        }


def _told(found: Input, settings: ShardSettings) -> Json:
    """Return everything that the bytes of the shards depend on, for the journal."""
    return {
        "input": f"{found.kind} {found.identity}",
        "shard_size_bytes": settings.shard_size_bytes,
        "names": settings.names.pattern,
        "columns": dict(settings.reading.columns),
        "field": settings.reading.field,
        "pack": settings.reading.pack,
        "classes": settings.reading.classes,
        "shuffle": settings.reading.seed,
        **({} if settings.tokens is None else {"tokens": str(settings.tokens)}),
    }
