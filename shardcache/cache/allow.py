"""Which urls a user may have fetched with the daemon's rights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from shardcache.errors import ConfigError, NotAllowedError
from shardcache.origin.urls import protocol_of

_LOCAL = ("file", "local")


class AllowList:
    """Url prefixes; an empty list allows every url, but other users no local files."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        self._prefixes = tuple(prefixes)

    def check(self, url: str, uid: int) -> None:
        """Raise NotAllowedError unless the user may have `url` fetched."""
        try:
            path = urlsplit(url).path
            url.encode()
        except ValueError as exn:
            raise ConfigError(f"this is no url ({exn})", url=ascii(url)) from None
        if ".." in unquote(path).split("/"):
            raise NotAllowedError("a url may not climb with '..'", url=url, remedy="write the path out")
        if self._prefixes:
            if not any(_is_below(url, prefix) for prefix in self._prefixes):
                raise NotAllowedError("the url lies outside what this daemon may fetch", url=url)
        elif protocol_of(url) in _LOCAL and uid not in (os.getuid(), 0):
            raise NotAllowedError("local files are read with the daemon's rights, not with yours", url=url)


def _is_below(url: str, prefix: str) -> bool:
    if not url.startswith(prefix):
        return False
    # `s3://data` must not open `s3://data-private`; below the host, a prefix is any string.
    is_host = not urlsplit(prefix).path
    return not is_host or url[len(prefix) :][:1] in ("", "/")
