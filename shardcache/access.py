"""Access control: the protocols of urls, what a url means, and which urls a user may request.

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
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from shardcache.errors import ConfigError, NotAllowedError, ShardcacheError, did_you_mean
from shardcache.near import is_near
from shardcache.url_names import path_of


class PlaceKind(enum.Enum):
    """Kind of place that the urls of a protocol name."""

    STORE = "service at an address fixed by its provider, with credentials given to the daemon"
    WEB = "web servers, which may be any host"
    LOCAL = "files of this node"
    WRAPPER = "fsspec filesystem that reads another url's bytes: no prefix tells what it reads"
    OTHER = "any other fsspec filesystem"


class UrlProtocol(NamedTuple):
    """One protocol.

    Attributes:
        names: its spellings in lower case, of one and the same place; urls are compared by the
            first.
        kind: decides who may use it by default, and what its urls may look like.
        origin: module and class of the `Origin`, imported on first use.
        package: to install if that import fails; empty if it is the one that could not be imported.
        has_tier: True if a cluster's tier can be in front of it.
        signed_options: `storage_options` with which a tier can be used; None if there are no
            others.
        load: module and function that loads what its first request needs, if that takes long.
            Blocks.
        variables: how the names of the environment's variables begin that configure it; empty if
            unknown.
    """

    names: tuple[str, ...]
    kind: PlaceKind
    origin: str = "shardcache.origin.filesystems.fsspec_origin:FsspecOrigin"
    package: str = ""
    has_tier: bool = False
    signed_options: frozenset[str] | None = None
    load: str = ""
    variables: str = ""


PRESIGNED_OPTIONS = frozenset({"key", "secret", "token", "endpoint_url", "anon", "use_ssl"})
"""Keys of `storage_options` that presigned urls of S3 support; others need its SDK."""

_STORE = PlaceKind.STORE
_HTTP = "shardcache.origin.http.web_origin:HttpOrigin"
_FILES = "shardcache.origin.filesystems.local_origin:LocalOrigin"
_GCS = "shardcache.origin.cloud.gcs_origin:GcsOrigin"
_AZURE = "shardcache.origin.cloud.azure_origin:AzureOrigin"
_HUB = "shardcache.origin.cloud.hub_origin:HubOrigin"
S3 = UrlProtocol(
    ("s3", "s3a"),
    _STORE,
    "shardcache.origin.s3.s3_origin:S3Origin",
    package="s3fs",
    has_tier=True,
    signed_options=PRESIGNED_OPTIONS,
    load="shardcache.origin.s3.s3_origin:load",
    variables="AWS_",
)
_WRAPPERS = (
    "asynclocal",
    "async_wrapper",
    "asyncwrapper",
    "blockcache",
    "cached",
    "dask",
    "data",
    "dir",
    "filecache",
    "generic",
    "libarchive",
    "reference",
    "simplecache",
    "tar",
    "zip",
)
# gs and gcs, like az and abfs, stay apart: a rule that allows one does not allow the other.
_TABLE = (
    S3,
    UrlProtocol(("http",), PlaceKind.WEB, _HTTP, has_tier=True),
    UrlProtocol(("https",), PlaceKind.WEB, _HTTP, has_tier=True),
    UrlProtocol(("file", "local"), PlaceKind.LOCAL, _FILES),
    UrlProtocol(("gs",), _STORE, _GCS, "gcsfs"),
    UrlProtocol(("gcs",), _STORE, _GCS, "gcsfs"),
    UrlProtocol(("az",), _STORE, _AZURE, "adlfs"),
    UrlProtocol(("abfs",), _STORE, _AZURE, "adlfs"),
    UrlProtocol(("abfss",), _STORE, _AZURE, "adlfs"),
    UrlProtocol(("hf",), _STORE, _HUB, "huggingface_hub"),
    UrlProtocol(("adl",), _STORE, package="adlfs"),
    UrlProtocol(("oss",), _STORE, package="ossfs"),
    UrlProtocol(("oci",), _STORE, package="ocifs"),
    UrlProtocol(("ocilake",), _STORE, package="ocifs"),
    UrlProtocol(("tos",), _STORE, package="tosfs"),
    UrlProtocol(("tosfs",), _STORE, package="tosfs"),
    UrlProtocol(("lakefs",), _STORE, package="lakefs-spec"),
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

STORES = _all(PlaceKind.STORE)
WEB = _all(PlaceKind.WEB)
LOCAL = _all(PlaceKind.LOCAL)
WRAPPERS = _all(PlaceKind.WRAPPER)


# Parts of a url


def protocol_of(url: str) -> str:
    """Return the part before `://`; a plain path is `file`."""
    protocol, separator, _ = url.partition("://")
    return protocol.lower() if separator else "file"


def _path_of(url: str) -> str:
    """Return the part after `://`, which begins with the bucket or host; of a plain path, all."""
    _, separator, path = url.partition("://")
    return path if separator else url


def store_of(url: str) -> str:
    """Return protocol and bucket or host: the name of an origin, which may have a request limit."""
    _, _, place = url.partition("://")
    authority, _, _ = place.partition("/")
    _, _, host = authority.rpartition("@")
    return f"{protocol_of(url)}://{host}"


def host_of(url: str) -> str:
    """Return the host of a web url in lower case, without port and brackets."""
    return (urlsplit(url).hostname or "").lower()


_PORTS = {"http": ":80", "https": ":443"}


def canonical(url: str) -> str:
    """Return the url in a form for comparison.

    `file://` for a path, schemes and web hosts in lower case. Everything after the host is kept:
    two spellings of a path are two urls.
    """
    protocol = row_of(protocol_of(url)).names[0]
    path = _path_of(url)
    if protocol in WEB:
        authority, slash, rest = path.partition("/")
        host = authority.lower().removesuffix(_PORTS[protocol])
        path = f"{host}{slash}{rest}"
    return f"{protocol}://{path}"


_WILDCARD = re.compile(r"[*?\[]")


def is_glob(url: str) -> bool:
    """Return whether the url has wildcards.

    In http(s) urls, `?` begins the query and `[` an IPv6 address.
    """
    if protocol_of(url) in WEB:
        return "*" in url.partition("?")[0]
    return _WILDCARD.search(url) is not None


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

# Control characters, surrogates, line separators, and characters that change the direction of
# text.
_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# Local paths and all other hosts need a closer look.
_PLAIN = re.compile(
    rf"(?:(?:{'|'.join(sorted(STORES))})://"
    r"|https?://[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?"
    r"(?::(?:[1-5][0-9]{4}|[1-9][0-9]{0,3}))?/)"  # a port below 60,000
    r"[A-Za-z0-9_./=-]+",
)
# Web servers refuse longer urls; S3 keys have at most 1,024. The checks below block the event loop.
_MAX_CHARS = 8192
# No honest path is encoded more often than this; each level costs a pass over the path.
_MAX_ENCODINGS = 4
_HOST = re.compile(
    r"(?:[A-Za-z0-9*_{-](?:[A-Za-z0-9*_.,{}-]*[A-Za-z0-9*_}-])?"  # a name, or a pattern of names
    r"|\[[0-9A-Fa-f:.]+\])"  # or an IPv6 address
    r"(?::[0-9]{1,5})?",  # and perhaps a port
)


def checked(url: str) -> str:
    """Return the url unless it is too long, or may refer to another place than it seems to.

    Raises ConfigError. Refused are `..`, encoded or not, and paths encoded so often that only `..` would need it;
    characters that end a line or a string; urls within urls (`simplecache::…`, `zip://`);
    credentials; relative paths of local files; and hosts that people and programs read differently.
    """
    if len(url) > _MAX_CHARS:
        raise ConfigError(
            f"the url or pattern has {len(url)} characters; the limit is {_MAX_CHARS}",
            url=url[:200],
            remedy="give a list of urls, or an index file",
        )
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
    protocol = protocol_of(url)
    _, _, place = url.partition("://")
    authority, _, _ = place.partition("/")
    userinfo, at, _ = authority.rpartition("@")
    if protocol in S3.names:
        # Not only before an `@`: a secret key may hold a slash.
        has_colon = ":" in authority and not authority.startswith("arn:")
        return bool(at) or has_colon
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
    (
        _is_unwritable,
        "not a url: it is empty, or has control characters or leading or trailing white space",
        "",
    ),
    (_climbs, "a url must not contain `..`", "write the resolved url"),
    (
        _leads_on,
        "a url within a url is not followed",
        "use the url of the shard itself, without `::` or an archive",
    ),
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
    (
        _has_ambiguous_host,
        "programs may disagree on the url's host",
        "write it in ASCII, as host or host:port",
    ),
)


@dataclass(frozen=True, slots=True)
class Peer:
    """The user behind a request.

    Attributes:
        uid: id of the user.
        gids: ids of all groups that the user is in.
    """

    uid: int
    gids: frozenset[int] = frozenset()

    @property
    def is_trusted(self) -> bool:
        """True for the daemon's own user and root, who have its permissions anyway."""
        return self.uid in (0, os.getuid())


