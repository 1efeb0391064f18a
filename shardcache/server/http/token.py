"""The bearer token of requests over TCP."""

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
    """A secret, kept only as its hash."""

    def __init__(self, text: str) -> None:
        self._hash = _hash(text)

    def __repr__(self) -> str:
        return "<Token>"

    @classmethod
    def read(cls, path: Path) -> Token:
        """Read the token from a file, without surrounding white space.

        Raises ConfigError if the file cannot be read, others may read or write it, or the token is too short.
        """
        try:
            mode, text = path.stat().st_mode, path.read_text().strip()
        except (OSError, UnicodeDecodeError) as exn:
            raise ConfigError(f"cannot read the token file: {exn}", remedy="correct --http-token-file") from None
        if mode & _OTHERS:
            raise ConfigError(f"{path} may be read or written by others", remedy=f"chmod 600 {path}")
        if len(text) < _LEAST_CHARS or not text.isascii() or not text.isprintable():
            raise ConfigError(
                f"{path} does not hold a token of at least {_LEAST_CHARS} printable ASCII characters",
                remedy=f"openssl rand -hex 32 > {path}",
            )
        return cls(text)

    def is_in(self, request: web.Request) -> bool:
        """Return True if a request carries the token: `Authorization: Bearer …` (RFC 6750, 2.1)."""
        scheme, _, text = request.headers.get("Authorization", "").partition(" ")
        # Hashes have one length: the comparison's time reveals nothing.
        return hmac.compare_digest(_hash(text.strip()), self._hash) and scheme.lower() == "bearer"


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
