"""A process that answers JSON requests, and pings meanwhile, from the daemon's side.

`helper_program` is the process's own side.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import structlog

from shardcache.errors import NO_PROCESS_REMEDY, CacheError

log = structlog.get_logger()

_LINE_BYTES = 1024**2  # of an answer, which may be an error
SILENCE_S: Final = 20.0
"""Time for which a process may be silent, even about pings, before it counts as hung."""

# A process that leaves this many pings in a row unanswered hangs; one that has not started yet has
# longer.
_PINGS = 3
_STARTING_PINGS = 60
_PING = b"\n"


@dataclass(slots=True, eq=False)
class HelperProcess:
    """A process that answers one JSON value at a time, and pings meanwhile.

    Its program reads them by `helper_program.requests`.
    """

    _process: Process
    _ping_s: float
    _is_up: bool = False  # True once it has sent anything

    @classmethod
    async def start(
        cls,
        module: str,
        url: str | None = None,
        *,
        silence_s: float = SILENCE_S,
        env: Mapping[str, str] | None = None,
    ) -> Self:
        """Run a module, whose only argument is this process's pid.

        Args:
            module: its full name.
            url: a shard's, for errors.
            silence_s: a process that is silent for longer hangs.
            env: its environment; by default, this process's.

        Raises CacheError, which names `url`.
        """
        # Plain pipes: the semaphores of multiprocessing would be left behind in /dev/shm by a
        # killed daemon. -P keeps the working directory out of the import path; a new session keeps
        # Ctrl-C from reaching the process.
        command = (sys.executable, "-P", "-m", module, str(os.getpid()))
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,
                limit=_LINE_BYTES,
                env=env,
            )
        except OSError as exn:
            raise CacheError(
                f"cannot start a process for {module} ({exn.strerror})",
                url=url,
                remedy=NO_PROCESS_REMEDY,
            ) from exn
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
        while unanswered <= self._max_unanswered:
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
        log.warning("helper process is not responding; killing it", pid=self.pid)
        return b""

    @property
    def _max_unanswered(self) -> int:
        return _PINGS if self._is_up else _STARTING_PINGS

    def _write(self, data: bytes) -> None:
        if self.runs:
            assert self._process.stdin
            self._process.stdin.write(data)  # not drained: a process that hangs would never take it

    async def end(self) -> None:
        """Kill the process, unless it has ended."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
