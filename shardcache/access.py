"""Access control: the table of shard urls' protocols, what an url means, and the urls that a user may have fetched.

A new store is a module in `origin/` and a row of the table.
"""

import enum
import grp
import os
import posixpath
import pwd
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from shardcache.errors import ConfigError, NotAllowedError, ShardcacheError, did_you_mean
from shardcache.near import is_near
from shardcache.url_names import path_of


class PlaceKind(enum.Enum):
    """Kind of place that the urls of a protocol name."""

    STORE = "network service at an address fixed by its provider, accessed with credentials given to the daemon"
    WEB = "web servers, which may be any host"
    LOCAL = "files of this node"
    WRAPPER = "fsspec filesystem that reads another url's bytes: no prefix tells what it reads"
    OTHER = "any other fsspec filesystem"


class UrlProtocol(NamedTuple):
    """One protocol: its spellings in lower case, and the kind of place that its urls name."""

    names: tuple[str, ...]  # of one and the same place; urls are compared by the first
    kind: PlaceKind  # decides who may use it by default, and what its urls may look like
    # Module and class of the `Origin`, imported on first use.
    origin: str = "shardcache.origin.filesystems.fsspec_origin:FsspecOrigin"
    # To install if that import fails; empty if it is the one that could not be imported.
    package: str = ""
    # True if a cluster's tier can be in front of it.
    has_tier: bool = False
    # `storage_options` with which a tier can be used; None if there are no others.
    signed_options: frozenset[str] | None = None
    # Module and function that loads what its first request needs, if that takes long. Blocks.
    load: str = ""
    # How the names of the environment's variables begin that configure it; empty if unknown.
    variables: str = ""


PRESIGNED_OPTIONS = frozenset({"key", "secret", "token", "endpoint_url", "anon", "use_ssl"})
"""Keys of `storage_options` that presigned urls of S3 support; others need its SDK."""


_WRAPPERS = (
    *("asynclocal", "async_wrapper", "asyncwrapper", "blockcache", "cached", "dask", "data", "dir", "filecache"),
    *("generic", "libarchive", "reference", "simplecache", "tar", "zip"),
)
_WEB = "shardcache.origin.http.web_origin:HttpOrigin"
_FILES = "shardcache.origin.filesystems.local_origin:LocalOrigin"
_GCS = "shardcache.origin.cloud.gcs_origin:GcsOrigin"
_AZURE = "shardcache.origin.cloud.azure_origin:AzureOrigin"
_HUB = "shardcache.origin.cloud.hub_origin:HubOrigin"
# Other store protocols by the package of their filesystem. gs and gcs, like az and abfs, stay apart: a rule that allows
# one does not allow the other.
_STORES = {
    "adlfs": ("adl",),
    "ossfs": ("oss",),
    "ocifs": ("oci", "ocilake"),
    "tosfs": ("tos", "tosfs"),
    "lakefs-spec": ("lakefs",),
}
S3 = UrlProtocol(
    ("s3", "s3a"),
    PlaceKind.STORE,
    "shardcache.origin.s3.s3_origin:S3Origin",
    package="s3fs",
    has_tier=True,
    signed_options=PRESIGNED_OPTIONS,
    load="shardcache.origin.s3.s3_origin:load",
    variables="AWS_",
)
_TABLE = (
    S3,
    *(UrlProtocol((name,), PlaceKind.WEB, _WEB, has_tier=True) for name in ("http", "https")),
    UrlProtocol(("file", "local"), PlaceKind.LOCAL, _FILES),
    *(UrlProtocol((name,), PlaceKind.STORE, _GCS, "gcsfs") for name in ("gs", "gcs")),
    *(UrlProtocol((name,), PlaceKind.STORE, _AZURE, "adlfs") for name in ("az", "abfs", "abfss")),
    UrlProtocol(("hf",), PlaceKind.STORE, _HUB, "huggingface_hub"),
    *(UrlProtocol((n,), PlaceKind.STORE, package=package) for package, names in _STORES.items() for n in names),
    UrlProtocol(("smb",), PlaceKind.OTHER, package="smbprotocol"),
    *(UrlProtocol((name,), PlaceKind.WRAPPER) for name in _WRAPPERS),
)
_ROWS = {name: row for row in _TABLE for name in row.names}

PREPARED = tuple(row for row in _TABLE if row.load)
"""Protocols that are prepared before the first url comes, where they are configured."""


