"""Urls that nobody may request, because they may refer to another place than they seem to.

`AllowList` checks each url that a user requests with `checked`, before it applies its rules. All
functions here look only at the text of a url: they read no files and send no requests.
"""

import re
from urllib.parse import unquote, urlsplit

from shardcache.access.protocols import LOCAL, STORES, WEB, WRAPPERS, row_of
from shardcache.access.urls import protocol_of, without_protocol
from shardcache.shared.exceptions import ConfigError

# Control characters, surrogates, line separators, and characters that change the direction of
# text.
_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# Urls that need no further checks unless they contain "..". They have only plain characters, and
# name a provider's store or a host with a plain name.
_PLAIN = re.compile(
    rf"(?:(?:{'|'.join(sorted(STORES))})://"
    r"|https?://[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?"
    r"(?::(?:[1-5][0-9]{4}|[1-9][0-9]{0,3}))?/)"  # a port below 60,000
    r"[A-Za-z0-9_./=-]+",
)
# Maximum length of a url. Web servers refuse longer urls, and S3 keys have at most 1,024 bytes. A
# limit is necessary because the checks below block the event loop.
_MAX_CHARS = 8192
# Maximum number of times that a path may be percent-encoded. No honest path is encoded more often,
# and each time costs a pass over the path.
_MAX_ENCODINGS = 4
_HOST = re.compile(
    r"(?:[A-Za-z0-9*_{-](?:[A-Za-z0-9*_.,{}-]*[A-Za-z0-9*_}-])?"  # a name, or a pattern of names
    r"|\[[0-9A-Fa-f:.]+\])"  # or an IPv6 address
    r"(?::[0-9]{1,5})?",  # and perhaps a port
)


def checked(url: str) -> str:
    """Return a url unchanged, unless it may refer to another place than it seems to.

    Raises ConfigError for these urls:

    - urls that are too long, or have characters that end a line or a string;
    - urls with `..`, percent-encoded or not, and urls that are encoded so often that they may hide
      a `..`;
    - urls within urls (`simplecache::…`, `zip://`);
    - urls with credentials;
    - relative paths of local files;
    - urls with hosts that people and programs read differently.
    """
    if len(url) > _MAX_CHARS:
        raise ConfigError(
            f"the url or pattern has {len(url)} characters; the limit is {_MAX_CHARS}",
            url=url[:200],
            remedy="give a list of urls, or an index file",
        )
    if _PLAIN.fullmatch(url) and ".." not in url:
        return url  # fast path for nearly all urls, of which there may be millions
    for is_misleading, fault, remedy in _FAULTS:
        if is_misleading(url):
            raise ConfigError(fault, url=url, remedy=remedy)
    return url


def url_with_prefix(prefix: str) -> str:
    """Return a url that begins with a prefix, for checks of the prefix.

    If a prefix ends with `..`, that may be the beginning of a name such as `...`, rather than the
    parent folder. A dot is then appended.
    """
    return f"{prefix}." if prefix.endswith("/..") else prefix


def is_sound(url: str) -> bool:
    """Return whether `checked` accepts a url."""
    try:
        checked(url)
    except ConfigError:
        return False
    return True


def _is_unwritable(url: str) -> bool:
    """Return whether a url is empty, or has characters that cannot be shown or written as text."""
    return not url or url != url.strip() or _UNWRITABLE.search(url) is not None


def _climbs(url: str) -> bool:
    """Return whether a server might read a segment of the path as `..`."""
    path = without_protocol(url)
    if protocol_of(url) in WEB:
        path = re.split(r"[?#]", path, maxsplit=1)[0]
    for _ in range(_MAX_ENCODINGS + 1):
        # Servers may read "..;x" as "..", and "\\" as "/".
        names = [segment.partition(";")[0] for segment in re.split(r"[/\\]", path)]
        if ".." in names:
            return True
        decoded = unquote(path)
        if decoded == path:
            return False
        path = decoded
    return True  # the path is still encoded


def _is_nested(url: str) -> bool:
    """Return whether fsspec would read another url that this url contains."""
    # In a local path, no characters have a special meaning.
    if "://" not in url and url.startswith("/"):
        return False
    return "::" in url.partition("://")[0] or protocol_of(url) in WRAPPERS


def _has_credentials(url: str) -> bool:
    """Return whether a url has credentials before its host, as in `user:password@host`."""
    protocol = protocol_of(url)
    _, _, after_protocol = url.partition("://")
    authority, _, _ = after_protocol.partition("/")
    userinfo, at, _ = authority.rpartition("@")
    if row_of(protocol).has_slashed_secrets:
        # A colon is enough: if the secret contains a slash, the `@` comes after that slash, outside
        # of `authority`.
        has_colon = ":" in authority and not authority.startswith("arn:")
        return bool(at) or has_colon
    if protocol in WEB:
        return bool(at)
    # In a url of fsspec's GitHub filesystem, owner and repository are at this place.
    return ":" in userinfo and protocol != "github"


def _is_relative(url: str) -> bool:
    """Return whether a local url has a relative path."""
    # fsspec reads `file://x` as a path below the working directory, and `~` as a home directory.
    return protocol_of(url) in LOCAL and not without_protocol(url).startswith("/")


def _has_ambiguous_host(url: str) -> bool:
    """Return whether programs may read different hosts from a web url."""
    if protocol_of(url) not in WEB:
        return False
    authority = re.split(r"[/?#]", without_protocol(url), maxsplit=1)[0]
    try:
        port = urlsplit(url).port
    except ValueError:
        return True
    return _HOST.fullmatch(authority) is None or port == 0


# For each kind of misleading url: the predicate that finds it, its fault, and the remedy.
_FAULTS = (
    (
        _is_unwritable,
        "not a url: it is empty, or has control characters or leading or trailing white space",
        "",
    ),
    (_climbs, "a url must not contain `..`", "write the resolved url"),
    (
        _is_nested,
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
