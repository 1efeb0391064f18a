"""One reader's session: its plan and leases, kept from one daemon to the next."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from shardcache import errors
from shardcache.shared.protocol import Json, Wanted
from shardcache.shared.unix_socket import served_lately
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import DaemonConnection, ReaderIdentity
from shardcache_client.daemon.declaring import send_through
from shardcache_client.daemon.lease import Grant, LeaseRequest
from shardcache_client.daemon.link import CACHE_SIDE, DaemonLink
from shardcache_client.daemon.patience import Deadline, Patience
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest

log = logging.getLogger("shardcache")

# A daemon is started again within seconds; one that is gone for good leaves the same traces as one
# that restarts.
_RESTART_S = 30.0


class Session(DaemonLink):
    """One reader's plan and leases at a daemon; after a broken connection, at the next daemon.

    Positions of a plan mean the same to every daemon, so no sample is lost or repeated when reading
    goes on at another one. Every method that needs an answer raises NoDaemonError if no daemon
    gives one within the session's patience, and DaemonError if this user may not use the daemon or
    it speaks another protocol.

    With a fallback, an error of the node's cache leads to the private daemon until the node's works
    again; errors of the origin and refusals reach the reader as usual. See `failover`.

    Attributes:
        reader: as the daemon lists it.
        on_wait: called periodically while waiting for a shard.
        waited_s: time that its borrower has waited for daemon and shards.
    """

    def __init__(
        self,
        choice: DaemonChoice,
        reader: ReaderIdentity,
        patience: Patience,
        *,
        partial_reads: bool = False,
    ) -> None:
        """Begin a session; the daemon is connected to when it is first needed.

        Args:
            partial_reads: True if a shard may be granted before it has arrived whole.
        """
        super().__init__(choice, reader, patience)
        self.on_wait: Callable[[], None] | None = None
        self.waited_s = 0.0
        self._partial_reads = partial_reads
        self._plan: Plan | None = None
        self._leases: list[LeaseRequest] = []
        self._ended: list[LeaseRequest] = []  # whose release is sent with the next requests

        # Of the current connection:
        self._declared: Plan | None = None
        # The daemon's position 0: a plan declared again begins at the reader's position.
        self._start = 0
        self._unsent: Iterator[tuple[str, Json]] = iter(())  # messages of the plan still to be sent
        self._piece = 0  # id of the request with its last piece, until the daemon has accepted it

    def __repr__(self) -> str:
        which = f"{self._failover!r}, leases={len(self._leases)}"
        return f"Session({self.reader!r}, {which}, {self._connection!r})"

    # Manifests and plans

    def resolve(
        self,
        urls: Sequence[str],
        wanted: Wanted = "samples",
        max_age_s: float | None = None,
    ) -> Manifest:
        """Have the daemon resolve urls, patterns and prefixes to shards, or to files.

        Waits for a daemon that is stopping, or is lost before it has answered, and up to half a
        minute for one that was at the socket a moment ago. If there was none, raises NoDaemonError
        immediately. Raises NotFoundError, and any other error of the origin.

        Args:
            wanted: what the urls are wanted for; see the protocol.
            max_age_s: what the daemon found out longer ago is not used.
        """
        deadline = Deadline(self._patience.limit_s)
        try:
            self._connected(deadline)
        except CACHE_SIDE as exn:
            is_handled = self._failover.is_private or self._failover.can_replace
            if not (is_handled or isinstance(exn, errors.StoppingError)):
                self._await_restart(exn, deadline)

        fields: Json = {"urls": list(urls), "wanted": wanted}
        if max_age_s is not None:
            fields["max_age_ms"] = int(max_age_s * 1000)

        def ask(connection: DaemonConnection) -> Json:
            return self._call(connection, "resolve", deadline, **fields)

        answer = self._ask_until_answered(deadline, ask)
        return Manifest.from_answer(answer, urls)

    def _await_restart(self, exn: errors.ShardcacheError, deadline: Deadline) -> None:
        """Wait for the next daemon at the socket, if the traces of one are there.

        Raises the error if not.
        """
        was_there = served_lately(cast(Path, self._choice.node), _RESTART_S)
        if not (isinstance(exn, errors.NoDaemonError) and was_there):
            raise exn
        left_s = deadline.at_s - time.monotonic()
        restart = Deadline(min(left_s, _RESTART_S))
        self._pause_or_replace(exn, restart)
        self._ask_until_answered(restart, lambda connection: None)

    def declare(self, plan: Plan) -> None:
        """Declare the plan, of a long one the first piece.

        All leases of an earlier plan must have ended.
        """
        self._return_to_node()
        self._plan = plan
        self._failover.forget_unreadable()
        with self._timed():
            deadline = Deadline(self._patience.limit_s)
            self._ask_until_answered(deadline, lambda connection: None)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the time of a block as a wait."""
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
        self._tell_if_connected(self._send_piece)

    def _send_piece(self, connection: DaemonConnection) -> None:
        if self._piece and connection.answer(self._piece, time.monotonic()) is None:
            return
        self._piece = 0
        message = next(self._unsent, None)
        if message is not None:
            kind, fields = message
            self._piece = connection.request(kind, **fields)

    # Leases

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
        """Request the shard at a position of the plan, without waiting for it.

        Args:
            partial: True if its beginning will do; None for the session's default.
            unpublished: True if its files may be granted before they have their final paths, to
                this process alone.
            first: in a plan of ranges, start and end of the bytes that are wanted.
            latest: True if it may have been replaced.
            named: True if a path that ends with the object's name is wanted as well.
        """
        self._choose_daemon([position])
        if partial is None:
            partial = self._partial_reads
        lease = LeaseRequest(position, partial, unpublished, first, latest=latest, named=named)
        self._leases.append(lease)
        self._tell_if_connected(lambda connection: self._request(connection, [lease]))
        return lease

    def lease_ranges(
        self,
        ranges: Sequence[tuple[int, tuple[int, int]]],
        *,
        needed: bool,
        ahead_to: int = 0,
    ) -> list[LeaseRequest]:
        """Request ranges of objects of a plan of ranges, without waiting for them.

        Args:
            ranges: position in the plan, and start and end of the bytes, of each.
            needed: True if the reader has nothing else to do than to wait for the first of them. It
                must have released all that it needed before.
            ahead_to: with `needed`, where the bytes end of which the reader takes what is cached,
                beyond the first range.
        """
        self._choose_daemon([position for position, _ in ranges])
        leases = [LeaseRequest(position, partial=True, first=span) for position, span in ranges]
        leases[0].needed = needed
        leases[0].ahead_to = ahead_to
        self._leases += leases
        self._tell_if_connected(lambda connection: self._request(connection, leases))
        return leases

    def _choose_daemon(self, positions: Sequence[int]) -> None:
        """Have another daemon serve if this process cannot read the files of the present one.

        Also return from a private daemon to the node's, once that works again.
        """
        assert self._plan is not None
        unreadable = next(filter(self._failover.is_unreadable, positions), None)
        if unreadable is not None:
            url = self._plan.shard(unreadable).url
            cause = errors.CacheDirError("this process cannot read the daemon's files", url=url)
            self._replace_node(cause)
        self._return_to_node()

    def wait(self, lease: LeaseRequest) -> Grant:
        """Wait for the shard, or for its beginning, and return its grant. The reader then holds it.

        The shard stays cached until `release`, as do all others that were waited for; but one
        granted ahead may have been evicted before the daemon receives this request. A long wait is
        logged with its reason. Raises ShardTimeoutError if nothing of it arrives for the session's
        time limit, CapacityError if all readers wait for space that only they could free, and any
        other error that the daemon met in fetching the shard; the lease has then ended.
        """
        deadline = Deadline(self._patience.limit_s)
        if lease.grant is None:
            self._send_before_wait(lease)
            self._failover.begin_wait()
            lease.grant = self._await_grant(lease, deadline, self._ask_until_answered)
            lease.number = lease.grant["lease"]
            self._failover.record_grant()
        return lease.grant

    def _send_before_wait(self, lease: LeaseRequest) -> None:
        """Send what may keep a lease from being granted, unless it is granted already."""
        if self._connection is None:
            lease.needed = True
            return
        answer = self._connection.arrived(lease.request)
        if answer is None:
            self.flush()
        elif lease.first is not None:
            return  # a range that was granted before it is needed is read at once
        if not lease.needed:
            lease.needed = True
            self._tell_if_connected(lambda connection: connection.tell("need", of=lease.request))

    def more(self, lease: LeaseRequest, beyond: int) -> Grant | None:
        """Return a new grant of an arriving shard, once more of it has arrived than `beyond` bytes.

        If all of it was granted, but is not published yet, wait for that.

        Waits as `wait` does. Returns None if the connection broke: the earlier grant has ended and
        must not be read any further; `wait` returns a new one.
        """
        assert lease.grant is not None
        lease.grant = None
        deadline = Deadline(self._patience.limit_s)
        self._failover.begin_wait()

        def ask(connection: DaemonConnection) -> None:
            lease.request = connection.request("more", lease=lease.number, beyond=beyond)

        self._tell_if_connected(ask)
        try:
            lease.grant = self._await_grant(lease, deadline, self._ask_once)
        except errors.NoDaemonError as exn:
            self._record_outage(exn)
        return lease.grant

    def _await_grant(
        self,
        lease: LeaseRequest,
        deadline: Deadline,
        through: Callable[[Deadline, Callable[[DaemonConnection], Any]], Any],
    ) -> Grant:
        """Wait for a lease's last answer. Any error but a lost connection ends the lease.

        Args:
            through: `_ask_until_answered` or `_ask_once`.
        """
        assert self._plan is not None
        url = self._plan.shard(lease.position).url

        def poll(until_s: float) -> Json | None:
            ask = partial(self._poll, lease=lease, until_s=until_s)
            return cast("Json | None", through(deadline, ask))

        def explain(until_s: float) -> tuple[str, int]:
            ask = partial(DaemonConnection.explain, request=lease.request, deadline_s=until_s)
            return cast("tuple[str, int]", through(deadline, ask))

        try:
            with self._timed():
                answer: Json = self._patience.wait(url, deadline, poll, explain, self.on_wait)
        except errors.NoDaemonError:
            raise
        except errors.ShardcacheError as exn:
            self._leases.remove(lease)
            if isinstance(exn, errors.ShardTimeoutError):
                # A pending lease cannot be cancelled; a new connection requests the others again.
                self._disconnect()
            raise
        _log_damage(answer)
        return cast(Grant, answer)

    def _poll(
        self,
        connection: DaemonConnection,
        lease: LeaseRequest,
        until_s: float,
    ) -> Json | None:
        """Return the answer to a lease's last request; None if none has come.

        Raises as `_check_silence` does.
        """
        answer = connection.answer(lease.request, until_s)
        if answer is None:
            self._check_silence()
        return answer

    def release(self, lease: LeaseRequest, *, read: bool = True, damage: str = "") -> None:
        """Release a shard or its request, unless it has ended.

        Args:
            read: False if the file could not be read.
            damage: what is wrong with the file: the daemon then checks the shard before it grants
                it again.
        """
        if not read:
            self._failover.record_unreadable(lease.position)
        if lease not in self._leases:
            return
        self._leases.remove(lease)

        fields: Json = {}
        if not read:
            fields["read"] = False
        if lease.unmatched:
            fields["unmatched"] = lease.unmatched
        if damage:
            fields["damage"] = damage

        def tell(connection: DaemonConnection) -> None:
            connection.forget(lease.request)
            connection.tell("release", lease=lease.number, **fields)

        self._tell_if_connected(tell)

    def release_later(self, lease: LeaseRequest) -> None:
        """Release what was read, with the next ranges that are requested; `flush` sends it now."""
        if lease in self._leases:
            self._leases.remove(lease)
            self._ended.append(lease)

    def flush(self) -> None:
        """Send the releases that were to be sent later."""
        if self._ended:
            self._tell_if_connected(lambda connection: self._request(connection, []))

    def close(self) -> None:
        """End the session; the daemon drops its plan and leases."""
        self._plan = None
        self._leases.clear()
        self._ended.clear()
        self._disconnect()

    # Each new connection, and each new daemon

    def _prepare(self, connection: DaemonConnection, deadline: Deadline, *, is_new: bool) -> None:
        """Declare the plan, and request every lease, unless this has been done."""
        if is_new:
            self._declared = None
        if self._plan is None or self._declared is self._plan:
            return
        self._declare(connection, self._plan, deadline)
        self._declared = self._plan

    def _move(self) -> None:
        """Have another daemon serve what is not granted yet.

        Mapped files stay, which the previous daemon respects.
        """
        self._leases = [lease for lease in self._leases if not lease.is_granted_whole]

    def _declare(self, connection: DaemonConnection, plan: Plan, deadline: Deadline) -> None:
        """Declare the plan from the first lease on, and request all leases again."""
        # Newest first: earlier positions then count as read, and the burst of requests does not
        # distort the pace.
        leases = sorted(self._leases, key=attrgetter("position"), reverse=True)
        self._start = leases[-1].position if leases else 0
        furthest = leases[0].position if leases else 0
        if plan.wanted == "ranges":  # in any order
            self._start = 0
            furthest = plan.reads - 1
        self._unsent = plan.messages(self._start)
        self._piece = 0

        def call(kind: str, **fields: Any) -> Json:
            return self._call(connection, kind, deadline, **fields)

        send_through(furthest - self._start, plan, self._unsent, call)
        self._ended.clear()  # the daemon knows nothing of them
        self._request(connection, leases)

    def _request(self, connection: DaemonConnection, leases: Sequence[LeaseRequest]) -> None:
        """Send requests of leases, after the releases that were to be sent with them."""
        messages: list[Json] = [_release_of(lease) for lease in self._ended]
        self._ended.clear()
        for lease in leases:
            message = connection.lease_message(
                position=lease.position - self._start,
                needed=lease.needed,
                **lease.options(),
            )
            lease.grant = None  # a grant from another daemon has ended
            lease.request = message["id"]
            lease.number = lease.request
            messages.append(message)
        if messages:
            connection.send_all(messages)


def _release_of(lease: LeaseRequest) -> Json:
    return {"type": "release", "lease": lease.number}


def _log_damage(answer: Json) -> None:
    """Warn of damage in shards that this process reads, which the daemon has found."""
    for each in answer.get("damaged", ()):
        damage = errors.from_json(each)
        log.warning(
            "%s: %s; samples that this process read from it may be wrong; the next reader gets a "
            "fresh copy",
            damage.url,
            damage.message,
        )


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
