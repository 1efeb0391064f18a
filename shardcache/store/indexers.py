"""Pool of processes that index shards, started on first use and replaced when one dies; and processes of this kind.

They read JSON from standard input, one value per line, and answer in the same way.
"""

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import asdict
from typing import Any

import structlog

from shardcache.errors import NO_PROCESS_REMEDY, CacheError, from_json
from shardcache.store import indexing
from shardcache.store.indexing import Indexed, IndexRequest, TokensRequest

log = structlog.get_logger()

_TRIES = 2
_LINE_BYTES = 1024**2  # of an answer, which may be an error


class Indexers:
    """Runs up to `processes` processes of `shardcache.store.indexing`."""

    def __init__(self, processes: int) -> None:
        self._slots = asyncio.Semaphore(processes)
        self._idle: list[Process] = []

    async def index(self, request: IndexRequest) -> Indexed:
        """Run `index_shard` in a process; raise its error, or CacheError if the process is killed twice."""
        return Indexed(**await self._run(request))

    async def count_tokens(self, request: TokensRequest) -> int:
        """Run `count_tokens` in a process, as `index` does with `index_shard`."""
        tokens: int = (await self._run(request))["tokens"]
        return tokens

    async def _run(self, request: IndexRequest | TokensRequest) -> dict[str, Any]:
        async with self._slots:
            for _ in range(_TRIES):
                process = await self._process(request.url)
                try:
                    answer = await ask(process, asdict(request))
                except BaseException:  # cancelled: the pending answer would be taken for that of the next request
                    await end(process)
                    raise
                if answer:
                    self._idle.append(process)
                    fields: dict[str, Any] = json.loads(answer)
                    if "error" in fields:
                        raise from_json(fields["error"])
                    return fields
                await end(process)
                log.warning("indexing process killed", url=request.url)
        raise CacheError(
            "the indexing process was killed twice", url=request.url, remedy="look for the OOM killer in dmesg"
        )

    async def _process(self, url: str) -> Process:
        """Return an idle process that is still running, or a new one."""
        while self._idle:
            process = self._idle.pop()
            if _runs(process):
                return process
            await end(process)
            log.warning("idle indexing process killed")
        return await start(indexing.__name__, url)

    async def prepare(self) -> None:
        """Start one process before the first shard needs it. Raises CacheError."""
        self._idle.append(await start(indexing.__name__))

    async def close(self) -> None:
        """Kill the idle processes; a busy one is killed with the task that waits for it."""
        while self._idle:
            await end(self._idle.pop())


def _runs(process: Process) -> bool:
    # uvloop raises a RuntimeError on writes to a pipe that it knows to be closed.
    return process.returncode is None and process.stdin is not None and not process.stdin.is_closing()


async def start(module: str, url: str | None = None) -> Process:
    """Run a module, whose only argument is this process's pid. Raises CacheError, which names a shard's `url`."""
    # Plain pipes: the semaphores of multiprocessing would be left behind in /dev/shm by a killed daemon.
    # -P keeps the working directory out of the import path; a new session keeps Ctrl-C from reaching the process.
    command = (sys.executable, "-P", "-m", module, str(os.getpid()))
    try:
        return await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, start_new_session=True, limit=_LINE_BYTES
        )
    except OSError as exn:
        message = f"cannot start a process for {module} ({exn.strerror})"
        raise CacheError(message, url=url, remedy=NO_PROCESS_REMEDY) from exn


async def send(process: Process, value: object) -> None:
    """Send a JSON value; if the process was killed, its answer will be missing."""
    assert process.stdin
    with contextlib.suppress(ConnectionError):
        process.stdin.write(json.dumps(value).encode() + b"\n")
        await process.stdin.drain()


async def ask(process: Process, value: object) -> bytes:
    """Return the answer to a JSON value, or empty bytes if the process died."""
    assert process.stdout
    await send(process, value)
    return await process.stdout.readline()


async def end(process: Process) -> None:
    """Kill a process, unless it has ended."""
    if process.returncode is None:
        process.kill()
    await process.wait()
