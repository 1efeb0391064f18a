"""The sessions of one dataset in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from shardcache_client.daemon import connection
from shardcache_client.daemon.connection import Reader
from shardcache_client.daemon.direct import load
from shardcache_client.daemon.fallback import FallbackSession, resolve_past
from shardcache_client.daemon.lender import Lender
from shardcache_client.daemon.session import Patience, Session
from shardcache_client.order.manifest import Manifest

Fallback: TypeAlias = Literal["error", "direct"]


class Sessions:
    """Lends a session to each iterator, and keeps one from epoch to epoch.

    What is kept still tells the daemon what the next epoch reads, so that it is worked on between epochs.
    """

    def __init__(self, socket: Path, patience: Patience, *, partial_reads: bool, fallback: Fallback = "error") -> None:
        self._socket = socket
        self._patience = patience
        self._partial_reads = partial_reads
        self._fallback: Fallback = fallback
        self._kept: list[Lender] = []  # at most one

    @contextmanager
    def borrow(self, reader: Reader) -> Iterator[Lender]:
        """Lend a session to an iterator. One that does not reach its end has no plan any more: it is closed."""
        session = self._take(reader)
        try:
            yield session
        except BaseException:
            session.close()
            raise
        if self._kept:
            session.close()
        else:
            self._kept.append(session)

    def _take(self, reader: Reader) -> Lender:
        while self._kept:
            session = self._kept.pop()
            if session.reader == reader:
                return session
            session.close()  # this process forked off, or has become another rank
        kind = FallbackSession if self._fallback == "direct" else Session
        return kind(self._socket, reader, self._patience, partial_reads=self._partial_reads)

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(Sessions, partial_reads=self._partial_reads, fallback=self._fallback)
        return make, (self._socket, self._patience)


def resolver(fallback: Fallback) -> Callable[[Path, Reader, Sequence[str], float], Manifest]:
    """Return what finds out which shards urls stand for, as `connection.resolve` does.

    Raises ConfigError when the packages are not installed that the fallback needs.
    """
    if fallback == "error":
        return connection.resolve
    load()  # now, and not in the night when the daemon goes away
    return resolve_past
