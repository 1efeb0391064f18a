"""Urls, redirects, index files, links and requests that try to reach what they may not, against a real daemon."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from campaign.access_urls import Places, locations, urls
from campaign.harness import Result, Row, scaled
from shardcache.errors import ShardcacheError
from support.network.ports import free_port
from support.programs.daemon import Daemon
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples
from support.stores.canary import Canary

_URLS = 6000
_REDIRECTS = 1500
_INDEXES = 60
_ENTRIES = 20
_REQUESTS = 1500

_PAGE = ("GET", "/")  # the dashboard, which holds no data and asks for them by itself
_PATHS = (
    *("/v1/warm", "/v1/evict", "/v1/session", "/v1/verify", "/v1/index", "/", "//v1/evict", "/v1/%65vict", "*"),
    *("/v1/pin", "/v1/unpin", "/v1/pins"),
    *("/v1/../v1/evict", "/v1/evict?x", "http://x/v1/evict", "/v1/evict/", "/v1/status/../evict", "/v1/session?x=1"),
)


@dataclass(slots=True)
class Ground:
    """A daemon that may fetch from one folder of one server and one local folder, and what lies around them."""

    good: Canary
    canary: Canary
    daemon: Daemon
    places: Places
    tcp_port: int

    @classmethod
    def laid_out(cls, stack: ExitStack, folder: Path) -> Ground:
        """Start servers and daemon."""
        good, canary = stack.enter_context(Canary()), stack.enter_context(Canary())
        shard = make_tar(random_samples(2))
        open_dir, secret_dir = folder / "open", folder / "secret"
        for path in (open_dir, secret_dir):
            path.mkdir()
        (secret_dir / "secret.tar").write_bytes(shard)
        (open_dir / "a.tar").write_bytes(shard)
        (open_dir / "link.tar").symlink_to(secret_dir / "secret.tar")
        (open_dir / "folder").symlink_to(secret_dir)
        for path_ in ("/data/a.tar", "/secret", "/secret.tar", "/secret.json"):
            good.files[path_] = shard
        canary.files["/data/a.tar"] = shard
        port = free_port()
        daemon = Daemon(
            folder, "--allow", good.url("/data/"), "--allow", f"file://{open_dir}/", "--attempts", "1",
            "--listing-ttl-s", "0", "--http", f"127.0.0.1:{port}",
        )  # fmt: skip
        stack.enter_context(daemon)
        return cls(good, canary, daemon, Places(good.port, canary.port, open_dir, secret_dir), port)

    def warm(self, url: str) -> Any:
        """Ask for a url; return the answer's lines."""
        answer = self.daemon.request("POST", "/v1/warm", {"urls": [url]})
        return [json.loads(line) for line in answer.splitlines()]

    def harm(self) -> str:
        """Say what was reached that may not be; empty where nothing was."""
        if self.canary.connections:
            return f"{self.canary.connections} connections to the canary: {self.canary.paths}"
        for path in self.good.paths:
            if not _is_below_data(path):
                return f"the good server was asked for {path}"
        for shard in self.daemon.shards():
            if "secret" in _decoded(shard["url"]) or "link" in shard["url"] or "folder" in shard["url"]:
                return f"cached: {shard['url']}"
        return ""


@contextmanager
def ground(folder: Path, _scale: float) -> Iterator[Ground]:
    """Start servers and daemon."""
    with ExitStack() as stack:
        yield Ground.laid_out(stack, folder)


def hostile_urls(kind: str, ground: Ground, result: Result, scale: float) -> None:
    """Ask for urls that lead elsewhere: to warm them, or in a session."""
    with RawSession(ground.daemon) as session:
        ask = ground.warm if kind == "warm" else _asked(session, kind)
        count = scaled(_URLS, scale, 60)
        for number, url in enumerate(islice(urls(ground.places, seed=1), count)):
            _try(result, url, ask)
            if number % 100 == 99 or number == count - 1:
                _look(ground, result, url)


def _try(result: Result, url: str, ask: Callable[[str], Any]) -> None:
    try:
        answer = ask(url)
    except TimeoutError:
        result.fail("hangs", ascii(url))
        return
    except (ValueError, AssertionError, OSError, http.client.HTTPException, ShardcacheError) as exn:
        result.fail("untyped", f"{url!a}: {exn!r}")
        return
    result.injected += 1
    if "Traceback" in str(answer) or "internal error in the daemon" in str(answer):
        result.fail("untyped", f"{url!a}: {answer}")


