"""A reader's standing with the daemon: its plan and its leases, kept over a restart of the daemon."""

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
from shardcache.protocol import Arriving, Leased
from shardcache_client.daemon.connection import Connection, Json, Reader
from shardcache_client.daemon.outage import Outage
from shardcache_client.order.plan import Plan

log = logging.getLogger("shardcache")

T = TypeVar("T")
Grant: TypeAlias = Arriving | Leased

# A daemon that does not answer at once why a shard is late is late itself.
_EXPLAIN_TIMEOUT_S = 5.0
# A daemon that does not let us in for so long is frozen, or on its way out: another try may meet the next one.
_OPEN_TIMEOUT_S = 10.0
_LEAST_OPEN_S = 1.0
# How often one who waits looks up to see what has changed: whether anybody still wants what is waited for.
LOOK_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for one shard, and when to say in the log that one waits.

    Attributes:
        away_s: how long to wait for a daemon that went away; None: as long as for a shard.
    """

    limit_s: float = 300.0
    first_report_s: float = 10.0
    next_report_s: float = 60.0
    away_s: float | None = None

    @property
    def away_limit_s(self) -> float:
        """How long to wait for a daemon that went away."""
        return self.limit_s if self.away_s is None else self.away_s


@dataclass(slots=True, eq=False)
class Lease:
    """A shard that was asked for.

    Attributes:
        position: in the plan.
        partial: whether its beginning may be granted before the whole has arrived.
        needed: whether the reader has come to it: it is in its hands, or the only thing to wait for.
        number: by which the daemon knows it, on the present connection.
        request: the id of the request that was made last for it, on the present connection.
        grant: what the daemon has granted over the present connection; None while that is waited for.
    """

    position: int
    partial: bool
    needed: bool = False
    number: int = 0
    request: int = 0
    grant: Grant | None = None


class _Through(Protocol):
    """A way to ask something of the daemon: until one answers, or only of the one that is there."""

    def __call__(self, deadline_s: float, ask: Callable[[Connection], T]) -> T: ...


class Session:
    """What one reader has asked of the daemon, asked again of the next daemon when the connection breaks.

    Every method that needs an answer raises NoDaemonError when no daemon gives one within its patience, and DaemonError
    when this user may not ask or the daemon speaks another protocol.

    Args:
        partial_reads: whether a shard may be granted before it has arrived whole, where `lease` does not say.

    Attributes:
        meanwhile: called now and then while a shard is waited for.
    """

    def __init__(self, socket: Path, reader: Reader, patience: Patience, *, partial_reads: bool = False) -> None:
        self.reader = reader
        self.meanwhile: Callable[[], None] | None = None
        self._socket = socket
        self._patience = patience
        self._partial_reads = partial_reads
        self._connection: Connection | None = None
        self._outage: Outage | None = None  # since the last connection was lost, until a daemon answers
        self._plan: Plan | None = None
        self._declared: Plan | None = None  # the plan that the present connection knows
        self._start = 0  # the position that the daemon calls 0: a plan declared again begins where we are
        self._untold: Iterator[tuple[str, Json]] = iter(())  # what this connection has still to be told of the plan
        self._leases: list[Lease] = []

    def __repr__(self) -> str:
        return f"Session({self.reader!r}, leases={len(self._leases)}, {self._connection!r})"

    def __contains__(self, lease: Lease) -> bool:
        """Whether it has been asked for here, and is not over."""
        return lease in self._leases

    def declare(self, plan: Plan) -> None:
        """Tell the daemon what will be read. Every lease of an earlier plan must be over.

        A long plan goes in pieces: the first of them now, the others with `extend`.
        """
        self._plan = plan
        self._insist(time.monotonic() + self._patience.limit_s, lambda connection: None)

    def extend(self) -> None:
        """Tell the daemon the next piece of the plan, if there is one.

        Called once a shard, this keeps what the daemon knows far ahead of the reader, and the first sample does not
        wait until a plan of a million positions is told.
        """
        self._try(self._extend)

    def lease(self, position: int, *, partial: bool | None = None) -> Lease:
        """Ask for the shard at a position of the plan, without waiting for it or claiming to need it yet.

        Args:
            partial: whether its beginning will do; None: as the session was told for all.
        """
        lease = Lease(position, self._partial_reads if partial is None else partial)
        self._leases.append(lease)
        self._try(lambda connection: self._ask(connection, lease))
        return lease

    def wait(self, lease: Lease) -> Grant:
        """Return where the shard lies, once it is there, or once its beginning is. It is in the reader's hands then.

        It stays in place from now on until `release`, as do all others that were waited for; only when it was granted
        earlier, it may have gone before the daemon hears this. While it is not there, a line in the log says so and
        why. Raises ShardTimeoutError when patience ends, CapacityError when all readers wait for room that only they
        could give, and any other error that the daemon met when it fetched the shard; the lease is then over.
        """
        if not lease.needed:
            lease.needed = True
            self._try(partial(_need, lease=lease))
        if lease.grant is None:
            lease.grant = self._settle(lease, self._insist)
            lease.number = lease.grant["lease"]
        return lease.grant

    def more(self, lease: Lease, beyond: int) -> Grant | None:
        """Return the grant of an arriving shard anew, once more than its first `beyond` bytes are there, or all.

        Waits as `wait` does. None when the connection broke: what was granted is over, and may not be read on; `wait`
        returns what is granted instead.
        """
        assert lease.grant is not None
        lease.grant = None
        self._try(lambda connection: _ask_more(connection, lease, beyond))
        try:
            lease.grant = self._settle(lease, self._once)
        except NoDaemonError as exn:
            self._lost(exn)
        return lease.grant

    def _settle(self, lease: Lease, through: _Through) -> Grant:
        """Wait for the answer to a lease's last request; any error but a lost connection ends the lease."""
        try:
            return self._wait(lease, through)
        except NoDaemonError:
            raise
        except ShardcacheError as exn:
            self._leases.remove(lease)
            if isinstance(exn, ShardTimeoutError):
                self._lose()  # a lease that is still to come cannot be declined; a new connection asks for the others
            raise

    def _wait(self, lease: Lease, through: _Through) -> Grant:
        start_s = time.monotonic()
        deadline_s, report_s = start_s + self._patience.limit_s, start_s + self._patience.first_report_s
        while True:
            until_s = min(report_s, deadline_s, time.monotonic() + LOOK_UP_S)
            answer = through(deadline_s, partial(_answer, lease=lease, until_s=until_s))
            if answer is not None:
                _tell_of_damage(answer)
                return cast(Grant, answer)
            check_parent()
            if self.meanwhile is not None:
                self.meanwhile()
            if time.monotonic() < min(report_s, deadline_s):
                continue
            reason = through(deadline_s, partial(_explain, lease=lease))
            if time.monotonic() >= deadline_s:
                raise self._timeout(lease, reason)
            log.warning("waiting for %s since %.0f s: %s", self._url(lease), time.monotonic() - start_s, reason)
            report_s = time.monotonic() + self._patience.next_report_s

    def release(self, lease: Lease, *, read: bool = True) -> None:
        """Give a shard back, or ask for it no longer. Nothing is left to do for a lease that an error ended.

        Args:
            read: False where it is still to be read: what was granted could not be.
        """
        if lease in self._leases:
            self._leases.remove(lease)
            unread = {} if read else {"read": False}
            self._try(partial(_release, lease=lease, fields=unread))

    def close(self) -> None:
        """End the session; the daemon drops its plan and its leases."""
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
            except NoDaemonError as exn:
                self._lost(exn)

    def _insist(self, deadline_s: float, ask: Callable[[Connection], T]) -> T:
        """Ask until there is a daemon that answers; raise NoDaemonError when there is none at the deadline."""
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

    def _once(self, deadline_s: float, ask: Callable[[Connection], T]) -> T:
        """Ask over the present connection alone; raise NoDaemonError when it is lost."""
        if self._connection is None:
            raise NoDaemonError("the connection to the daemon is lost", url=str(self._socket))
        return ask(self._connection)

    def _ready(self, deadline_s: float) -> Connection:
        """Return a connection whose other end knows the plan and every lease."""
        if self._connection is None:
            timeout_s = max(_LEAST_OPEN_S, min(_OPEN_TIMEOUT_S, deadline_s - time.monotonic()))
            self._connection, self._declared = Connection(self._socket, self.reader, timeout_s), None
        if self._plan is not None and self._declared is not self._plan:
            self._tell(self._connection, self._plan, deadline_s)
            self._declared = self._plan
        return self._connection

    def _tell(self, connection: Connection, plan: Plan, deadline_s: float) -> None:
        """Declare the plan from where we are, as far as there are leases, and ask for each of these again."""
        # The newest first: what lies before is over then, and no pace is learnt from taking them all at one moment.
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

    def _extend(self, connection: Connection) -> None:
        for kind, fields in islice(self._untold, 1):
            connection.call(kind, self._silence_ends_s(), **fields)

    def _silence_ends_s(self) -> float:
        """When a daemon that has not taken a piece of the plan by then is as good as away."""
        return time.monotonic() + min(self._patience.limit_s, max(self._patience.away_limit_s, _OPEN_TIMEOUT_S))

    def _ask(self, connection: Connection, lease: Lease) -> None:
        lease.grant = None  # what another daemon granted is over
        place = lease.position - self._start
        lease.number = lease.request = connection.request("lease", position=place, partial=lease.partial)
        if lease.needed:
            _need(connection, lease)


