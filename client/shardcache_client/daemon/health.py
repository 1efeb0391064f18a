"""Health checks of the daemon, for readers that do without it until it recovers."""

from __future__ import annotations

from pathlib import Path

from shardcache import unix_socket

_TIMEOUT_S = 2.0


def health(path: Path) -> str | None:
    """Return the `status` that the daemon reports, "ok" if it is healthy; None if it does not answer."""
    try:
        status: str = unix_socket.health(path, _TIMEOUT_S)["status"]
    except (OSError, ValueError):
        return None
    return status


def listens(path: Path) -> bool:
    """Return True if a process accepts connections on the socket; a frozen daemon still does."""
    try:
        with unix_socket.connected(path, _TIMEOUT_S):
            return True
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except OSError:
        return True  # the next request reports the error
