"""Health checks of the daemon, for readers that do without it until it recovers."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path

_TIMEOUT_S = 2.0


def health(path: Path) -> str | None:
    """Return the `status` that the daemon reports, "ok" if it is healthy; None if it does not answer."""
    connection = _Connection(path)
    try:
        connection.request("GET", "/v1/health")
        return str(json.loads(connection.getresponse().read())["status"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None
    finally:
        connection.close()


def listens(path: Path) -> bool:
    """Return True if a process accepts connections on the socket; a frozen daemon still does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            pass  # the next request reports the error
    return True


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("shardcache", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
