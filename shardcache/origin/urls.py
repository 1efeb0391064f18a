"""Urls of shards, taken apart and put together. Pure."""

from __future__ import annotations

import posixpath
import re

from shardcache.errors import ConfigError

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
INDEX_SUFFIX = ".json"

_WILDCARD = re.compile(r"[*?\[]")
# In brackets, a "]" that comes first, or first after "!", is one of the characters.
_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|\[(?>!?)(?>\]?)[^\]/]*\]|.", re.DOTALL)


def protocol_of(url: str) -> str:
    """Return the part before `://`; a plain path is `file`."""
    protocol, separator, _ = url.partition("://")
    return protocol.lower() if separator else "file"


def store_of(url: str) -> str:
    """Return what is likely to be one store with one limit: the protocol with the bucket or host."""
    protocol, path = protocol_of(url), url.partition("://")[2]
    return f"{protocol}://{path.partition('/')[0].rpartition('@')[2]}"


def checked(url: str) -> str:
    """Return the url unless it could mean another place than it seems to. Raises ConfigError."""
    if not url:
        raise ConfigError("an empty url")
    path = url.partition("://")[2] if "://" in url else url
    if ".." in path.split("/"):
        raise ConfigError("a url must not climb with `..`", url=url, remedy="write the url that it leads to")
    if "://" not in url and not url.startswith("/"):
        raise ConfigError(
            "neither a url nor an absolute path", url=url, remedy="the daemon has its own working folder: start with /"
        )
    return url


def is_glob(url: str) -> bool:
    """Tell whether the url has wildcards; in http(s) urls `?` begins the query and `[` is an address."""
    return "*" in url if protocol_of(url) in ("http", "https") else _WILDCARD.search(url) is not None


def glob_prefix(pattern: str) -> str:
    """Return what every match of a glob begins with."""
    match = _WILDCARD.search(pattern)
    return pattern[: match.start()] if match else pattern


def glob_regex(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a glob. Raises ConfigError for a range in brackets that runs backwards.

    As in a shell: `*`, `?` and `[...]` stay within one folder, `**` crosses folders and `**/` may match none.
    """
    try:
        return re.compile("".join(map(_translate, _TOKEN.findall(pattern))), re.DOTALL)
    except re.error as exn:
        raise ConfigError(f"not a glob: {exn}", url=pattern) from None


def _translate(token: str) -> str:
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(token)
    if known is not None:
        return known
    if len(token) == 1:
        return re.escape(token)
    chars = re.escape(token[1:-1].removeprefix("!")).replace(r"\-", "-")
    return f"[^/{chars}]" if token.startswith("[!") else f"[{chars}]"


def join(base: str, relative: str) -> str:
    """Resolve what an index at `base` calls its shard; what is a url already stays."""
    if "://" in relative:
        return relative
    head, separator, path = base.rpartition("://")
    if separator and protocol_of(base) != "file":
        authority, _, path = path.partition("/")
        head = f"{head}{separator}{authority}"
    else:
        head += separator
    return head + posixpath.normpath(posixpath.join("/", posixpath.dirname(path), relative))
