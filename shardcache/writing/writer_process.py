"""The program that writes shards: one of several processes of `shardcache write`.

Reads JSON from standard input, one value per line: first a `WriterSetup`, then one `Task` after another; writes one
answer per line. Ends with its input, hence with the command, however that ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any

from shardcache.config import OriginTable
from shardcache.errors import ShardcacheError
from shardcache.store.indexing import end_with_parent
from shardcache.tarindex import TokenMember
from shardcache.writing.destination import Destination
from shardcache.writing.plan.journal import Stored
from shardcache.writing.shard_file import ShardFile
from shardcache.writing.sources.opening import open_source
from shardcache.writing.sources.source import Json, Position, Source


@dataclass(frozen=True, slots=True)
class WriterSetup:
    """Settings of a run, the same for all of its shards.

    Attributes:
        kind, arguments: the input, for `open_source`.
        destination: url of the destination.
        tables: `[[origin]]` tables, as JSON.
        tokens: the member whose tokens to count, as `TokenMember.parse` takes it.
    """

    kind: str
    arguments: Json
    destination: str
    tables: list[Json]
    tokens: str | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """A shard to write: its name, and the positions of its first and last sample in the input."""

    name: str
    first: Position
    last: Position


async def write_shard(source: Source, destination: Destination, task: Task, tokens: TokenMember | None) -> Stored:
    """Write one shard and store it. Blocks, except for the upload.

    Raises InputError, SampleError, TokensError, DiskError, and what `Destination.store` raises.
    """
    shard = ShardFile(destination.draft(task.name), tokens)
    try:
        for sample in source.read(task.first, task.last):
            shard.add(sample)
        shard.finish()
        stored = await destination.store(shard.path, task.name)
    finally:
        shard.discard()
    return Stored(stored.size_bytes, stored.version, shard.samples, shard.tokens)


async def _serve(setup: WriterSetup) -> None:
    source: Source | None = None
    tables = [OriginTable.model_validate(table) for table in setup.tables]
    tokens = None if setup.tokens is None else TokenMember.parse(setup.tokens)
    async with Destination(setup.destination, tables) as destination:
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                source = source or open_source(setup.kind, setup.arguments)
                answer: Any = await write_shard(source, destination, Task(**json.loads(line)), tokens)
            except ShardcacheError as exn:
                answer = {"error": exn.to_json()}
            print(json.dumps(answer), flush=True)


def main() -> None:
    """Write shards until the input ends; the only argument is the pid of the command.

    When the command is killed, so is this process: the next run may write the same shard.
    """
    end_with_parent(int(sys.argv[1]))
    asyncio.run(_serve(WriterSetup(**json.loads(sys.stdin.readline()))))


if __name__ == "__main__":
    main()
