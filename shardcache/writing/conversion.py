"""Conversion of a whole input to shards by parallel processes; an interrupted run can be resumed.

The command `shardcache write` calls `convert`. The command's own process plans the shards: it cuts
the input into sequences of samples, one per shard. Writer processes write the shards and upload
them. The journal, an object in the destination, records the complete shards, so that the next run
can keep them.

Besides shards and their index, a run stores the table of samples, which lists each sample with its
place in its shard. Each shard's part of the table is made together with the shard.

As a program, this module is a writer process. It reads JSON from standard input, one value per
line: first a `_Setup`, then a `_Request` for each shard. It writes one answer per line: a
`ShardRecord`, or an error. It ends when its input does.
"""

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardcache.config.origin_table import OriginTable
from shardcache.origin.objects import RemoteObject
from shardcache.shared.exceptions import CacheError, InputError, ShardcacheError, from_json
from shardcache.shared.protocol import Json
from shardcache.shared.tarindex.named_members import TokenMember
from shardcache.store.indexing.helper_process import HelperProcess
from shardcache.store.indexing.helper_program import end_with_parent, requests, send_answer
from shardcache.writing.destination import INDEX, TABLE, Destination, check_has_no_shards
from shardcache.writing.inputs import WriteOptions, open_source, recognize
from shardcache.writing.journal import JOURNAL, Journal, ShardRecord, resume
from shardcache.writing.sample_tar import Position
from shardcache.writing.shard_cuts import Cut, cut
from shardcache.writing.shard_file import ShardFile
from shardcache.writing.sources import Input, Source

CLASSES = "classes.json"
"""Name of the object in the destination that lists the classes of the input's folders."""

Progress = Callable[[Json], object]
"""Called with the values `done_bytes`, `total_bytes`, `done_shards` and `shards`.

`total_bytes` and `shards` grow until all shards are planned. If a run is resumed, the function is
first called once with the single value `files`: the number of the input's files that are compared
with the journal, or 0 if the number is unknown.
"""


class _Setup(NamedTuple):
    """The settings of a writer process, as JSON values.

    Attributes:
        kind: kind of the input, as in `Input`.
        arguments: arguments from which the process constructs the `Source` of the input.
        url: url of the destination.
        origin_tables: access settings of object stores, from `[[origin]]` tables.
        tokens: the member whose tokens are counted; None to count no tokens.
        scratch: folder for drafts, the local files of unfinished shards.
    """

    kind: str
    arguments: Json
    url: str
    origin_tables: list[Json]
    tokens: str | None
    scratch: str


class _Request(NamedTuple):
    """A request to a writer process to write a shard.

    Attributes:
        number: number of the shard in the index.
        name: name of the shard.
        first: position of the shard's first sample in the input.
        last: position of the shard's last sample.
        kept_record: the shard's record if it is stored already; then only its part of the table of
            samples is written. None for a shard that has to be written.
    """

    number: int
    name: str
    first: Position
    last: Position
    kept_record: ShardRecord | None


class _PlannedShard(NamedTuple):
    """A shard in the queue, for the next writer process that is free.

    Attributes:
        number: number of the shard in the index.
        name: name of the shard.
        cut: the samples of the shard.
    """

    number: int
    name: str
    cut: Cut