_RULE_KEYS = ("prefix", "users", "groups")


@dataclass(frozen=True, slots=True)
class AllowRule:
    """One entry of `allow`: who may request the urls that begin with a prefix.

    Attributes:
        prefix: of the urls.
        uids: ids of users who may request them.
        gids: ids of groups whose members may, too; if both are empty, everyone may.
    """

    prefix: str
    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, entry: object) -> "AllowRule":
        """Parse a prefix, or a table of `prefix`, `users` and `groups`, by name or number.

        Raises ValueError for anything else, and for a user or group unknown to this system.
        """
        match entry:
            case AllowRule():
                return entry
            case str(prefix) if prefix:
                return cls(prefix)
            case {**table}:
                return cls._of_table(table)
        raise ValueError(_NO_RULE)

    @classmethod
    def _of_table(cls, table: dict[Any, Any]) -> "AllowRule":
        unknown = next(iter(table.keys() - _RULE_KEYS), None)
        if unknown is not None:
            similar = did_you_mean(str(unknown), _RULE_KEYS)
            raise ValueError(f"unknown key {unknown!r} in a rule{similar}")
        prefix = table.get("prefix")
        if not isinstance(prefix, str) or not prefix:
            raise ValueError(_NO_RULE)

        users = _ids(table.get("users", ()), "users")
        groups = _ids(table.get("groups", ()), "groups")
        is_restricted = "users" in table or "groups" in table
        if is_restricted and not users and not groups:
            raise ValueError(f"the rule for {prefix} applies to nobody")
        return cls(prefix, users, groups)


