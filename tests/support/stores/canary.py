"""Web servers: one remembers who came, one holds every byte until the test lets it go."""

import socket

from support.network.http_requests import Request
from support.network.scripted_server import Reply, ScriptedServer, answer
from support.programs.guard import GUARD_S
from support.stores.mischief import Ending, part_of


class Canary(ScriptedServer):
    """Listens on every address of this machine; a context manager.

    Attributes:
        files: what it serves, by path.
        redirects: where it sends whoever asks for a path, as status and Location.
        etag: of all files; None for one of its own for each version of a file, "" for none.
        words: what it says in place of any answer.
        bytewise: whether an answer begins at once, and its bytes are sent as they may be.
        requests: method, path and headers of each request.
    """

    def __init__(self) -> None:
        super().__init__(address="::")
        self._address = "127.0.0.1"  # in its urls
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, tuple[int, str]] = {}
        self.etag: str | None = None
        self.words = b""
        self.bytewise = False
        self.requests: list[tuple[str, str, dict[str, str]]] = []

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _ in self.requests]

    def put(self, name: str, body: bytes) -> str:
        """Serve a file under a name; return its url."""
        self.files[f"/{name}"] = body
        return self.url(f"/{name}")

    def ranges(self, suffix: str = "") -> list[tuple[int, int]]:
        """Return each range asked for of such files, without the byte that asks for a version."""
        found = []
        for _, path, headers in self.requests:
            if path.endswith(suffix) and "range" in headers:
                start, last = map(int, headers["range"].removeprefix("bytes=").split("-"))
                stop = min(last + 1, len(self.files[path])) if path in self.files else last + 1
                found.append((start, stop))
        return [span for span in found if span != (0, 1)]

    def asked_bytes(self, suffix: str = "") -> int:
        """Return the number of bytes in these ranges."""
        return sum(end - start for start, end in self.ranges(suffix))

    def wait(self, path: str, stop: int) -> int:
        """Return up to which byte a file may be sent, when that is `stop` at least."""
        return stop

    def reply(self, head: str, _number: int) -> Reply:
        request = Request.parse(head)
        self.requests.append((request.method, request.target, request.headers))
        path = request.target.partition("?")[0]
        if self.words:
            return Reply(self.words, Ending.CLOSE)
        if request.target in self.redirects:
            status, location = self.redirects[request.target]
            return Reply(answer(b"", f"Location: {location}", status=f"{status} Redirect"))
        if path not in self.files:
            return Reply(answer(b"", status="404 Not Found"))
        return self._file(path, request)

    def _file(self, path: str, request: Request) -> Reply:
        data = self.files[path]
        etag = f'"{hash(data)}"' if self.etag is None else self.etag
        begun, wanted = part_of(len(data), request.part, {"etag": etag, "accept-ranges": "bytes"})
        start = wanted.start
        stop = wanted.stop
        if request.part and not self.bytewise:
            self.wait(path, stop)
        if request.headers.get("if-match", etag) != etag:
            return Reply(answer(b"", status="412 Precondition Failed"))
        if not etag:
            del begun.headers["etag"]
        if request.method == "HEAD":
            return Reply(begun.head())
        if request.part and not self.bytewise:
            return Reply(begun.head() + data[start:stop])

        def send(sock: socket.socket) -> None:
            sent = start
            while sent < stop:
                until = min(stop, self.wait(path, sent + 1))
                sock.sendall(data[sent:until])
                sent = until

        return Reply(begun.head(), then=send)


class GatedStore(Canary):
    """Answers a ranged read once its last byte is let go, and sends whole objects as they are."""

    def __init__(self) -> None:
        super().__init__()
        self._open_until: dict[str, int] = {}

    def __exit__(self, *exc: object) -> None:
        for path in self.files:
            self.let(path[1:])
        super().__exit__(*exc)

    def put(self, name: str, body: bytes) -> str:
        """Store bytes, none of them let go yet; return their url."""
        with self._changed:
            self._open_until.setdefault(name, 0)
            return super().put(name, body)

    def let(self, name: str, until_byte: int = 2**62) -> None:
        with self._changed:
            self._open_until[name] = until_byte
            self._changed.notify_all()

    def wait(self, path: str, stop: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._open_until[path[1:]] >= stop, GUARD_S)
            return self._open_until[path[1:]]
