"""The processes that index shards: a few, started at first use, replaced when one of them dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import asdict

import structlog

from shardcache.errors import NO_PROCESS_REMEDY, CacheError, from_json
from shardcache.store.indexing import Indexed, Request

log = structlog.get_logger()

_TRIES = 2


class Indexers:
    """Runs `shardcache.store.indexing` as a program, up to `processes` times at once.

    Plain pipes, and not multiprocessing: its semaphores lie in /dev/shm, where a killed daemon would leave them.
    """

    def __init__(self, processes: int) -> None:
        self._slots = asyncio.Semaphore(processes)
        self._idle: list[Process] = []

    async def index(self, request: Request) -> Indexed:
        """Return what `index_shard` returns; raise what it raises.

        Raises CacheError when the process is killed again and again, as the kernel does when memory is short.
        """
        async with self._slots:
            for _ in range(_TRIES):
                process = await self._process(request.url)
                try:
                    answer = await _ask(process, json.dumps(asdict(request)))
                except BaseException:  # cancelled midway: the answer to come would be taken for that of the next
                    await _end(process)
                    raise
                if answer:
                    self._idle.append(process)
                    return _parse(answer)
                await _end(process)
                log.warning("an indexing process was killed", url=request.url)
        raise CacheError("indexing was killed twice", url=request.url, remedy="look for the OOM killer in dmesg")

    async def _process(self, url: str) -> Process:
        """Return an idle process, or a new one where none is left that runs."""
        while self._idle:
            process = self._idle.pop()
            if _runs(process):
                return process
            await _end(process)
            log.warning("an idle indexing process was killed")
        return await _start(url)

    async def prepare(self) -> None:
        """Start one process before the first shard needs it."""
        with contextlib.suppress(CacheError):  # whoever needs it will be told
            self._idle.append(await _start())

    async def close(self) -> None:
        """End the idle processes; one at work ends with the task that waits for it."""
        while self._idle:
            await _end(self._idle.pop())


async def _start(url: str | None = None) -> Process:
    # -P keeps the working folder out of the import path; in a session of its own, Ctrl-C does not reach it.
    command = (sys.executable, "-P", "-m", "shardcache.store.indexing", str(os.getpid()))
    try:
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True)
    except OSError as exn:
        message = f"cannot start a process to index shards ({exn.strerror})"
        raise CacheError(message, url=url, remedy=NO_PROCESS_REMEDY) from exn


def _runs(process: Process) -> bool:
    # To write to a pipe that is known to be closed is an error of its own in uvloop.
    return process.returncode is None and process.stdin is not None and not process.stdin.is_closing()


async def _ask(process: Process, request: str) -> bytes:
    """Return the answer, empty where the process died."""
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
