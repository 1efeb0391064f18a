"""The processes that write shards: the program, and the command's side of it.

The program reads JSON from standard input, one value per line: first the arguments of `_serve`, then name, first and
last position of one shard after another; it writes one answer per line. It ends with its input, hence with the command,
however that ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from shardcache.config import OriginTable
from shardcache.errors import NO_PROCESS_REMEDY, CacheError, ShardcacheError, from_json
from shardcache.store.indexing import end_with_parent
from shardcache.tarindex import TokenMember
from shardcache.writing.destination import Destination, ShardFile
from shardcache.writing.inputs import open_source
from shardcache.writing.plan import Cut, Stored
from shardcache.writing.source import Input, Json, Position, Source

_LINE_BYTES = 1024**2  # of an answer, which may be an error


class WritingProcess:
    """One process, started for its first shard; a context manager that ends it.

    Args:
        found: the input.
        destination: url of the destination.
        tables: `[[origin]]` tables for it.
        tokens: the member whose tokens to count.
    """

    def __init__(
        self, found: Input, destination: str, tables: Sequence[OriginTable], tokens: TokenMember | None
    ) -> None:
        member = None if tokens is None else str(tokens)
        self._setup = (found.kind, found.arguments, destination, [table.model_dump() for table in tables], member)
        self._process: Process | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()

    async def write(self, name: str, shard: Cut) -> Stored:
        """Write one shard. Raises as `_write_shard`; CacheError if there is no process, or it ended."""
        process = self._process = self._process or await self._start()
        assert process.stdout is not None
        await _send(process, (name, shard.first, shard.last))
        answer = await process.stdout.readline()
        if not answer:
            raise CacheError(
                "a process that writes shards ended",
                url=name,
                remedy="if it printed no traceback, look for the OOM killer in dmesg, and try fewer --workers; "
                "the same command again resumes",
            )
        found = json.loads(answer)
        if isinstance(found, dict):
            raise from_json(found["error"])
        return Stored(*found)

    async def _start(self) -> Process:
        # -P keeps the working directory out of the import path; a new session keeps Ctrl-C from reaching the process.
        command = (sys.executable, "-P", "-m", "shardcache.writing.worker", str(os.getpid()))
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, start_new_session=True, limit=_LINE_BYTES
            )
        except OSError as exn:
            raise CacheError(f"cannot start a process ({exn.strerror})", remedy=NO_PROCESS_REMEDY) from exn
        await _send(process, self._setup)  # not as an argument: it may contain credentials
        return process


async def _send(process: Process, value: object) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # if it was killed, its answer will be missing
        process.stdin.write(json.dumps(value).encode() + b"\n")
        await process.stdin.drain()


async def _serve(kind: str, arguments: Json, url: str, tables: list[Json], tokens: str | None) -> None:
    source: Source | None = None
    member = None if tokens is None else TokenMember.parse(tokens)
    async with Destination(url, [OriginTable.model_validate(table) for table in tables]) as destination:
        while line := await asyncio.to_thread(sys.stdin.readline):
            name, first, last = json.loads(line)
            try:
                source = source or open_source(kind, arguments)
                shard = ShardFile(destination.draft(name), member)
                answer: Any = await _write_shard(shard, source, (first, last), destination, name)
            except ShardcacheError as exn:
                answer = {"error": exn.to_json()}
            print(json.dumps(answer), flush=True)


async def _write_shard(
    shard: ShardFile, source: Source, span: tuple[Position, Position], destination: Destination, name: str
) -> Stored:
    """Write one shard and store it. Blocks, except for the upload.

    Raises InputError, SampleError, TokensError, DiskError, and what `Destination.store_shard` raises.
    """
    try:
        for sample in source.read(*span):
            shard.add(sample)
        shard.finish()
        return await destination.store_shard(shard, name)
    finally:
        shard.discard()


def main() -> None:
    """Write shards until the input ends; the only argument is the pid of the command.

    When the command is killed, so is this process: the next run may write the same shard.
    """
    end_with_parent(int(sys.argv[1]))
    asyncio.run(_serve(*json.loads(sys.stdin.readline())))


if __name__ == "__main__":
    main()