async def convert(
    inputs: Sequence[str],
    destination: str,
    options: WriteOptions,
    *,
    workers: int,
    origin_tables: Sequence[OriginTable] = (),
    progress: Progress = lambda _event: None,
) -> Json:
    """Write files, folders or a dataset to shards with an index; return a summary.

    An interrupted run is resumed: shards in its journal are kept if the destination still has them
    with the same size and version. When the destination has all shards, the table of their samples
    is written, and then the index. For the table, the samples of kept shards are read again, unless
    an earlier run has written the table. Shards of packed lines (`tarindex.packed_lines`) get no
    table.

    Args:
        inputs: paths of the files or folders, or the name of one dataset.
        destination: folder or url that the shards are written to.
        options: options that determine the bytes of the shards.
        workers: number of writer processes.
        origin_tables: access settings of object stores, from `[[origin]]` tables.
        progress: called as the run proceeds.

    Raises:
        ConfigError: an option is wrong, or the destination holds shards that were not made from
            this input with these options.
        InputError, SampleError: the input cannot be read, or a sample cannot be written.
        OriginError, DiskError: a shard cannot be stored.
    """
    with tempfile.TemporaryDirectory(prefix="shardcache-write-") as scratch:
        async with Destination(destination, origin_tables, Path(scratch)) as target:
            input_ = await asyncio.to_thread(recognize, inputs, options, Path(scratch))
            setup = _Setup(
                kind=input_.kind,
                arguments=input_.arguments,
                url=target.url,
                origin_tables=[table.model_dump() for table in origin_tables],
                tokens=None if options.tokens is None else str(options.tokens),
                scratch=scratch,
            )
            return await _Conversion(input_, target, options, setup, progress).run(workers)


