"""Events of the dashboard's page, over a Unix socket."""

import json
import os
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool
from urllib3.connection import HTTPConnection

from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S

LIVE_PATH = "/dashboard/live"
# A page gets one or two events a second.
_MAX_EVENTS = 120

Event = tuple[str, dict[str, Any]]


def events_of(answer: requests.Response) -> Iterator[Event]:
    rest = b""
    for piece in answer.iter_content(chunk_size=None):
        *blocks, rest = (rest + piece).split(b"\n\n")
        for name, data in (block.split(b"\n") for block in blocks):
            yield name.removeprefix(b"event: ").decode(), json.loads(data.removeprefix(b"data: "))


@contextmanager
def live(daemon: Daemon) -> Iterator[Iterator[Event]]:
    """Follow a daemon over its socket, as its page does: it asks again when a stream has lasted its time."""
    with session(daemon.socket) as http, closing(follow(http, BASE_URL)) as events:
        yield events


def follow(http: requests.Session, base_url: str) -> Generator[Event, None, None]:
    while True:
        with http.get(f"{base_url}{LIVE_PATH}", stream=True, timeout=GUARD_S) as answer:
            assert answer.status_code == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
            yield from events_of(answer)


class Page:
    """A page's state after some events."""

    def __init__(self, events: Iterator[Event]) -> None:
        self._events = events
        self.moment: dict[str, Any] = {}  # the last moment
        self.map: dict[str, int] = {}  # the band of each cached shard, by url: see `shardcache.cache.views`
        self.maps = 0  # number of maps received

    def hear(self) -> None:
        """Take events until there is a moment, and a map."""
        for name, data in self._events:
            if name == "moment":
                self.moment = data
            else:
                self.map = {folder + row[0]: row[1] for folder, rows in data["folders"].items() for row in rows}
                self.maps += 1
            if self.moment and self.maps:
                return
        raise EOFError("the stream has ended")

    def until(self, condition: Callable[[], bool]) -> None:
        """Listen until a condition holds. Raises TimeoutError."""
        for _ in range(_MAX_EVENTS):
            self.hear()
            if condition():
                return
        raise TimeoutError(f"still: {self.moment}, {self.map}")

    @property
    def lanes(self) -> dict[str, dict[str, Any]]:
        return {lane["name"]: lane for lane in self.moment["lanes"]}


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
