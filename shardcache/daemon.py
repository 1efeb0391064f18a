"""Composition root of the daemon: build the components, serve until a stop signal, drain."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from shardcache import __version__, logs
from shardcache.access import AllowList
from shardcache.cache.facade import Cache
from shardcache.config import Settings, rule_of, unknown_variables
from shardcache.fetch.download import Downloader
from shardcache.metrics import Counters
from shardcache.origin.registry import Origins
from shardcache.protocol import socket_path
from shardcache.server.app import serving
from shardcache.server.drain import Drain
from shardcache.server.listening.activation import ActivatedSockets
from shardcache.server.listening.limits import Limits, raise_open_files
from shardcache.server.listening.tcp_listener import Listener, listening
from shardcache.server.listening.unix_listener import listening_at
from shardcache.server.service_notifier import Liveness, ServiceNotifier, liveness
from shardcache.server.takeover import predecessor_gone
from shardcache.store.indexing.indexers import Indexers
from shardcache.store.store import Store
from shardcache.units import duration, size

log = structlog.get_logger()

# Hard limit for shutdown, even if a task hangs; service managers usually allow 90 s, Kubernetes 30
# s.
_STOP_LIMIT_S = 20.0
_MARGIN_S = 5.0
# Blocking work mostly waits for the disk rather than a CPU: part writes, fsync, SQLite, unlink,
# inflating.
_THREADS = 32
# How long a thread that parses an index may keep the interpreter while the event loop waits, at
# each system call.
_SWITCH_S = 0.001
_INDEXERS = 2
_FULL_COLLECTIONS_RARER = 10
# Where S3 is configured, the daemon serves once its SDK is loaded and a transport worker is up: a
# reader's first batch then takes as long as any. These are the limits on that, and on the
# credentials, which may come from far away.
_PREPARED_WITHIN_S = 10.0
_CREDENTIALS_WITHIN_S = 1.0
# Where nothing says that S3 will be used, its SDK is loaded after what a job with other urls waits
# for at first.
_UNCONFIGURED_S = 1.0
# At first, a daemon that is started for a job has other things to do than to start more transport
# workers.
_OTHERS_AFTER_S = 5.0


def serve(settings: Settings, on_ready: Callable[[Store], None] = lambda store: None) -> None:
    """Run the daemon until SIGTERM or SIGINT.

    With `idle_exit_s`, also until it was idle for that time, or lost its folder.

    Args:
        settings: all options.
        on_ready: called once the daemon serves.

    Raises:
        SocketInUseError, CacheDirError, ConfigError: always before `on_ready` is called.
    """
    logs.configure(settings.log_level, settings.log_format)
    raise_open_files()
    manager = ServiceNotifier.take(os.environ, os.getpid())
    handed = ActivatedSockets.take(os.environ, os.getpid())
    for name, meant in unknown_variables():
        log.warning("unknown environment variable", name=name, meant=meant)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        run = DaemonRun(settings, manager, on_ready)
        stopping_s, store = runner.run(run.serve(handed))
    log.info(
        "stopped",
        took=duration(time.monotonic() - stopping_s),
        cache_dir=str(settings.cache_dir),
        shards=len(store.shards),
        used=size(store.space.used_bytes),
    )


@dataclass(frozen=True, slots=True)
class DaemonRun:
    """One run of the daemon."""

    _settings: Settings
    _manager: ServiceNotifier
    _on_ready: Callable[[Store], None]

    async def serve(self, handed: ActivatedSockets) -> tuple[float, Store]:
        """Serve until the daemon is to stop.

        Returns:
            The time of the stop signal by the monotonic clock, and the closed store.
        """
        settings = self._settings
        path = handed.path(settings.socket)
        if path is None:
            path = socket_path(settings.socket)
            await predecessor_gone(path, _STOP_LIMIT_S)

        log.info("starting", socket=str(path), handed_over=handed.unix is not None)
        collect_seldom()
        sys.setswitchinterval(_SWITCH_S)
        with (
            listening(settings.http, settings.http_token_file, handed.tcp) as listener,
            listening_at(path, settings.group, handed.unix) as sock,
        ):
            return await self._serve_at(sock, listener)

    async def _serve_at(self, sock: socket.socket, listener: Listener) -> tuple[float, Store]:
        with building():
            store = await self._manager.have_patience(
                "Scanning the cache folder.",
                self._open_store,
            )
        # The server closes last: until the folder is free, a new daemon must see that this one is
        # stopping.
        async with contextlib.AsyncExitStack() as last:
            with contextlib.closing(store):
                loop = asyncio.get_running_loop()
                loop.set_default_executor(ThreadPoolExecutor(_THREADS, "disk"))

                async def serve_cache(cache: Cache) -> Drain:
                    limits = partial(Limits.of_socket, self._settings)
                    server = serving(cache, sock, limits, listener)
                    return await last.enter_async_context(server)

                try:
                    stopping_s = await self._run(store, serve_cache)
                finally:
                    # No thread may still write when the next daemon does.
                    await loop.shutdown_default_executor()
        return stopping_s, store

    def _open_store(self) -> Store:
        settings = self._settings
        return Store.open(settings.cache_dir, settings.capacity, settings.min_free, settings.group)

    async def _run(self, store: Store, serve_cache: Callable[[Cache], Awaitable[Drain]]) -> float:
        """Serve until the daemon is to stop; return the time of that by the monotonic clock."""
        settings = self._settings
        counters = Counters()
        if any(table.cost(0, 0) is not None for table in settings.origin):
            counters.bills.cost = self._cost
        origins = Origins(
            settings.origin,
            max_connections=settings.max_connections,
            redirect_guard=AllowList(settings.allow),
            stall_timeout_s=settings.stall_timeout_s,
        )
        downloader = Downloader(settings, counters)
        indexers = Indexers(_INDEXERS)
        try:
            async with asyncio.TaskGroup() as group:
                cache = Cache(settings, store, origins, downloader, indexers, group)
                # Before the first connection is handled: a private daemon's reader is there
                # already.
                tasks = await _start_preparing(group, origins, indexers)
                drain = await serve_cache(cache)
                tasks.append(group.create_task(_prepare_later(origins)))

                with _stop_signals() as stop:
                    self._log_ready(store)
                    await self._manager.tell(READY=1)
                    self._on_ready(store)
                    tasks += self._start_watching(group, stop, cache, store, drain)
                    await stop.wait()

                stopping_s = time.monotonic()
                await self._stop(tasks, drain)
                cache.stop()
        finally:
            await indexers.close()
            await origins.close()
        return stopping_s

    def _cost(self, url: str, size_bytes: int, requests: int) -> float | None:
        return rule_of(self._settings.origin, url).cost(size_bytes, requests)

    def _log_ready(self, store: Store) -> None:
        log.info(
            "ready",
            version=__version__,
            cache_dir=str(self._settings.cache_dir),
            shards=len(store.shards),
            used=size(store.space.used_bytes),
            capacity=size(store.space.capacity_bytes),
        )

    def _start_watching(
        self,
        group: asyncio.TaskGroup,
        stop: asyncio.Event,
        cache: Cache,
        store: Store,
        drain: Drain,
    ) -> list[asyncio.Task[None]]:
        """Start the tasks that report to the service manager and end an idle daemon."""

        def alive() -> Liveness:
            return liveness(cache.health()["disk"], store, len(drain.sessions))

        tasks = [group.create_task(self._manager.watch(alive), name="manager")]
        idle_exit_s = self._settings.idle_exit_s
        if idle_exit_s is not None:
            tasks.append(group.create_task(_stop_when_idle(stop, drain, idle_exit_s)))
            tasks.append(group.create_task(_stop_when_lost(stop, cache)))
        return tasks

    async def _stop(self, tasks: list[asyncio.Task[None]], drain: Drain) -> None:
        """End the tasks and the server's sessions and requests, by force if that takes too long."""
        log.info("stopping")
        _end_by_force(_STOP_LIMIT_S)
        for task in tasks:
            task.cancel()
        limit_s = _STOP_LIMIT_S + _MARGIN_S
        await self._manager.ask_for_time(limit_s, STOPPING=1, STATUS="Stopping.")
        await drain.run()