_NO_RULE = "an entry must be a url prefix, or a table with prefix and, optionally, users and groups"


def _ids(names: object, kind: str) -> frozenset[int]:
    if not isinstance(names, (list, tuple)):
        # Not a TypeError, which pydantic ignores.
        raise ValueError(f"{kind} must be a list of names or numbers")  # noqa: TRY004
    return frozenset(_id(name, kind) for name in names)


def _id(name: object, kind: str) -> int:
    if type(name) is int and name >= 0:
        return name
    try:
        if kind == "users":
            return pwd.getpwnam(str(name)).pw_uid
        return grp.getgrnam(str(name)).gr_gid
    except (KeyError, ValueError):
        raise ValueError(f"{name!r} is not among this system's {kind}") from None


class _Rule:
    def __init__(self, rule: AllowRule) -> None:
        prefix = canonical(rule.prefix)
        self._uids = rule.uids
        self._gids = rule.gids
        self.is_for_all = not (rule.uids or rule.gids)
        self._prefixes = tuple({prefix, _real(prefix)})
        # `s3://data` must not allow `s3://data-private`; a prefix that does not end with the host
        # may be any string.
        _, _, place = prefix.partition("://")
        self._is_host = bool(place) and "/" not in place

    def covers(self, url: str) -> bool:
        """Return whether a canonical url starts with the prefix."""
        return any(self._begins(url, prefix) for prefix in self._prefixes)

    def _begins(self, url: str, prefix: str) -> bool:
        if not url.startswith(prefix):
            return False
        following = url[len(prefix) : len(prefix) + 1]
        return not self._is_host or following in ("", "/")

    def includes(self, other: "_Rule") -> bool:
        """Return whether this rule applies to every user to whom `other` applies."""
        if self.is_for_all:
            return True
        if other.is_for_all:
            return False
        return other._uids <= self._uids and other._gids <= self._gids

    def is_for(self, peer: Peer) -> bool:
        if self.is_for_all or peer.is_trusted or peer.uid in self._uids:
            return True
        return not self._gids.isdisjoint(peer.gids)


