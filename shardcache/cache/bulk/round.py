"""Work through the shards of one request, a few at a time, with events for progress.

A user's request to warm, pin or count a list of shards is one round. Its events are the lines of
JSON that the user's command gets. To visit a shard means to fetch or count it, as the request says.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.listings.shard_listing import name_of
from shardcache.errors import ShardcacheError
from shardcache.fetch.download import Downloader
from shardcache.redact import redact
from shardcache.shared.protocol import ShardRef

Event = dict[str, Any]
"""A line of the response to a user's request."""

Send = Callable[[Event], Awaitable[None]]
"""Sends an event to the user; an exception from it aborts the request."""

_PROGRESS_S = 0.25  # interval between events of progress

# Counters that every round has. A third counter, whose name the request chooses, counts the shards
# that need not be fetched.
FETCHED = "fetched"
FAILED = "failed"


class ShardOutcome(NamedTuple):
    """Result of visiting one shard.

    Attributes:
        state: name of the counter that the shard adds to.
        origin_bytes: the shard's size at the origin, whether or not it was fetched.
        details: further fields of the shard's event.
    """

    state: str
    origin_bytes: int
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
            transfers: all transfers in progress, which tell how much of each shard has arrived.
            send: gets the events.
            unfetched_state: name of the counter of shards that need not be fetched.
        """
        self._refs = refs
        self._transfers = transfers
        self._send = send
        self._counts = Counter(dict.fromkeys((FETCHED, unfetched_state, FAILED), 0))
        self._visiting: set[str] = set()  # names of the shards that are visited now
        self._done_bytes = 0  # size of the visited shards at their origins
        self._fetched_bytes = 0  # size of those among them that were fetched
        sizes = [ref.size_bytes for ref in refs if ref.size_bytes is not None]
        self.total_bytes = sum(sizes) or None

    async def run(
        self, visit: Callable[[ShardRef], Awaitable[ShardOutcome]], at_once: int
    ) -> Event:
        """Visit every shard, `at_once` at a time, with an event for each; return the totals.

        Args:
            visit: does the work for a shard. A ShardcacheError from it is sent as an event.
            at_once: number of shards that are visited at the same time.
        """
        await self._send(
            {"event": "resolved", "shards": len(self._refs), "total_bytes": self.total_bytes},
        )
        async with asyncio.TaskGroup() as group:
            progress_task = group.create_task(self._send_progress())
            async with asyncio.TaskGroup() as workers:
                todo = iter(self._refs)  # shared by all workers
                for _ in range(at_once):
                    workers.create_task(self._work(visit, todo))
            progress_task.cancel()
        await self._send(self._progress())
        return {
            "shards": len(self._refs),
            **self._counts,
            # Only what came from the origins, unlike the `origin_bytes` of a `ShardOutcome`.
            "origin_bytes": self._fetched_bytes,
        }

    async def _work(
        self,
        visit: Callable[[ShardRef], Awaitable[ShardOutcome]],
        todo: Iterator[ShardRef],
    ) -> None:
        """Visit shards, one after another, until the workers together have visited all.

        Args:
            visit: does the work for a shard.
            todo: iterator over the shards, which all workers share.
        """
        for ref in todo:
            name = name_of(ref)
            self._visiting.add(name)
            try:
                outcome = await visit(ref)
            except ShardcacheError as exn:
                self._counts[FAILED] += 1
                await self._send({"event": "error", "error": exn.to_json()})
            else:
                await self._report(ref, outcome)
            finally:
                self._visiting.discard(name)
            # Cached shards take no waiting, so a hundred thousand of them would block the event
            # loop.
            await asyncio.sleep(0)

    async def _report(self, ref: ShardRef, outcome: ShardOutcome) -> None:
        """Count a shard that was visited, and send its event."""
        self._counts[outcome.state] += 1
        self._done_bytes += outcome.origin_bytes
        if outcome.state == FETCHED:
            self._fetched_bytes += outcome.origin_bytes
        event = {"event": "shard", "url": ref.url, "state": outcome.state}
        await self._send(event | outcome.details)

    async def _send_progress(self) -> None:
        """Send events of progress until cancelled."""
        while True:
            await asyncio.sleep(_PROGRESS_S)
            await self._send(self._progress())

    def _progress(self) -> Event:
        """Return an event with the present progress, including shards that have arrived in part."""
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
async def reporting(
    urls: Collection[str],
    downloader: Downloader,
    send: Send,
) -> AsyncIterator[None]:
    """Report, during the block, requests that fail and are repeated.

    While several requests fail, only the one with the most attempts is reported.

    Args:
        urls: the urls that the requests are for.
        downloader: makes the requests, and repeats those that fail.
        send: gets the events.
    """
    watching = asyncio.create_task(_report_failures(urls, downloader, send))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _report_failures(urls: Collection[str], downloader: Downloader, send: Send) -> None:
    """Send an event whenever the failed attempt to report has changed; see `reporting`."""
    last_sent = None
    while True:
        await asyncio.sleep(_PROGRESS_S)
        failing = [(attempt, url) for url, attempt in downloader.failing.items() if url in urls]
        if not failing:
            continue
        # Failed attempts compare by their numbers first: the 3rd attempt is greater than the 2nd.
        attempt, url = max(failing)
        # The attempt stays the same until the request has failed once more.
        if attempt != last_sent:
            last_sent = attempt
            await send({"event": "retrying", "url": redact(url), "message": str(attempt)})
