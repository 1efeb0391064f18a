"""The processes that write shards, from the side of the command."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from dataclasses import asdict

from shardcache.errors import NO_PROCESS_REMEDY, CacheError, from_json
from shardcache.writing.plan.journal import Stored
from shardcache.writing.writer_process import Task, WriterSetup

_LINE_BYTES = 1024**2  # of an answer, which may be an error


class WritingProcess:
    """One process of `writer_process.py`, started for its first shard; a context manager that ends it."""

    def __init__(self, setup: WriterSetup) -> None:
        self._setup = setup
        self._process: Process | None = None

    async def __aenter__(self) -> WritingProcess:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()

    async def write(self, task: Task) -> Stored:
        """Write one shard. Raises as `writer_process.write_shard`; CacheError if there is no process, or it ended."""
        process = self._process = self._process or await _start(self._setup)
        assert process.stdout is not None
        await _send(process, json.dumps(asdict(task)))
        answer = await process.stdout.readline()
        if not answer:
            raise CacheError(
                "a process that writes shards ended",
                url=task.name,
                remedy="if it printed no traceback, look for the OOM killer in dmesg, and try fewer --workers; "
                "the same command again resumes",
            )
        found = json.loads(answer)
        if isinstance(found, dict):
            raise from_json(found["error"])
        return Stored(*found)


async def _start(setup: WriterSetup) -> Process:
    # -P keeps the working directory out of the import path; a new session keeps Ctrl-C from reaching the process.
    command = (sys.executable, "-P", "-m", "shardcache.writing.writer_process", str(os.getpid()))
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, start_new_session=True, limit=_LINE_BYTES
        )
    except OSError as exn:
        raise CacheError(f"cannot start a process ({exn.strerror})", remedy=NO_PROCESS_REMEDY) from exn
    await _send(process, json.dumps(asdict(setup)))  # not as an argument: it may contain credentials
    return process


async def _send(process: Process, line: str) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # if it was killed, its answer will be missing
        process.stdin.write(line.encode() + b"\n")
        await process.stdin.drain()