class AllowList:
    """Rules, at least one of which must allow a url.

    Without rules, everything is allowed except resources that only the daemon can reach, through
    its permissions or its place on the network: local files, the node and its cloud's metadata
    service (`is_near`), and filesystems that are not object stores. The daemon's own user and root
    may fetch these too.
    """

    def __init__(self, rules: Sequence[AllowRule]) -> None:
        self._rules = tuple(map(_Rule, rules))

    def __repr__(self) -> str:
        return f"<AllowList of {len(self._rules)} rules>"

    @property
    def far_only(self) -> bool:
        """True if names of near hosts (`is_near`) are refused: only rules can allow them."""
        return not self._rules

    def check(self, url: str, peer: Peer) -> None:
        """Check that a user may request a url.

        Raises:
            NotAllowedError: the user may not.
            ConfigError: the url is malformed or deceptive.
        """
        checked(url)
        if not self._rules:
            _check_default(url, peer)
            return
        place = canonical(url)
        if not any(rule.covers(place) and rule.is_for(peer) for rule in self._rules):
            raise NotAllowedError(
                "the daemon's allow rules do not permit you to fetch the url",
                url=url,
            )

    def check_all(self, urls: Iterable[str], peer: Peer) -> None:
        """Check every url as `check` does."""
        form_only = not self._rules and peer.is_trusted
        for url in urls:
            if form_only:
                checked(url)
            else:
                self.check(url, peer)

    def shows(self, url: str, peer: Peer) -> bool:
        """Return whether the user may see that `url` is cached, and evict it.

        Those who may request it may, and the trusted.
        """
        if peer.is_trusted:
            return True
        try:
            self.check(url, peer)
        except ShardcacheError:
            return False
        return True

    def check_hop(self, source: str, target: str) -> None:
        """Check that everyone who may request `source` may also request where it leads, `target`.

        Raises NotAllowedError if not, and ConfigError if `target` is malformed or deceptive.
        """
        checked(target)
        if self._rules:
            allowed = self._rules_allow_hop(source, target)
        else:
            is_far = protocol_of(target) not in WEB or not is_near(host_of(target))
            allowed = is_far or host_of(target) == host_of(source)
        if not allowed:
            raise NotAllowedError(
                f"the url leads to {target}, which the daemon is not allowed to fetch",
                url=source,
            )

    def _rules_allow_hop(self, source: str, target: str) -> bool:
        begins = self._covering(canonical(source))
        ends = self._covering(canonical(target))
        if not begins:
            return False
        return all(any(end.includes(begin) for end in ends) for begin in begins)

    def _covering(self, place: str) -> list[_Rule]:
        return [rule for rule in self._rules if rule.covers(place)]


def _check_default(url: str, peer: Peer) -> None:
    """Raise NotAllowedError if only the daemon can reach a url, unless the peer is trusted."""
    protocol = protocol_of(url)
    if protocol in STORES or peer.is_trusted:
        return
    if protocol in LOCAL:
        refusal = "local files would be read with the daemon's permissions, not yours"
    elif protocol not in WEB:
        reason = "is not an object store and would be read with the daemon's permissions"
        refusal = f"{protocol}:// {reason}"
    elif is_near(host_of(url)):
        refusal = "the host is this node or its cloud's metadata service"
    else:
        return
    raise NotAllowedError(refusal, url=url)


def _real(prefix: str) -> str:
    """Return a local prefix with its symbolic links resolved, as urls that lead there will show."""
    protocol, _, path = prefix.partition("://")
    if protocol not in LOCAL:
        return prefix
    if not path.endswith("/") and Path(path).is_dir():
        return f"{protocol}://{_real_folder(path)}"
    # A prefix may end in the middle of a name.
    folder, slash, beginning = path.rpartition("/")
    return f"{protocol}://{_real_folder(folder)}{slash}{beginning}"


def _real_folder(path: str) -> str:
    return os.path.realpath(path or "/").rstrip("/")
