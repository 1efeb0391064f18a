"""Writing of a whole input to shards, in parallel processes, so that an interrupted run can be resumed.

As a program it is one of these processes. It reads JSON from standard input, one value per line: first the setup of
`_serve`, then number, name, first and last position of one shard after another, and its record if it is there already;
it writes one answer per line. It ends with its input, hence with the command, however that ends.
"""

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardcache.config import OriginTable
from shardcache.errors import CacheError, InputError, ShardcacheError, from_json
from shardcache.origin.objects import RemoteObject
from shardcache.protocol import Json
from shardcache.store.indexing.helper_process import HelperProcess
from shardcache.store.indexing.helper_program import end_with_parent, requests, send_answer
from shardcache.tarindex.contents import TokenMember
from shardcache.writing.inputs import WriteOptions, open_source, recognize
from shardcache.writing.shards import JOURNAL, Cut, Journal, Stored, as_json, cut, resume
from shardcache.writing.sources import Input, Source
from shardcache.writing.writer import INDEX, TABLE, Destination, ShardFile, check_empty

CLASSES = "classes.json"
"""Name of the list of classes in the destination."""

Progress = Callable[[Json], object]
"""Called with `done_bytes` of `total_bytes` and `done_shards` of `shards`; the totals grow until all is planned.

First, if shards are there already, with the number of `files` of the input, 0 if unknown, that are compared with them.
"""


async def convert(
    names: Sequence[str],
    destination: str,
    options: WriteOptions,
    *,
    workers: int,
    tables: Sequence[OriginTable] = (),
    progress: Progress = lambda _event: None,
) -> Json:
    """Write files, folders or a dataset to shards with an index, by `workers` processes, and return a summary.

    A run that was interrupted is resumed: shards that its journal names are kept if they are still there, in the same
    size and version. When all shards are there, the table of their samples is written, and then the index. The table
    needs the input of kept shards again, unless an earlier run has written it; lines that are packed have none.

    Raises ConfigError for a wrong option, or a destination with shards of others, other input or settings; InputError,
    SampleError if the input cannot be read or written; OriginError, DiskError if a shard cannot be stored.
    """
    with tempfile.TemporaryDirectory(prefix="shardcache-write-") as scratch:
        async with Destination(destination, tables, Path(scratch)) as target:
            found = await asyncio.to_thread(recognize, names, options, Path(scratch))
            member = None if options.tokens is None else str(options.tokens)
            origins = [table.model_dump() for table in tables]
            setup = (found.kind, found.arguments, target.url, origins, member, scratch)
            return await _Conversion(found, target, options, setup, progress).run(workers)


