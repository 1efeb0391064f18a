"""Round: the shards of one request, visited a few at a time, with events for progress.

A user's request to warm, pin or count a list of shards is one round. To warm a shard is to fetch it
before it is read; to pin it is to fetch it and keep it in the cache. To visit a shard is to fetch
or count it, as the request says. Events are the lines of JSON that the user's command gets.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.listings.shard_listing import name_of
from shardcache.fetch.download import Downloader
from shardcache.shared.exceptions import ShardcacheError
from shardcache.shared.protocol import ShardRef
from shardcache.shared.wording.redact import redact

Event = dict[str, Any]
"""A line of the response to a user's request."""

Send = Callable[[Event], Awaitable[None]]
"""Sends an event to the user; an exception from it aborts the request."""

_PROGRESS_S = 0.25  # interval between events of progress

# States of visited shards, by which a round counts them. Shards that need not be fetched have a
# third state, such as "cached": the `unfetched_state` of their round.
FETCHED = "fetched"
FAILED = "failed"


class ShardOutcome(NamedTuple):
    """Result of visiting one shard.

    Attributes:
        state: `FETCHED`, or the state of shards that need not be fetched.
        size_bytes: the shard's size at its origin, whether or not it was fetched.
        details: further fields of the shard's event.
    """

    state: str
    size_bytes: int
    details: Event


class Round:
    """The shards of one request, and the progress in visiting them.

    Attributes:
        total_bytes: the size of all shards at their origins, as far as it is known; None if it is
            not known of any.
    """

    def __init__(
        self,
        refs: Sequence[ShardRef],
        transfers: Transfers,
        send: Send,
        *,
        unfetched_state: str,
    ) -> None:
        """Begin without progress.

        Args:
            refs: the shards.
            transfers: all transfers in progress, which know how much of each shard has arrived.
            send: gets the events.
            unfetched_state: state of the shards that need not be fetched.
        """
        self._refs = refs
        self._transfers = transfers
        self._send = send
        # By state, the number of shards that were visited. The result has all states, even with 0.
        self._counts = Counter({FETCHED: 0, unfetched_state: 0, FAILED: 0})
        self._visiting: set[str] = set()  # names of the shards that are being visited
        # Sizes at the origins: of all shards that were visited without an error, and of those
        # among them that were fetched.
        self._done_bytes = 0
        self._fetched_bytes = 0
        sizes = [ref.size_bytes for ref in refs if ref.size_bytes is not None]
        self.total_bytes = sum(sizes) or None

    async def run(
        self, visit: Callable[[ShardRef], Awaitable[ShardOutcome]], at_once: int
    ) -> Event:
        """Visit every shard, `at_once` at a time, with an event for each.

        Return the totals, as fields of the request's last event: the number of all `shards`, the
        number of those in each state, by its name, and the `origin_bytes` that were fetched.

        Args:
            visit: does the work for a shard. A ShardcacheError from it is sent as an event.
            at_once: number of shards that are visited at the same time.
        """
        await self._send(
            {"event": "resolved", "shards": len(self._refs), "total_bytes": self.total_bytes},
        )
        async with asyncio.TaskGroup() as group:
            progress_task = group.create_task(self._send_progress())
            async with asyncio.TaskGroup() as workers:  # ends when all shards are visited
                todo = iter(self._refs)  # shared by all workers
                for _ in range(at_once):
                    workers.create_task(self._work(visit, todo))
            progress_task.cancel()
        await self._send(self._progress())
        return {
            "shards": len(self._refs),
            **self._counts,
            "origin_bytes": self._fetched_bytes,
        }

    async def _work(
        self,
        visit: Callable[[ShardRef], Awaitable[ShardOutcome]],
        todo: Iterator[ShardRef],
    ) -> None:
        """Visit shards, one after another, until none is left.

        Args:
            visit: does the work for a shard.
            todo: iterator over the shards, which all workers share.
        """
        for ref in todo:
            try:
                with self._visit_in_progress(name_of(ref)):
                    outcome = await visit(ref)
            except ShardcacheError as exn:
                self._counts[FAILED] += 1
                await self._send({"event": "error", "error": exn.to_json()})
            else:
                await self._report(ref, outcome)
            # The visit of a cached shard does not wait for anything, so a hundred thousand of them
            # would block the event loop.
            await asyncio.sleep(0)

    @contextmanager
    def _visit_in_progress(self, name: str) -> Iterator[None]:
        """Let events of progress include what has arrived of a shard, during the block."""
        self._visiting.add(name)
        try:
            yield
        finally:
            self._visiting.discard(name)

    async def _report(self, ref: ShardRef, outcome: ShardOutcome) -> None:
        """Count a shard that was visited, and send its event."""
        self._counts[outcome.state] += 1
        self._done_bytes += outcome.size_bytes
        if outcome.state == FETCHED:
            self._fetched_bytes += outcome.size_bytes
        event = {"event": "shard", "url": ref.url, "state": outcome.state}
        await self._send(event | outcome.details)

    async def _send_progress(self) -> None:
        """Send events of progress until cancelled."""
        while True:
            await asyncio.sleep(_PROGRESS_S)
            await self._send(self._progress())

    def _progress(self) -> Event:
        """Return an event with the progress so far, including shards that have arrived in part."""
        done_bytes = self._done_bytes
        for name in self._visiting:
            transfer = self._transfers.get(name)
            if transfer is not None:
                done_bytes += transfer.arrived_bytes
        return {
            "event": "progress",
            "done_shards": self._counts.total(),
            "shards": len(self._refs),
            "done_bytes": done_bytes,
            "total_bytes": self.total_bytes,
        }


@asynccontextmanager
async def reporting_retries(
    urls: Collection[str],
    downloader: Downloader,
    send: Send,
) -> AsyncIterator[None]:
    """Tell the user, during the block, about requests that have failed and will be repeated.

    If there are several at a time, only the one with the most attempts is reported.

    Args:
        urls: the urls that the requests are for.
        downloader: makes the requests, and repeats those that fail.
        send: gets the events.
    """
    task = asyncio.create_task(_report_retries(urls, downloader, send))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _report_retries(urls: Collection[str], downloader: Downloader, send: Send) -> None:
    """Send events about failed attempts, as `reporting_retries` describes, until cancelled."""
    last_sent = None
    while True:
        await asyncio.sleep(_PROGRESS_S)
        failing = [(attempt, url) for url, attempt in downloader.failing.items() if url in urls]
        if not failing:
            continue
        # Attempts compare by their number first, so this is the request with the most attempts.
        attempt, url = max(failing)
        # Until another attempt fails, there is nothing new to report. A failure of another request
        # with the same number and cause is not news either.
        if attempt != last_sent:
            last_sent = attempt
            await send({"event": "retrying", "url": redact(url), "message": str(attempt)})
