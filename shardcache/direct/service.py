"""The way past the daemon, for code that blocks: requests to the event loop of this process, and what they fetch."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any, ParamSpec, TypeVar

from shardcache.config import Settings
from shardcache.direct.fetching import Fetcher, Held, Wish
from shardcache.direct.loop import LoopThread, loop_here
from shardcache.direct.scratch import Scratch
from shardcache.errors import OriginUnavailableError
from shardcache.protocol import Leased, ShardRef

P = ParamSpec("P")
T = TypeVar("T")

_STOP_LIMIT_S = 5.0


class Direct:
    """Reads from the stores with the rights of this process; options as `shardcache serve` would find them here.

    Belongs to the process that made it: to a forked child it is as good as closed. Making one raises what
    `check_options` does.
    """

    def __init__(self) -> None:
        settings = Settings.load({})
        self._fetcher = Fetcher(settings, Scratch(settings.min_free))
        self._thread = loop_here()
        self._tasks = _Tasks()
        self._end = weakref.finalize(self, _end, self._thread, self._fetcher, self._tasks, os.getpid())

    def __repr__(self) -> str:
        return f"Direct({self._fetcher!r}, closed={not self._end.alive})"

    @staticmethod
    def check_options() -> None:
        """Raise ConfigError when an option in the environment or in the config file makes no sense."""
        Settings.load({})

    def resolve(self, urls: Sequence[str], timeout_s: float) -> list[ShardRef]:
        """Return the shards that urls, patterns and prefixes stand for.

        Raises NotFoundError and whatever else the store has to say about them; OriginUnavailableError when it says
        nothing in time.
        """
        future = self._thread.run(self._tasks.run, self._fetcher.resolve, urls)
        wait([future], timeout_s)
        if not future.done():
            future.cancel()
            raise OriginUnavailableError(f"the store did not say within {timeout_s:g} s which shards there are")
        return future.result()

    def fetch(self, ref: ShardRef) -> Fetch:
        """Begin to fetch a shard."""
        wish = Wish(ref)
        return Fetch(self._thread.run(self._tasks.run, self._fetcher.fetch, wish), wish, self._reconsider)

    def _reconsider(self) -> None:
        self._thread.loop.call_soon_threadsafe(self._fetcher.reconsider)

    def close(self) -> None:
        """End what is still being fetched, and the connections. What was fetched stays as long as it is held."""
        self._end()


class Fetch:
    """A shard on its way, or here: what it takes on the disk goes when nobody refers to it any more."""

    def __init__(self, future: Future[Held], wish: Wish, reconsider: Callable[[], None]) -> None:
        self._future = future
        self._wish = wish
        self._reconsider = reconsider

    def __repr__(self) -> str:
        return f"Fetch({self._wish.ref.url!r}, done={self._future.done()})"

    def need(self) -> None:
        """Let it go before what is fetched ahead: the reader has come to it."""
        self._wish.needed = True
        self._reconsider()

    def wait(self, timeout_s: float) -> Leased | None:
        """Return where it lies, for this process alone; None while it is not there.

        Raises every error of the origin and the shard; DiskFullError and CacheDirError of the scratch folder.
        """
        wait([self._future], timeout_s)
        return self._future.result().leased if self._future.done() else None

    def explain(self) -> str:
        """Return what it waits for."""
        wish = self._wish
        done = f" ({wish.done_bytes / 1e6:.0f} of {wish.total_bytes / 1e6:.0f} MB)" if wish.total_bytes else ""
        return f"{wish.doing}{done}"

    def cancel(self) -> None:
        """Let it be, if it is still on its way."""
        self._future.cancel()


class _Tasks:
    """The tasks of one `Direct` on the loop that all of them share."""

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
        """Cancel the tasks, and wait for their ends."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _close(fetcher: Fetcher, tasks: _Tasks) -> None:
    await tasks.cancel()  # their connections go back before these are closed
    await fetcher.close()


def _end(thread: LoopThread, fetcher: Fetcher, tasks: _Tasks, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child has neither the thread nor a say in its loop
    closed = thread.run(_close, fetcher, tasks)
    if not thread.is_current():  # where the collector finds it
        wait([closed], _STOP_LIMIT_S)
