"""Composition root of the daemon: build the components, serve until a stop signal, drain.

`shardcache serve` calls `serve`, and so does a private daemon: one that a reader has started for
its own user. To drain is to end sessions and requests in order before the daemon exits. The service
manager is the program that started the daemon, if it speaks sd_notify as systemd does. Activated
sockets are listening sockets that it has passed to the daemon.
"""

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from shardcache import __version__
from shardcache.access.rules import AllowList
from shardcache.cache.facade import Cache
from shardcache.config.origin_table import table_of
from shardcache.config.settings import Settings, unknown_variables
from shardcache.daemon.garbage_collection import (
    creating_long_lived_objects,
    make_collections_rare,
)
from shardcache.daemon.preparing import prepare_later, start_preparing
from shardcache.daemon.stopping import (
    end_by_force,
    stop_signals,
    stop_when_idle,
    stop_when_lost,
    stop_when_unreachable,
)
from shardcache.fetch.download import Downloader
from shardcache.origin.registry import Origins
from shardcache.server.app import serving
from shardcache.server.listening.activation import ActivatedSockets
from shardcache.server.listening.limits import Limits, raise_limit_of_open_files
from shardcache.server.listening.s3_listener import S3Options, listening_for_s3
from shardcache.server.listening.tcp_listener import TcpListener, listening_over_tcp
from shardcache.server.listening.unix_listener import listening_at
from shardcache.server.process.drain import Drain
from shardcache.server.process.service_notifier import Liveness, ServiceNotifier, liveness
from shardcache.server.process.takeover import wait_for_predecessor
from shardcache.shared.socket_paths import socket_path
from shardcache.shared.units import duration, size
from shardcache.store.indexing.indexers import Indexers
from shardcache.store.store import Store
from shardcache.telemetry import logs
from shardcache.telemetry.bills import Bills
from shardcache.telemetry.metrics import Counters

log = structlog.get_logger()

# Hard limit for shutdown, even if a task hangs. Service managers usually allow 90 s, Kubernetes
# 30 s.
_STOP_LIMIT_S = 20.0
# The daemon asks the service manager for the hard limit plus this time.
_STOP_MARGIN_S = 5.0
# Number of threads for blocking work, most of which waits for the disk rather than a CPU: part
# writes, fsync, SQLite, unlink, inflating.
_THREADS = 32
# The interpreter's switch interval. After each system call, the event loop may have to wait up to
# this long for a thread that computes, such as one that parses an index.
_SWITCH_S = 0.001
_INDEXERS = 2  # number of processes that index shards


def serve(
    settings: Settings,
    on_ready: Callable[[Store], None] = lambda store: None,
    *,
    is_private: bool = False,
    second_socket: Path | None = None,
) -> None:
    """Run the daemon until SIGTERM or SIGINT.

    With the option `idle_exit_s`, the daemon also stops once it was idle for that time, or once its
    cache folder or socket is gone.

    Args:
        settings: all options.
        on_ready: called once the daemon serves.
        is_private: True for a user's private daemon, which reads with its sessions' credentials.
        second_socket: path of a second socket to listen at, such as one in the cache folder; None
            for only one socket.

    Raises:
        SocketInUseError, CacheDirError, ConfigError: always before `on_ready` is called.
    """
    logs.configure(settings.log_level, settings.log_format)
    raise_limit_of_open_files()
    manager = ServiceNotifier.take(os.environ, os.getpid())
    activated = ActivatedSockets.take(os.environ, os.getpid())
    for name, similar in unknown_variables():
        log.warning("unknown environment variable", name=name, meant=similar)

    path = activated.path(settings.socket)
    if path is None:
        path = socket_path(settings.socket)
    run = DaemonRun(
        settings,
        path,
        manager,
        on_ready,
        is_private=is_private,
        second_socket=second_socket,
    )
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        stop_began_s, store = runner.run(run.serve(activated))
    log.info(
        "stopped",
        took=duration(time.monotonic() - stop_began_s),
        cache_dir=str(settings.cache_dir),
        shards=len(store.shards),
        used=size(store.space.used_bytes),
    )


