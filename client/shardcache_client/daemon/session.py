"""One reader's session with a daemon: its plan and leases, kept across restarts and from one daemon to another."""

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, cast

from shardcache import errors
from shardcache.protocol import Json, Wanted
from shardcache.unix_socket import served_lately
from shardcache_client.daemon.choice import DaemonChoice, Deadline, Outage, Patience, check_parent, ensure_started
from shardcache_client.daemon.connection import DaemonConnection, ReaderIdentity
from shardcache_client.daemon.declaring import send_until
from shardcache_client.daemon.lease import Grant, LeaseRequest
from shardcache_client.order.manifest import Manifest, Plan

log = logging.getLogger("shardcache")

T = TypeVar("T")

# Errors of a cache itself: another daemon may do better. Refusals and errors of the origin would be the same there.
_CACHE_SIDE = (errors.CacheError, errors.NoDaemonError, errors.VersionMismatchError)
# A daemon that takes longer to accept a session is frozen or exiting: the next try may reach its successor.
_OPEN_TIMEOUT_S = 10.0
_MIN_OPEN_S = 1.0
# A daemon is started again within seconds; one that is gone for good leaves the same traces as one that restarts.
_RESTART_S = 30.0
_MAX_RETRY_S = 300.0
# Failures after which a file counts as unreadable: at the first, it may only have been evicted for a more urgent shard.
_UNREADABLE = 2


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
        self._piece = 0  # id of the request with its last piece, until the daemon has accepted it
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
        deadline = Deadline(self._patience.limit_s)
        try:
            self._ready(deadline)
        except _CACHE_SIDE as exn:
            if not (isinstance(exn, errors.StoppingError) or self._is_private or self._can_leave):
                self._await_restart(exn, deadline)
        fields: Json = {"urls": list(urls), "wanted": wanted}
        if max_age_s is not None:
            fields["max_age_ms"] = int(max_age_s * 1000)

        def ask(connection: DaemonConnection) -> Json:
            return connection.call("resolve", deadline.at_s, **fields)

        return Manifest.from_answer(self._insist(deadline, ask), urls)

    def _await_restart(self, exn: errors.ShardcacheError, deadline: Deadline) -> None:
        """Wait for the next daemon at the socket, if the traces of one are there. Raises the error if not."""
        was_there = served_lately(cast(Path, self._choice.node), _RESTART_S)
        if not (isinstance(exn, errors.NoDaemonError) and was_there):
            raise exn
        restart = Deadline(min(deadline.at_s - time.monotonic(), _RESTART_S))
        self._recover(exn, restart)
        self._insist(restart, lambda connection: None)

    def declare(self, plan: Plan) -> None:
        """Declare the plan, of a long one the first piece. All leases of an earlier plan must have ended."""
        self._go_back()
        self._plan, self._unreadable = plan, (-1, 0)
        with self._waiting():
            self._insist(Deadline(self._patience.limit_s), lambda connection: None)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begun_s = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - begun_s

    def extend(self) -> None:
        """Send the next piece of the plan, if the daemon has accepted the one before.

        Called once per shard, this keeps the declared part far ahead of the reader, and the first
        sample does not wait until a plan of a million positions is sent. A daemon that takes its
        time with a piece holds up no reader.
        """
        self._try(self._send_piece)

    def _send_piece(self, connection: DaemonConnection) -> None:
        if self._piece and connection.answer(self._piece, time.monotonic()) is None:
            return
        self._piece = 0
        kind, fields = next(self._unsent, ("", {}))
        if kind:
            self._piece = connection.request(kind, **fields)

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
        deadline = Deadline(self._patience.limit_s)
        if not lease.needed:
            lease.needed = True
            self._try(lambda connection: connection.tell("need", of=lease.request))
        if lease.grant is None:
            self._heard_s = time.monotonic()
            lease.grant = self._settle(lease, deadline, self._insist)
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
        deadline = Deadline(self._patience.limit_s)
        lease.grant, self._heard_s = None, time.monotonic()
        self._try(ask)
        try:
            lease.grant = self._settle(lease, deadline, self._once)
        except errors.NoDaemonError as exn:
            self._lost(exn)
        return lease.grant

    def _settle(self, lease: LeaseRequest, deadline: Deadline, through: Callable[..., Any]) -> Grant:
        """Wait for a lease's last answer by `_insist` or `_once`; any error but a lost connection ends the lease."""
        assert self._plan is not None
        url = self._plan.shard(lease.position).url

        def poll(until_s: float) -> Json | None:
            ask = partial(self._answer, lease=lease, until_s=until_s, deadline=deadline)
            return cast("Json | None", through(deadline, ask))

        def explain(until_s: float) -> tuple[str, int]:
            ask = partial(DaemonConnection.explain, request=lease.request, deadline_s=until_s)
            return cast("tuple[str, int]", through(deadline, ask))

        try:
            with self._waiting():
                answer: Json = self._patience.wait(url, deadline, poll, explain, self.on_wait)
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

    def _lost(self, exn: errors.NoDaemonError, begun_s: float | None = None) -> Outage:
        self._lose()
        if self._outage is None:
            self._outage = Outage(exn, time.monotonic() if begun_s is None else begun_s)
        return self._outage

    def _try(self, say: Callable[[DaemonConnection], object]) -> None:
        """Send a message; if the connection is broken, `_ready` makes up for it later."""
        if self._connection is not None:
            try:
                say(self._connection)
            except errors.NoDaemonError as exn:
                self._lost(exn)

    def _insist(self, deadline: Deadline, ask: Callable[[DaemonConnection], T]) -> T:
        """Send a request, reconnecting until a daemon answers; raise NoDaemonError if none has by the deadline."""
        while True:
            try:
                answer = ask(self._ready(deadline))
            except _CACHE_SIDE as exn:
                self._recover(exn, deadline)
            else:
                self._outage, self._met = None, True
                return answer
            check_parent()

    def _once(self, deadline: Deadline, ask: Callable[[DaemonConnection], T]) -> T:
        """Send a request on the current connection only; raise NoDaemonError if it is lost."""
        if self._connection is None:
            raise errors.NoDaemonError("the connection to the daemon is lost")
        try:
            return ask(self._connection)
        except (errors.CacheError, errors.VersionMismatchError) as exn:
            if not self._can_leave:
                raise
            self._leave(exn, deadline)
            raise errors.NoDaemonError(exn.message) from exn

    def _recover(self, exn: errors.ShardcacheError, deadline: Deadline) -> None:
        """After an error of a cache, pause before the next try or go on with the private daemon; else raise the error.

        A daemon that went away gets time to restart, unless another can replace it and it has never answered.
        """
        if isinstance(exn, errors.NoDaemonError):
            outage = self._lost(exn)
            if outage.pause(self._tried_until_s(deadline)):
                return
            if not self._can_leave:
                raise outage.given_up(exn)
        if not self._can_leave:
            raise exn
        self._leave(exn, deadline)

    def _tried_until_s(self, deadline: Deadline) -> float:
        """Return the time until which a daemon is tried, which may end before the deadline."""
        if self._outage is None:
            return deadline.at_s
        away_s = min(self._patience.limit_s, self._patience.away_s)
        if self._can_leave:
            away_s = self._patience.grace_s if self._met else 0.0
        return min(deadline.at_s, self._outage.begun_s + away_s)

    @property
    def _can_leave(self) -> bool:
        """True while the node's daemon serves this reader, and the private one could."""
        return self._choice.fallback and not self._is_private

    def _leave(self, exn: errors.ShardcacheError, deadline: Deadline | None = None) -> None:
        """Go on with the private daemon for a while; a wait begins again with it."""
        self._move(is_private=True)
        if deadline is not None:
            deadline.restart()
        self._back_at_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_RETRY_S)
        where = f" ({exn.url})" if exn.url else ""
        log.warning("%s%s; reading through a private daemon until the node's recovers", exn.message, where)

    def _go_back(self) -> None:
        """Return to the node's daemon if it is due to be tried again and well."""
        if not (self._choice.fallback and self._is_private) or time.monotonic() < self._back_at_s:
            return
        self._back_at_s = time.monotonic() + self._patience.retry_s
        if self._choice.node_status() == "ok":
            self._move(is_private=False)
            log.info("the daemon at %s has recovered; shards come from it again", self._choice.node)

    def _move(self, *, is_private: bool) -> None:
        """Have another daemon serve what is not granted yet; mapped files stay, which the former daemon respects."""
        self._lose()
        self._outage, self._unreadable, self._is_private = None, (-1, 0), is_private
        self._leases = [lease for lease in self._leases if lease.grant is None or lease.grant["type"] == "arriving"]

    def _answer(
        self, connection: DaemonConnection, lease: LeaseRequest, until_s: float, deadline: Deadline
    ) -> Json | None:
        """Return the answer to a lease's last request; None if none has come. Leaves a daemon that is frozen."""
        answer = connection.answer(lease.request, until_s)
        silent_s = time.monotonic() - self._heard_s
        if answer is None and self._can_leave and silent_s > self._patience.grace_s / 2:
            if self._choice.node_status() is not None:
                self._heard_s = time.monotonic()
            elif silent_s > self._patience.grace_s:
                cause = f"the daemon has not answered for {silent_s:.0f} s"
                self._leave(errors.NoDaemonError(cause), deadline)
        return answer

    def _ready(self, deadline: Deadline) -> DaemonConnection:
        """Return a connection on which the plan is declared and every lease requested."""
        if self._connection is None:
            self._connection = self._open(deadline)
            self._declared = None
        if self._plan is not None and self._declared is not self._plan:
            self._declare(self._connection, self._plan, deadline)
            self._declared = self._plan
        return self._connection

    def _open(self, deadline: Deadline) -> DaemonConnection:
        where = ensure_started() if self._is_private else cast(Path, self._choice.node)
        begun_s = time.monotonic()
        until_s = min(self._tried_until_s(deadline), begun_s + _OPEN_TIMEOUT_S)
        until_s = max(until_s, begun_s + _MIN_OPEN_S)
        try:
            return DaemonConnection(where, self.reader, until_s, is_private=self._is_private)
        except errors.NoDaemonError as exn:
            self._lost(exn, begun_s)
            raise

    def _declare(self, connection: DaemonConnection, plan: Plan, deadline: Deadline) -> None:
        """Declare the plan from the first lease to the last, and request each of these leases again."""
        # Newest first: earlier positions then count as read, and the burst of requests does not distort the pace.
        leases = sorted(self._leases, key=attrgetter("position"), reverse=True)
        self._start, furthest = (leases[-1].position, leases[0].position) if leases else (0, 0)
        self._unsent = plan.messages(self._start)
        self._piece = 0

        def call(kind: str, **fields: Any) -> Json:
            until_s = deadline.at_s
            if self._can_leave:  # a daemon that another can replace is left if it is silent
                until_s = min(until_s, time.monotonic() + _OPEN_TIMEOUT_S)
            return connection.call(kind, until_s, **fields)

        send_until(furthest - self._start, plan, self._unsent, call)
        for lease in leases:
            self._ask(connection, lease)

    def _ask(self, connection: DaemonConnection, lease: LeaseRequest) -> None:
        lease.grant = None  # a grant from another daemon has ended
        place = lease.position - self._start
        lease.request = connection.request("lease", position=place, **lease.options())
        lease.number = lease.request
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
