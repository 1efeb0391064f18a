"""Indexing in processes of their own: walking a tar of small members would hold the event loop's interpreter."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar, TypeVarTuple

import structlog

from shardcache.errors import CacheError

log = structlog.get_logger()

T = TypeVar("T")
Args = TypeVarTuple("Args")

_PR_SET_PDEATHSIG = 1
_TRIES = 2


class Indexers:
    """A small pool of processes, made at first use and made anew when one of them dies."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None

    async def run(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Return what the function returns in another process; raise what it raises.

        Raises CacheError when its process is killed again and again, as the kernel does when memory is short.
        """
        for _ in range(_TRIES):
            pool = self._pool = self._pool or self._make()
            try:
                return await asyncio.get_running_loop().run_in_executor(pool, function, *args)
            except BrokenProcessPool:
                log.warning("an indexing process was killed")
                self.close()
        raise CacheError("indexing was killed twice", remedy="look for the out-of-memory killer in dmesg")

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _make(self) -> ProcessPoolExecutor:
        # Forking a process that has threads is not safe; these import nothing but the index.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._processes, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    # Ctrl-C goes to the whole terminal; the parent decides. A parent that is killed takes its pool along.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