def row_of(protocol: str) -> UrlProtocol:
    """Return the row of a protocol, given in lower case."""
    return _ROWS.get(protocol) or UrlProtocol((protocol,), PlaceKind.OTHER)


def is_known(protocol: str) -> bool:
    """Return whether a protocol, given in lower case, has a row; fsspec may know others."""
    return protocol in _ROWS


def _all(kind: PlaceKind) -> frozenset[str]:
    return frozenset(name for name, row in _ROWS.items() if row.kind is kind)


COMMON = ("s3", "gs", "az", "hf", "https", "file")
"""Protocols to name in advice."""

STORES, WEB, LOCAL, WRAPPERS = map(_all, (PlaceKind.STORE, PlaceKind.WEB, PlaceKind.LOCAL, PlaceKind.WRAPPER))


# Parts of a url


def protocol_of(url: str) -> str:
    """Return the part before `://`; a plain path is `file`."""
    protocol, separator, _ = url.partition("://")
    return protocol.lower() if separator else "file"


def _path_of(url: str) -> str:
    """Return the part after `://`, which begins with the bucket or host; of a plain path, all."""
    return url.partition("://")[2] if "://" in url else url


def store_of(url: str) -> str:
    """Return the name of a url's origin, which is likely to have one request limit: protocol and bucket or host."""
    return f"{protocol_of(url)}://{url.partition('://')[2].partition('/')[0].rpartition('@')[2]}"


def host_of(url: str) -> str:
    """Return the host of a web url in lower case, without port and brackets."""
    return (urlsplit(url).hostname or "").lower()


_PORTS = {"http": ":80", "https": ":443"}


def canonical(url: str) -> str:
    """Return the url in a form for comparison: `file://` for a path, schemes and web hosts in lower case.

    Everything after the host is kept: two spellings of a path are two urls.
    """
    protocol, path = row_of(protocol_of(url)).names[0], _path_of(url)
    if protocol in WEB:
        authority, slash, rest = path.partition("/")
        path = f"{authority.lower().removesuffix(_PORTS[protocol])}{slash}{rest}"
    return f"{protocol}://{path}"


_WILDCARD = re.compile(r"[*?\[]")


def is_glob(url: str) -> bool:
    """Return whether the url has wildcards; in http(s) urls, `?` begins the query and `[` an IPv6 address."""
    return "*" in url.partition("?")[0] if protocol_of(url) in WEB else _WILDCARD.search(url) is not None


def glob_prefix(pattern: str) -> str:
    """Return the literal prefix of a glob."""
    return _WILDCARD.split(pattern, maxsplit=1)[0]


def join(base: str, relative: str) -> str:
    """Resolve a shard's name in an index at `base`; a url is returned unchanged."""
    if "://" in relative:
        return relative
    head, separator, path = path_of(base).rpartition("://")
    if separator and protocol_of(base) != "file":
        authority, _, path = path.partition("/")
        head = f"{head}{separator}{authority}"
    else:
        head += separator
    return head + posixpath.normpath(posixpath.join("/", posixpath.dirname(path), relative))


# Deceptive urls

# Control characters, surrogates, line separators, and characters that change the direction of text.
_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# Local paths and all other hosts need a closer look.
_PLAIN = re.compile(
    rf"(?:(?:{'|'.join(sorted(STORES))})://|"
    r"https?://[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::(?:[1-5][0-9]{4}|[1-9][0-9]{0,3}))?/)"
    r"[A-Za-z0-9_./=-]+"
)
# Web servers refuse longer urls; S3 keys have at most 1,024. The checks below block the event loop.
_MAX_CHARS = 8192
# No honest path is encoded more often than this; each level costs a pass over the path.
_MAX_ENCODINGS = 4
_HOST = re.compile(r"(?:[A-Za-z0-9*_{-](?:[A-Za-z0-9*_.,{}-]*[A-Za-z0-9*_}-])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")