def _look(ground: Ground, result: Result, last: str) -> None:
    if harm := ground.harm():
        result.fail("wrong", f"up to {last!a}: {harm}")
        ground.canary.connections = 0
        ground.good.requests.clear()


def _asked(session: RawSession, kind: str) -> Callable[[str], Any]:
    def ask(url: str) -> Any:
        if kind == "plan":
            return session.plan([url], [0])
        return session.ask("resolve", urls=[url])

    return ask


def redirects(ground: Ground, result: Result, scale: float) -> None:
    """Redirect what may be asked for to what may not."""
    rng = random.Random(2)
    for number, location in enumerate(islice(locations(ground.places, seed=2), scaled(_REDIRECTS, scale, 15))):
        path = f"/data/r{number}.tar"
        ground.good.redirects[path] = rng.choice((301, 302, 303, 307, 308)), location
        _try(result, ground.good.url(path), ground.warm)
        if path not in ground.good.paths:
            result.fail("untyped", f"the server was not asked for {path}")
    _look(ground, result, "redirects")


def indexes(ground: Ground, result: Result, scale: float) -> None:
    """Have index files name what may not be asked for."""
    entries = urls(ground.places, seed=3)
    for number in range(scaled(_INDEXES, scale, 4)):
        path = f"/data/i{number}.json"
        # Halves of characters cannot be written in an index.
        rows = [{"url": url.encode(errors="replace").decode()} for url in islice(entries, _ENTRIES)]
        ground.good.files[path] = json.dumps({"shardlist": rows}).encode()
        _try(result, ground.good.url(path), ground.warm)
    _look(ground, result, "indexes")


def requests(ground: Ground, result: Result, scale: float) -> None:
    """Send requests by TCP, none of which may change anything or show a session."""
    rng = random.Random(4)
    before = ground.daemon.shards()
    for _ in range(scaled(_REQUESTS, scale, 60)):
        method = rng.choice(["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "GET", "CONNECT", "TRACE"])
        path = rng.choice(_PATHS)
        headers = {"Host": rng.choice(["localhost", "127.0.0.1", "evil.example", "", f"127.0.0.1:{ground.tcp_port}"])}
        headers |= rng.choice(
            [{}, {"Upgrade": "websocket", "Connection": "Upgrade"}, {"X-HTTP-Method-Override": "POST"}]
        )
        status = _send(result, ground.tcp_port, method, path, headers)
        if status is not None and status < 400 and (method, path) != _PAGE:
            result.fail("wrong", f"{method} {path} {headers}: {status}")
    if ground.daemon.shards() != before:
        result.fail("wrong", "the cache is another")
    _look(ground, result, "requests")


def _send(result: Result, port: int, method: str, path: str, headers: dict[str, str]) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        body = b'{"urls": ["**"], "prefix": ""}'
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        status = connection.getresponse().status
    except TimeoutError:
        result.fail("hangs", f"{method} {path} {headers}")
        return None
    except (OSError, http.client.HTTPException) as exn:
        result.fail("untyped", f"{method} {path} {headers}: {exn!r}")
        return None
    finally:
        connection.close()
    result.injected += 1
    return status


def _is_below_data(path: str) -> bool:
    """Tell whether a server that decodes, and takes a backslash for a slash, finds the path below /data/."""
    segments = _decoded(path.partition("?")[0]).replace("\\", "/").split("/")
    return segments[1] == "data" and not any(segment.partition(";")[0] == ".." for segment in segments)


def _decoded(path: str) -> str:
    while (decoded := unquote(path)) != path:
        path = decoded
    return path


ROWS = (
    Row("urls that lead elsewhere, to warm", partial(hostile_urls, "warm")),
    Row("the same, to a session", partial(hostile_urls, "resolve")),
    Row("the same, in a plan", partial(hostile_urls, "plan")),
    Row("redirects that lead elsewhere", redirects),
    Row("index files whose entries lead elsewhere", indexes),
    Row("requests by TCP that would change something", requests),
)
