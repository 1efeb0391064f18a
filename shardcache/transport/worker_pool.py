"""The daemon's transport workers: started as needed, given requests, replaced when they die.

A transport worker is a process that sends HTTP requests and writes the answers' bodies to files.
Origins, which are the daemon's clients of object stores, call `Workers.ask` for answers without a
body, such as an object's version, and `Workers.fetch` for bodies. A worker is up once it has
started and takes requests. A request is primed if it was sent ahead of the `fetch` for its body.
"""

import asyncio
import os
import socket
import sys
from functools import partial

from shardcache.shared.exceptions import CacheError
from shardcache.shared.wording.remedies import NO_PROCESS_REMEDY
from shardcache.telemetry.logs import SharedLogger
from shardcache.transport.between import descriptors
from shardcache.transport.between.flow import Commit, Flow
from shardcache.transport.between.messages import Answer, Body, Request
from shardcache.transport.worker_handle import WorkerProcess, ping_interval_s

log = SharedLogger()

# Once each worker has this many requests, another worker is started: the threads of one process
# share its interpreter lock, which changes hands for every 16 KiB over TLS.
_REQUESTS_PER_WORKER = 4
_CORES_PER_WORKER = 4
_MIN_WORKERS = 2
_MAX_WORKERS = 8
# An interpreter starts in a fraction of a second, but in several seconds on a node that is so short
# of memory that it swaps.
_START_LIMIT_S = 60.0