async def _start_preparing(
    group: asyncio.TaskGroup,
    origins: Origins,
    indexers: Indexers,
) -> list[asyncio.Task[None]]:
    """Start to prepare; if S3 is configured, return once that is done, or its limits are over."""
    preparation = group.create_task(_prepare(origins, indexers))
    credentials = group.create_task(_obtain_credentials(origins, preparation))
    if origins.prepared_urls:
        await asyncio.wait([preparation], timeout=_PREPARED_WITHIN_S)
        await asyncio.wait([credentials], timeout=_CREDENTIALS_WITHIN_S)
    return [preparation, credentials]


async def _prepare(origins: Origins, indexers: Indexers) -> None:
    """Start processes, and load the SDK of S3 if that is configured, side by side.

    Nothing that fails here ends the daemon: the request that needs it fails again, and tells its
    reader.
    """
    preparations = [
        _attempt("transport worker", origins.start_worker()),
        _attempt("indexer", indexers.prepare()),
    ]
    if origins.prepared_urls:
        preparations.append(_attempt("S3", _load_s3()))
    await asyncio.gather(*preparations)


async def _prepare_later(origins: Origins) -> None:
    """Prepare what the first readers hardly need."""
    await asyncio.sleep(_UNCONFIGURED_S)
    if not origins.prepared_urls:
        await _attempt("S3", _load_s3())
    await asyncio.sleep(_OTHERS_AFTER_S - _UNCONFIGURED_S)
    await _attempt("transport workers", origins.start_other_workers())


