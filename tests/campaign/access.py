"""Urls, redirects, index files and links that try to reach what they may not."""

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
from urllib.parse import quote, unquote

from campaign.harness import Result, Row, scaled
from shardcache.errors import ShardcacheError
from support.programs.daemon import Daemon
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples
from support.stores.canary import Canary

_SCHEMES = [
    "http",
    "http",
    "http",
    "HTTP",
    "hTTp",
    "https",
    "ftp",
    "sftp",
    "webhdfs",
    "gopher",
    "git",
    "memory",
    "data",
]
_STARTS = ["//", "//", "//", "/", "", "///", "\\\\"]
_CHAINS = [
    "simplecache::",
    "filecache::",
    "blockcache::",
    "reference::",
    "zip://x::",
    "tar://a.tar::",
    "dir::",
    "::",
]
_JOINTS = [
    "@",
    "\\@",
    "#@",
    "?@",
    "%00@",
    "%40",
    ";@",
    ",",
    " ",
    "\t",
    "\n",
    "%0d%0a",
    "%2f@",
    "&@",
    "。",
    ".",
]
_CLIMBS = [
    "..",
    "%2e%2e",
    "%2E.",
    ".%2e",
    "%252e%252e",
    "%25252e%25252e",
    "..;",
    "..%00",
    "..%2f..",
    "..\\",
    "．．",
]
_SLASHES = ["/", "/", "/", "//", "/./", "%2f", "%252f", "\\", "%5c"]
_TAILS = [
    "",
    "",
    "?x=1",
    "?a=/../b",
    "#x",
    "%00",
    "%00.tar",
    ";.tar",
    ".json",
    "*",
    "**/*.tar",
    "/",
    "{a,b}",
    "{,/../..}",
]
_STRAY = [
    "\x00",
    "\n",
    "\r\n",
    "\t",
    "\x1b[2J",
    "\x7f",
    "\x9b2J",
    "\u202e",
    "\u2028",
    "\ud800",
    "ﬀ",
    " ",
]


@dataclass(frozen=True, slots=True)
class Places:
    """The start of the urls, and what they try to reach."""

    good_port: int  # of the server that is allowed below `/data/`
    canary_port: int  # of the server that nobody may ask
    open_dir: Path  # folder that is allowed; holds links into `secret_dir`
    secret_dir: Path  # folder that is not


def urls(places: Places, seed: int) -> Iterator[str]:
    """Yield urls forever, the same for a seed, in notations by which filters have been fooled."""
    rng = random.Random(seed)
    makers = (_authority, _path, _local, _chained)
    while True:
        url = rng.choice(makers)(rng, places)
        yield _disturbed(rng, url) if rng.random() < 0.3 else url


def locations(places: Places, seed: int) -> Iterator[str]:
    """Yield what a server may send as `Location`: one line of visible ASCII."""
    for url in urls(places, seed):
        if url.isascii() and url.isprintable():
            yield url.strip()


def _authority(rng: random.Random, places: Places) -> str:
    good = f"127.0.0.1:{places.good_port}"
    canary = places.canary_port
    bad = rng.choice(
        [
            f"{host}:{canary}"
            for host in (
                "127.0.0.1",
                "localhost",
                "[::1]",
                "127.1",
                "2130706433",
                "0x7f000001",
                "0177.0.0.1",
                "0",
                "LOCALHOST.",
                "[::ffff:127.0.0.1]",
                "１２７.0.0.1",
                "127。0。0。1",
                "127.0.0.1.",
                "①②⑦.0.0.1",
            )
        ]
    )
    joint = rng.choice(_JOINTS)
    host = rng.choice(
        [
            bad,
            f"{good}{joint}{bad}",
            f"{bad}{joint}{good}",
            f"{{{good},{bad}}}",
            f"user:pw@{bad}",
            f"{good}/data@{bad}",
        ]
    )
    return f"{rng.choice(_SCHEMES)}:{rng.choice(_STARTS)}{host}/data/a.tar{rng.choice(_TAILS)}"


def _path(rng: random.Random, places: Places) -> str:
    climb = ""
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.7:
            climb += rng.choice(_CLIMBS) + rng.choice(_SLASHES)
        else:
            climb += rng.choice(["data", "x", "."]) + "/"
    return f"http://127.0.0.1:{places.good_port}/data{rng.choice(_SLASHES)}{climb}secret{rng.choice(_TAILS)}"


def _local(rng: random.Random, places: Places) -> str:
    begin = rng.choice(
        [
            "",
            "file://",
            "FILE://",
            "local://",
            "file:",
            "file://localhost",
            "file:////",
            "~",
            "file://~",
        ]
    )
    climb = rng.choice(_CLIMBS)
    path = rng.choice(
        [
            f"{places.secret_dir}/secret.tar",
            f"{places.open_dir}/link.tar",
            f"{places.open_dir}/folder/secret.tar",
            f"{places.open_dir}/folder/",
            f"{places.open_dir}/folder/*.tar",
            f"{places.open_dir}/fol[d]er/*",
            f"{places.open_dir}{rng.choice(_SLASHES)}{climb}{rng.choice(_SLASHES)}{places.secret_dir.name}/secret.tar",
            f"{places.open_dir}/{{a,{climb}/{places.secret_dir.name}/secret}}.tar",
            f"{places.open_dir}/.{{.,x}}/{places.secret_dir.name}/*.tar",
            f"{places.open_dir}-other/../{places.secret_dir.name}/",
            "/proc/self/environ",
            "/proc/self/fd/3",
            f"/proc/self/root{places.secret_dir}/secret.tar",
        ]
    )
    return begin + path


