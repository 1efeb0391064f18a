"""One reader's session with a daemon: its plan and leases, kept across restarts and from one daemon to another."""

import atexit
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from shardcache import errors
from shardcache.protocol import Arriving, Json, Leased, Wanted
from shardcache.unix_socket import health, served_lately
from shardcache_client.daemon.choice import DaemonChoice, Outage, Patience, check_parent, ensure_started
from shardcache_client.daemon.connection import DaemonConnection, ReaderIdentity
from shardcache_client.order.manifest import Manifest, Plan

log = logging.getLogger("shardcache")

T = TypeVar("T")
Grant: TypeAlias = Arriving | Leased

# Errors of a cache itself: another daemon may do better. Refusals and errors of the origin would be the same there.
_CACHE_SIDE = (errors.CacheError, errors.NoDaemonError, errors.VersionMismatchError)
# A daemon that takes longer to accept a session is frozen or exiting: the next try may reach its successor.
_OPEN_TIMEOUT_S = 10.0
_MIN_OPEN_S = 1.0
_HEALTH_TIMEOUT_S = 2.0
# A daemon is started again within seconds; one that is gone for good leaves the same traces as one that restarts.
_RESTART_S = 30.0
_MAX_RETRY_S = 300.0
# Failures after which a file counts as unreadable: at the first, it may only have been evicted for a more urgent shard.
_UNREADABLE = 2


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """A request for one shard, and the daemon's grant of it; number, request and grant on the current connection."""

    position: int  # of the shard in the plan
    partial: bool  # True if the beginning may be granted before the whole shard has arrived
    unpublished: bool = False  # True if the checked files may be granted before they are published
    first: tuple[int, int] | None = None  # with `partial`: start and end of the bytes of a file that are needed first
    needed: bool = False  # True once the reader has reached the shard, and holds it or waits for it
    number: int = 0  # of the lease
    request: int = 0  # id of the last request for it
    grant: Grant | None = None  # None while waiting for it
    latest: bool = False  # True if the present version will do, whatever the plan says
    named: bool = False  # True if a path that ends with the object's name is wanted as well
    unmatched: int = 0  # number of samples read that had no partner in the shards that they are joined with