@dataclass(frozen=True, slots=True)
class DaemonRun:
    """One run of the daemon.

    Its fields are the arguments of `serve`, the path of the socket and the service manager.
    """

    settings: Settings
    socket_path: Path
    manager: ServiceNotifier
    on_ready: Callable[[Store], None]
    is_private: bool
    second_socket: Path | None

    async def serve(self, activated: ActivatedSockets) -> tuple[float, Store]:
        """Serve until the daemon is to stop.

        An activated socket is used as it is. Before the daemon binds one, a previous daemon at the
        same path, which may still be stopping, has to end.

        Returns:
            The time of the stop signal by the monotonic clock, and the closed store.
        """
        settings = self.settings
        path = self.socket_path
        if activated.unix is None:
            await wait_for_predecessor(path, _STOP_LIMIT_S)

        log.info("starting", socket=str(path), handed_over=activated.unix is not None)
        make_collections_rare()
        sys.setswitchinterval(_SWITCH_S)
        with (
            listening_over_tcp(settings.http, settings.http_token_file, activated.tcp) as listener,
            listening_for_s3(settings.s3) as s3_sockets,
            listening_at(path, settings.group, activated.unix) as sock,
            contextlib.ExitStack() as stack,
        ):
            socks = [sock]
            if self.second_socket is not None:
                second = listening_at(self.second_socket, group=None)
                socks.append(stack.enter_context(second))
            s3 = S3Options(s3_sockets, settings.s3_key_life_s, settings.s3_stall_s)
            return await self._serve_at(socks, listener, s3)

    async def _serve_at(
        self,
        socks: Sequence[socket.socket],
        listener: TcpListener,
        s3: S3Options,
    ) -> tuple[float, Store]:
        """Open the store, and serve it at sockets that listen already. Returns as `serve` does."""
        with creating_long_lived_objects():
            store = await self.manager.keep_alive_during(
                "Scanning the cache folder.",
                self._open_store,
            )
        # The server closes after the store: until the cache folder is free, a new daemon must see
        # that this one is still stopping.
        async with contextlib.AsyncExitStack() as server_stack:
            with contextlib.closing(store):
                loop = asyncio.get_running_loop()
                loop.set_default_executor(ThreadPoolExecutor(_THREADS, "disk"))

                async def serve_cache(cache: Cache) -> Drain:
                    # The limits are computed for each connection: an operator may raise the limit
                    # of open files of a running daemon (prlimit).
                    limits = partial(Limits.of_unix_socket, self.settings)
                    server = serving(cache, socks, limits, listener, s3)
                    return await server_stack.enter_async_context(server)

                try:
                    stop_began_s = await self._run(store, serve_cache)
                finally:
                    # No thread may still write to the cache folder when the next daemon does.
                    await loop.shutdown_default_executor()
        return stop_began_s, store

    def _open_store(self) -> Store:
        """Scan the cache folder, and return its store. Blocks."""
        settings = self.settings
        return Store.open(settings.cache_dir, settings.capacity, settings.min_free, settings.group)

    async def _run(self, store: Store, serve_cache: Callable[[Cache], Awaitable[Drain]]) -> float:
        """Build the components, and serve until the daemon is to stop.

        Returns the time of the stop signal by the monotonic clock.

        Args:
            serve_cache: starts the server for a cache, and returns the server's drain.
        """
        settings = self.settings
        counters = Counters(bills=self._empty_bills())
        origins = Origins(
            settings.origin,
            max_connections=settings.max_connections,
            redirect_guard=AllowList(settings.allow),
            stall_timeout_s=settings.stall_timeout_s,
            is_private=self.is_private,
        )
        downloader = Downloader(settings, counters)
        indexers = Indexers(_INDEXERS)
        try:
            async with asyncio.TaskGroup() as group:
                cache = Cache(settings, store, origins, downloader, indexers, group)
                # The preparation starts before the first connection is handled. The reader that
                # started a private daemon has connected by now, and would otherwise wait for the
                # preparation in its first batch.
                tasks = await start_preparing(group, origins, indexers)
                drain = await serve_cache(cache)
                tasks.append(group.create_task(prepare_later(origins)))

                with stop_signals() as stop:
                    self._log_ready(store)
                    await self.manager.notify(READY=1)
                    self.on_ready(store)
                    tasks += self._start_watching(group, stop, cache, store, drain)
                    await stop.wait()

                stop_began_s = time.monotonic()
                await self._stop(tasks, drain)
                cache.stop()
        finally:
            await indexers.close()
            await origins.close()
        return stop_began_s

    def _empty_bills(self) -> Bills:
        """Return empty bills, which include costs if any origin has a price."""
        # The cost of 0 bytes and 0 requests is None if a table has no price.
        has_price = any(table.cost(0, 0) is not None for table in self.settings.origin)
        if has_price:
            return Bills(self._cost)
        return Bills()

    def _cost(self, url: str, size_bytes: int, requests: int) -> float | None:
        """Return the cost of bytes and requests from a url; None if its origin has no price."""
        return table_of(self.settings.origin, url).cost(size_bytes, requests)

    def _log_ready(self, store: Store) -> None:
        log.info(
            "ready",
            version=__version__,
            cache_dir=str(self.settings.cache_dir),
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

        def current_liveness() -> Liveness:
            return liveness(cache.health()["disk"], store, len(drain.sessions))

        tasks = [group.create_task(self.manager.watch(current_liveness), name="manager")]
        idle_exit_s = self.settings.idle_exit_s
        if idle_exit_s is not None:
            tasks.append(group.create_task(stop_when_idle(stop, drain, idle_exit_s)))
            tasks.append(group.create_task(stop_when_lost(stop, cache)))
            watching_socket = stop_when_unreachable(stop, cache, drain, self.socket_path)
            tasks.append(group.create_task(watching_socket))
        return tasks

    async def _stop(self, tasks: list[asyncio.Task[None]], drain: Drain) -> None:
        """End the tasks and the server's sessions and requests.

        If that takes longer than the hard limit, a timer ends the process by force.
        """
        log.info("stopping")
        end_by_force(after_s=_STOP_LIMIT_S)
        for task in tasks:
            task.cancel()
        needed_s = _STOP_LIMIT_S + _STOP_MARGIN_S
        await self.manager.ask_for_time(needed_s, STOPPING=1, STATUS="Stopping.")
        await drain.run()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory of event loops; None, for asyncio's own loop, without uvloop."""
    # uvloop is missing where it is not built for the system or this Python.
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop
    return None
