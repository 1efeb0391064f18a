"""The other end of a session: a WebSocket server on a Unix socket that follows a script."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, unix_serve

from shardcache.errors import ShardcacheError
from shardcache.shared.protocol import parse
from shardcache.shared.versions import PROTOCOL_VERSION

Json = dict[str, Any]
WELCOME = {
    "type": "welcome",
    "protocol": PROTOCOL_VERSION,
    "version": "0.0.0",
    "cache_dir": "/nowhere",
}


class Heard(list[Json]):
    """Messages, in order.

    Attributes:
        needs: the client's needs, by the ids of its requests. They come between the others and have
            no answer, so they are kept apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needs: list[int] = []


class Peer:
    def __init__(self, websocket: ServerConnection, heard: Heard) -> None:
        self.websocket = websocket
        self.heard = heard

    def hear(self) -> Json:
        """Return the next message, but for needs, and note it in `heard`."""
        message = parse(self.websocket.recv())
        while message["type"] == "need":
            self.heard.needs.append(message["of"])
            message = parse(self.websocket.recv())
        self.heard.append(message)
        return message

    def say(self, **message: Any) -> None:
        self.websocket.send(json.dumps(message))

    def welcome(self) -> None:
        self.hear()
        self.say(**WELCOME)

    def begin(self) -> None:
        self.welcome()
        accepted(self)

    def lend(self, request: int, lease: int, **fields: Any) -> None:
        """Answer a request that was heard as a granted lease."""
        place = {
            "url": "s3://bucket/a.tar",
            "version": "v1",
            "path": "/nowhere.tar",
            "index_path": "/nowhere.idx",
        }
        self.say(
            type="leased",
            id=request,
            lease=lease,
            **({"size_bytes": 10_240, "samples": 1} | place | fields),
        )

    def stay(self) -> None:
        """Hear whatever still comes, until the other side leaves."""
        while True:
            self.hear()


Script = Callable[[Peer], None]
Step = Callable[[Peer], object]


def welcomed(*steps: Step, stays: bool = True) -> Script:
    """Return a daemon's script that welcomes a reader, takes these steps, and listens."""

    def script(peer: Peer) -> None:
        peer.welcome()
        for step in steps:
            step(peer)
        if stays:
            peer.stay()

    return script


def begun(*steps: Step, stays: bool = True) -> Script:
    """Return such a script that begins with a plan."""
    return welcomed(accepted, *steps, stays=stays)


def granted(lease: int, **fields: Any) -> Step:
    """Return the step that hears one request and answers it as a granted lease."""
    return lambda peer: peer.lend(peer.hear()["id"], lease, **fields)


def arriving(lease: int, ready_bytes: int, **fields: Any) -> Step:
    """Return the step that hears one request and answers it with the beginning of a shard."""
    place = {
        "url": "s3://bucket/a.tar",
        "version": "v1",
        "path": "/nowhere.part",
        "size_bytes": 10_240,
    } | fields

    def arrive(peer: Peer) -> None:
        path = Path(str(place["path"]))
        inode = path.stat().st_ino if path.exists() else 0
        peer.say(
            type="arriving",
            id=peer.hear()["id"],
            lease=lease,
            ready_bytes=ready_bytes,
            inode=inode,
            **place,
        )

    return arrive


def refused(error: ShardcacheError) -> Step:
    """Return the step that hears one request and answers it with an error."""
    return lambda peer: peer.say(type="error", id=peer.hear()["id"], error=error.to_json())


def accepted(peer: Peer) -> None:
    peer.say(type="ok", id=peer.hear()["id"])


@contextmanager
def scripted(path: Path, *scripts: Script) -> Iterator[Heard]:
    """Serve a script to each connection in turn; its end closes the connection.

    Yields the messages heard, in order; they are complete when the block is left, which the client
    must have done. What a script asserts is raised there, too.
    """
    heard = Heard()
    failures: list[AssertionError] = []
    turns = iter(scripts)

    handlers: list[threading.Thread] = []

    def handle(websocket: ServerConnection) -> None:
        handlers.append(threading.current_thread())
        try:
            with suppress(ConnectionClosed):  # the client may leave in the middle of the script
                next(turns)(Peer(websocket, heard))
        except AssertionError as exn:
            failures.append(exn)

    # A client that is busy reading a shard does not answer a goodbye, and is not waited for.
    with unix_serve(handle, str(path), close_timeout=0.1) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield heard
        finally:
            server.shutdown()
            for each in (thread, *handlers):
                each.join()
    path.unlink()
    if failures:
        raise failures[0]
