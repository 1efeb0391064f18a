"""Pool of processes that index shards, started on first use, replaced when one dies or hangs; and their kind.

They read JSON from standard input, one value per line, and answer in the same way. They answer an empty line, a ping,
with an empty line, whatever they are doing.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import structlog

from shardcache.errors import NO_PROCESS_REMEDY, CacheError, from_json
from shardcache.store import indexing
from shardcache.store.indexing import Indexed, IndexRequest, TokensRequest

log = structlog.get_logger()

_TRIES = 2
_LINE_BYTES = 1024**2  # of an answer, which may be an error

SILENCE_S: Final = 20.0
"""How long a process may be silent, even about pings, before it counts as hung."""

# A process that leaves this many pings in a row unanswered hangs; one that has not started yet has longer.
_PINGS = 3
_STARTING_PINGS = 60
_PING = b"\n"


class Indexers:
    """Runs up to `processes` processes of `shardcache.store.indexing`; one that is silent for `silence_s` is killed."""

    def __init__(self, processes: int, *, silence_s: float = SILENCE_S) -> None:
        self._slots = asyncio.Semaphore(processes)
        self._silence_s = silence_s
        self._idle: list[HelperProcess] = []

    async def index(self, request: IndexRequest) -> Indexed:
        """Run `index_shard` in a process; raise its error, or CacheError if the process dies or hangs twice."""
        return Indexed(**await self._run(request))

    async def count_tokens(self, request: TokensRequest) -> int:
        """Run `count_tokens` in a process, as `index` does with `index_shard`."""
        tokens: int = (await self._run(request))["tokens"]
        return tokens

    async def _run(self, request: IndexRequest | TokensRequest) -> dict[str, Any]:
        async with self._slots:
            process = await self._idle_or_new(request.url)
            for tries_left in reversed(range(_TRIES)):
                try:
                    answer = await process.ask(asdict(request))
                except BaseException:  # cancelled: the pending answer would be taken for that of the next request
                    await process.end()
                    raise
                if answer:
                    self._idle.append(process)
                    fields: dict[str, Any] = json.loads(answer)
                    if "error" in fields:
                        raise from_json(fields["error"])
                    return fields
                await process.end()
                log.warning("indexing process killed", url=request.url)
                if tries_left:  # not an idle one: what killed or froze this one may have met them all
                    process = await self._start(request.url)
        raise CacheError(
            "the indexing process was killed, or did not respond, twice",
            url=request.url,
            remedy="look for the OOM killer in dmesg",
        )

    async def _idle_or_new(self, url: str) -> "HelperProcess":
        """Return an idle process that is still running, or a new one."""
        while self._idle:
            process = self._idle.pop()
            if process.runs:
                return process
            await process.end()
            log.warning("idle indexing process killed")
        return await self._start(url)

    async def _start(self, url: str | None = None) -> "HelperProcess":
        return await HelperProcess.start(indexing.__name__, url, silence_s=self._silence_s)

    async def prepare(self) -> None:
        """Start one process before the first shard needs it. Raises CacheError."""
        self._idle.append(await self._start())

    async def close(self) -> None:
        """Kill the idle processes; a busy one is killed with the task that waits for it."""
        while self._idle:
            await self._idle.pop().end()


@dataclass(slots=True, eq=False)
class HelperProcess:
    """A process that answers one JSON value at a time, and pings meanwhile, as `indexing.requests` has it do."""

    _process: Process
    _ping_s: float
    _is_up: bool = False  # True once it has sent anything

    @classmethod
    async def start(cls, module: str, url: str | None = None, *, silence_s: float = SILENCE_S) -> Self:
        """Run a module, whose only argument is this process's pid. Raises CacheError, which names a shard's `url`."""
        # Plain pipes: the semaphores of multiprocessing would be left behind in /dev/shm by a killed daemon.
        # -P keeps the working directory out of the import path; a new session keeps Ctrl-C from reaching the process.
        command = (sys.executable, "-P", "-m", module, str(os.getpid()))
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, start_new_session=True, limit=_LINE_BYTES
            )
        except OSError as exn:
            message = f"cannot start a process for {module} ({exn.strerror})"
            raise CacheError(message, url=url, remedy=NO_PROCESS_REMEDY) from exn
        return cls(process, silence_s / (_PINGS + 1))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """False once it has ended."""
        # uvloop raises a RuntimeError on writes to a pipe that it knows to be closed.
        stdin = self._process.stdin
        return self._process.returncode is None and stdin is not None and not stdin.is_closing()

    def send(self, value: object) -> None:
        """Send a JSON value; if the process was killed, its answer will be missing."""
        self._write(json.dumps(value).encode() + b"\n")

    async def ask(self, value: object) -> bytes:
        """Return the answer to a JSON value, or empty bytes if the process died or hangs.

        Counts pings, not time: if this process was stopped itself, the answers wait to be read.
        """
        assert self._process.stdout
        self.send(value)
        unanswered = 0
        while unanswered <= (_PINGS if self._is_up else _STARTING_PINGS):
            try:
                async with asyncio.timeout(self._ping_s):
                    line = await self._process.stdout.readline()
            except TimeoutError:
                unanswered += 1
                self._write(_PING)
                continue
            if line != _PING:
                return line
            unanswered = 0
            self._is_up = True
        log.warning("a process does not respond; killing it", pid=self.pid)
        return b""

    def _write(self, data: bytes) -> None:
        if self.runs:
            assert self._process.stdin
            self._process.stdin.write(data)  # not drained: a process that hangs would never take it

    async def end(self) -> None:
        """Kill the process, unless it has ended."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