class Session:
    """One reader's plan and leases at a daemon; after a broken connection, declared again to the next daemon.

    Positions of a plan mean the same to every daemon, so no sample is lost or repeated when reading goes on at another
    one. Every method that needs an answer raises NoDaemonError if no daemon gives one within the session's patience,
    and DaemonError if this user may not use the daemon or it speaks another protocol.

    With a fallback, an error of the node's cache leads to the private daemon until the node's is well again; errors of
    the origin and refusals reach the reader as usual.
    """

    def __init__(
        self, choice: DaemonChoice, reader: ReaderIdentity, patience: Patience, *, partial_reads: bool = False
    ) -> None:
        self.reader = reader
        self.on_wait: Callable[[], None] | None = None  # called periodically while waiting for a shard
        self.waited_s = 0.0  # time that its borrower has waited for daemon and shards
        self._choice = choice
        self._patience = patience
        self._partial_reads = partial_reads  # True if a shard may be granted before it has arrived whole
        self._is_private = choice.node is None
        self._connection: DaemonConnection | None = None
        self._outage: Outage | None = None  # since the last connection was lost, until a daemon answers
        self._plan: Plan | None = None
        self._declared: Plan | None = None  # the plan declared on the current connection
        self._start = 0  # the daemon's position 0: a plan declared again begins at the reader's position
        self._unsent: Iterator[tuple[str, Json]] = iter(())  # messages of the plan still to be sent on this connection
        self._leases: list[LeaseRequest] = []
        # For a node's daemon that a private one can replace:
        self._met = False  # True once it has answered
        self._heard_s = 0.0  # time of its last sign of life during a wait
        self._back_at_s, self._pause_s = 0.0, patience.retry_s  # when it is tried again; the next delay until then
        self._unreadable = (-1, 0)  # position of the last file that could not be read, and number of failures

    def __repr__(self) -> str:
        which = "private" if self._is_private else str(self._choice.node)
        return f"Session({self.reader!r}, {which}, leases={len(self._leases)}, {self._connection!r})"

    def resolve(self, urls: Sequence[str], wanted: Wanted = "samples", max_age_s: float | None = None) -> Manifest:
        """Have the daemon resolve urls, patterns and prefixes to shards, or to files.

        Waits for a daemon that is stopping, or is lost before it has answered, and up to half a minute for one that was
        at the socket a moment ago. If there was none, raises NoDaemonError immediately. What the daemon found out more
        than `max_age_s` ago is not used. Raises NotFoundError, and any other error of the origin.
        """
        deadline_s = time.monotonic() + self._patience.limit_s
        try:
            self._ready(deadline_s)
        except _CACHE_SIDE as exn:
            if not (isinstance(exn, errors.StoppingError) or self._is_private or self._can_leave):
                self._await_restart(exn, deadline_s)
        fields: Json = {"urls": list(urls), "wanted": wanted}
        if max_age_s is not None:
            fields["max_age_ms"] = int(max_age_s * 1000)
        ask = partial(DaemonConnection.call, kind="resolve", deadline_s=deadline_s, **fields)
        return Manifest.from_answer(self._insist(deadline_s, ask), urls)

    def _await_restart(self, exn: errors.ShardcacheError, deadline_s: float) -> None:
        """Wait for the next daemon at the socket, if the traces of one are there. Raises the error if not."""
        was_there = served_lately(cast(Path, self._choice.node), _RESTART_S)
        if not (isinstance(exn, errors.NoDaemonError) and was_there):
            raise exn
        self._lost(exn)
        self._insist(min(deadline_s, time.monotonic() + _RESTART_S), lambda connection: None)

    def declare(self, plan: Plan) -> None:
        """Declare the plan, of a long one the first piece. All leases of an earlier plan must have ended."""
        self._go_back()
        self._plan, self._unreadable = plan, (-1, 0)
        with self._waiting():
            self._insist(time.monotonic() + self._patience.limit_s, lambda connection: None)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begun_s = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - begun_s

    def extend(self) -> None:
        """Send the next piece of the plan, if there is one.

        Called once per shard, this keeps the declared part far ahead of the reader, and the first sample does not wait
        until a plan of a million positions is sent.
        """
        kind, fields = next(self._unsent, ("", {}))
        if kind:
            self._try(lambda connection: connection.call(kind, self._silence_ends_s(), **fields))

    def lease(
        self,
        position: int,
        *,
        partial: bool | None = None,
        unpublished: bool = False,
        first: tuple[int, int] | None = None,
        latest: bool = False,
        named: bool = False,
    ) -> LeaseRequest:
        """Request the shard at a position of the plan, or with `partial` its beginning, without waiting for it.

        With `unpublished`, its files may be granted before they have their final paths, to this
        process alone. Of a file, another part than the beginning may be needed `first`. With
        `latest`, it may have been replaced. With `named`, a path that ends with the object's name
        is wanted as well.
        """
        assert self._plan is not None
        if self._can_leave and self._unreadable == (position, _UNREADABLE):
            url = self._plan.shard(position).url
            self._leave(errors.CacheDirError("this process cannot read the daemon's files", url=url))
        self._go_back()
        is_partial = self._partial_reads if partial is None else partial
        lease = LeaseRequest(position, is_partial, unpublished, first, latest=latest, named=named)
        self._leases.append(lease)
        self._try(lambda connection: self._ask(connection, lease))
        return lease

    def wait(self, lease: LeaseRequest) -> Grant:
        """Wait for the shard, or for its beginning, and return its grant. The reader then holds it.

        The shard stays cached until `release`, as do all others that were waited for; but one granted ahead may have
        been evicted before the daemon receives this request. A long wait is logged with its reason. Raises
        ShardTimeoutError if nothing of it arrives for the session's time limit, CapacityError if all readers wait for
        space that only they could free, and any other error that the daemon met in fetching the shard; the lease has
        then ended.
        """
        if not lease.needed:
            lease.needed = True
            self._try(lambda connection: connection.tell("need", of=lease.request))
        if lease.grant is None:
            self._heard_s = time.monotonic()
            lease.grant = self._settle(lease, self._insist)
            lease.number = lease.grant["lease"]
            if not self._is_private:
                self._pause_s = self._patience.retry_s
        return lease.grant

    def more(self, lease: LeaseRequest, beyond: int, start: int | None = None) -> Grant | None:
        """Return an updated grant of an arriving shard, once more than its first `beyond` bytes, or all, have arrived.

        Of a shard that is not published yet, wait for that.

        Of a file, with `start`, only the bytes from there to `beyond`, which are then fetched before all others.

        Waits as `wait` does. Returns None if the connection broke: the earlier grant has ended and must not be read any
        further; `wait` returns a new one.
        """

        def ask(connection: DaemonConnection) -> None:
            fields = {} if start is None else {"start": start}
            lease.request = connection.request("more", lease=lease.number, beyond=beyond, **fields)

        assert lease.grant is not None
        lease.grant, self._heard_s = None, time.monotonic()
        self._try(ask)
        try:
            lease.grant = self._settle(lease, self._once)
        except errors.NoDaemonError as exn:
            self._lost(exn)
        return lease.grant

    def _settle(self, lease: LeaseRequest, through: Callable[..., Any]) -> Grant:
        """Wait for a lease's last answer by `_insist` or `_once`; any error but a lost connection ends the lease."""
        assert self._plan is not None
        ask = partial(through, math.inf)  # the patience has limits for the shard and for a lost daemon
        try:
            with self._waiting():
                answer: Json = self._patience.wait(
                    self._plan.shard(lease.position).url,
                    lambda until_s: ask(partial(self._answer, lease=lease, until_s=until_s)),
                    lambda: ask(lambda connection: connection.explain(lease.request)),
                    self.on_wait,
                )
        except errors.NoDaemonError:
            raise
        except errors.ShardcacheError as exn:
            self._leases.remove(lease)
            if isinstance(exn, errors.ShardTimeoutError):
                self._lose()  # a pending lease cannot be cancelled; a new connection requests the others again
            raise
        text = "%s: %s; samples that this process read from it may be wrong; the next reader gets a fresh copy"
        for damage in map(errors.from_json, answer.get("damaged", ())):
            log.warning(text, damage.url, damage.message)
        return cast(Grant, answer)

    def release(self, lease: LeaseRequest, *, read: bool = True, damage: str = "") -> None:
        """Release a shard or its request, unless it has ended; `read` is False if the file could not be read.

        With `damage`, what is wrong with the file, the daemon checks the shard before it grants it again.
        """
        fields: Json = {} if read else {"read": False}
        if lease.unmatched:
            fields["unmatched"] = lease.unmatched
        if damage:
            fields["damage"] = damage

        def tell(connection: DaemonConnection) -> None:
            connection.forget(lease.request)
            connection.tell("release", lease=lease.number, **fields)

        if not read:
            position, times = self._unreadable
            self._unreadable = (lease.position, times + 1 if position == lease.position else 1)
        if lease in self._leases:
            self._leases.remove(lease)
            self._try(tell)

    def close(self) -> None:
        """End the session; the daemon drops its plan and leases."""
        self._plan = None
        self._leases.clear()
        self._lose()

    def _lose(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _lost(self, exn: errors.NoDaemonError) -> Outage:
        self._lose()
        self._outage = self._outage or Outage(exn)
        return self._outage

    def _try(self, say: Callable[[DaemonConnection], object]) -> None:
        """Send a message; if the connection is broken, `_ready` makes up for it later."""
        if self._connection is not None:
            try:
                say(self._connection)
            except errors.NoDaemonError as exn:
                self._lost(exn)

    def _insist(self, deadline_s: float, ask: Callable[[DaemonConnection], T]) -> T:
        """Send a request, reconnecting until a daemon answers; raise NoDaemonError if none has by the deadline."""
        while True:
            try:
                answer = ask(self._ready(deadline_s))
            except _CACHE_SIDE as exn:
                deadline_s = self._recover(exn, deadline_s)
            else:
                self._outage, self._met = None, True
                return answer
            check_parent()

    def _once(self, deadline_s: float, ask: Callable[[DaemonConnection], T]) -> T:
        """Send a request on the current connection only; raise NoDaemonError if it is lost."""
        if self._connection is None:
            raise errors.NoDaemonError("the connection to the daemon is lost")
        try:
            return ask(self._connection)
        except (errors.CacheError, errors.VersionMismatchError) as exn:
            if not self._can_leave:
                raise
            self._leave(exn)
            raise errors.NoDaemonError(exn.message) from exn

    def _recover(self, exn: errors.ShardcacheError, deadline_s: float) -> float:
        """After an error of a cache, pause before the next try or go on with the private daemon; else raise the error.

        Returns the deadline from then on.
        A daemon that went away gets time to restart, unless another can replace it and it has never answered.
        """
        if isinstance(exn, errors.NoDaemonError):
            outage = self._lost(exn)
            away_s = min(self._patience.limit_s, self._patience.away_s)
            if self._can_leave:
                away_s = self._patience.grace_s if self._met else 0.0
            if outage.pause(min(deadline_s, outage.begun_s + away_s)):
                return deadline_s
        if not self._can_leave:
            raise exn
        self._leave(exn)
        return time.monotonic() + self._patience.limit_s

    @property
    def _can_leave(self) -> bool:
        """True while the node's daemon serves this reader, and the private one could."""
        return self._choice.fallback and not self._is_private

    def _leave(self, exn: errors.ShardcacheError) -> None:
        """Go on with the private daemon for a while."""
        self._move(is_private=True)
        self._back_at_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_RETRY_S)
        where = f" ({exn.url})" if exn.url else ""
        log.warning("%s%s; reading through a private daemon until the node's recovers", exn.message, where)

    def _go_back(self) -> None:
        """Return to the node's daemon if it is due to be tried again and well."""
        if not (self._choice.fallback and self._is_private) or time.monotonic() < self._back_at_s:
            return
        self._back_at_s = time.monotonic() + self._patience.retry_s
        if self._node_health() == "ok":
            self._move(is_private=False)
            log.info("the daemon at %s has recovered; shards come from it again", self._choice.node)

    def _move(self, *, is_private: bool) -> None:
        """Have another daemon serve what is not granted yet; mapped files stay, which the former daemon respects."""
        self._lose()
        self._outage, self._unreadable, self._is_private = None, (-1, 0), is_private
        self._leases = [lease for lease in self._leases if lease.grant is None or lease.grant["type"] == "arriving"]

    def _node_health(self) -> str | None:
        """Return the status that the node's daemon reports, "ok" if it is well; None if it does not answer."""
        with suppress(OSError, ValueError):
            return str(health(cast(Path, self._choice.node), _HEALTH_TIMEOUT_S)["status"])
        return None

    def _answer(self, connection: DaemonConnection, lease: LeaseRequest, until_s: float) -> Json | None:
        """Return the answer to a lease's last request; None if none has come. Leaves a daemon that is frozen."""
        answer = connection.answer(lease.request, until_s)
        silent_s = time.monotonic() - self._heard_s
        if answer is None and self._can_leave and silent_s > self._patience.grace_s / 2:
            if self._node_health() is not None:
                self._heard_s = time.monotonic()
            elif silent_s > self._patience.grace_s:
                self._leave(errors.NoDaemonError(f"the daemon has not answered for {silent_s:.0f} s"))
        return answer

    def _ready(self, deadline_s: float) -> DaemonConnection:
        """Return a connection on which the plan is declared and every lease requested."""
        if self._connection is None:
            timeout_s = max(_MIN_OPEN_S, min(_OPEN_TIMEOUT_S, deadline_s - time.monotonic()))
            where = ensure_started() if self._is_private else cast(Path, self._choice.node)
            self._connection = DaemonConnection(where, self.reader, timeout_s, is_private=self._is_private)
            self._declared = None
        if self._plan is not None and self._declared is not self._plan:
            self._declare(self._connection, self._plan, deadline_s)
            self._declared = self._plan
        return self._connection

    def _declare(self, connection: DaemonConnection, plan: Plan, deadline_s: float) -> None:
        """Declare the plan from the first lease to the last, and request each of these leases again."""
        # Newest first: earlier positions then count as read, and the burst of requests does not distort the pace.
        leases = sorted(self._leases, key=attrgetter("position"), reverse=True)
        self._start, furthest = (leases[-1].position, leases[0].position) if leases else (0, 0)
        self._unsent, sent = plan.messages(self._start), self._start

        def call(kind: str, **fields: Any) -> Json:
            return connection.call(kind, min(deadline_s, self._silence_ends_s()), **fields)

        for kind, fields in self._unsent:
            if call(kind, **fields)["type"] == "unknown":
                pieces = list(plan.shards.pieces())
                for piece in pieces:
                    if call("shards", fingerprint=piece.fingerprint)["type"] == "unknown":
                        call("shards", fingerprint=piece.fingerprint, packed=piece.packed)
                if call(kind, **fields | {"shards": [each.fingerprint for each in pieces]})["type"] == "unknown":
                    raise errors.CapacityError("the daemon forgets the shards", remedy="raise its --plan-memory")
            sent += len(fields["order"])
            if sent > furthest:
                break
        for lease in leases:
            self._ask(connection, lease)

    def _silence_ends_s(self) -> float:
        """Return the deadline after which a daemon that has not accepted a piece of the plan counts as lost."""
        limit_s = self._patience.limit_s
        return time.monotonic() + (min(limit_s, _OPEN_TIMEOUT_S) if self._can_leave else limit_s)

    def _ask(self, connection: DaemonConnection, lease: LeaseRequest) -> None:
        lease.grant = None  # a grant from another daemon has ended
        place = lease.position - self._start
        options: Json = {"partial": lease.partial}
        if lease.unpublished:
            options["unpublished"] = True
        if lease.first is not None:
            options |= {"start": lease.first[0], "beyond": lease.first[1] - 1}
        if lease.latest:
            options["latest"] = True
        if lease.named:
            options["named"] = True
        lease.number = lease.request = connection.request("lease", position=place, **options)
        if lease.needed:
            connection.tell("need", of=lease.request)