class _Conversion:
    """One run: a task that plans shards, and a task for each writer process."""

    def __init__(
        self,
        input_: Input,
        target: Destination,
        options: WriteOptions,
        setup: _Setup,
        progress: Progress,
    ) -> None:
        self._input = input_
        self._target = target
        self._options = options
        self._setup = setup
        self._progress = progress
        self._journal = Journal(options.for_journal(input_))
        # The objects that the destination had when the run began, by name.
        self._initial_objects: dict[str, RemoteObject] = {}
        # The planned shards that no task has taken yet. None follows the last shard.
        self._queue: asyncio.Queue[_PlannedShard | None] = asyncio.Queue()
        self._needs_table = not options.pack
        self._shard_names: list[str] = []  # names of the shards planned so far
        self._planned_bytes = 0
        self._written_count = 0  # number of shards that this run has written
        self._kept_count = 0  # number of shards that were stored already
        self._done_bytes = 0  # bytes of the written and kept shards
        self._save_lock = asyncio.Lock()
        self._has_unsaved_records = False  # True if the stored journal lacks a written shard
        self._failure: ShardcacheError | None = None  # the first error of any task

    async def run(self, workers: int) -> Json:
        """Write the shards that the destination lacks; return the summary.

        After an error, the shards in progress are completed, and no others are begun.
        """
        await self._load_or_start_journal()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._plan())
            for _ in range(workers):
                group.create_task(self._write_shards())
        if self._failure is not None:
            raise self._failure
        return await self._finish()

    async def _load_or_start_journal(self) -> None:
        """Load the journal of an interrupted run, or store a new one if there is none.

        Raises ConfigError if the destination has shards that no such run has written.
        """
        self._initial_objects = await self._target.objects()
        if JOURNAL not in self._initial_objects:
            check_has_no_shards(self._initial_objects, self._target.url)
            await self._target.store_bytes(self._journal.to_json(), JOURNAL)
            return

        self._progress({"files": self._input.files})
        journal_text = await self._target.read(JOURNAL)
        self._journal = resume(journal_text, self._journal.settings, self._target.url)
        # The interrupted run has left shards that follow the pattern; no others may be there.
        other_shards = self._options.names.shards_not_matching(self._initial_objects)
        check_has_no_shards(other_shards, self._target.url)
        # If all objects of the journal are unchanged, the stored table lists just these shards.
        if TABLE in self._journal.shards and all(map(self._is_unchanged, self._journal.shards)):
            self._needs_table = False

    async def _plan(self) -> None:
        """Cut the whole input into planned shards, and queue them.

        Planning runs ahead of the writing without limit, since a planned shard takes hardly any
        memory.
        """
        try:
            source = await asyncio.to_thread(open_source, self._input.kind, self._input.arguments)
            cuts = cut(source.sized_positions(), self._options.shard_size_bytes)
            while self._failure is None:
                next_cut = await asyncio.to_thread(next, cuts, None)
                if next_cut is None:
                    break
                number = len(self._shard_names)
                name = self._options.names.name(number)
                self._shard_names.append(name)
                self._planned_bytes += next_cut.size_bytes
                self._queue.put_nowait(_PlannedShard(number, name, next_cut))
                self._report_progress()
            if not self._shard_names:
                raise InputError("the input contains no samples", remedy="check the path")
        except ShardcacheError as exn:
            self._failure = self._failure or exn
        self._queue.put_nowait(None)  # no more shards will follow

    async def _write_shards(self) -> None:
        """Let one writer process write planned shards until none are left or a task has failed."""
        writer = _WriterProcess(self._setup)
        try:
            while True:
                shard = await self._queue.get()
                if shard is None or self._failure is not None:
                    break
                try:
                    await self._write_or_keep(writer, shard)
                except ShardcacheError as exn:
                    self._failure = self._failure or exn
                self._done_bytes += shard.cut.size_bytes
                self._report_progress()
            self._queue.put_nowait(None)  # ends the next task that waits for a shard
        finally:
            await writer.end()

    async def _write_or_keep(self, writer: "_WriterProcess", shard: _PlannedShard) -> None:
        """Let a process write a planned shard unless it is stored already, and record the shard."""
        kept_record = self._find_kept_record(shard)
        # Of a kept shard, the process writes only the part of the table, if a table is needed.
        if kept_record is None or self._needs_table:
            first = shard.cut.first
            last = shard.cut.last
            request = _Request(shard.number, shard.name, first, last, kept_record)
            self._journal.shards[shard.name] = await writer.write(request)
        if kept_record is not None:
            self._kept_count += 1
            return
        self._written_count += 1
        self._has_unsaved_records = True
        await self._save_journal()

    def _find_kept_record(self, shard: _PlannedShard) -> ShardRecord | None:
        """Return the journal's record of a shard that an interrupted run has stored.

        Returns None if the shard has to be written: it is not in the journal, it had other samples,
        or the object in the destination has changed.
        """
        record = self._journal.shards.get(shard.name)
        if record is None or record.samples != shard.cut.samples:
            return None
        if not self._is_unchanged(shard.name):
            return None
        return record

    def _is_unchanged(self, name: str) -> bool:
        """Return True if the destination has the object that the journal records."""
        obj = self._initial_objects.get(name)
        if obj is None:
            return False
        record = self._journal.shards[name]
        return (record.size_bytes, record.version) == (obj.size_bytes, obj.version)

    async def _save_journal(self) -> None:
        """Store the journal, unless a concurrent call has already stored it with this shard.

        Calls that wait while the journal is being uploaded share the next upload.
        """
        async with self._save_lock:
            if self._has_unsaved_records:
                # Reset before the upload, during which further shards may be completed.
                self._has_unsaved_records = False
                await self._target.store_bytes(self._journal.to_json(), JOURNAL)

    def _report_progress(self) -> None:
        self._progress(
            {
                "done_bytes": self._done_bytes,
                "total_bytes": self._planned_bytes,
                "done_shards": self._written_count + self._kept_count,
                "shards": len(self._shard_names),
            },
        )

    async def _finish(self) -> Json:
        """Store the classes, the table and the index; return the summary.

        The index is stored last, since readers take it as the sign of a complete dataset.
        """
        records = {name: self._journal.shards[name] for name in self._shard_names}
        if self._input.classes:
            # In ASCII, since a folder's name may have bytes that are not UTF-8.
            classes = json.dumps(self._input.classes, separators=(",", ":"))
            await self._target.store_bytes(classes.encode(), CLASSES)
        if self._needs_table:
            table = await self._target.store_table(self._shard_names)
            samples = sum(record.samples for record in records.values())
            self._journal.shards[TABLE] = ShardRecord(table.size_bytes, table.version, samples)
            await self._target.store_bytes(self._journal.to_json(), JOURNAL)
        await self._target.store_index(records.items())
        return self._summary(list(records.values()))

    def _summary(self, records: Sequence[ShardRecord]) -> Json:
        """Return the summary of the run, given the records of all shards."""
        members = Counter[str]()
        for record in records:
            members.update(record.members or {})
        summary = {
            "index": self._target.url + INDEX,
            "shards": len(records),
            "written": self._written_count,
            "kept": self._kept_count,
            "samples": sum(record.samples for record in records),
            "members": dict(sorted(members.items())),
        }
        if self._options.tokens is not None:
            summary["tokens"] = sum(record.tokens or 0 for record in records)
        summary["bytes"] = sum(record.size_bytes for record in records)
        summary["skipped_files"] = self._input.skipped
        return summary


