"""Urls that try to lead elsewhere: a grammar of the notations by which filters of urls have been fooled."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

_SCHEMES = [
    *("http", "http", "http", "HTTP", "hTTp", "https", "ftp", "sftp", "webhdfs", "gopher", "git", "memory"),
    "data",
]
_STARTS = ["//", "//", "//", "/", "", "///", "\\\\"]
_CHAINS = ["simplecache::", "filecache::", "blockcache::", "reference::", "zip://x::", "tar://a.tar::", "dir::", "::"]
_JOINTS = ["@", "\\@", "#@", "?@", "%00@", "%40", ";@", ",", " ", "\t", "\n", "%0d%0a", "%2f@", "&@", "。", "."]
_CLIMBS = ["..", "%2e%2e", "%2E.", ".%2e", "%252e%252e", "%25252e%25252e", "..;", "..%00", "..%2f..", "..\\", "．．"]
_SLASHES = ["/", "/", "/", "//", "/./", "%2f", "%252f", "\\", "%5c"]
_TAILS = [
    *("", "", "?x=1", "?a=/../b", "#x", "%00", "%00.tar", ";.tar", ".json", "*", "**/*.tar", "/", "{a,b}"),
    "{,/../..}",
]
_STRAY = ["\x00", "\n", "\r\n", "\t", "\x1b[2J", "\x7f", "\x9b2J", "\u202e", "\u2028", "\ud800", "ﬀ", " "]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the urls start, and where they try to go."""

    good_port: int  # of the server that is allowed below `/data/`
    canary_port: int  # of the server that nobody may ask
    open_dir: Path  # folder that is allowed; holds links into `secret_dir`
    secret_dir: Path  # folder that is not


def urls(places: Places, seed: int) -> Iterator[str]:
    """Yield them forever; the same for the same seed."""
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
    good, canary = f"127.0.0.1:{places.good_port}", places.canary_port
    bad = rng.choice(
        [
            f"{host}:{canary}"
            for host in (
                *(
                    "127.0.0.1",
                    "localhost",
                    "[::1]",
                    "127.1",
                    "2130706433",
                    "0x7f000001",
                    "0177.0.0.1",
                    "0",
                    "LOCALHOST.",
                ),
                *("[::ffff:127.0.0.1]", "１２７.0.0.1", "127。0。0。1", "127.0.0.1.", "①②⑦.0.0.1"),
            )
        ]
    )
    joint = rng.choice(_JOINTS)
    host = rng.choice(
        [bad, f"{good}{joint}{bad}", f"{bad}{joint}{good}", f"{{{good},{bad}}}", f"user:pw@{bad}", f"{good}/data@{bad}"]
    )
    return f"{rng.choice(_SCHEMES)}:{rng.choice(_STARTS)}{host}/data/a.tar{rng.choice(_TAILS)}"


def _path(rng: random.Random, places: Places) -> str:
    climb = "".join(
        rng.choice(_CLIMBS) + rng.choice(_SLASHES) if rng.random() < 0.7 else rng.choice(["data", "x", "."]) + "/"
        for _ in range(rng.randint(1, 4))
    )
    return f"http://127.0.0.1:{places.good_port}/data{rng.choice(_SLASHES)}{climb}secret{rng.choice(_TAILS)}"


def _local(rng: random.Random, places: Places) -> str:
    begin = rng.choice(
        ["", "file://", "FILE://", "local://", "file:", "file://localhost", "file:////", "~", "file://~"]
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
    return rng.choice([rng.choice(_CHAINS) + inner, f"{good}{inner}", f"{good}::{inner}", f"generic://{inner}"])


def _disturbed(rng: random.Random, url: str) -> str:
    place = rng.randrange(len(url) + 1)
    match rng.randrange(4):
        case 0:
            return url[:place] + rng.choice(_STRAY) + url[place:]
        case 1:
            return url[:place] + "".join(f"%{byte:02x}" for byte in url[place : place + 1].encode()) + url[place + 1 :]
        case 2:
            return url.swapcase()
    return url[:place] + quote(quote(url[place : place + 2], safe=""), safe="") + url[place + 2 :]
