"""One reader's session: its plan and leases, kept from one daemon to the next.

A plan is the order in which the reader reads shards; a position is a place in it, from 0. A lease
is the reader's claim on the shard at a position. The daemon grants a lease by naming the shard's
file, and keeps that file until the lease is released. `resolve` at the end is for one-off calls.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from operator import attrgetter
from typing import Any, cast

from shardcache.shared import exceptions
from shardcache.shared.announced_range import MAX_ANNOUNCED
from shardcache.shared.protocol import Json, Wanted
from shardcache.shared.unix_socket import served_lately
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import DaemonConnection, ReaderIdentity, log_damage
from shardcache_client.daemon.declaration import Declaration
from shardcache_client.daemon.lease import Grant, LeaseRequest
from shardcache_client.daemon.link import CACHE_ERRORS, Ask, DaemonLink
from shardcache_client.daemon.patience import Deadline, Patience, WaitReason
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest

# How long to wait for a daemon that was at the socket a moment ago. A restarting daemon is back
# within seconds; the wait is limited because a daemon that is gone for good leaves the same traces.
_RESTART_S = 30.0


class Session(DaemonLink):
    """One reader's plan and leases at a daemon; after a broken connection, at the next daemon.

    Positions of a plan mean the same to every daemon, so no sample is lost or repeated when reading
    continues at another daemon. Every method that needs an answer raises NoDaemonError if no daemon
    answers within the session's patience, DaemonError if this user may not use the daemon, and
    VersionMismatchError if the daemon speaks another protocol.

    With a fallback, an error of the node's cache makes the session change to the private daemon
    until the node's daemon works again. Errors of the origin and refusals reach the reader as they
    do without a fallback. See `failover`.

    Attributes:
        reader: identity under which the daemon lists the session.
        on_wait: called about once a second while waiting for a shard; None for no call.
        waited_s: time spent waiting for daemon and shards since the pool last lent the session.
        has_range_plan: True once the present daemon knows, by `plan_ranges`, the order of ranges.
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
        self.has_range_plan = False
        self._partial_reads = partial_reads
        self._plan: Plan | None = None
        self._leases: list[LeaseRequest] = []
        # Leases that have ended, whose release is sent with the next requests.
        self._to_release: list[LeaseRequest] = []
        # The plan as it was declared over the current connection; None before that.
        self._declaration: Declaration | None = None

    def __repr__(self) -> str:
        facts = f"{self._failover!r}, leases={len(self._leases)}"
        return f"Session({self.reader!r}, {facts}, {self._connection!r})"

    # Manifests and plans

    def resolve(
        self,
        urls: Sequence[str],
        wanted: Wanted = "samples",
        max_age_s: float | None = None,
    ) -> Manifest:
        """Have the daemon resolve urls, patterns and prefixes to shards, or to files.

        Waits if the daemon is stopping or is lost before it answers, and up to half a minute if a
        daemon was at the socket a moment ago. If there was none, raises NoDaemonError immediately.
        Raises NotFoundError, and any other error of the origin.

        Args:
            wanted: what the urls are to name, such as "samples" or "files"; see the protocol.
            max_age_s: maximum age of a kept answer that the daemon may give; None for the daemon's
                own limit.
        """
        deadline = Deadline(self._patience.limit_s)
        # The first try shows whether there is a daemon. The request itself would wait for one until
        # the deadline, even if nobody has started one.
        try:
            self._connected(deadline)
        except CACHE_ERRORS as exn:
            self._await_restart(exn, deadline)

        fields: Json = {"urls": list(urls), "wanted": wanted}
        if max_age_s is not None:
            fields["max_age_ms"] = int(max_age_s * 1000)

        def ask(connection: DaemonConnection) -> Json:
            return self._call(connection, "resolve", deadline, **fields)

        answer = self._ask_until_answered(deadline, ask)
        return Manifest.from_answer(answer, urls)

    def _await_restart(self, exn: exceptions.ShardcacheError, deadline: Deadline) -> None:
        """Wait for the next daemon at the socket, if one was there a moment ago.

        Args:
            exn: the error of connecting to the daemon. It is raised if no daemon is expected.
        """
        # 1. The request connects again: to a private daemon, or after a stop that was announced.
        node_socket = self._choice.node_socket
        if node_socket is None or self._choice.may_fall_back:
            return
        if isinstance(exn, exceptions.StoppingError):
            return

        # 2. No daemon is expected: none was there lately, or the present one will not do.
        is_absent = isinstance(exn, exceptions.NoDaemonError)
        if not is_absent or not served_lately(node_socket, _RESTART_S):
            raise exn

        # 3. A daemon that was there a moment ago is probably restarting.
        left_s = deadline.at_s - time.monotonic()
        restart = Deadline(min(left_s, _RESTART_S))
        self._pause_or_change_daemon(exn, restart)
        self._ask_until_answered(restart, _only_connect)

    def declare(self, plan: Plan) -> None:
        """Declare a plan; of a long plan, only the first piece. `extend` sends the others.

        All leases of an earlier plan must have ended.
        """
        self._return_to_node()
        self.flush()  # `_declare` drops the releases that were put off
        self._plan = plan
        self._failover.forget_unreadable()
        with self._counted_as_wait():
            # A connection is enough, as `_prepare` declares the plan over each one.
            self._ask_until_answered(Deadline(self._patience.limit_s), _only_connect)

    @contextmanager
    def _counted_as_wait(self) -> Iterator[None]:
        """Add the time that a block takes to `waited_s`."""
        begun_s = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - begun_s

    def extend(self) -> None:
        """Send the next piece of the plan, if the daemon has accepted the previous piece.

        Called once per shard, this keeps the declared part far ahead of the reader, and the first
        sample does not wait until a plan of a million positions is sent. A daemon that is slow to
        accept a piece does not delay the reader.
        """
        if self._declaration is not None:
            self._tell_if_connected(self._declaration.send_piece)

    # Leases

    def lease(
        self,
        position: int,
        *,
        partial: bool | None = None,
        unpublished: bool = False,
        latest: bool = False,
        named: bool = False,
    ) -> LeaseRequest:
        """Request the shard at a position of the plan, without waiting for it.

        Args:
            partial: True if the shard may be granted before all of it has arrived; None for the
                session's default.
            unpublished: True if the shard's files may be granted before they have their final
                paths, which other processes need to find them.
            latest: True to accept the object's present version, whatever version the plan names.
            named: True to get a path that ends with the object's name as well.
        """
        self._choose_daemon([position])
        if partial is None:
            partial = self._partial_reads
        lease = LeaseRequest(
            position,
            partial=partial,
            unpublished=unpublished,
            latest=latest,
            named=named,
        )
        self._leases.append(lease)
        self._tell_if_connected(lambda connection: self._request(connection, [lease]))
        return lease

    def lease_ranges(
        self,
        ranges: Sequence[tuple[int, tuple[int, int]]],
        *,
        needed: bool,
        ahead_to: int = 0,
        numbers: Sequence[int | None] = (),
    ) -> list[LeaseRequest]:
        """Request ranges of objects of a plan of ranges, without waiting for them.

        Args:
            ranges: for each, the object's position in the plan, and start and end of the bytes.
            needed: True if the reader can do nothing but wait for the first range now. The reader
                must have released all leases that it needed before: the daemon always has space for
                one range that a reader needs, but only for one.
            ahead_to: with `needed`, offset up to which the reader also takes cached bytes after
                the first range; 0 for none.
            numbers: number of each range among those announced; empty if none is.
        """
        self._choose_daemon([position for position, _ in ranges])
        leases = [LeaseRequest(position, partial=True, span=span) for position, span in ranges]
        for lease, number in zip(leases, numbers, strict=False):
            lease.range_number = number
        leases[0].needed = needed
        leases[0].ahead_to = ahead_to
        self._leases += leases
        self._tell_if_connected(lambda connection: self._request(connection, leases))
        return leases

    def plan_ranges(self, ranges: Sequence[int], *, begins: bool) -> None:
        """Announce ranges in reading order, if the daemon is connected and takes this advice.

        Args:
            ranges: four numbers for each range; see `plan_ranges` in the protocol.
            begins: True if the ranges do not continue earlier ones.
        """

        def tell(connection: DaemonConnection) -> None:
            if not connection.takes_range_plans:
                return
            step = 4 * MAX_ANNOUNCED
            for first in range(0, len(ranges), step):
                announced = ranges[first : first + step]
                is_first = first == 0
                connection.tell("plan_ranges", ranges=announced, begins=begins and is_first)
            self.has_range_plan = True

        self._tell_if_connected(tell)

    def _choose_daemon(self, positions: Sequence[int]) -> None:
        """Change to the private daemon if this process cannot read the node's files, or back."""
        assert self._plan is not None
        unreadable = next(filter(self._failover.should_change_for, positions), None)
        if unreadable is not None:
            url = self._plan.shard(unreadable).url
            cause = exceptions.CacheDirError("this process cannot read the daemon's files", url=url)
            self._change_to_private(cause)
        self._return_to_node()

    def wait(self, lease: LeaseRequest) -> Grant:
        """Wait for the shard, or for its beginning, and return its grant.

        From then on the shard stays cached until `release`. But if it was granted ahead of this
        wait, it may have been evicted before the daemon learned of the wait: its file is missing
        then. A long wait is logged with its reason.

        Raises ShardTimeoutError if nothing of the shard arrives for the session's time limit,
        CapacityError if all readers wait for space that only they could free, and any other error
        that the daemon met in fetching the shard; the lease has then ended.
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
        """Send pending releases, and that the reader needs a lease: a grant may depend on both."""
        if self._connection is None:
            lease.needed = True
            return
        has_answer = self._connection.has_answer(lease.request)
        if has_answer and lease.span is not None:
            return  # a granted range is read at once: no need to tell the daemon
        if not has_answer:
            self.flush()
        if not lease.needed:
            lease.needed = True
            self._tell_if_connected(lambda connection: connection.tell("need", of=lease.request))

    def more(self, lease: LeaseRequest, beyond: int) -> Grant | None:
        """Return a new grant of an arriving shard, once more than `beyond` bytes have arrived.

        If all of the shard was granted, but is not published yet, wait until it is published.

        Waits as `wait` does. Returns None if the connection broke: the earlier grant has ended, and
        its file must not be read any further; `wait` returns a new grant.
        """
        if lease.grant is None:  # another connection was opened since the earlier grant
            return None
        lease.grant = None
        deadline = Deadline(self._patience.limit_s)
        self._failover.begin_wait()

        def ask(connection: DaemonConnection) -> None:
            lease.request = connection.request("more", lease=lease.number, beyond=beyond)

        self._tell_if_connected(ask)
        # If the connection is lost, `wait` requests the lease again over the next one.
        with suppress(exceptions.NoDaemonError):
            lease.grant = self._await_grant(lease, deadline, self._ask_once)
        return lease.grant

    def _await_grant(
        self,
        lease: LeaseRequest,
        deadline: Deadline,
        send: Callable[[Deadline, Ask[Any]], Any],
    ) -> Grant:
        """Wait for the answer to a lease's last request.

        Any error but a lost connection ends the lease.

        Args:
            send: `_ask_until_answered` to connect again if necessary, or `_ask_once`.
        """
        assert self._plan is not None
        url = self._plan.shard(lease.position).url

        # `lease.request` is read only once there is a connection: each new one changes it.
        def poll(until_s: float) -> Json | None:
            answer = send(deadline, lambda connection: self._poll(connection, lease, until_s))
            return cast("Json | None", answer)

        def explain(until_s: float) -> WaitReason:
            reason = send(deadline, lambda connection: connection.explain(lease.request, until_s))
            return cast(WaitReason, reason)

        try:
            with self._counted_as_wait():
                answer: Json = self._patience.wait(url, deadline, poll, explain, self.on_wait)
        except exceptions.NoDaemonError:
            raise
        except exceptions.ShardcacheError as exn:
            self._leases.remove(lease)
            if isinstance(exn, exceptions.ShardTimeoutError):
                # A pending lease cannot be cancelled; a new connection requests the others again.
                self._disconnect()
            raise
        log_damage(answer)
        return cast(Grant, answer)

    def _poll(
        self,
        connection: DaemonConnection,
        lease: LeaseRequest,
        until_s: float,
    ) -> Json | None:
        """Return the answer to a lease's last request; None if there is none by a time.

        Raises NoDaemonError if the daemon is frozen.
        """
        answer = connection.answer(lease.request, until_s)
        if answer is None:
            self._check_silence()
        return answer

    def release(self, lease: LeaseRequest, *, unreadable: bool = False, damage: str = "") -> None:
        """Release a lease, granted or not; do nothing if it has ended.

        Args:
            unreadable: True if the file could not be read.
            damage: what is wrong with the file, so that the daemon checks the shard before it
                grants it again; empty for nothing.
        """
        if unreadable:
            self._failover.record_unreadable(lease.position)
        if lease not in self._leases:
            return
        self._leases.remove(lease)

        fields: Json = {}
        if unreadable:
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
        """Release a shard that was read, by a message with the next requests or by `flush`."""
        if lease in self._leases:
            self._leases.remove(lease)
            self._to_release.append(lease)

    def flush(self) -> None:
        """Send the releases that `release_later` put off."""
        if self._to_release:
            self._tell_if_connected(lambda connection: self._request(connection, []))

    def close(self) -> None:
        """End the session; the daemon drops its plan and leases."""
        self._plan = None
        self._leases.clear()
        self._to_release.clear()
        self._disconnect()

    # Each new connection, and each new daemon

    def _prepare(self, connection: DaemonConnection, deadline: Deadline, *, is_new: bool) -> None:
        """Declare the plan and request every lease, unless this connection has had both."""
        if is_new:
            self._declaration = None
        if self._plan is None:
            return
        declared = self._declaration
        if declared is None or declared.plan is not self._plan or not declared.is_accepted:
            self._declare(connection, self._plan, deadline)

    def _drop_leases_of_whole_shards(self) -> None:
        """Drop the leases whose whole shard is granted: another daemon serves only the others.

        This process has opened the files of those shards, and a daemon evicts no file that is open.
        """
        self._leases = [lease for lease in self._leases if not lease.is_granted_whole]

    def _declare(self, connection: DaemonConnection, plan: Plan, deadline: Deadline) -> None:
        """Declare the plan from the first lease on, and request all leases again."""
        # The furthest position comes first: the daemon then counts the earlier positions as read,
        # and the burst of requests does not distort its measure of the reader's pace.
        leases = sorted(self._leases, key=attrgetter("position"), reverse=True)
        if plan.wanted == "ranges":  # ranges are read in any order, so all of the plan is declared
            first_position = 0
            furthest = plan.reads - 1
        else:
            positions = [lease.position for lease in leases]
            first_position = min(positions, default=0)
            furthest = max(positions, default=0)
        self._declaration = Declaration(plan, first_position)
        self.has_range_plan = False

        def call(kind: str, **fields: Any) -> Json:
            return self._call(connection, kind, deadline, **fields)

        self._declaration.send_through(furthest, call)
        self._to_release.clear()  # a new connection knows nothing of the leases to be released
        self._request(connection, leases)

    def _request(self, connection: DaemonConnection, leases: Sequence[LeaseRequest]) -> None:
        """Send requests for leases, after the releases that were put off."""
        messages: list[Json] = [lease.release_message() for lease in self._to_release]
        self._to_release.clear()
        for lease in leases:
            assert self._declaration is not None
            message = connection.lease_message(
                position=lease.position - self._declaration.first_position,
                needed=lease.needed,
                **lease.options(),
            )
            lease.grant = None  # a grant from another daemon has ended
            lease.request = message["id"]
            lease.number = lease.request
            messages.append(message)
        if messages:
            connection.send_all(messages)


def _only_connect(connection: DaemonConnection) -> None:
    """Make no request, where only a prepared connection is wanted."""


def resolve(
    choice: DaemonChoice,
    reader: ReaderIdentity,
    urls: Sequence[str],
    timeout_s: float,
    wanted: Wanted = "samples",
    max_age_s: float | None = None,
) -> Manifest:
    """Have a daemon resolve urls over a new session that is then closed; see `Session.resolve`."""
    with closing(Session(choice, reader, Patience(timeout_s))) as session:
        return session.resolve(urls, wanted, max_age_s)