def checked(url: str) -> str:
    """Return the url unless it is too long, or may refer to another place than it seems to. Raises ConfigError.

    Refused are `..`, encoded or not, and paths encoded so often that only `..` would need it; characters that end a
    line or a string; urls within urls (`simplecache::…`, `zip://`); credentials; relative paths of local files; and
    hosts that people and programs read differently.
    """
    if len(url) > _MAX_CHARS:
        wrong = f"the url or pattern has {len(url)} characters; the limit is {_MAX_CHARS}"
        raise ConfigError(wrong, url=url[:200], remedy="give a list of urls, or an index file")
    if _PLAIN.fullmatch(url) and ".." not in url:
        return url  # fast path for nearly all urls, of which there may be millions
    for misleads, wrong, remedy in _MISLEADING:
        if misleads(url):
            raise ConfigError(wrong, url=url, remedy=remedy)
    return url


def is_sound(url: str) -> bool:
    """Return whether `checked` accepts a url."""
    try:
        checked(url)
    except ConfigError:
        return False
    return True


def _is_unwritable(url: str) -> bool:
    return not url or url != url.strip() or _UNWRITABLE.search(url) is not None


def _climbs(url: str) -> bool:
    path = _path_of(url)
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
    if "://" not in url and url.startswith("/"):  # a path: none of its characters has a meaning
        return False
    return "::" in url.partition("://")[0] or protocol_of(url) in WRAPPERS


def _has_credentials(url: str) -> bool:
    protocol, authority = protocol_of(url), url.partition("://")[2].partition("/")[0]
    userinfo, at, _ = authority.rpartition("@")
    if protocol in S3.names:
        return bool(at) or (":" in authority and not authority.startswith("arn:"))  # a secret key may hold a slash
    if protocol in WEB:
        return bool(at)
    return ":" in userinfo and protocol != "github"  # there, owner:repository


def _is_relative(url: str) -> bool:
    # fsspec reads `file://x` as a path below the working directory, and `~` as a home directory.
    return protocol_of(url) in LOCAL and not _path_of(url).startswith("/")


def _has_ambiguous_host(url: str) -> bool:
    if protocol_of(url) not in WEB:
        return False
    authority = re.split(r"[/?#]", _path_of(url), maxsplit=1)[0]
    try:
        port = urlsplit(url).port
    except ValueError:
        return True
    return _HOST.fullmatch(authority) is None or port == 0


_MISLEADING = (
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


@dataclass(frozen=True, slots=True)
class Peer:
    """The user behind a request."""

    uid: int
    gids: frozenset[int] = frozenset()  # ids of all groups that the user is in

    @property
    def is_trusted(self) -> bool:
        """True for the daemon's own user and root, who have its permissions anyway."""
        return self.uid in (0, os.getuid())


_RULE_KEYS = ("prefix", "users", "groups")


@dataclass(frozen=True, slots=True)
class AllowRule:
    """One entry of `allow`: urls that begin with `prefix` may be fetched for the users and groups, or for everyone."""

    prefix: str
    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, entry: object) -> "AllowRule":
        """Parse a prefix, or a table of `prefix`, `users` and `groups`; users and groups by name or number.

        Raises ValueError for anything else, and for a user or group unknown to this system.
        """
        match entry:
            case AllowRule():
                return entry
            case str(prefix) if prefix:
                return cls(prefix)
            case {**keys} if unknown := next(iter(keys.keys() - _RULE_KEYS), None):
                raise ValueError(f"unknown key {unknown!r} in a rule{did_you_mean(str(unknown), _RULE_KEYS)}")
            case {"prefix": str(prefix), **others} if prefix:
                users, groups = (_ids(others.get(name, ()), name) for name in ("users", "groups"))
                if others and not users and not groups:
                    raise ValueError(f"the rule for {prefix} applies to nobody")
                return cls(prefix, users, groups)
        raise ValueError("an entry must be a url prefix, or a table with prefix and, optionally, users and groups")


def _ids(names: object, kind: str) -> frozenset[int]:
    if not isinstance(names, (list, tuple)):
        raise ValueError(f"{kind} must be a list of names or numbers")  # noqa: TRY004  # pydantic ignores TypeError
    return frozenset(_id(name, kind) for name in names)


def _id(name: object, kind: str) -> int:
    if type(name) is int and name >= 0:
        return name
    try:
        return pwd.getpwnam(str(name)).pw_uid if kind == "users" else grp.getgrnam(str(name)).gr_gid
    except (KeyError, ValueError):
        raise ValueError(f"{name!r} is not among this system's {kind}") from None


