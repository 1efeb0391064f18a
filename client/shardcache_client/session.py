"""A reader's standing with the daemon: its plan and its leases, kept over a restart of the daemon."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from shardcache.errors import DaemonError, NoDaemonError, ShardcacheError, ShardTimeoutError
from shardcache.protocol import Leased
from shardcache_client.connection import Connection, Reader
from shardcache_client.order import Plan

log = logging.getLogger("shardcache")

T = TypeVar("T")

# A daemon that does not answer at once why a shard is late is late itself.
_EXPLAIN_TIMEOUT_S = 5.0
# A restart takes the daemon some two seconds: short enough to go on soon, long enough to be no load.
_RECONNECT_PAUSE_S = 0.25
# How often one who waits looks up to see whether anybody still wants what is waited for.
_LOOK_UP_S = 5.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for one shard, or for a daemon to come back; and when to say in the log that one waits."""

    limit_s: float = 300.0
    first_report_s: float = 10.0
    next_report_s: float = 60.0


@dataclass(slots=True, eq=False)
class Lease:
    """A shard that was asked for.

    Attributes:
        position: in the plan.
        request: the id of the request, on the present connection.
        granted: what the daemon calls the lease, once it is granted.
    """

    position: int
    request: int = 0
    granted: int = 0


class Session:
    """What one reader has asked of the daemon, asked again of the next daemon when the connection breaks.

    Every method that needs an answer raises NoDaemonError when no daemon gives one within its patience, and DaemonError
    when this user may not ask or the daemon speaks another protocol.
    """

    def __init__(self, socket: Path, reader: Reader, patience: Patience) -> None:
        self.reader = reader
        self._socket = socket
        self._patience = patience
        self._connection: Connection | None = None
        self._plan: Plan | None = None
        self._declared: Plan | None = None  # the plan that the present connection knows
        self._start = 0  # the position that the daemon calls 0: a plan declared again begins where we are
        self._leases: list[Lease] = []

    def __repr__(self) -> str:
        return f"Session({self.reader!r}, leases={len(self._leases)}, {self._connection!r})"

    def declare(self, plan: Plan) -> None:
        """Tell the daemon what will be read. Every lease of an earlier plan must be over."""
        self._plan = plan
        self._insist(time.monotonic() + self._patience.limit_s, lambda connection: None)

    def lease(self, position: int) -> Lease:
        """Ask for the shard at a position of the plan, without waiting for it."""
        lease = Lease(position)
        self._leases.append(lease)
        self._try(lambda connection: self._ask(connection, lease))
        return lease

    def wait(self, lease: Lease) -> Leased:
        """Return where the shard lies, once it is there.

        While it is not, a line in the log says so and why. Raises ShardTimeoutError when patience ends, and the
        error that the daemon met when it fetched the shard; the lease is then over.
        """
        try:
            leased = self._wait(lease)
        except ShardTimeoutError:
            self._leases.remove(lease)
            self._lose()  # a lease that is still to come cannot be declined; a new connection asks for the others
            raise
        except ShardcacheError:
            self._leases.remove(lease)
            raise
        lease.granted = leased["lease"]
        return leased

    def _wait(self, lease: Lease) -> Leased:
        start_s = time.monotonic()
        deadline_s, report_s = start_s + self._patience.limit_s, start_s + self._patience.first_report_s
        while True:
            until_s = min(report_s, deadline_s, time.monotonic() + _LOOK_UP_S)
            answer = self._insist(deadline_s, partial(_answer, lease=lease, until_s=until_s))
            if answer is not None:
                return cast(Leased, answer)
            _check_parent()
            if time.monotonic() < min(report_s, deadline_s):
                continue
            reason = self._insist(deadline_s, partial(_explain, lease=lease))
            if time.monotonic() >= deadline_s:
                raise self._timeout(lease, reason)
            log.warning("waiting for %s since %.0f s: %s", self._url(lease), time.monotonic() - start_s, reason)
            report_s = time.monotonic() + self._patience.next_report_s

    def release(self, lease: Lease) -> None:
        """Give a shard back that `wait` returned."""
        self._leases.remove(lease)
        self._try(lambda connection: connection.tell("release", lease=lease.granted))

    def close(self) -> None:
        """End the session; the daemon drops its plan and its leases."""
        self._plan = None
        self._leases.clear()
        self._lose()

    def _lose(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _timeout(self, lease: Lease, reason: str) -> ShardTimeoutError:
        return ShardTimeoutError(
            f"did not come within {self._patience.limit_s:g} s: {reason}",
            url=self._url(lease),
            remedy="mend that cause (`shardcache status` shows the transfers), or raise ShardDataset's timeout_s",
        )

    def _url(self, lease: Lease) -> str:
        assert self._plan is not None
        return self._plan.shard(lease.position).url

    def _try(self, say: Callable[[Connection], object]) -> None:
        """Say something that `_ready` would make up for if the connection is broken."""
        if self._connection is not None:
            try:
                say(self._connection)
            except NoDaemonError:
                self._lose()

    def _insist(self, deadline_s: float, ask: Callable[[Connection], T]) -> T:
        """Ask until there is a daemon that answers; raise NoDaemonError when there is none at the deadline."""
        lost = False
        while True:
            try:
                return ask(self._ready(deadline_s))
            except NoDaemonError as exn:
                self._lose()
                left_s = deadline_s - time.monotonic()
                if left_s <= _RECONNECT_PAUSE_S:
                    raise
                if not lost:
                    log.warning("%s (%s); trying for another %.0f s", exn.message, exn.url, left_s)
                lost = True
            _check_parent()
            time.sleep(_RECONNECT_PAUSE_S)

    def _ready(self, deadline_s: float) -> Connection:
        """Return a connection whose other end knows the plan and every lease."""
        if self._connection is None:
            self._connection, self._declared = Connection(self._socket, self.reader), None
        if self._plan is not None and self._declared is not self._plan:
            self._start = min((lease.position for lease in self._leases), default=0)
            self._connection.call("plan", deadline_s, **self._plan.message(self._start))
            for lease in self._leases:
                self._ask(self._connection, lease)
            self._declared = self._plan
        return self._connection

    def _ask(self, connection: Connection, lease: Lease) -> None:
        lease.request = connection.request("lease", position=lease.position - self._start)


class Sessions:
    """The sessions of one dataset in one process: one for each iterator, and one kept from epoch to epoch.

    What is kept still tells the daemon what the next epoch reads, so that it is worked on between epochs.
    """

    def __init__(self, socket: Path, patience: Patience) -> None:
        self._socket = socket
        self._patience = patience
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
        return Session(self._socket, reader, self._patience)

    def __reduce__(self) -> tuple[Any, ...]:
        return Sessions, (self._socket, self._patience)


def _check_parent() -> None:
    """Raise DaemonError in a worker whose training process has ended: it would wait for nobody, and for minutes."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise DaemonError("the training process that this worker reads for has ended")


def _answer(connection: Connection, lease: Lease, until_s: float) -> dict[str, Any] | None:
    return connection.answer(lease.request, until_s)


def _explain(connection: Connection, lease: Lease) -> str:
    request = connection.request("explain", of=lease.request)
    answer = connection.answer(request, time.monotonic() + _EXPLAIN_TIMEOUT_S)
    if answer is None:
        return "the daemon is too busy to say why"
    total_bytes = answer.get("total_bytes")
    done = f" ({answer.get('done_bytes', 0) / 1e6:.0f} of {total_bytes / 1e6:.0f} MB)" if total_bytes else ""
    return f"{answer['reason']}{done}"
