"""Limits on the connections of a listening socket, and the open files that connections take.

`acceptor` enforces the limits. A descriptor is a number by which a process refers to an open file
or connection; a process has a limit on their number.
"""

import resource
from contextlib import suppress
from dataclasses import dataclass

from shardcache.config.settings import Settings
from shardcache.shared.exceptions import ExhaustedError

# Number of descriptors for the daemon's own files, processes and TCP connections.
_OWN_FILES = 160
# Number of descriptors for each connection to an origin, and for each transfer of a shard.
_FILES_PER_CONNECTION = 2
_FILES_PER_TRANSFER = 6

_MAX_CONNECTIONS = 8192  # a connection takes some 20 KiB
_FIRST_REQUEST_S = 10.0  # a client that connects sends its request immediately
# Sessions leave some connections to commands, metrics and probes, whose connections are short: this
# share of all connections, but at least this number.
_SHORT_SHARE = 1 / 8
_MIN_SHORT = 4

FEWER_CONNECTIONS = (
    "run fewer readers, or raise the daemon's limit of open files: "
    "LimitNOFILE= in its unit, or ulimit -n"
)
"""Remedy for a limit that is reached."""


def own_files(settings: Settings) -> int:
    """Return the number of descriptors that the daemon needs apart from its clients."""
    for_origins = _FILES_PER_CONNECTION * settings.max_connections
    for_transfers = _FILES_PER_TRANSFER * settings.max_transfers
    return _OWN_FILES + for_origins + for_transfers


def raise_limit_of_open_files() -> None:
    """Raise this process's limit of open files as far as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the connections of a listening socket.

    Attributes:
        connections: maximum number of connections at a time.
        per_user: maximum number of connections at a time for each user, except root and the
            daemon's own user.
        lifetime_s: maximum lifetime of a connection; None for no limit.
        first_request_s: maximum time until the head of a connection's first request has arrived;
            None for no limit.
        stall_s: maximum time for which a client may read nothing although there is something to
            read; None for no limit.
    """

    connections: int
    per_user: int
    lifetime_s: float | None = None
    first_request_s: float | None = None
    stall_s: float | None = None

    @classmethod
    def of_unix_socket(cls, settings: Settings) -> "Limits":
        """Return the limits of the Unix socket, within the present limit of open files."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # With a low limit, clients get a quarter of the descriptors, even if the daemon then lacks
        # some for itself.
        files_for_clients = max(files // 4, files - own_files(settings))
        connections = min(files_for_clients, settings.socket_connections or _MAX_CONNECTIONS)
        return cls(
            connections,
            per_user=settings.user_connections or connections // 2,
            first_request_s=_FIRST_REQUEST_S,
        )

    def check_sessions(self, sessions: int) -> None:
        """Raise ExhaustedError if there may be no further session.

        Args:
            sessions: number of connected readers.
        """
        reserved = max(_MIN_SHORT, int(self.connections * _SHORT_SHARE))
        if sessions >= self.connections - reserved:
            raise ExhaustedError(
                f"the daemon has {sessions} readers, its maximum",
                remedy=FEWER_CONNECTIONS,
            )