def resolve(
    choice: DaemonChoice,
    reader: ReaderIdentity,
    urls: Sequence[str],
    timeout_s: float,
    wanted: Wanted = "samples",
    max_age_s: float | None = None,
) -> Manifest:
    """Have a daemon resolve urls over a session of its own; see `Session.resolve`."""
    with closing(Session(choice, reader, Patience(timeout_s))) as session:
        return session.resolve(urls, wanted, max_age_s)


class SessionPool:
    """Lends a session to each iterator of a dataset in one process, and keeps one from epoch to epoch.

    The plan of the kept session still names the next epoch's shards, so the daemon prefetches them between epochs.
    """

    def __init__(self, choice: DaemonChoice, patience: Patience, partial_reads: bool) -> None:
        self.settings = choice, patience, partial_reads  # equal for interchangeable pools
        self._kept: list[Session] = []  # at most one

    @contextmanager
    def borrow(self, reader: ReaderIdentity) -> Iterator[Session]:
        """Lend a session to an iterator. It is closed, and its plan dropped, if the iterator stops before its end."""
        session = self._take(reader)
        session.waited_s = 0.0
        _lent.add(session)
        try:
            yield session
        except BaseException:
            session.close()
            raise
        if self._kept:
            session.close()
        else:
            self._kept.append(session)

    def _take(self, reader: ReaderIdentity) -> Session:
        while self._kept:
            session = self._kept.pop()
            if session.reader == reader:
                return session
            session.close()  # this process was forked, or its rank has changed
        return self.open(reader)

    def open(self, reader: ReaderIdentity) -> Session:
        """Return a session of its own, to be closed by the caller."""
        choice, patience, partial_reads = self.settings
        return Session(choice, reader, patience, partial_reads=partial_reads)

    @property
    def timeout_s(self) -> float:
        """Time limit of a wait for a shard."""
        return self.settings[1].limit_s

    def __reduce__(self) -> tuple[Any, ...]:
        return SessionPool, self.settings


_lent: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_lent() -> None:
    """Close the sessions of iterators that a script leaves unfinished, while the modules that they need exist."""
    for session in list(_lent):
        session.close()
