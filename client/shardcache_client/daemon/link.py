"""Requests to a daemon that are repeated over new connections until a daemon answers.

A connection ends when its daemon restarts. The link then connects to the daemon's next run; or,
with a fallback, it changes from the node's daemon to the user's private daemon. An outage is the
time from the loss of a connection until a daemon answers. `Session` is the only kind of link.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from shardcache.shared import exceptions
from shardcache.shared.protocol import Json
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import DaemonConnection, ReaderIdentity, hanging_daemon
from shardcache_client.daemon.failover import Failover
from shardcache_client.daemon.patience import Deadline, Outage, Patience, check_parent
from shardcache_client.daemon.private_start import ensure_started

log = logging.getLogger("shardcache")

T = TypeVar("T")
# Sends a request over a connection, and returns the answer.
Ask: TypeAlias = Callable[[DaemonConnection], T]

# Errors of the daemon or of its cache, which another daemon may not have. Refusals and errors of
# the origin would be the same at any daemon.
CACHE_ERRORS = (exceptions.CacheError, exceptions.NoDaemonError, exceptions.VersionMismatchError)
# Maximum time for opening one connection. A daemon that takes longer to accept a session is frozen
# or exiting, and the next try may reach its successor.
_OPEN_TIMEOUT_S = 10.0
# Minimum time for opening one connection, granted even if the deadline is nearer or has passed.
_MIN_OPEN_S = 1.0


class DaemonLink(ABC):
    """Sends requests to a daemon, and opens a new connection whenever one is lost.

    A subclass prepares each new connection for its requests. It inherits from the link instead of
    giving the link a callback: the two objects would refer to each other, and stay alive until the
    garbage collector runs.

    Args:
        choice: the daemon, and whether a private daemon may replace it.
        reader: identity under which the daemon lists the session.
        patience: limits of the waits for the daemon.

    Attributes:
        reader: identity under which the daemon lists the session.
    """

    def __init__(self, choice: DaemonChoice, reader: ReaderIdentity, patience: Patience) -> None:
        self.reader = reader
        self._choice = choice
        self._patience = patience
        self._failover = Failover(choice, patience)
        self._connection: DaemonConnection | None = None
        # The present outage; None while the daemon answers.
        self._outage: Outage | None = None
        # Time of the last try to reach the daemon: a connection was begun, or a wait for an answer
        # was checked and had none.
        self._tried_s = 0.0

    @abstractmethod
    def _prepare(self, connection: DaemonConnection, deadline: Deadline, *, is_new: bool) -> None:
        """Make a connection ready for a request.

        Called before every request; `is_new` is True before the connection's first request.
        """

    @abstractmethod
    def _drop_leases_of_whole_shards(self) -> None:
        """Drop the leases whose whole shard is granted, as another daemon serves from now on."""

    # Messages to a daemon that may be lost

    def _tell_if_connected(self, send: Callable[[DaemonConnection], object]) -> None:
        """Send a message over the present connection, if there is one.

        A message that is lost need not be repeated: the next connection gets the same facts from
        `_prepare`.
        """
        if self._connection is None:
            return
        try:
            send(self._connection)
        except exceptions.NoDaemonError as exn:
            self._record_outage(exn)

    def _ask_until_answered(self, deadline: Deadline, ask: Ask[T]) -> T:
        """Send a request, and connect again until a daemon answers.

        Raises NoDaemonError if no daemon has answered by the deadline.
        """
        while True:
            try:
                answer = ask(self._connected(deadline))
            except CACHE_ERRORS as exn:
                self._pause_or_change_daemon(exn, deadline)
            else:
                self._outage = None
                self._failover.record_answer()
                return answer
            check_parent()

    def _ask_once(self, deadline: Deadline, ask: Ask[T]) -> T:
        """Send a request on the current connection only.

        Raises NoDaemonError if the connection is lost. It is lost, too, if an error of the node's
        cache made this link change to the private daemon.
        """
        if self._connection is None:
            raise exceptions.NoDaemonError("the connection to the daemon is lost")
        try:
            return ask(self._connection)
        except exceptions.NoDaemonError as exn:
            self._record_outage(exn)
            raise
        except (exceptions.CacheError, exceptions.VersionMismatchError) as exn:
            if not self._failover.may_change_to_private:
                raise
            self._change_to_private(exn, deadline)
            raise exceptions.NoDaemonError(exn.message) from exn

    def _pause_or_change_daemon(self, exn: exceptions.ShardcacheError, deadline: Deadline) -> None:
        """Decide about the next try after one of CACHE_ERRORS.

        1. An unreachable daemon: pause, and try it again, while there is time for tries.
        2. Another error, or no time left: change from the node's daemon to the private daemon, if
           the reader has a fallback.
        3. Otherwise, raise the error.
        """
        if isinstance(exn, exceptions.NoDaemonError):
            outage = self._record_outage(exn)
            tried_until_s = self._failover.tried_until_s(deadline, outage)
            if outage.pause(tried_until_s, self._tried_s):
                return
            if not self._failover.may_change_to_private:
                raise outage.given_up(exn)
        if not self._failover.may_change_to_private:
            raise exn
        self._change_to_private(exn, deadline)

    def _disconnect(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _record_outage(self, exn: exceptions.NoDaemonError, begun_s: float | None = None) -> Outage:
        """Close a broken connection; return the outage, which an earlier error may have begun.

        Args:
            begun_s: time from which on the daemon has given no sign of life, of `time.monotonic`;
                None for the present time.
        """
        self._disconnect()
        if self._outage is None:
            self._outage = Outage(exn, time.monotonic() if begun_s is None else begun_s)
        return self._outage

    def _call(
        self,
        connection: DaemonConnection,
        kind: str,
        deadline: Deadline,
        **fields: Any,
    ) -> Json:
        """Send a request and return its answer. Raises NoDaemonError if the daemon is frozen."""
        self._failover.begin_wait()
        return connection.call(kind, deadline.at_s, self._check_silence, **fields)

    def _check_silence(self) -> None:
        """Note that no answer has come yet, and raise NoDaemonError if the daemon is frozen.

        The outage of a frozen daemon begins at the daemon's last sign of life.
        """
        self._tried_s = time.monotonic()
        if self._connection is None or not self._failover.is_frozen(self._connection.socket):
            return
        alive_s = self._failover.alive_s
        silent_s = time.monotonic() - alive_s
        exn = hanging_daemon(self._connection.socket, f"it has not answered for {silent_s:.0f} s")
        self._record_outage(exn, alive_s)
        raise exn

    # From one daemon to another

    def _change_to_private(
        self,
        exn: exceptions.ShardcacheError,
        deadline: Deadline | None = None,
    ) -> None:
        """Change from the node's daemon to the private daemon for a while.

        Args:
            exn: the reason, which is logged.
            deadline: the deadline of the present wait, whose time begins again; None if nothing
                waits.
        """
        self._failover.change_to_private()
        self._change_daemon()
        if deadline is not None:
            deadline.restart()
        where = f" ({exn.url})" if exn.url else ""
        log.warning(
            "%s%s; reading through a private daemon until the node's recovers", exn.message, where
        )

    def _return_to_node(self) -> None:
        """Return to the node's daemon if its next trial is due, and the daemon is healthy."""
        if self._failover.return_to_node():
            self._change_daemon()
            socket = self._choice.node_socket
            log.info("the daemon at %s has recovered; shards come from it again", socket)

    def _change_daemon(self) -> None:
        """Leave the present daemon, after the failover has chosen another."""
        self._disconnect()
        self._outage = None
        self._drop_leases_of_whole_shards()

    # Connections

    def _connected(self, deadline: Deadline) -> DaemonConnection:
        """Return a connection that is ready for a request; open one if there is none."""
        is_new = self._connection is None
        if self._connection is None:
            self._connection = self._open(deadline)
        self._prepare(self._connection, deadline, is_new=is_new)
        return self._connection

    def _open(self, deadline: Deadline) -> DaemonConnection:
        """Return a new connection. A private daemon that does not run is started first."""
        is_private = self._failover.is_private
        if is_private:
            socket = ensure_started()
        else:
            assert self._choice.node_socket is not None
            socket = self._choice.node_socket
        begun_s = time.monotonic()
        self._tried_s = begun_s
        tried_until_s = self._failover.tried_until_s(deadline, self._outage)
        until_s = min(tried_until_s, begun_s + _OPEN_TIMEOUT_S)
        until_s = max(until_s, begun_s + _MIN_OPEN_S)
        try:
            return DaemonConnection(socket, self.reader, until_s, is_private=is_private)
        except exceptions.NoDaemonError as exn:
            self._record_outage(exn, begun_s)
            raise
