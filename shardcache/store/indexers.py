"""Pool of processes that index shards, started on first use and replaced when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import asdict

import structlog

from shardcache.errors import CacheError, from_json
from shardcache.store.indexing import Indexed, Request

log = structlog.get_logger()

_TRIES = 2


class Indexers:
    """Runs up to `processes` processes of `shardcache.store.indexing`.

    Uses plain pipes instead of multiprocessing, whose semaphores a killed daemon would leave behind in /dev/shm.
    """

    def __init__(self, processes: int) -> None:
        self._slots = asyncio.Semaphore(processes)
        self._idle: list[Process] = []

    async def index(self, request: Request) -> Indexed:
        """Run `index_shard` in a process; return its result or raise its error.

        Raises CacheError if the process is killed twice, as the OOM killer does.
        """
        async with self._slots:
            for _ in range(_TRIES):
                process = self._idle.pop() if self._idle else await _start()
                try:
                    answer = await _ask(process, json.dumps(asdict(request)))
                except BaseException:  # cancelled: the pending answer would be taken for that of the next request
                    await _end(process)
                    raise
                if answer:
                    self._idle.append(process)
                    return _parse(answer)
                await _end(process)
                log.warning("indexing process killed", url=request.url)
        raise CacheError(
            "the indexing process was killed twice", url=request.url, remedy="look for the OOM killer in dmesg"
        )

    async def prepare(self) -> None:
        """Start one process before the first shard needs it."""
        with contextlib.suppress(CacheError):  # `index` will report it
            self._idle.append(await _start())

    async def close(self) -> None:
        """Kill the idle processes; a busy one is killed with the task that waits for it."""
        while self._idle:
            await _end(self._idle.pop())


async def _start() -> Process:
    # -P keeps the working directory out of the import path; a new session keeps Ctrl-C from reaching the process.
    command = (sys.executable, "-P", "-m", "shardcache.store.indexing", str(os.getpid()))
    try:
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True)
    except OSError as exn:
        remedy = "check limits on memory and processes (ulimit -a, the container's limits)"
        raise CacheError(f"cannot start a process to index shards ({exn.strerror})", remedy=remedy) from exn


async def _ask(process: Process, request: str) -> bytes:
    """Return the answer, or empty bytes if the process died."""
    assert process.stdin and process.stdout
    try:
        process.stdin.write(request.encode() + b"\n")
        await process.stdin.drain()
    except ConnectionError:
        return b""
    return await process.stdout.readline()


def _parse(answer: bytes) -> Indexed:
    fields = json.loads(answer)
    if "error" in fields:
        raise from_json(fields["error"])
    return Indexed(**fields)


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
