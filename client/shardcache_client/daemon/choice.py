"""Choice of the daemon that serves a reader: the node's, or this user's private one."""

import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

from shardcache import errors
from shardcache.shared.private import node_has_daemon
from shardcache.shared.socket_paths import socket_path
from shardcache.shared.unix_socket import health

Which: TypeAlias = Literal["auto", "node", "private"]
Fallback: TypeAlias = Literal["error", "private"]

# Packages without which no daemon can be started.
_DAEMON_PACKAGES = ("aiohttp", "click", "diskcache", "fsspec", "pydantic", "structlog")
_HEALTH_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class DaemonChoice:
    """The daemon that serves a reader.

    Attributes:
        node: socket of the node's daemon; None for a private one.
        fallback: True if a private one serves while the node's cannot.
    """

    node: Path | None
    fallback: bool = False

    @classmethod
    def of(
        cls,
        socket: str | os.PathLike[str] | None = None,
        daemon: Which = "auto",
        fallback: Fallback = "error",
    ) -> "DaemonChoice":
        """Return the choice that a user's arguments describe. Raises ConfigError."""
        if socket is not None and daemon == "private":
            raise errors.ConfigError(
                "socket and daemon='private' cannot be combined",
                remedy='omit socket, or daemon="private"',
            )
        is_private = daemon == "private"
        if daemon == "auto" and socket is None:
            is_private = not node_has_daemon()
        may_fall_back = fallback == "private"
        if is_private or may_fall_back:
            _check_installed()
        if is_private:
            return cls(None)
        return cls(socket_path(socket), may_fall_back)

    def node_status(self) -> str | None:
        """Return the status that the node's daemon reports, "ok" if it is healthy.

        None if it does not answer.
        """
        assert self.node is not None
        return status_at(self.node)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that describe this choice."""
        if self.node is None:
            return {"daemon": "private"}
        fallback = "private" if self.fallback else "error"
        return {"socket": self.node, "fallback": fallback}


def status_at(socket: Path) -> str | None:
    """Return the status that the daemon at a socket reports; None if it does not answer."""
    with suppress(OSError, ValueError):
        return str(health(socket, _HEALTH_TIMEOUT_S)["status"])
    return None


def _check_installed() -> None:
    """Raise ConfigError if a package of the daemon is not installed."""
    for name in _DAEMON_PACKAGES:
        if find_spec(name) is None:
            raise errors.ConfigError(
                "no daemon is set up on this node, and this environment cannot start one: "
                f"{name} is not installed",
                remedy="pip install 'shardcache[daemon]'; or start the node's daemon, and set "
                "SHARDCACHE_SOCKET",
            )
