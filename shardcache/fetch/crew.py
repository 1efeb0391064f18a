"""How many of a shard's parts are on their way at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator


class Crew:
    """Workers that take one part after the other: a few at first, and one more for each part that arrives."""

    def __init__(self, most: int, parts: Iterator[int], fetch: Callable[[int], Awaitable[None]]) -> None:
        self._most = most
        self._parts = parts
        self._fetch = fetch
        self._count = 0

    async def run(self, first: int) -> None:
        """Fetch every part. Raises what fetching them raises, as a group."""
        async with asyncio.TaskGroup() as group:
            for _ in range(first):
                self._hire(group)

    def _hire(self, group: asyncio.TaskGroup) -> None:
        if self._count < self._most:
            self._count += 1
            group.create_task(self._work(group))

    async def _work(self, group: asyncio.TaskGroup) -> None:
        for index in self._parts:
            await self._fetch(index)
            self._hire(group)