class _Rule:
    def __init__(self, rule: AllowRule) -> None:
        prefix = canonical(rule.prefix)
        self._uids, self._gids = rule.uids, rule.gids
        self.is_for_all = not (rule.uids or rule.gids)
        self._prefixes = tuple({prefix, _real(prefix)})
        # `s3://data` must not allow `s3://data-private`; a prefix that does not end with the host may be any string.
        place = prefix.partition("://")[2]
        self._is_host = bool(place) and "/" not in place

    def covers(self, url: str) -> bool:
        """Return whether a canonical url starts with the prefix."""
        ends = ("", "/") if self._is_host else None
        return any(
            url.startswith(start) and (ends is None or url[len(start) :][:1] in ends) for start in self._prefixes
        )

    def includes(self, other: "_Rule") -> bool:
        """Return whether this rule applies to every user to whom `other` applies."""
        return self.is_for_all or (not other.is_for_all and other._uids <= self._uids and other._gids <= self._gids)

    def is_for(self, peer: Peer) -> bool:
        return self.is_for_all or peer.is_trusted or peer.uid in self._uids or not self._gids.isdisjoint(peer.gids)


class AllowList:
    """Rules, at least one of which must allow a url.

    Without rules, everything is allowed except resources that only the daemon can reach, through its permissions or
    its place on the network: local files, the node and its cloud's metadata service (`is_near`), and filesystems that
    are not object stores. The daemon's own user and root may fetch these too.
    """

    def __init__(self, rules: Sequence[AllowRule]) -> None:
        self._rules = tuple(map(_Rule, rules))

    def __repr__(self) -> str:
        return f"<AllowList of {len(self._rules)} rules>"

    @property
    def far_only(self) -> bool:
        """True if names that resolve to near hosts (`is_near`) are refused: only rules can allow them."""
        return not self._rules

    def check(self, url: str, peer: Peer) -> None:
        """Raise NotAllowedError unless the user may fetch `url`, ConfigError if the url is malformed or deceptive."""
        checked(url)
        if not self._rules:
            _check_default(url, peer)
            return
        place = canonical(url)
        if not any(rule.covers(place) and rule.is_for(peer) for rule in self._rules):
            raise NotAllowedError("the daemon's allow rules do not permit you to fetch the url", url=url)

    def check_all(self, urls: Iterable[str], peer: Peer) -> None:
        """Check every url as `check` does."""
        form_only = not self._rules and peer.is_trusted
        for url in urls:
            checked(url) if form_only else self.check(url, peer)

    def shows(self, url: str, peer: Peer) -> bool:
        """Return whether the user may see that `url` is cached, and evict it: if allowed to fetch it, or trusted."""
        if peer.is_trusted:
            return True
        try:
            self.check(url, peer)
        except ShardcacheError:
            return False
        return True

    def check_hop(self, source: str, target: str) -> None:
        """Raise NotAllowedError unless everyone who may fetch `source` may also fetch `target`, to which it leads."""
        checked(target)
        if self._rules:
            begins, ends = self._covering(canonical(source)), self._covering(canonical(target))
            allowed = bool(begins) and all(any(end.includes(begin) for end in ends) for begin in begins)
        else:
            web = protocol_of(target) in WEB
            allowed = not web or not is_near(host_of(target)) or host_of(target) == host_of(source)
        if not allowed:
            raise NotAllowedError(f"the url leads to {target}, which the daemon is not allowed to fetch", url=source)

    def _covering(self, place: str) -> list[_Rule]:
        return [rule for rule in self._rules if rule.covers(place)]


def _check_default(url: str, peer: Peer) -> None:
    protocol, refusal = protocol_of(url), ""
    if protocol in STORES or peer.is_trusted:
        return
    if protocol in LOCAL:
        refusal = "local files would be read with the daemon's permissions, not yours"
    elif protocol not in WEB:
        refusal = f"{protocol}:// is not an object store and would be read with the daemon's permissions"
    elif is_near(host_of(url)):
        refusal = "the host is this node or its cloud's metadata service"
    if refusal:
        raise NotAllowedError(refusal, url=url)


def _real(prefix: str) -> str:
    """Return a local prefix with symbolic links resolved, as urls resolved through links will show it."""
    protocol, _, path = prefix.partition("://")
    if protocol not in LOCAL:
        return prefix
    is_folder = not path.endswith("/") and Path(path).is_dir()
    folder, slash, rest = (path, "", "") if is_folder else path.rpartition("/")
    return f"{protocol}://{os.path.realpath(folder or '/').rstrip('/')}{slash}{rest}"
