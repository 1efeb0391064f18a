"""The daemon's transport workers: started as needed, given requests, replaced when they die."""

import asyncio
import os
import socket
import sys
from functools import partial

from shardcache.errors import NO_PROCESS_REMEDY, CacheError
from shardcache.logs import SharedLogger
from shardcache.transport import descriptors
from shardcache.transport.flow import Commit, Flow
from shardcache.transport.messages import Answer, Body, Request
from shardcache.transport.worker_handle import WorkerProcess, ping_interval_s

log = SharedLogger()

# Threads of one process share its interpreter lock, which over TLS changes hands for every 16 KiB.
_REQUESTS_A_WORKER = 4
_CORES_A_WORKER = 4
_MIN_WORKERS = 2
_MAX_WORKERS = 8
# An interpreter starts in a fraction of a second; on a full node that pages, in several.
_START_LIMIT_S = 60.0


class Workers:
    """Up to `maximum` worker processes.

    They are started as requests need them and replaced when one dies. A request waits for a process
    to start only if there is none; while another starts, the others get all requests. A worker that
    has requests and does not respond for `silence_s` is killed.

    Args:
        maximum: None for a number that suits the machine's cores.
    """

    def __init__(self, maximum: int | None = None, *, silence_s: float = 20.0) -> None:
        self._ping_s = ping_interval_s(silence_s)
        self._maximum = maximum or _workers_of(len(os.sched_getaffinity(0)))
        self._workers: list[WorkerProcess] = []
        self._starting = asyncio.Lock()
        self._growing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Workers {[len(worker.requests) for worker in self._workers]} requests>"

    async def start_one(self) -> None:
        """Start a worker before the first request needs it, and wait until it is up.

        Raises CacheError.
        """
        await self._start_first()
        await self._workers[0].up.wait()

    async def start_others(self) -> None:
        """Start as many further workers as a busy daemon has at least."""
        for _ in range(_MIN_WORKERS - 1):
            await self._grow()

    async def ask(self, request: Request, ahead: Request | None = None) -> Answer:
        """Return the answer to a request, without its body.

        Args:
            ahead: a request to send at the same time. Its body will soon be fetched: by `fetch` of
                the same url, which takes the answer if it is the expected one. Any other is
                dropped, as is one that nobody fetches.

        Raises TransportError, ssl.SSLCertVerificationError, NotAllowedError; OriginError for a head
        that is too large; CacheError if no process can be started.
        """
        answer = await self._run(request, None, Flow(), ahead=ahead)
        assert answer is not None
        return answer

    async def fetch(
        self,
        request: Request,
        body: Body,
        flow: Flow,
        commit: Commit | None = None,
    ) -> Answer | None:
        """Return the answer to a request; its body is written to the file if it is as expected.

        None if `commit` refused the body. Raises what `ask` raises, and PartFileError. After it is
        cancelled or fails, nothing more is written, unless the disk hangs.
        """
        return await self._run(request, body, flow, commit)

    async def close(self) -> None:
        """Kill the processes."""
        if self._growing is not None:
            self._growing.cancel()
            await asyncio.wait([self._growing])
        while self._workers:
            await self._workers.pop().end()

    async def _run(
        self,
        request: Request,
        body: Body | None,
        flow: Flow,
        commit: Commit | None = None,
        ahead: Request | None = None,
    ) -> Answer | None:
        await flow.ready()
        if body is None:
            worker = await self._worker_for("", "")
        else:
            worker = await self._worker_for(body.parts.path, request.url)
        running = worker.begin(request, body, flow)
        if ahead is not None:
            worker.prime(ahead)
        try:
            with flow.interruptible(running.pause):
                return await running.outcome(commit)
        finally:
            await running.end()

    async def _worker_for(self, path: str, url: str) -> WorkerProcess:
        """Return the worker that writes to a file or has primed a url.

        If there is none, the one with the fewest requests.
        """
        self._drop_ended()
        while not self._workers:
            await self._start_first()
            self._drop_ended()

        for worker in self._workers:
            if worker.writes_to(path) or url in worker.primed:
                return worker

        best = min(self._workers, key=lambda worker: len(worker.requests))
        is_busy = len(best.requests) >= _REQUESTS_A_WORKER
        if is_busy and len(self._workers) < self._maximum and not self._is_growing:
            self._growing = asyncio.create_task(self._grow(), name="another transport worker")
        return best

    def _drop_ended(self) -> None:
        self._workers = [worker for worker in self._workers if not worker.has_ended]

    @property
    def _is_growing(self) -> bool:
        return self._growing is not None and not self._growing.done()

    async def _start_first(self) -> None:
        async with self._starting:
            if all(worker.has_ended for worker in self._workers):
                self._workers = [await self._start()]

    async def _grow(self) -> None:
        """Start another worker, if there may be one, and use it once it takes requests."""
        async with self._starting:
            alive = sum(not worker.has_ended for worker in self._workers)
            if alive >= self._maximum:
                return
            try:
                worker = await self._start()
            except CacheError as exn:  # the others do all of the work
                log.warning("cannot start another transport worker", cause=exn.message)
                return
            try:
                async with asyncio.timeout(_START_LIMIT_S):
                    await worker.up.wait()
                self._workers.append(worker)
            except TimeoutError:
                log.warning("transport worker failed to start", waited_s=_START_LIMIT_S)
            finally:
                if worker not in self._workers:
                    await worker.end()

    async def _start(self) -> WorkerProcess:
        """Return a new worker, which may not be up yet. Raises CacheError."""
        try:
            sending, receiving = descriptors.channel()
            with receiving:
                return await self._start_with(sending, receiving.fileno())
        except OSError as exn:
            message = f"cannot start a transport worker ({exn.strerror})"
            raise CacheError(message, remedy=NO_PROCESS_REMEDY) from exn

    async def _start_with(self, files: socket.socket, passed_fd: int) -> WorkerProcess:
        # -P keeps the working directory out of the import path; a new session keeps Ctrl-C from
        # reaching the process.
        command = (sys.executable, "-P", "-m", "shardcache.transport.worker")
        arguments = (str(os.getpid()), str(passed_fd))
        try:
            _, worker = await asyncio.get_running_loop().subprocess_exec(
                partial(WorkerProcess, self._distrust, self._ping_s, files),
                *command,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=None,
                start_new_session=True,
                pass_fds=(passed_fd,),
            )
        except BaseException:
            files.close()
            raise
        return worker

    def _distrust(self, before_s: float) -> None:
        """Make all processes distrust idle connections; the clock is the machine's."""
        for worker in self._workers:
            worker.distrust(before_s)


def _workers_of(cores: int) -> int:
    """Return the number of workers that suits a number of cores."""
    return max(_MIN_WORKERS, min(_MAX_WORKERS, cores // _CORES_A_WORKER))
