"""Events of the dashboard's page, over a Unix socket."""

import json
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

from support.programs.daemon import Daemon, UnixConnection

LIVE_PATH = "/dashboard/live"
_MAX_EVENTS = 120  # a page gets one or two events a second

Event = tuple[str, dict[str, Any]]


def events_of(lines: Iterable[bytes]) -> Iterator[Event]:
    """Yield the events of an answer's lines, as they come: two lines and an empty one each."""
    name = ""
    for line in lines:
        match line.rstrip(b"\n").partition(b": "):
            case b"event", _, value:
                name = value.decode()
            case b"data", _, value:
                yield name, json.loads(value)


def live(daemon: Daemon) -> closing[Generator[Event, None, None]]:
    """Follow a daemon over its socket, as its page does, asking again after each stream."""
    return closing(follow(lambda: UnixConnection(daemon.socket)))


def follow(connect: Callable[[], HTTPConnection]) -> Generator[Event, None, None]:
    while True:
        with closing(connect()) as connection:
            connection.request("GET", LIVE_PATH)
            answer = connection.getresponse()
            assert answer.status == 200
            assert (answer.getheader("Content-Type") or "").startswith("text/event-stream")
            yield from events_of(answer)


class Page:
    def __init__(self, events: Iterator[Event]) -> None:
        self._events = events
        self.moment: dict[str, Any] = {}  # the last moment

    def hear(self) -> None:
        """Take the next moment."""
        for name, data in self._events:
            if name == "moment":
                self.moment = data
                return
        raise EOFError("the stream has ended")

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(_MAX_EVENTS):
            self.hear()
            if condition():
                return
        raise TimeoutError(f"still: {self.moment}")

    @property
    def lanes(self) -> dict[str, dict[str, Any]]:
        return {lane["name"]: lane for lane in self.moment["lanes"]}
