"""Direct reads without the daemon, for blocking code: runs requests on the event loop of this process."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any, ParamSpec, TypeVar

from shardcache.config import Settings
from shardcache.direct.fetching import DirectFetcher, Held, Wish
from shardcache.direct.loop import LoopThread, loop_here
from shardcache.direct.scratch import Scratch
from shardcache.errors import OriginUnavailableError
from shardcache.protocol import Leased, ShardRef

P = ParamSpec("P")
T = TypeVar("T")

_STOP_LIMIT_S = 5.0


class Direct:
    """Reads from origins with this process's rights, and with the options that `shardcache serve` would find here.

    Usable only in the process that made it: in a forked child it is closed. The constructor raises what `check_options`
    raises.
    """

    def __init__(self) -> None:
        settings = Settings.load({})
        self._fetcher = DirectFetcher(settings, Scratch(settings.min_free))
        self._thread = loop_here()
        self._tasks = _Tasks()
        self._end = weakref.finalize(self, _end, self._thread, self._fetcher, self._tasks, os.getpid())

    def __repr__(self) -> str:
        return f"Direct({self._fetcher!r}, closed={not self._end.alive})"

    @staticmethod
    def check_options() -> None:
        """Raise ConfigError if an option in the environment or in the config file is invalid."""
        Settings.load({})

    def resolve(self, urls: Sequence[str], timeout_s: float) -> list[ShardRef]:
        """Return the shards that urls, patterns and prefixes expand to.

        Raises NotFoundError and the origin's other errors; OriginUnavailableError if it does not answer in time.
        """
        future = self._thread.run(self._tasks.run, self._fetcher.resolve, urls)
        wait([future], timeout_s)
        if not future.done():
            future.cancel()
            raise OriginUnavailableError(f"the origin did not list its shards within {timeout_s:g} s")
        return future.result()

    def fetch(self, ref: ShardRef) -> Fetch:
        """Start fetching a shard."""
        wish = Wish(ref)
        return Fetch(self._thread.run(self._tasks.run, self._fetcher.fetch, wish), wish, self._reconsider)

    def _reconsider(self) -> None:
        self._thread.loop.call_soon_threadsafe(self._fetcher.reconsider)

    def close(self) -> None:
        """Cancel unfinished fetches and close the connections. Fetched shards stay as long as they are referenced."""
        self._end()


class Fetch:
    """A shard that is being or has been fetched; its disk space is freed once nothing references it."""

    def __init__(self, future: Future[Held], wish: Wish, reconsider: Callable[[], None]) -> None:
        self._future = future
        self._wish = wish
        self._reconsider = reconsider

    def __repr__(self) -> str:
        return f"Fetch({self._wish.ref.url!r}, done={self._future.done()})"

    def need(self) -> None:
        """Give it priority over shards fetched ahead: the reader has reached it."""
        self._wish.needed = True
        self._reconsider()

    def wait(self, timeout_s: float) -> Leased | None:
        """Return its paths, valid only in this process; None if it is not fetched in time.

        Raises every error of the origin and the shard; DiskFullError and CacheDirError of the scratch folder.
        """
        wait([self._future], timeout_s)
        return self._future.result().leased if self._future.done() else None

    def explain(self) -> str:
        """Return the current step, with its progress."""
        wish = self._wish
        done = f" ({wish.done_bytes / 1e6:.0f} of {wish.total_bytes / 1e6:.0f} MB)" if wish.total_bytes else ""
        return f"{wish.doing}{done}"

    def cancel(self) -> None:
        """Cancel the fetch if it is unfinished."""
        self._future.cancel()


class _Tasks:
    """Tasks of one `Direct` on the shared loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a coroutine function until it returns, or until `cancel`."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await function(*args, **kwargs)
        finally:
            self._running.discard(task)

    async def cancel(self) -> None:
        """Cancel the tasks and wait for their ends."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _close(fetcher: DirectFetcher, tasks: _Tasks) -> None:
    await tasks.cancel()  # returns their connections before those are closed
    await fetcher.close()


def _end(thread: LoopThread, fetcher: DirectFetcher, tasks: _Tasks, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child has no such thread, and must not touch its loop
    closed = thread.run(_close, fetcher, tasks)
    if not thread.is_current():  # the garbage collector may run this on the loop
        wait([closed], _STOP_LIMIT_S)