class Workers:
    """Up to `maximum` worker processes.

    Workers are started as requests need them, and replaced when they die. A request waits for a
    worker to start only if there is none; while another worker starts, the running ones get all
    requests.

    Args:
        maximum: maximum number of workers; None for a number that suits the machine's cores.
        silence_s: time after which a worker that has requests and does not respond is killed.
    """

    def __init__(self, maximum: int | None = None, *, silence_s: float = 20.0) -> None:
        self._ping_s = ping_interval_s(silence_s)
        self._maximum = maximum or _maximum_for(len(os.sched_getaffinity(0)))
        self._workers: list[WorkerProcess] = []  # some of them may have ended
        self._starting = asyncio.Lock()  # held while a process starts: they start one by one
        # The latest task that runs `_grow`; it may be done. None before the first.
        self._grow_task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Workers {[len(worker.requests) for worker in self._workers]} requests>"

    async def start_one(self) -> None:
        """Start a worker before the first request needs it; return once it is up or has ended.

        Raises CacheError.
        """
        await self._ensure_one()
        await self._workers[0].started_or_ended.wait()

    async def start_others(self) -> None:
        """Start the workers after the first that even a daemon with few requests needs."""
        for _ in range(_MIN_WORKERS - 1):
            await self._grow()

    async def ask(self, request: Request, ahead: Request | None = None) -> Answer:
        """Return the answer to a request, without its body.

        Args:
            ahead: another request to send at the same time, as its body will be fetched soon; None
                for none. The `fetch` of its url takes the answer, or drops an answer that is not
                the expected one. An answer that is not fetched within seconds is dropped, too.

        Raises TransportError, ssl.SSLCertVerificationError, NotAllowedError; OriginError for a head
        that is too large; CacheError if no process can be started.
        """
        # The plain flow neither pauses nor limits the read.
        answer = await self._run(request, body=None, flow=Flow(), ahead=ahead)
        assert answer is not None  # only a `commit` that returns False leads to None
        return answer

    async def fetch(
        self,
        request: Request,
        body: Body,
        flow: Flow,
        commit: Commit | None = None,
    ) -> Answer | None:
        """Send a request, write the answer's body to a file, and return the answer.

        The body is written only if the answer is as `body` expects. After a fetch was cancelled or
        has failed, nothing more is written, except by a write that hangs in the disk.

        Args:
            flow: pauses the read, limits the number of its bytes, and receives its progress.
            commit: for a body that is held in memory until it may be written: called once it has
                arrived. If it returns False, the body is dropped and None is returned. None to
                write the body in any case.

        Raises what `ask` raises, and PartFileError.
        """
        return await self._run(request, body, flow, commit)

    async def close(self) -> None:
        """Kill the processes, including one that is still starting."""
        if self._grow_task is not None:
            self._grow_task.cancel()
            await asyncio.wait([self._grow_task])
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
        """Have a worker carry out a request; the arguments are those of `ask` and `fetch`."""
        # A flow that is paused waits here, so that the worker is chosen by its load afterwards.
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
        """Return the worker for a request; start a worker if there is none.

        1. For a body, a worker that already writes to the same file is preferred: the writers of a
           file take turns, so another process would gain nothing. A worker that has sent this
           request ahead is preferred as well, as it has the answer.
        2. Otherwise, the worker with the fewest requests is chosen. If it has many, another worker
           is started for later requests.
        """
        self._drop_ended()
        while not self._workers:  # a new worker may end at once
            await self._ensure_one()
            self._drop_ended()

        if body is not None:
            for worker in self._workers:
                if worker.writes_to(body.parts.path) or request.url in worker.primed:
                    return worker

        idlest = min(self._workers, key=lambda worker: len(worker.requests))
        is_busy = len(idlest.requests) >= _REQUESTS_PER_WORKER
        if is_busy and len(self._workers) < self._maximum and not self._is_growing:
            self._grow_task = asyncio.create_task(self._grow(), name="another transport worker")
        return idlest

    def _drop_ended(self) -> None:
        self._workers = [worker for worker in self._workers if not worker.has_ended]

    @property
    def _is_growing(self) -> bool:
        return self._grow_task is not None and not self._grow_task.done()

    async def _ensure_one(self) -> None:
        """Start a worker if none is alive.

        Requests can be given to the worker before it is up, as its input is buffered. Raises
        CacheError.
        """
        async with self._starting:
            if all(worker.has_ended for worker in self._workers):
                self._workers = [await self._new_worker()]

    async def _grow(self) -> None:
        """Start another worker unless `maximum` are alive, and use it once it is up.

        A worker that takes too long to start is killed, and so is one that is still starting when
        this call is cancelled.
        """
        async with self._starting:
            alive = sum(not worker.has_ended for worker in self._workers)
            if alive >= self._maximum:
                return
            try:
                worker = await self._new_worker()
            except CacheError as exn:
                # No request fails, as the other workers carry on with all of the work.
                log.warning("cannot start another transport worker", cause=exn.message)
                return
            try:
                async with asyncio.timeout(_START_LIMIT_S):
                    await worker.started_or_ended.wait()
            except TimeoutError:
                log.warning("transport worker failed to start", waited_s=_START_LIMIT_S)
                await worker.end()
            except asyncio.CancelledError:
                await worker.end()
                raise
            else:
                self._workers.append(worker)

    async def _new_worker(self) -> WorkerProcess:
        """Return a new worker, which may not be up yet. Raises CacheError."""
        try:
            daemon_end, worker_end = descriptors.channel()
            with worker_end:  # a started process has its own copy of this descriptor
                return await self._spawn(daemon_end, worker_end.fileno())
        except OSError as exn:
            message = f"cannot start a transport worker ({exn.strerror})"
            raise CacheError(message, remedy=NO_PROCESS_REMEDY) from exn

    async def _spawn(self, daemon_end: socket.socket, worker_fd: int) -> WorkerProcess:
        """Start a worker's process, and return the worker.

        Args:
            daemon_end: the daemon's end of the socket for file descriptors, which is closed when
                the process ends.
            worker_fd: descriptor of the worker's end, which the process inherits.
        """
        # -P keeps the working directory out of the import path. A new session keeps Ctrl-C from
        # reaching the process. Its errors go to the daemon's standard error (stderr=None).
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

        This is called when a worker reports that a server did not respond over an idle connection.
        The NAT or load balancer that has dropped this connection has probably dropped the other
        idle ones, too.

        Args:
            before_s: a time by the monotonic clock, which all processes of the machine share.
        """
        for worker in self._workers:
            worker.distrust(before_s)


def _maximum_for(cores: int) -> int:
    """Return the maximum number of workers that suits a number of cores."""
    return max(_MIN_WORKERS, min(_MAX_WORKERS, cores // _CORES_PER_WORKER))