class _Conversion:
    """One run: a task that plans shards, and one per process that writes them, which `setup` is sent to."""

    def __init__(
        self, found: Input, target: Destination, options: WriteOptions, setup: tuple[object, ...], progress: Progress
    ) -> None:
        self._input = found
        self._target = target
        self._options = options
        self._setup = setup
        self._progress = progress
        self._journal = Journal(options.recorded(found))
        self._objects: dict[str, RemoteObject] = {}
        self._queue: asyncio.Queue[tuple[int, str, Cut] | None] = asyncio.Queue()
        self._tabled = options.pack  # True if no table is to be written
        self._planned: list[str] = []
        self._planned_bytes = 0
        self._done = {"written": 0, "kept": 0}
        self._done_bytes = 0
        self._saving = asyncio.Lock()
        self._unsaved = 0
        self._failure: ShardcacheError | None = None

    async def run(self, workers: int) -> Json:
        """Write what is missing; return the summary. After a failure, only the shards in progress are completed."""
        await self._begin()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._plan())
            for _ in range(workers):
                group.create_task(self._write())
        if self._failure is not None:
            raise self._failure
        return await self._finish()

    async def _begin(self) -> None:
        """Read the journal of an interrupted run, or begin one."""
        self._objects = await self._target.objects()
        if JOURNAL in self._objects:
            self._progress({"files": self._input.files})
            self._journal = resume(await self._target.read(JOURNAL), self._journal.settings, self._target.url)
            check_empty(self._options.names.foreign(self._objects.keys() - {TABLE}), self._target.url)
            self._tabled |= TABLE in self._journal.shards and all(map(self._is_there, self._journal.shards))
        else:
            check_empty(self._objects, self._target.url)
            await self._target.store_bytes(self._journal.to_json(), JOURNAL)

    async def _plan(self) -> None:
        """Cut the input into shards, ahead of the writing: a planned shard takes next to no memory."""
        try:
            source = await asyncio.to_thread(open_source, self._input.kind, self._input.arguments)
            cuts = cut(source.positions(), self._options.shard_size_bytes)
            while self._failure is None and (shard := await asyncio.to_thread(next, cuts, None)) is not None:
                number, name = len(self._planned), self._options.names.name(len(self._planned))
                self._planned.append(name)
                self._planned_bytes += shard.size_bytes
                self._queue.put_nowait((number, name, shard))
                self._show()
            if not self._planned:
                raise InputError("there is no sample in the input", remedy="check the path")
        except ShardcacheError as exn:
            self._failure = self._failure or exn
        self._queue.put_nowait(None)

    async def _write(self) -> None:
        """Have a process of its own write shards, as long as there are any."""
        process: HelperProcess | None = None
        try:
            while (planned := await self._queue.get()) is not None and self._failure is None:
                number, name, shard = planned
                try:
                    kept = self._kept(name, shard)
                    if kept is None or not self._tabled:
                        if process is None:
                            process = await HelperProcess.start(__name__)
                            process.send(self._setup)  # not as an argument: it may contain credentials
                        self._journal.shards[name] = await _ask(process, number, name, shard, kept)
                    self._done["written" if kept is None else "kept"] += 1
                    if kept is None:
                        self._unsaved += 1
                        await self._save()
                except ShardcacheError as exn:
                    self._failure = self._failure or exn
                self._done_bytes += shard.size_bytes
                self._show()
            self._queue.put_nowait(None)  # for the next that waits
        finally:
            if process is not None:
                await process.end()

    def _is_there(self, name: str) -> bool:
        found = self._objects.get(name)
        return found is not None and self._journal.shards[name][:2] == (found.size_bytes, found.version)

    def _kept(self, name: str, shard: Cut) -> Stored | None:
        recorded = self._journal.shards.get(name)
        return recorded if recorded and self._is_there(name) and recorded.samples == shard.samples else None

    async def _save(self) -> None:
        """Store the journal, once for all shards that were completed while it was stored the last time."""
        async with self._saving:
            if self._unsaved:
                self._unsaved = 0
                await self._target.store_bytes(self._journal.to_json(), JOURNAL)

    def _show(self) -> None:
        done, planned = sum(self._done.values()), len(self._planned)
        sizes = {"done_bytes": self._done_bytes, "total_bytes": self._planned_bytes}
        self._progress({**sizes, "done_shards": done, "shards": planned})

    async def _finish(self) -> Json:
        """Store the table, and the index, which readers take for the end; return the summary."""
        shards = {name: self._journal.shards[name] for name in self._planned}
        samples = sum(shard.samples for shard in shards.values())
        if self._input.classes:
            await self._target.store_bytes(as_json(self._input.classes), CLASSES)
        if not self._tabled:
            table = await self._target.store_table(self._planned)
            self._journal.shards[TABLE] = Stored(table.size_bytes, table.version, samples)
            await self._target.store_bytes(self._journal.to_json(), JOURNAL)
        await self._target.store_index(shards.items())
        tokens = sum(shard.tokens or 0 for shard in shards.values())
        return {
            "index": self._target.url + INDEX,
            "shards": len(shards),
            **self._done,
            "samples": samples,
            "members": dict(sorted(sum((Counter(shard.members) for shard in shards.values()), Counter()).items())),
            **({} if self._options.tokens is None else {"tokens": tokens}),
            "bytes": sum(shard.size_bytes for shard in shards.values()),
            "skipped_files": self._input.skipped,
        }


async def _ask(process: HelperProcess, number: int, name: str, shard: Cut, kept: Stored | None) -> Stored:
    """Have a process write a shard, or only its part of the table.

    Raises what it raises; CacheError if it ended or hangs.
    """
    answer = await process.ask((number, name, shard.first, shard.last, kept))
    if not answer:
        raise CacheError(
            "a process that writes shards was killed, or did not respond",
            url=name,
            remedy="if it printed no traceback, look for the OOM killer in dmesg, and try fewer --workers; "
            "the same command again resumes",
        )
    found = json.loads(answer)
    if isinstance(found, dict):
        raise from_json(found["error"])
    return Stored(*found)


async def _serve(
    todo: Iterator[Any], kind: str, arguments: Json, url: str, tables: list[Json], tokens: str | None, scratch: str
) -> None:
    tempfile.tempdir = scratch  # the command removes it, and with it the drafts of a process that was killed
    source: Source | None = None
    member = None if tokens is None else TokenMember.parse(tokens)
    origins = [OriginTable.model_validate(table) for table in tables]
    async with Destination(url, origins, Path(scratch)) as destination:
        while (request := await asyncio.to_thread(next, todo, None)) is not None:
            number, name, first, last, kept = request
            try:
                source = source or open_source(kind, arguments)
                shard = ShardFile(destination.draft(name), member)
                try:
                    for sample in source.read(first, last):
                        shard.add(sample)
                    shard.finish()
                    answer: Any = await destination.store_shard(shard, name, number, kept and Stored(*kept))
                finally:
                    shard.discard()
            except ShardcacheError as exn:
                answer = {"error": exn.to_json()}
            send_answer(answer)


def main() -> None:
    """Write shards until the input ends; the only argument is the pid of the command.

    When the command is killed, so is this process: the next run may write the same shard.
    """
    end_with_parent(int(sys.argv[1]))
    todo = requests()
    setup = next(todo)
    asyncio.run(_serve(todo, *setup))


if __name__ == "__main__":
    main()