async def _attempt(what: str, preparation: Coroutine[Any, Any, None]) -> None:
    # Not by type: SDKs raise what they like over the user's files.
    for outcome in await asyncio.gather(preparation, return_exceptions=True):
        if outcome is not None:
            log.debug("preparation failed", what=what, cause=repr(outcome))


async def _load_s3() -> None:
    """Load the SDK, and freeze its many objects."""
    with building():
        await Origins.load()


async def _obtain_credentials(origins: Origins, preparation: asyncio.Task[None]) -> None:
    """Obtain S3's credentials, if it is configured, once the SDK is loaded."""
    await asyncio.wait([preparation])
    await _attempt("credentials", origins.prepare_credentials())


async def _stop_when_idle(stop: asyncio.Event, drain: Drain, idle_exit_s: float) -> None:
    await drain.unused(idle_exit_s)
    log.info("idle", for_s=idle_exit_s)
    stop.set()


async def _stop_when_lost(stop: asyncio.Event, cache: Cache) -> None:
    """Stop a daemon whose cache folder is gone.

    It is started again when it is needed, and may then have its cache elsewhere.
    """
    await cache.lost()
    log.info("cache folder deleted")
    stop.set()


@contextlib.contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    """Yield an event that the first stop signal sets.

    A second one ends the process immediately, as safe as kill -9.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)


def collect_seldom() -> None:
    """Make full garbage collections rare.

    With many plans in memory, one blocks the event loop for a tenth of a second. Reference counting
    frees nearly everything; only the cycles that exceptions and their frames create need it.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, old * _FULL_COLLECTIONS_RARER)


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Disable collection while a block creates many long-lived objects.

    These are then exempt from all later collections.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _end_by_force(after_s: float) -> None:
    """End the process if it still runs after `after_s` seconds.

    An unresponsive disk blocks its threads for good.
    """

    def end() -> None:
        log.warning("forced exit: tasks still blocked; published shards are safe, as after a crash")
        os._exit(0)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    with contextlib.suppress(ImportError):  # not on Linux, or not yet built for this Python
        import uvloop

        return uvloop.new_event_loop
    return None
