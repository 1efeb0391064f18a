"""A Unix socket for `requests`, which knows nothing but hosts."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool
from urllib3.connection import HTTPConnection

from support.programs.guard import GUARD_S

BASE_URL = "http://shardcache"


def session(path: Path) -> requests.Session:
    """Return a session in which every url below BASE_URL is asked of the server at `path`."""
    found = requests.Session()
    found.trust_env = False  # a proxy of this machine would only be in the way
    found.mount(BASE_URL, _UnixAdapter(path))
    return found


class _UnixConnection(HTTPConnection):
    path: Path

    def _new_conn(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(GUARD_S)
        try:
            sock.connect(os.fspath(self.path))
        except BaseException:
            sock.close()
            raise
        return sock


class _UnixAdapter(HTTPAdapter):
    def __init__(self, path: Path) -> None:
        super().__init__()
        connection = type("Connection", (_UnixConnection,), {"path": path})
        self._pool = type("Pool", (HTTPConnectionPool,), {"ConnectionCls": connection})("shardcache", maxsize=4)

    def get_connection_with_tls_context(self, *_args: Any, **_kwargs: Any) -> Any:
        """Return the one pool there is."""
        return self._pool

    def close(self) -> None:
        self._pool.close()
