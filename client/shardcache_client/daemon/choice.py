"""Choice of the daemon that serves a reader: the node's daemon, or this user's private daemon.

The choice is made from the arguments `socket`, `daemon` and `fallback` of a dataset, and stays the
same for the life of the reader. With a fallback, `failover` decides which daemon serves now.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

from shardcache.shared import exceptions
from shardcache.shared.private import node_has_daemon
from shardcache.shared.socket_paths import socket_path
from shardcache.shared.unix_socket import health

DaemonName: TypeAlias = Literal["auto", "node", "private"]
Fallback: TypeAlias = Literal["error", "private"]

# Packages that a daemon imports. An installation without the extra `daemon` lacks some of them.
_DAEMON_PACKAGES = ("aiohttp", "click", "diskcache", "fsspec", "pydantic", "structlog")
_HEALTH_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class DaemonChoice:
    """The daemon that serves a reader.

    Attributes:
        node_socket: socket of the node's daemon; None for the private daemon.
        may_fall_back: True if the private daemon serves while the node's daemon cannot.
    """

    node_socket: Path | None
    may_fall_back: bool = False

    @classmethod
    def of(
        cls,
        socket: str | os.PathLike[str] | None = None,
        daemon: DaemonName = "auto",
        fallback: Fallback = "error",
    ) -> "DaemonChoice":
        """Return the choice that a user's arguments describe.

        Args:
            socket: path of the node's daemon's socket; None for the configured path.
            daemon: "auto" for the node's daemon if the node has one, and otherwise a private one.
            fallback: "private" if a private daemon may replace the node's daemon.

        Raises ConfigError if the arguments contradict each other, or if a private daemon may be
        needed but cannot be started.
        """
        if socket is not None and daemon == "private":
            raise exceptions.ConfigError(
                "socket and daemon='private' cannot be combined",
                remedy='omit socket, or daemon="private"',
            )
        if daemon == "auto":
            # With a socket given, "auto" means the daemon at that socket.
            is_private = socket is None and not node_has_daemon()
        else:
            is_private = daemon == "private"
        may_fall_back = fallback == "private"
        # If this process may have to start a daemon, it finds out now whether it can.
        if is_private or may_fall_back:
            _check_installed()
        if is_private:
            return cls(node_socket=None)
        return cls(socket_path(socket), may_fall_back)

    def node_status(self) -> str | None:
        """Return the status that the node's daemon reports: "ok" if the daemon is healthy.

        Returns None if the daemon does not answer.
        """
        assert self.node_socket is not None
        return status_at(self.node_socket)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of a dataset that lead to this choice."""
        if self.node_socket is None:
            return {"daemon": "private"}
        fallback = "private" if self.may_fall_back else "error"
        return {"socket": self.node_socket, "fallback": fallback}


def status_at(socket: Path) -> str | None:
    """Return the status that a socket's daemon reports; None if the daemon does not answer."""
    with suppress(OSError, ValueError):
        return str(health(socket, _HEALTH_TIMEOUT_S)["status"])
    return None


def _check_installed() -> None:
    """Raise ConfigError if a package of the daemon is not installed."""
    for name in _DAEMON_PACKAGES:
        if find_spec(name) is None:
            raise exceptions.ConfigError(
                "no daemon is set up on this node, and this environment cannot start one: "
                f"{name} is not installed",
                remedy="pip install 'shardcache[daemon]'; or start the node's daemon, and set "
                "SHARDCACHE_SOCKET",
            )
