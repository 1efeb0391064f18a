"""What is worth remembering but may be lost: sample counts, listings, versions, in one diskcache.

Counts outlive their shard's eviction. Everything here can be deleted: counts of cached shards come back from
their sidecars, the rest from the store.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import diskcache
import structlog

log = structlog.get_logger()
_MODE_PICKLE = diskcache.core.MODE_PICKLE
_SELECT = "SELECT key, mode, filename, value FROM Cache WHERE key IN (SELECT value FROM json_each(?))"


class PicklelessDisk(diskcache.JSONDisk):  # type: ignore[misc]
    """JSONDisk that refuses rows which ask to be unpickled, whoever wrote them into the database."""

    def fetch(self, mode: int, filename: str | None, value: object, read: bool) -> Any:
        """Return the JSON value of a row."""
        if mode == _MODE_PICKLE:
            raise pickle.UnpicklingError("the catalogue holds JSON only")
        return super().fetch(mode, filename, value, read)

    def put(self, key: object) -> tuple[str, bool]:
        """Return a key as it stands in a row: JSON too short to be worth compressing."""
        return json.dumps(key), True

    def get(self, key: str, raw: bool) -> Any:
        """Return the JSON key of a row."""
        if not raw:
            raise pickle.UnpicklingError("the catalogue holds JSON only")
        return json.loads(key)


class Catalogue:
    """Rows under (kind, …) keys. SQLite never sees the event loop: one thread reads and writes."""

    def __init__(self, cache: diskcache.Cache) -> None:
        self._cache = cache
        self._thread = ThreadPoolExecutor(1, "catalogue")

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the catalogue, anew where it cannot be read. Blocks."""
        try:
            return cls(cls._connect(folder))
        except (sqlite3.DatabaseError, diskcache.Timeout, ValueError, OSError) as exn:
            log.warning("catalogue was unreadable and is made anew", folder=str(folder), cause=str(exn))
        aside = folder.with_name(f"{folder.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        return cls(cls._connect(folder))

    @staticmethod
    def _connect(folder: Path) -> diskcache.Cache:
        cache = diskcache.Cache(str(folder), disk=PicklelessDisk, eviction_policy="none", cull_limit=0, tag_index=False)
        cache.get(["probe"])  # a damaged database shows at the first read, not when it is opened
        cache.close()  # this thread's connection; each thread has its own
        return cache

    async def get(self, *key: str) -> Any:
        """Return the row's value, or None."""
        return await self._in_thread(lambda: self._cache.get(list(key)))

    async def put(self, value: object, *key: str) -> None:
        """Write a row of JSON."""
        await self._in_thread(lambda: self._cache.set(list(key), value))

    async def get_many(self, keys: Sequence[Sequence[str]]) -> list[Any]:
        """Return the values of many rows, None for those that are not there."""
        rows: list[Any] | None = await self._in_thread(lambda: self._select([json.dumps(list(key)) for key in keys]))
        return rows or [None] * len(keys)

    def _select(self, keys: list[str]) -> list[Any]:
        # diskcache itself gets one row at a time: for a manifest of 100,000 shards that takes four times as long.
        rows = self._cache._sql(_SELECT, [json.dumps(keys)])
        found = {key: self._cache.disk.fetch(mode, filename, value, False) for key, mode, filename, value in rows}
        return [found.get(key) for key in keys]

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        def guarded() -> Any:
            try:
                return call()
            except (sqlite3.DatabaseError, diskcache.Timeout, pickle.UnpicklingError, ValueError, OSError) as exn:
                # Losing a row costs a listing; failing a reader for it would cost a training run.
                log.warning("catalogue row lost", cause=str(exn))
                return None

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    def close(self) -> None:
        """Close the database, after what is under way. Blocks."""
        self._thread.submit(self._cache.close)
        self._thread.shutdown()
