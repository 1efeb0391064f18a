"""The token that requests over TCP bring."""

from __future__ import annotations

import hashlib
import hmac
import stat
from pathlib import Path

from aiohttp import web

from shardcache.errors import ConfigError

_LEAST_CHARS = 16
_OTHERS = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP


class Token:
    """A secret, of which only the hash is kept."""

    def __init__(self, text: str) -> None:
        self._hash = _hash(text)

    def __repr__(self) -> str:
        return "<Token>"

    @classmethod
    def read(cls, path: Path) -> Token:
        """Read it from a file, white space around it left out.

        Raises ConfigError when the file cannot be read, when others may read or write it, and for a short token.
        """
        try:
            mode, text = path.stat().st_mode, path.read_text().strip()
        except (OSError, UnicodeDecodeError) as exn:
            raise ConfigError(f"cannot read the token file: {exn}", remedy="correct --http-token-file") from None
        if mode & _OTHERS:
            raise ConfigError(f"{path} may be read or written by others", remedy=f"chmod 600 {path}")
        if len(text) < _LEAST_CHARS or not text.isascii() or not text.isprintable():
            raise ConfigError(
                f"{path} holds no token of {_LEAST_CHARS} characters or more",
                remedy=f"openssl rand -hex 32 > {path}",
            )
        return cls(text)

    def is_in(self, request: web.Request) -> bool:
        """Tell whether a request brings it: `Authorization: Bearer …` (RFC 6750, 2.1)."""
        scheme, _, text = request.headers.get("Authorization", "").partition(" ")
        # Hashes of one length: how long the comparison takes tells nothing.
        return hmac.compare_digest(_hash(text.strip()), self._hash) and scheme.lower() == "bearer"


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