class _WriterProcess:
    """A process that writes shards; it is started when the first shard is written."""

    def __init__(self, setup: _Setup) -> None:
        self._setup = setup
        self._process: HelperProcess | None = None

    async def write(self, request: _Request) -> ShardRecord:
        """Let the process write a shard, or only its part of the table; return the shard's record.

        Raises the process's errors; CacheError if it ended or hangs.
        """
        if self._process is None:
            self._process = await HelperProcess.start(__name__)
            # The setup may contain credentials, and every user can see a process's arguments.
            self._process.send(self._setup)
        answer = await self._process.ask(request)
        if not answer:
            raise CacheError(
                "a process that writes shards was killed, or did not respond",
                url=request.name,
                remedy="if it printed no traceback, see in dmesg whether the OOM killer "
                "ended it, and try fewer --workers; to resume, run the same command "
                "again",
            )
        # An error is a JSON object, and a record is a list.
        result = json.loads(answer)
        if isinstance(result, dict):
            raise from_json(result["error"])
        return ShardRecord(*result)

    async def end(self) -> None:
        """End the process, if it was started."""
        if self._process is not None:
            await self._process.end()


async def _serve(messages: Iterator[Any], setup: _Setup) -> None:
    """Write the shards that the command asks for, and answer each request.

    Args:
        messages: yields the values of each `_Request`, as a list.
        setup: the settings that the command has sent first.
    """
    # Drafts lie in a folder that the command removes, even if this process is killed.
    tempfile.tempdir = setup.scratch
    source: Source | None = None
    token_member = None if setup.tokens is None else TokenMember.parse(setup.tokens)
    origin_tables = [OriginTable.model_validate(table) for table in setup.origin_tables]
    async with Destination(setup.url, origin_tables, Path(setup.scratch)) as destination:
        while True:
            values = await asyncio.to_thread(next, messages, None)
            if values is None:
                break
            try:
                # The source is opened here, so that an error is sent as the answer to a request.
                if source is None:
                    source = open_source(setup.kind, setup.arguments)
                record = await _write_shard(source, destination, token_member, _Request(*values))
            except ShardcacheError as exn:
                send_answer({"error": exn.to_json()})
            else:
                send_answer(record)


async def _write_shard(
    source: Source,
    destination: Destination,
    token_member: TokenMember | None,
    request: _Request,
) -> ShardRecord:
    """Write the shard of a request, and return its record.

    Args:
        source: the samples of the input.
        destination: the destination of the shard.
        token_member: the member whose tokens are counted; None to count no tokens.
        request: the request.
    """
    # A kept shard needs a draft, too: its part of the table has the places of members in the draft.
    shard = ShardFile(destination.draft(request.name), token_member)
    try:
        for sample in source.read(request.first, request.last):
            shard.add(sample)
        shard.finish()
        kept_record = request.kept_record
        if kept_record is not None:
            kept_record = ShardRecord(*kept_record)  # JSON has turned it into a list
        return await destination.store_shard(shard, request.name, request.number, kept_record)
    finally:
        shard.discard()


def main() -> None:
    """Write shards until the input ends; the only argument is the pid of the command.

    When the command is killed, this process is killed with it, since the next run may write the
    same shard.
    """
    end_with_parent(int(sys.argv[1]))
    messages = requests()
    setup = _Setup(*next(messages))
    asyncio.run(_serve(messages, setup))


if __name__ == "__main__":
    main()
