"""The files that the SOURCE of `shardcache get` names, and their names below the destination.

The daemon lists the files of a url or pattern. Each file keeps its folders below the base, which is
the url up to the last slash before any wildcard.
"""

from __future__ import annotations

import re
from contextlib import closing, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from shardcache.access.deceptive import checked
from shardcache.access.protocols import WEB
from shardcache.access.urls import protocol_of
from shardcache.cli.getting.placed_files import Names
from shardcache.errors import ConfigError, NotFoundError
from shardcache.shared.protocol import ShardRef
from shardcache.shared.urls.local_urls import local_path
from shardcache.shared.urls.url_names import path_of
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.session import Session

PATIENCE = Patience(limit_s=7 * 86_400.0, away_s=30.0)
"""Time limits of `get`: for a file, which may take hours, and for the absence of the daemon.

A daemon that stops finishes its requests for at most 20 s, and the next daemon starts in seconds.
"""

_WILDCARD = re.compile(r"[*?\[{]")
_NO_NAMES = ("", ".", "..")  # components of a path that are not names of a file or folder


@dataclass(frozen=True, slots=True)
class WantedFiles:
    """The files of a source.

    Attributes:
        by_names: the files by their names below the destination.
        refused: the files whose names are not possible below the destination, with the reason.
        is_alone: True if the source is the url of a single file, for which DEST may be a new name.
    """

    by_names: dict[Names, ShardRef]
    refused: dict[ShardRef, ConfigError]
    is_alone: bool


def find_files(source: str, choice: DaemonChoice, reader: ReaderIdentity) -> WantedFiles:
    """Return the files of a source. Raises ConfigError if two files would have the same name.

    Args:
        source: a url or pattern.
        choice: the choice of a daemon.
        reader: identity of this command towards the daemon.
    """
    refs = _list_files(source, choice, reader)
    # For the url of an object that does not exist, the daemon returns that url without a version.
    is_missing = len(refs) == 1 and refs[0].url == source and refs[0].version is None
    if is_missing and protocol_of(source) not in WEB:
        # The url may be that of a folder without its slash, or of a repository on the Hub. Web
        # servers have no folders.
        folder = f"{source}/"
        with suppress(NotFoundError):
            refs = _list_files(folder, choice, reader)
            source = folder

    base = _base_of(source)
    by_names: dict[Names, ShardRef] = {}
    refused: dict[ShardRef, ConfigError] = {}
    for ref in refs:
        try:
            checked(ref.url)  # raises ConfigError
            names = _names(ref.url, base)
        except ConfigError as exn:
            refused[ref] = exn
            continue
        other = by_names.setdefault(names, ref)
        if other != ref:
            raise ConfigError(
                f"two files would be written to {'/'.join(names)}: this one and {other.url}",
                url=ref.url,
            )
    is_one_url = not source.endswith("/") and _WILDCARD.search(path_of(source)) is None
    is_alone = is_one_url and len(refs) == len(by_names) == 1
    return WantedFiles(by_names, refused, is_alone)


def _list_files(source: str, choice: DaemonChoice, reader: ReaderIdentity) -> list[ShardRef]:
    """Return the files that the daemon finds for a url or pattern."""
    with closing(Session(choice, reader, PATIENCE)) as session:
        return list(session.resolve([source], wanted="files"))


def _base_of(source: str) -> str:
    """Return the base of a source, with a slash at its end."""
    if protocol_of(source) in WEB:
        # Web servers have no listings, so braces are the only pattern.
        path, _, _query = source.partition("?")
        literal, _, _braces = path.partition("{")
    else:
        literal, *_ = _WILDCARD.split(path_of(source), maxsplit=1)
    return source[: literal.rfind("/") + 1]


def _names(url: str, base: str) -> Names:
    """Return the names of a file below the destination: of its folders, and its own.

    Raises ConfigError for names that lead outside of the destination.

    Args:
        url: url of the file.
        base: base of the source.
    """
    path = local_path(url) or url
    root = local_path(base) or base
    if protocol_of(url) in WEB:
        path = urlsplit(path)._replace(query="", fragment="").geturl()
    else:
        path = path_of(path)
    if path.startswith(root):
        relative_path = path.removeprefix(root)
    else:
        _, _, relative_path = path.rpartition("/")
    names = tuple(relative_path.split("/"))
    if any(name in _NO_NAMES or "\0" in name for name in names):
        raise ConfigError(
            "the key is not a path below a folder",
            url=url,
            remedy="copy the object to another key, or read it with open_cached, which "
            "needs no file name",
        )
    return names