def check_parent() -> None:
    """Raise DaemonError in a worker whose training process has ended: it would wait for nobody, and for minutes."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise DaemonError("the training process that this worker reads for has ended")


def _need(connection: Connection, lease: Lease) -> None:
    connection.tell("need", of=lease.request)


def _release(connection: Connection, lease: Lease, fields: Json) -> None:
    connection.forget(lease.request)
    connection.tell("release", lease=lease.number, **fields)


def _ask_more(connection: Connection, lease: Lease, beyond: int) -> None:
    lease.request = connection.request("more", lease=lease.number, beyond=beyond)


def _answer(connection: Connection, lease: Lease, until_s: float) -> Json | None:
    return connection.answer(lease.request, until_s)


def _tell_of_damage(answer: Json) -> None:
    for error in answer.get("damaged", ()):
        exn = from_json(error)
        log.warning(
            "%s: %s; samples that this process was given of it may be wrong, the next reader gets it afresh",
            exn.url,
            exn.message,
        )


def _explain(connection: Connection, lease: Lease) -> str:
    request = connection.request("explain", of=lease.request)
    answer = connection.answer(request, time.monotonic() + _EXPLAIN_TIMEOUT_S)
    if answer is None:
        return "the daemon is too busy to say why"
    total_bytes = answer.get("total_bytes")
    done = f" ({answer.get('done_bytes', 0) / 1e6:.0f} of {total_bytes / 1e6:.0f} MB)" if total_bytes else ""
    return f"{answer['reason']}{done}"
