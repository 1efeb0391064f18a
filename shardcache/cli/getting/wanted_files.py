"""The files that the SOURCE of `shardcache get` names, and their paths below the destination.

The source is a url or pattern, and the daemon lists its files. Each file keeps its folders below
the base, which is the source up to the last slash before any wildcard. A `ShardRef` stands for a
file: it has its url, version and size. The `names` of a file are the folders and the name of its
path below the destination.
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
from shardcache.shared.exceptions import ConfigError, NotFoundError
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
_NO_NAMES = ("", ".", "..")  # components of a path that do not name a file or folder


@dataclass(frozen=True, slots=True)
class WantedFiles:
    """The files of a source.

    Attributes:
        by_names: the files by their names below the destination.
        refused: the files that cannot have a path below the destination, with the reason.
        is_alone: True if the source is the url of a single file, for which DEST may be a new name.
    """

    by_names: dict[Names, ShardRef]
    refused: dict[ShardRef, ConfigError]
    is_alone: bool


def find_files(source: str, choice: DaemonChoice, reader: ReaderIdentity) -> WantedFiles:
    """Return the files of a source. Raises ConfigError if two files would have the same path.

    Args:
        source: a url or pattern.
        choice: which daemon to ask, the node's or a private one.
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

    by_names, refused = _name_files(refs, _base_of(source))
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
        before_wildcard, _, _braces = path.partition("{")
    else:
        before_wildcard, *_ = _WILDCARD.split(path_of(source), maxsplit=1)
    return source[: before_wildcard.rfind("/") + 1]


def _name_files(
    refs: list[ShardRef],
    base: str,
) -> tuple[dict[Names, ShardRef], dict[ShardRef, ConfigError]]:
    """Return the files by their names, and the refused files with the reasons, as `WantedFiles`.

    Raises ConfigError if two files would have the same path.
    """
    by_names: dict[Names, ShardRef] = {}
    refused: dict[ShardRef, ConfigError] = {}
    for ref in refs:
        try:
            checked(ref.url)  # raises ConfigError for a url that is deceptive
            names = _names_below(ref.url, base)
        except ConfigError as exn:
            refused[ref] = exn
            continue
        other = by_names.setdefault(names, ref)
        if other != ref:
            raise ConfigError(
                f"two files would be written to {'/'.join(names)}: this one and {other.url}",
                url=ref.url,
            )
    return by_names, refused


def _names_below(url: str, base: str) -> Names:
    """Return the names of a file's path below the destination.

    Raises ConfigError for names that lead outside of the destination.

    Args:
        url: url of the file.
        base: base of the source.
    """
    path = local_path(url) or url
    base_path = local_path(base) or base
    if protocol_of(url) in WEB:
        path = urlsplit(path)._replace(query="", fragment="").geturl()
    else:
        path = path_of(path)
    if path.startswith(base_path):
        relative_path = path.removeprefix(base_path)
    else:  # an index file may list files that are elsewhere
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
