"""One reader's session with the daemon: its plan and leases, kept across restarts of the daemon."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar, cast

from shardcache.errors import DaemonError, NoDaemonError, ShardcacheError, ShardTimeoutError, from_json
from shardcache.protocol import Arriving, Json, Leased
from shardcache_client.daemon.connection import DaemonConnection, ReaderIdentity
from shardcache_client.daemon.outage import Outage
from shardcache_client.order.plan import Plan

log = logging.getLogger("shardcache")

T = TypeVar("T")
Grant: TypeAlias = Arriving | Leased

# A daemon that takes longer to accept a session is frozen or exiting: the next try may reach its successor.
_OPEN_TIMEOUT_S = 10.0
_LEAST_OPEN_S = 1.0
# How often a waiting reader calls `on_wait` and checks that its training process still runs.
_LOOK_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits for waiting: for one shard, for a lost daemon, and until a wait is logged.

    Attributes:
        limit_s: how long to wait for one shard.
        first_report_s: how long a wait lasts before it is first logged.
        next_report_s: interval between further log lines.
        away_s: how long to wait for a daemon that went away; None: as long as for a shard.
    """

    limit_s: float = 300.0
    first_report_s: float = 10.0
    next_report_s: float = 60.0
    away_s: float | None = None

    @property
    def away_limit_s(self) -> float:
        """Time limit for a daemon that went away."""
        return self.limit_s if self.away_s is None else self.away_s

    def wait(
        self,
        url: str,
        poll: Callable[[float], T | None],
        explain: Callable[[], str],
        on_wait: Callable[[], None] | None,
        *,
        remedy: str,
    ) -> T:
        """Wait for a shard, and log the reason of a long wait. Raises ShardTimeoutError after `limit_s`.

        Args:
            poll: returns the shard, or None if it has not arrived by the given time.
            explain: returns the reason of the wait.
            on_wait: called periodically.
            remedy: of the ShardTimeoutError.
        """
        start_s = time.monotonic()
        deadline_s, report_s = start_s + self.limit_s, start_s + self.first_report_s
        while True:
            arrived = poll(min(report_s, deadline_s, time.monotonic() + _LOOK_UP_S))
            if arrived is not None:
                return arrived
            check_parent()
            if on_wait is not None:
                on_wait()
            if time.monotonic() < min(report_s, deadline_s):
                continue
            reason = explain()
            if time.monotonic() >= deadline_s:
                raise ShardTimeoutError(f"did not arrive within {self.limit_s:g} s: {reason}", url=url, remedy=remedy)
            log.warning("waiting for %s for %.0f s: %s", url, time.monotonic() - start_s, reason)
            report_s = time.monotonic() + self.next_report_s


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """A request for one shard, and the daemon's grant of it.

    Attributes:
        position: of the shard in the plan.
        partial: True if the beginning may be granted before the whole shard has arrived.
        needed: True once the reader has reached the shard, and holds it or waits for it.
        number: the lease's number on the current connection.
        request: id of the last request for it on the current connection.
        grant: the daemon's grant on the current connection; None while waiting for it.
    """

    position: int
    partial: bool
    needed: bool = False
    number: int = 0
    request: int = 0
    grant: Grant | None = None


class _Through(Protocol):
    """A way to send a request: with reconnects until a daemon answers, or on the current connection only."""

    def __call__(self, deadline_s: float, ask: Callable[[DaemonConnection], T]) -> T: ...


