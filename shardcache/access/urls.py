"""Parsing, checking and joining of shard urls. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from shardcache.access.protocols import LOCAL, S3, STORES, WEB, WRAPPERS, row_of
from shardcache.errors import ConfigError

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
INDEX_SUFFIX = ".json"

_PORTS = {"http": ":80", "https": ":443"}
# Control characters, surrogates, line separators, and characters that change the direction of text.
_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# Local paths and all other hosts need a closer look.
_PLAIN = re.compile(
    rf"(?:(?:{'|'.join(sorted(STORES))})://|https?://[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[1-9][0-9]{{0,3}})?/)"
    r"[A-Za-z0-9_./=-]+"
)
# Web servers refuse longer urls; S3 keys have at most 1,024. The checks below block the event loop.
_MAX_CHARS = 8192
# No honest path is encoded more often than this; each level costs a pass over the path.
_MAX_ENCODINGS = 4
_HOST = re.compile(r"(?:[A-Za-z0-9*_{-](?:[A-Za-z0-9*_.,{}-]*[A-Za-z0-9*_}-])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")

_WILDCARD = re.compile(r"[*?\[]")


def protocol_of(url: str) -> str:
    """Return the part before `://`; a plain path is `file`."""
    protocol, separator, _ = url.partition("://")
    return protocol.lower() if separator else "file"


def store_of(url: str) -> str:
    """Return the name of a url's origin, which is likely to have one request limit: protocol and bucket or host."""
    protocol, path = protocol_of(url), url.partition("://")[2]
    return f"{protocol}://{path.partition('/')[0].rpartition('@')[2]}"


def canonical(url: str) -> str:
    """Return the url in a form for comparison: `file://` for a path, schemes and web hosts in lower case.

    Everything after the host is kept: two spellings of a path are two urls.
    """
    protocol, path = row_of(protocol_of(url)).names[0], url.partition("://")[2] if "://" in url else url
    if protocol in WEB:
        authority, slash, rest = path.partition("/")
        path = f"{authority.lower().removesuffix(_PORTS[protocol])}{slash}{rest}"
    return f"{protocol}://{path}"


def host_of(url: str) -> str:
    """Return the host of a web url in lower case, without port and brackets."""
    return (urlsplit(url).hostname or "").lower()


def checked(url: str) -> str:
    """Return the url unless it is too long, or may refer to another place than it seems to. Raises ConfigError.

    Refused are `..`, encoded or not, and paths encoded so often that only `..` would need it; characters that end a
    line or a string; urls within urls (`simplecache::…`, `zip://`); credentials; relative paths of local files; and
    hosts that people and programs read differently.
    """
    if len(url) > _MAX_CHARS:
        raise ConfigError(
            f"the url or pattern has {len(url)} characters; the limit is {_MAX_CHARS}",
            url=url[:200],
            remedy="give a list of urls, or an index file",
        )
    if _PLAIN.fullmatch(url) and ".." not in url:
        return url  # fast path for nearly all urls, of which there may be millions
    for wrong, what, remedy in _MISLEADING:
        if wrong(url):
            raise ConfigError(what, url=url, remedy=remedy)
    return url


def _is_unwritable(url: str) -> bool:
    return not url or url != url.strip() or _UNWRITABLE.search(url) is not None


def _climbs(url: str) -> bool:
    path = url.partition("://")[2] if "://" in url else url
    if protocol_of(url) in WEB:
        path = re.split(r"[?#]", path, maxsplit=1)[0]
    for _ in range(_MAX_ENCODINGS + 1):
        # Servers may read "..;x" as "..", and "\\" as "/".
        if any(segment.partition(";")[0] == ".." for segment in re.split(r"[/\\]", path)):
            return True
        decoded = unquote(path)
        if decoded == path:
            return False
        path = decoded
    return True


def _leads_on(url: str) -> bool:
    return "::" in url.partition("://")[0] or protocol_of(url) in WRAPPERS


def _has_credentials(url: str) -> bool:
    authority = url.partition("://")[2].partition("/")[0]
    userinfo, at, _ = authority.rpartition("@")
    if protocol_of(url) in S3.names:
        return bool(at) or (":" in authority and not authority.startswith("arn:"))  # a secret key may hold a slash
    if protocol_of(url) in WEB:
        return bool(at)
    return ":" in userinfo and protocol_of(url) != "github"  # there, owner:repository


def _is_relative(url: str) -> bool:
    # fsspec reads `file://x` as a path below the working directory, and `~` as a home directory.
    return protocol_of(url) in LOCAL and not (url.partition("://")[2] if "://" in url else url).startswith("/")


def _has_ambiguous_host(url: str) -> bool:
    if protocol_of(url) not in WEB:
        return False
    authority = re.split(r"[/?#]", url.partition("://")[2], maxsplit=1)[0]
    try:
        port = urlsplit(url).port
    except ValueError:
        return True
    return _HOST.fullmatch(authority) is None or port == 0


_MISLEADING: tuple[tuple[Callable[[str], bool], str, str], ...] = (
    (_is_unwritable, "not a url: it is empty, or has control characters or leading or trailing white space", ""),
    (_climbs, "a url must not contain `..`", "write the resolved url"),
    (_leads_on, "a url within a url is not followed", "use the url of the shard itself, without `::` or an archive"),
    (
        _has_credentials,
        "a url must not contain credentials: it is displayed and stored",
        "put them in an [[origin]] table of the daemon's config",
    ),
    (
        _is_relative,
        "neither a url nor an absolute path",
        "the daemon has its own working directory: start with / or file:///",
    ),
    (_has_ambiguous_host, "programs may disagree on the url's host", "write it in ASCII, as host or host:port"),
)


def is_glob(url: str) -> bool:
    """Return whether the url has wildcards; in http(s) urls, `?` begins the query and `[` an IPv6 address."""
    return "*" in url.partition("?")[0] if protocol_of(url) in WEB else _WILDCARD.search(url) is not None


def glob_prefix(pattern: str) -> str:
    """Return the literal prefix of a glob."""
    match = _WILDCARD.search(pattern)
    return pattern[: match.start()] if match else pattern


def join(base: str, relative: str) -> str:
    """Resolve a shard's name in an index at `base`; a url is returned unchanged."""
    if "://" in relative:
        return relative
    head, separator, path = base.rpartition("://")
    if separator and protocol_of(base) != "file":
        authority, _, path = path.partition("/")
        head = f"{head}{separator}{authority}"
    else:
        head += separator
    return head + posixpath.normpath(posixpath.join("/", posixpath.dirname(path), relative))
