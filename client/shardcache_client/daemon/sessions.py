"""The sessions of one dataset in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from shardcache_client.daemon.connection import Reader
from shardcache_client.daemon.session import Patience, Session


class Sessions:
    """Lends a session to each iterator, and keeps one from epoch to epoch.

    What is kept still tells the daemon what the next epoch reads, so that it is worked on between epochs.
    """

    def __init__(self, socket: Path, patience: Patience, *, partial_reads: bool) -> None:
        self._socket = socket
        self._patience = patience
        self._partial_reads = partial_reads
        self._kept: list[Session] = []  # at most one

    @contextmanager
    def borrow(self, reader: Reader) -> Iterator[Session]:
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

    def _take(self, reader: Reader) -> Session:
        while self._kept:
            session = self._kept.pop()
            if session.reader == reader:
                return session
            session.close()  # this process forked off, or has become another rank
        return Session(self._socket, reader, self._patience, partial_reads=self._partial_reads)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Sessions, partial_reads=self._partial_reads), (self._socket, self._patience)
