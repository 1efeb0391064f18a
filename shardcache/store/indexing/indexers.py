"""Pool of processes that index shards: started on first use, and replaced when they die or hang.

The daemon indexes a shard once it has arrived, with `Indexers.index`. A `ProcessPoolExecutor` would
not do, for four reasons: its running calls cannot be cancelled; a hung process looks like a busy
one; a process that is killed breaks the whole pool and all of its calls; and its processes continue
to write after the daemon was killed. `indexer` is the program that the processes run.
"""

import asyncio
import json
import os
from dataclasses import asdict
from typing import Any

import structlog

from shardcache.shared.credentials.store_variables import reaches_stores
from shardcache.shared.exceptions import CacheError, from_json
from shardcache.store.indexing import indexer
from shardcache.store.indexing.helper_process import SILENCE_S, HelperProcess
from shardcache.store.indexing.indexer import IndexOutcome, IndexRequest, TokensRequest

log = structlog.get_logger()

_MAX_TRIES = 2  # maximum number of processes that are sent the same request, one after another


class Indexers:
    """Pool of indexing processes.

    Args:
        processes: maximum number of processes.
        silence_s: time after which a process that is silent counts as hung and is killed.
    """

    def __init__(self, processes: int, *, silence_s: float = SILENCE_S) -> None:
        self._slots = asyncio.Semaphore(processes)
        self._silence_s = silence_s
        self._idle: list[HelperProcess] = []

    async def index(self, request: IndexRequest) -> IndexOutcome:
        """Index a shard in a process, by `indexer.index_shard`.

        Raises the errors of `index_shard`, and CacheError if `_MAX_TRIES` processes in a row die or
        hang.
        """
        fields = await self._run(request)
        return IndexOutcome(**fields)

    async def count_tokens(self, request: TokensRequest) -> int:
        """Count the tokens of a shard in a process, by `indexer.count_tokens`.

        Raises the errors of `count_tokens`, and CacheError as `index` does.
        """
        fields = await self._run(request)
        tokens: int = fields["tokens"]
        return tokens

    async def _run(self, request: IndexRequest | TokensRequest) -> dict[str, Any]:
        """Return the fields of the answer to a request; raise the error that the answer reports."""
        fields = asdict(request)  # the process tells the kinds of requests apart by their fields
        async with self._slots:
            process = await self._idle_or_new(request.url)
            for attempt in range(1, _MAX_TRIES + 1):
                try:
                    answer = await process.ask(fields)
                except BaseException:
                    # Most likely, this task was cancelled. The process is killed because its
                    # pending answer would be taken for the answer to the next request.
                    await process.end()
                    raise
                if answer:
                    self._idle.append(process)
                    return _fields_of(answer)
                # The process died or hangs.
                await process.end()
                log.warning("indexing process died or was killed", url=request.url)
                if attempt < _MAX_TRIES:
                    # The next attempt gets a new process: what killed or froze this one may have
                    # affected the idle processes, too.
                    process = await self._start(request.url)
        raise CacheError(
            f"the indexing process died or did not respond, {_MAX_TRIES} times",
            url=request.url,
            remedy="see in dmesg whether the kernel's OOM killer ended it",
        )

    async def _idle_or_new(self, url: str) -> HelperProcess:
        """Return an idle process that is still running, or a new one."""
        while self._idle:
            process = self._idle.pop()
            if process.is_running:
                return process
            await process.end()
            log.warning("idle indexing process died")
        return await self._start(url)

    async def _start(self, url: str | None = None) -> HelperProcess:
        """Start a process; `url` is the shard that needs it, for errors."""
        # The process gets no variables by which it could reach object stores: it parses files whose
        # contents may come from anybody.
        env = {
            variable: value
            for variable, value in os.environ.items()
            if not reaches_stores(variable)
        }
        return await HelperProcess.start(indexer.__name__, url, silence_s=self._silence_s, env=env)

    async def prepare(self) -> None:
        """Start one process before the first shard needs it. Raises CacheError."""
        self._idle.append(await self._start())

    async def close(self) -> None:
        """Kill the idle processes.

        A busy process is killed when the task that waits for its answer is cancelled.
        """
        while self._idle:
            await self._idle.pop().end()


def _fields_of(answer: bytes) -> dict[str, Any]:
    """Return the fields of a process's answer, or raise the error that the answer reports."""
    fields: dict[str, Any] = json.loads(answer)
    if "error" in fields:
        raise from_json(fields["error"])
    return fields
