"""Events of the dashboard's page."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

import requests

from support.network.unix_http import BASE_URL, session
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
