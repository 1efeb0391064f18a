"""Part workers of one download: the number of its requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

# A first part that takes longer shares the link with others, or is not arriving at all.
_PATIENCE_S = 0.25


class PartWorkers(Generic[T]):
    """Workers that make one request after another: a few at first, one more for each answer, and twice as many whenever
    `patience_s` has passed.

    Args:
        most: maximum number of workers.
        requests: the parts to fetch, by request.
        fetch: makes a request.
    """

    def __init__(
        self, most: int, requests: Iterator[T], fetch: Callable[[T], Awaitable[None]], patience_s: float = _PATIENCE_S
    ) -> None:
        self._most = most
        self._requests = requests
        self._fetch = fetch
        self._patience_s = patience_s
        self._count = 0
        self._waiting: asyncio.Task[None] | None = None

    async def run(self, first: int) -> None:
        """Fetch every part, starting with `first` workers. Raises what `fetch` raises, as a group."""
        async with asyncio.TaskGroup() as group:
            if first < self._most:
                self._waiting = group.create_task(self._lose_patience(group))
            for _ in range(first):
                self._hire(group)

    async def _lose_patience(self, group: asyncio.TaskGroup) -> None:
        while self._count < self._most:
            await asyncio.sleep(self._patience_s)
            for _ in range(self._count):
                self._hire(group)

    def _hire(self, group: asyncio.TaskGroup) -> None:
        if self._count < self._most:
            self._count += 1
            group.create_task(self._work(group))

    async def _work(self, group: asyncio.TaskGroup) -> None:
        for request in self._requests:
            await self._fetch(request)
            self._hire(group)
        if self._waiting is not None:
            self._waiting.cancel()