def _chained(rng: random.Random, places: Places) -> str:
    inner = rng.choice([_authority, _local])(rng, places)
    good = f"http://127.0.0.1:{places.good_port}/data/"
    return rng.choice(
        [rng.choice(_CHAINS) + inner, f"{good}{inner}", f"{good}::{inner}", f"generic://{inner}"]
    )


def _disturbed(rng: random.Random, url: str) -> str:
    place = rng.randrange(len(url) + 1)
    match rng.randrange(4):
        case 0:
            return url[:place] + rng.choice(_STRAY) + url[place:]
        case 1:
            return (
                url[:place]
                + "".join(f"%{byte:02x}" for byte in url[place : place + 1].encode())
                + url[place + 1 :]
            )
        case 2:
            return url.swapcase()
    return url[:place] + quote(quote(url[place : place + 2], safe=""), safe="") + url[place + 2 :]


_URLS = 6000
_REDIRECTS = 1500
_INDEXES = 60
_ENTRIES = 20


@dataclass(slots=True)
class Ground:
    """A daemon that may fetch from a folder of a server and a local one; what lies around them."""

    good: Canary
    canary: Canary
    daemon: Daemon
    places: Places

    @classmethod
    def laid_out(cls, stack: ExitStack, folder: Path) -> "Ground":
        good = stack.enter_context(Canary())
        canary = stack.enter_context(Canary())
        shard = make_tar(random_samples(2))
        open_dir = folder / "open"
        secret_dir = folder / "secret"
        for path in (open_dir, secret_dir):
            path.mkdir()
        (secret_dir / "secret.tar").write_bytes(shard)
        (open_dir / "a.tar").write_bytes(shard)
        (open_dir / "link.tar").symlink_to(secret_dir / "secret.tar")
        (open_dir / "folder").symlink_to(secret_dir)
        for path_ in ("/data/a.tar", "/secret", "/secret.tar", "/secret.json"):
            good.files[path_] = shard
        canary.files["/data/a.tar"] = shard
        rules = ("--allow", good.url("/data/"), "--allow", f"file://{open_dir}/")
        daemon = Daemon(folder, *rules, "--attempts", "1", "--listing-ttl-s", "0")
        stack.enter_context(daemon)
        return cls(good, canary, daemon, Places(good.port, canary.port, open_dir, secret_dir))

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
            if (
                "secret" in _decoded(shard["url"])
                or "link" in shard["url"]
                or "folder" in shard["url"]
            ):
                return f"cached: {shard['url']}"
        return ""


@contextmanager
def ground(folder: Path, _scale: float) -> Iterator[Ground]:
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
    rng = random.Random(2)
    for number, location in enumerate(
        islice(locations(ground.places, seed=2), scaled(_REDIRECTS, scale, 15))
    ):
        path = f"/data/r{number}.tar"
        ground.good.redirects[path] = rng.choice((301, 302, 303, 307, 308)), location
        _try(result, ground.good.url(path), ground.warm)
        if path not in ground.good.paths:
            result.fail("untyped", f"the server was not asked for {path}")
    _look(ground, result, "redirects")


def indexes(ground: Ground, result: Result, scale: float) -> None:
    entries = urls(ground.places, seed=3)
    for number in range(scaled(_INDEXES, scale, 4)):
        path = f"/data/i{number}.json"
        # Halves of characters cannot be written in an index.
        rows = [{"url": url.encode(errors="replace").decode()} for url in islice(entries, _ENTRIES)]
        ground.good.files[path] = json.dumps({"shardlist": rows}).encode()
        _try(result, ground.good.url(path), ground.warm)
    _look(ground, result, "indexes")


def _is_below_data(path: str) -> bool:
    """Tell whether a server that decodes, and takes `\\` for `/`, finds the path below /data/."""
    segments = _decoded(path.partition("?")[0]).replace("\\", "/").split("/")
    return segments[1] == "data" and not any(
        segment.partition(";")[0] == ".." for segment in segments
    )


def _decoded(path: str) -> str:
    decoded = unquote(path)
    while decoded != path:
        path = decoded
        decoded = unquote(path)
    return path


ROWS = (
    Row("urls that lead elsewhere, to warm", partial(hostile_urls, "warm")),
    Row("the same, to a session", partial(hostile_urls, "resolve")),
    Row("the same, in a plan", partial(hostile_urls, "plan")),
    Row("redirects that lead elsewhere", redirects),
    Row("index files whose entries lead elsewhere", indexes),
)
