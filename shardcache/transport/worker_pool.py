"""The daemon's transport workers: started as needed, given requests, replaced when they die."""

import asyncio
import os
import socket
import sys
from functools import partial

from shardcache.errors import NO_PROCESS_REMEDY, CacheError
from shardcache.telemetry.logs import SharedLogger
from shardcache.transport.between import descriptors
from shardcache.transport.between.flow import Commit, Flow
from shardcache.transport.between.messages import Answer, Body, Request
from shardcache.transport.worker_handle import WorkerProcess, ping_interval_s

log = SharedLogger()

# With more requests in each, another worker is started: the threads of one process share its
# interpreter lock, which over TLS changes hands for every 16 KiB.
_REQUESTS_PER_WORKER = 4
_CORES_PER_WORKER = 4
_MIN_WORKERS = 2
_MAX_WORKERS = 8
# An interpreter starts in a fraction of a second; on a full node that pages, in several.
_START_LIMIT_S = 60.0


class Workers:
    """Up to `maximum` worker processes.

    They are started as requests need them and replaced when one dies. A request waits for a process
    to start only if there is none; while another starts, the others get all requests.

    Args:
        maximum: None for a number that suits the machine's cores.
        silence_s: a worker that has requests and does not respond for this long is killed.
    """

    def __init__(self, maximum: int | None = None, *, silence_s: float = 20.0) -> None:
        self._ping_s = ping_interval_s(silence_s)
        self._maximum = maximum or _number_for(len(os.sched_getaffinity(0)))
        self._workers: list[WorkerProcess] = []  # some may have ended
        self._starting = asyncio.Lock()  # one process is started after another
        self._growing: asyncio.Task[None] | None = None  # the one that runs or ran `_grow` last

    def __repr__(self) -> str:
        return f"<Workers {[len(worker.requests) for worker in self._workers]} requests>"

    async def start_one(self) -> None:
        """Start a worker before the first request needs it, and wait until it is up.

        Raises CacheError.
        """
        await self._ensure_one()
        await self._workers[0].up.wait()

    async def start_others(self) -> None:
        """Start as many further workers as a busy daemon has at least."""
        for _ in range(_MIN_WORKERS - 1):
            await self._grow()

    async def ask(self, request: Request, ahead: Request | None = None) -> Answer:
        """Return the answer to a request, without its body.

        Args:
            ahead: a request to send at the same time, whose body is to be fetched soon. The `fetch`
                of its url takes the answer, or drops it if it is not the expected one. One that
                nobody fetches is dropped as well.

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
        """Return the answer to a request, whose body is written to a file.

        It is written only if the answer is as `body` expects. None if `commit` refused it. Raises
        what `ask` raises, and PartFileError. After it is cancelled or fails, nothing more is
        written, unless the disk hangs.
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
        """Have a worker do a request; see `ask` and `fetch`."""
        await flow.ready()
        worker = await self._worker_for(request, body)
        running = worker.begin(request, body, flow)
        if ahead is not None:
            worker.prime(ahead)
        try:
            with flow.interruptible(running.pause):
                return await running.outcome(commit)
        finally:
            await running.end()

    async def _worker_for(self, request: Request, body: Body | None) -> WorkerProcess:
        """Return the worker to do a request; one is started if there is none.

        It is the one that writes to the same file, as the writers of a file take turns and another
        process would gain nothing, or the one that has sent this request ahead. Otherwise, it is
        the one with the fewest requests; if that has many, another is started for later requests.
        """
        self._drop_ended()
        while not self._workers:
            await self._ensure_one()
            self._drop_ended()

        if body is not None:
            for worker in self._workers:
                if worker.writes_to(body.parts.path) or request.url in worker.primed:
                    return worker

        idlest = min(self._workers, key=lambda worker: len(worker.requests))
        is_busy = len(idlest.requests) >= _REQUESTS_PER_WORKER
        if is_busy and len(self._workers) < self._maximum and not self._is_growing:
            self._growing = asyncio.create_task(self._grow(), name="another transport worker")
        return idlest

    def _drop_ended(self) -> None:
        self._workers = [worker for worker in self._workers if not worker.has_ended]

    @property
    def _is_growing(self) -> bool:
        return self._growing is not None and not self._growing.done()

    async def _ensure_one(self) -> None:
        """Start a worker if none is alive. It takes requests at once, though it may not be up yet.

        Raises CacheError.
        """
        async with self._starting:
            if all(worker.has_ended for worker in self._workers):
                self._workers = [await self._new_worker()]

    async def _grow(self) -> None:
        """Start another worker, if there may be one, and use it once it is up.

        It is ended if that takes too long, or if this is cancelled first.
        """
        async with self._starting:
            alive = sum(not worker.has_ended for worker in self._workers)
            if alive >= self._maximum:
                return
            try:
                worker = await self._new_worker()
            except CacheError as exn:
                # No request fails: the workers that there are do all of the work.
                log.warning("cannot start another transport worker", cause=exn.message)
                return
            is_up = False
            try:
                async with asyncio.timeout(_START_LIMIT_S):
                    await worker.up.wait()
                is_up = True
            except TimeoutError:
                log.warning("transport worker failed to start", waited_s=_START_LIMIT_S)
            finally:
                if is_up:
                    self._workers.append(worker)
                else:
                    await worker.end()

    async def _new_worker(self) -> WorkerProcess:
        """Return a new worker, which may not be up yet. Raises CacheError."""
        try:
            daemon_end, worker_end = descriptors.channel()
            with worker_end:  # the process has its own copy once it is started
                return await self._spawn(daemon_end, worker_end.fileno())
        except OSError as exn:
            message = f"cannot start a transport worker ({exn.strerror})"
            raise CacheError(message, remedy=NO_PROCESS_REMEDY) from exn

    async def _spawn(self, daemon_end: socket.socket, worker_fd: int) -> WorkerProcess:
        """Return a new worker, which closes the daemon's end of its channel when it ends."""
        # -P keeps the working directory out of the import path; a new session keeps Ctrl-C from
        # reaching the process.
        command = (sys.executable, "-P", "-m", "shardcache.transport.worker")
        arguments = (str(os.getpid()), str(worker_fd))
        try:
            _, worker = await asyncio.get_running_loop().subprocess_exec(
                partial(WorkerProcess, self._distrust_idle, self._ping_s, daemon_end),
                *command,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=None,
                start_new_session=True,
                pass_fds=(worker_fd,),
            )
        except BaseException:
            daemon_end.close()
            raise
        return worker

    def _distrust_idle(self, before_s: float) -> None:
        """Have all workers close their connections that have been idle since before `before_s`.

        Called when the peer did not respond on such a connection: whatever dropped that one has
        dropped the others, too. The time is by the machine's clock, which all processes share.
        """
        for worker in self._workers:
            worker.distrust(before_s)


def _number_for(cores: int) -> int:
    """Return the number of workers that suits a number of cores."""
    return max(_MIN_WORKERS, min(_MAX_WORKERS, cores // _CORES_PER_WORKER))