class ReaderSession:
    """One reader's plan and leases at the daemon; after a broken connection, declared again to the next daemon.

    Every method that needs an answer raises NoDaemonError if no daemon gives one within the session's patience, and
    DaemonError if this user may not use the daemon or it speaks another protocol.

    Args:
        partial_reads: default for `lease`: True if a shard may be granted before it has arrived whole.

    Attributes:
        on_wait: called periodically while waiting for a shard.
    """

    def __init__(
        self, socket: Path, reader: ReaderIdentity, patience: Patience, *, partial_reads: bool = False
    ) -> None:
        self.reader = reader
        self.on_wait: Callable[[], None] | None = None
        self._socket = socket
        self._patience = patience
        self._partial_reads = partial_reads
        self._connection: DaemonConnection | None = None
        self._outage: Outage | None = None  # since the last connection was lost, until a daemon answers
        self._plan: Plan | None = None
        self._declared: Plan | None = None  # the plan declared on the current connection
        self._start = 0  # the daemon's position 0: a plan declared again begins at the reader's position
        self._untold: Iterator[tuple[str, Json]] = iter(())  # messages of the plan still to be sent on this connection
        self._leases: list[LeaseRequest] = []

    def __repr__(self) -> str:
        return f"ReaderSession({self.reader!r}, leases={len(self._leases)}, {self._connection!r})"

    def __contains__(self, lease: LeaseRequest) -> bool:
        """Return True if the lease was made by this session and has not ended."""
        return lease in self._leases

    def declare(self, plan: Plan) -> None:
        """Declare the plan to the daemon. All leases of an earlier plan must have ended.

        A long plan is sent in pieces: the first one now, the others by `extend`.
        """
        self._plan = plan
        self._insist(time.monotonic() + self._patience.limit_s, lambda connection: None)

    def extend(self) -> None:
        """Send the next piece of the plan, if there is one.

        Called once per shard, this keeps the declared part far ahead of the reader, and the first sample does not wait
        until a plan of a million positions is sent.
        """
        self._try(self._extend)

    def lease(self, position: int, *, partial: bool | None = None) -> LeaseRequest:
        """Request the shard at a position of the plan, without waiting for it or marking it as needed yet.

        Args:
            partial: True if its beginning will do; None: the session's default.
        """
        lease = LeaseRequest(position, self._partial_reads if partial is None else partial)
        self._leases.append(lease)
        self._try(lambda connection: self._ask(connection, lease))
        return lease

    def wait(self, lease: LeaseRequest) -> Grant:
        """Wait for the shard, or for its beginning, and return its grant. The reader then holds it.

        The shard stays cached until `release`, as do all others that were waited for; but one granted ahead may have
        been evicted before the daemon receives this request. A long wait is logged with its reason. Raises
        ShardTimeoutError after the session's time limit, CapacityError if all readers wait for space that only they
        could free, and any other error that the daemon met in fetching the shard; the lease has then ended.
        """
        if not lease.needed:
            lease.needed = True
            self._try(lambda connection: connection.tell("need", of=lease.request))
        if lease.grant is None:
            lease.grant = self._settle(lease, self._insist)
            lease.number = lease.grant["lease"]
        return lease.grant

    def more(self, lease: LeaseRequest, beyond: int) -> Grant | None:
        """Return an updated grant of an arriving shard, once more than its first `beyond` bytes, or all, have arrived.

        Waits as `wait` does. Returns None if the connection broke: the earlier grant has ended and must not be read any
        further; `wait` returns a new one.
        """
        assert lease.grant is not None
        lease.grant = None
        self._try(lambda connection: _ask_more(connection, lease, beyond))
        try:
            lease.grant = self._settle(lease, self._once)
        except NoDaemonError as exn:
            self._lost(exn)
        return lease.grant

    def _settle(self, lease: LeaseRequest, through: _Through) -> Grant:
        """Wait for the answer to a lease's last request; any error except a lost connection ends the lease."""
        try:
            return self._wait(lease, through)
        except NoDaemonError:
            raise
        except ShardcacheError as exn:
            self._leases.remove(lease)
            if isinstance(exn, ShardTimeoutError):
                self._lose()  # a pending lease cannot be cancelled; a new connection requests the others again
            raise

    def _wait(self, lease: LeaseRequest, through: _Through) -> Grant:
        assert self._plan is not None
        deadline_s = time.monotonic() + self._patience.limit_s
        answer = self._patience.wait(
            self._plan.shard(lease.position).url,
            lambda until_s: through(deadline_s, partial(_answer, lease=lease, until_s=until_s)),
            lambda: through(deadline_s, lambda connection: connection.explain(lease.request)),
            self.on_wait,
            remedy="fix that cause (`shardcache status` shows the transfers), or raise timeout_s",
        )
        _tell_of_damage(answer)
        return cast(Grant, answer)

    def release(self, lease: LeaseRequest, *, read: bool = True) -> None:
        """Release a shard, or withdraw the request for it. No-op for a lease that an error has ended.

        Args:
            read: False if the granted file could not be read, so the shard is still to be read.
        """
        if lease in self._leases:
            self._leases.remove(lease)
            unread = {} if read else {"read": False}
            self._try(partial(_release, lease=lease, fields=unread))

    def close(self) -> None:
        """End the session; the daemon drops its plan and leases."""
        self._plan = None
        self._leases.clear()
        self._lose()

    def _lose(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _lost(self, exn: NoDaemonError) -> Outage:
        self._lose()
        self._outage = self._outage or Outage(exn)
        return self._outage

    def _try(self, say: Callable[[DaemonConnection], object]) -> None:
        """Send a message; if the connection is broken, `_ready` makes up for it later."""
        if self._connection is not None:
            try:
                say(self._connection)
            except NoDaemonError as exn:
                self._lost(exn)

    def _insist(self, deadline_s: float, ask: Callable[[DaemonConnection], T]) -> T:
        """Send a request, reconnecting until a daemon answers; raise NoDaemonError if none has by the deadline."""
        while True:
            try:
                answer = ask(self._ready(deadline_s))
            except NoDaemonError as exn:
                outage = self._lost(exn)
                if not outage.pause(min(deadline_s, outage.begun_s + self._patience.away_limit_s)):
                    raise
            else:
                self._outage = None
                return answer
            check_parent()

    def _once(self, deadline_s: float, ask: Callable[[DaemonConnection], T]) -> T:
        """Send a request on the current connection only; raise NoDaemonError if it is lost."""
        if self._connection is None:
            raise NoDaemonError("the connection to the daemon is lost", url=str(self._socket))
        return ask(self._connection)

    def _ready(self, deadline_s: float) -> DaemonConnection:
        """Return a connection on which the plan is declared and every lease requested."""
        if self._connection is None:
            timeout_s = max(_LEAST_OPEN_S, min(_OPEN_TIMEOUT_S, deadline_s - time.monotonic()))
            self._connection, self._declared = DaemonConnection(self._socket, self.reader, timeout_s), None
        if self._plan is not None and self._declared is not self._plan:
            self._tell(self._connection, self._plan, deadline_s)
            self._declared = self._plan
        return self._connection

    def _tell(self, connection: DaemonConnection, plan: Plan, deadline_s: float) -> None:
        """Declare the plan from the first lease to the last, and request each of these leases again."""
        # Newest first: earlier positions then count as read, and the burst of requests does not distort the pace.
        leases = sorted(self._leases, key=attrgetter("position"), reverse=True)
        self._start, furthest = (leases[-1].position, leases[0].position) if leases else (0, 0)
        self._untold, told = plan.messages(self._start), self._start
        for kind, fields in self._untold:
            connection.call(kind, min(deadline_s, self._silence_ends_s()), **fields)
            told += len(fields["order"])
            if told > furthest:
                break
        for lease in leases:
            self._ask(connection, lease)

    def _extend(self, connection: DaemonConnection) -> None:
        for kind, fields in islice(self._untold, 1):
            connection.call(kind, self._silence_ends_s(), **fields)

    def _silence_ends_s(self) -> float:
        """Return the deadline after which a daemon that has not accepted a piece of the plan counts as lost."""
        return time.monotonic() + min(self._patience.limit_s, max(self._patience.away_limit_s, _OPEN_TIMEOUT_S))

    def _ask(self, connection: DaemonConnection, lease: LeaseRequest) -> None:
        lease.grant = None  # a grant from another daemon has ended
        place = lease.position - self._start
        lease.number = lease.request = connection.request("lease", position=place, partial=lease.partial)
        if lease.needed:
            connection.tell("need", of=lease.request)


def check_parent() -> None:
    """Raise DaemonError in a worker whose training process has ended, as it would wait for minutes in vain."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise DaemonError("the training process that this worker reads for has ended")


def _release(connection: DaemonConnection, lease: LeaseRequest, fields: Json) -> None:
    connection.forget(lease.request)
    connection.tell("release", lease=lease.number, **fields)


def _ask_more(connection: DaemonConnection, lease: LeaseRequest, beyond: int) -> None:
    lease.request = connection.request("more", lease=lease.number, beyond=beyond)


def _answer(connection: DaemonConnection, lease: LeaseRequest, until_s: float) -> Json | None:
    return connection.answer(lease.request, until_s)


def _tell_of_damage(answer: Json) -> None:
    for error in answer.get("damaged", ()):
        exn = from_json(error)
        log.warning(
            "%s: %s; samples that this process read from it may be wrong; the next reader gets a fresh copy",
            exn.url,
            exn.message,
        )
