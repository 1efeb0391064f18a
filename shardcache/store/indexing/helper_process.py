"""The daemon's side of a helper process, which answers requests and pings.

A helper process does work that would hold the daemon's interpreter lock for too long, such as
indexing. Requests and answers are JSON values, one per line. A ping is an empty line, which the
process answers with an empty line even while it works; a process that leaves several pings
unanswered counts as hung. `helper_program` is the other side, which runs in the process.
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

from shardcache.shared.exceptions import CacheError
from shardcache.shared.wording.remedies import NO_PROCESS_REMEDY

log = structlog.get_logger()

_MAX_ANSWER_BYTES = 1024**2
SILENCE_S: Final = 20.0
"""Time after which a process that does not even answer pings counts as hung."""

# A process that leaves more than this many pings in a row unanswered counts as hung. A process that
# has not answered any ping yet may still be starting, and gets more time.
_MAX_UNANSWERED = 3
_MAX_UNANSWERED_AT_START = 60
_PING = b"\n"  # the answer to a ping is the same line


@dataclass(slots=True, eq=False)
class HelperProcess:
    """A process that answers one request at a time, and pings even while it works.

    Its program gets the requests from `helper_program.requests`.
    """

    _process: Process
    _ping_s: float  # interval of pings
    _has_started: bool = False  # True once the process has sent an empty line

    @classmethod
    async def start(
        cls,
        module: str,
        url: str | None = None,
        *,
        silence_s: float = SILENCE_S,
        env: Mapping[str, str] | None = None,
    ) -> Self:
        """Start a process that runs a module, with this process's pid as the only argument.

        Args:
            module: the module's full name.
            url: the shard for which the process is started, for errors; None for no shard.
            silence_s: time after which a silent process counts as hung.
            env: the process's environment; by default, that of this process.

        Raises CacheError, which names `url`.
        """
        # Plain pipes are used instead of multiprocessing, whose semaphores a killed daemon would
        # leave behind in /dev/shm. -P keeps the working directory out of the import path. A new
        # session keeps Ctrl-C from reaching the process.
        command = (sys.executable, "-P", "-m", module, str(os.getpid()))
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,
                limit=_MAX_ANSWER_BYTES,
                env=env,
            )
        except OSError as exn:
            raise CacheError(
                f"cannot start a process for {module} ({exn.strerror})",
                url=url,
                remedy=NO_PROCESS_REMEDY,
            ) from exn
        ping_s = silence_s / (_MAX_UNANSWERED + 1)
        return cls(process, ping_s)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """False once the process has ended."""
        stdin = self._process.stdin
        if self._process.returncode is not None or stdin is None:
            return False
        # The process's pipe may be closed before its exit status is known. With uvloop, a write to
        # a closed pipe raises a RuntimeError.
        return not stdin.is_closing()

    def send(self, request: object) -> None:
        """Send a request, a JSON value; if the process has ended, nothing is sent."""
        self._write(json.dumps(request).encode() + b"\n")

    async def ask(self, request: object) -> bytes:
        """Send a request, and return the answer; empty bytes if the process died or hangs.

        Unanswered pings are counted rather than time: while this process is stopped (SIGSTOP), time
        passes, but no ping is sent.
        """
        assert self._process.stdout
        self.send(request)
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
                return line  # the answer, or no bytes after the process has ended
            unanswered = 0
            self._has_started = True
        log.warning("helper process is not responding; killing it", pid=self.pid)
        return b""

    @property
    def _max_unanswered(self) -> int:
        return _MAX_UNANSWERED if self._has_started else _MAX_UNANSWERED_AT_START

    def _write(self, data: bytes) -> None:
        """Write to the process's input, unless the process has ended."""
        if self.is_running:
            assert self._process.stdin
            # The write is not awaited (drained): a hung process would never take the bytes.
            self._process.stdin.write(data)

    async def end(self) -> None:
        """Kill the process unless it has ended, and wait for its end."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
