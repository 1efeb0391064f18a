"""Events of the dashboard's page."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import requests

from support.network.unix_http import BASE_URL, session
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S

LIVE_PATH = "/dashboard/live"
# A page hears once a second: what is to come has so many of them.
_PATIENCE = 60

Event = tuple[str, dict[str, Any]]


def events_of(answer: requests.Response) -> Iterator[Event]:
    """Yield the name and the data of each event of a stream."""
    rest = b""
    for piece in answer.iter_content(chunk_size=None):
        *blocks, rest = (rest + piece).split(b"\n\n")
        for name, data in (block.split(b"\n") for block in blocks):
            yield name.removeprefix(b"event: ").decode(), json.loads(data.removeprefix(b"data: "))


@contextmanager
def live(daemon: Daemon, since: str = "") -> Iterator[Iterator[Event]]:
    """Follow a daemon over its socket, as its page does: it asks again when a stream has lasted its time."""
    with session(daemon.socket) as http, closing(follow(http, BASE_URL, since)) as events:
        yield events


def follow(http: requests.Session, base_url: str, since: str = "") -> Generator[Event, None, None]:
    """Yield events for ever; whoever stops closes this."""
    while True:
        with http.get(f"{base_url}{LIVE_PATH}", params={"since": since}, stream=True, timeout=GUARD_S) as answer:
            assert answer.status_code == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
            for name, data in events_of(answer):
                since = data.get("mark", since)
                yield name, data


class Page:
    """A page's knowledge after some events: the last moment, and the map's cells by number."""

    def __init__(self, events: Iterator[Event]) -> None:
        self._events = events
        self.moment: dict[str, Any] = {}
        self.marks: list[str] = []
        self.whole: list[bool] = []
        self._cells: dict[int, list[Any]] = {}

    def hear(self) -> None:
        """Take one moment and the map that follows it."""
        for name, data in self._events:
            if name == "moment":
                self.moment = data
            else:
                self._take(data)
                return
        raise EOFError("the stream has ended")

    def until(self, condition: Callable[[], bool]) -> None:
        """Listen until a condition holds. Raises TimeoutError."""
        for _ in range(_PATIENCE):
            self.hear()
            if condition():
                return
        raise TimeoutError(f"still: {self.moment}, {self.map}")

    def _take(self, data: Mapping[str, Any]) -> None:
        if data["whole"]:
            self._cells.clear()
        self._cells = {number: cell for number, cell in self._cells.items() if number not in data["gone"]}
        self._cells |= {cell[0]: cell for cell in data["cells"]}
        self.marks.append(data["mark"])
        self.whole.append(data["whole"])

    @property
    def map(self) -> dict[str, int]:
        """When each shard that is here is needed next, by url: see `shardcache.cache.views.shard_map`."""
        return {url: band for _, band, url, *_ in self._cells.values()}

    @property
    def lanes(self) -> dict[str, dict[str, Any]]:
        """Each job's next minutes, by its name."""
        return {lane["name"]: lane for lane in self.moment["lanes"]}
