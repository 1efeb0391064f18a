"""Pool of processes that index shards, started on first use, replaced when one dies or hangs.

Not a `ProcessPoolExecutor`: its running calls cannot be cancelled; a hung one looks like a busy
one; a process that is killed breaks the whole pool with all of its calls; and if the daemon is
killed, its processes continue to write.
"""

import asyncio
import json
import os
from dataclasses import asdict
from typing import Any

import structlog

from shardcache.errors import CacheError, from_json
from shardcache.shared.credentials.store_variables import reaches_stores
from shardcache.store.indexing import indexer
from shardcache.store.indexing.helper_process import SILENCE_S, HelperProcess
from shardcache.store.indexing.indexer import Indexed, IndexRequest, TokensRequest

log = structlog.get_logger()

_MAX_TRIES = 2  # of a request


class Indexers:
    """Pool of up to `processes` indexers. One that is silent for `silence_s` is killed."""

    def __init__(self, processes: int, *, silence_s: float = SILENCE_S) -> None:
        self._slots = asyncio.Semaphore(processes)
        self._silence_s = silence_s
        self._idle: list[HelperProcess] = []

    async def index(self, request: IndexRequest) -> Indexed:
        """Run `index_shard` in a process.

        Raises its error, or CacheError if the process dies or hangs twice.
        """
        fields = await self._run(request)
        return Indexed(**fields)

    async def count_tokens(self, request: TokensRequest) -> int:
        """Run `count_tokens` in a process, as `index` does with `index_shard`."""
        fields = await self._run(request)
        tokens: int = fields["tokens"]
        return tokens

    async def _run(self, request: IndexRequest | TokensRequest) -> dict[str, Any]:
        async with self._slots:
            process = await self._idle_or_new(request.url)
            for tries in range(1, _MAX_TRIES + 1):
                try:
                    answer = await process.ask(asdict(request))
                except BaseException:
                    # Cancelled: the pending answer would be taken for that of the next request.
                    await process.end()
                    raise
                if answer:
                    self._idle.append(process)
                    return _fields_of(answer)
                await process.end()
                log.warning("indexing process killed", url=request.url)
                if tries < _MAX_TRIES:
                    # Not an idle one: what killed or froze this one may have happened to them, too.
                    process = await self._start(request.url)
        raise CacheError(
            "the indexing process was killed, or did not respond, twice",
            url=request.url,
            remedy="see in dmesg whether the kernel's OOM killer ended it",
        )

    async def _idle_or_new(self, url: str) -> HelperProcess:
        """Return an idle process that is still running, or a new one."""
        while self._idle:
            process = self._idle.pop()
            if process.runs:
                return process
            await process.end()
            log.warning("idle indexing process killed")
        return await self._start(url)

    async def _start(self, url: str | None = None) -> HelperProcess:
        # Without credentials: it parses files whose contents may come from anybody.
        env = {name: value for name, value in os.environ.items() if not reaches_stores(name)}
        return await HelperProcess.start(indexer.__name__, url, silence_s=self._silence_s, env=env)

    async def prepare(self) -> None:
        """Start one process before the first shard needs it. Raises CacheError."""
        self._idle.append(await self._start())

    async def close(self) -> None:
        """Kill the idle processes; a busy one is killed with the task that waits for it."""
        while self._idle:
            await self._idle.pop().end()


def _fields_of(answer: bytes) -> dict[str, Any]:
    """Return the fields of a process's answer. Raises the error that it holds instead."""
    fields: dict[str, Any] = json.loads(answer)
    if "error" in fields:
        raise from_json(fields["error"])
    return fields
