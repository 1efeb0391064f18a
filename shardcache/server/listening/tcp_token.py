"""The token that requests over TCP must carry, if there is a token file.

The daemon keeps only the token's hash.
"""

import hashlib
import hmac
import stat
from pathlib import Path

from aiohttp import web

from shardcache.shared.exceptions import ConfigError

_MIN_TOKEN_CHARS = 16
# The file's group may read it, but nobody apart from the owner may write it.
_FORBIDDEN_MODES = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP


def read_token_hash(path: Path) -> bytes:
    """Return the hash of the token in a file, without surrounding white space.

    Raises ConfigError if the file cannot be read, if users outside its group may read it, if users
    other than its owner may write it, or if the token is too short or not printable ASCII.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as exn:
        raise ConfigError(
            f"cannot read the token file: {exn}",
            remedy="correct --http-token-file",
        ) from None
    if mode & _FORBIDDEN_MODES:
        raise ConfigError(f"{path} may be read or written by others", remedy=f"chmod 600 {path}")
    is_valid = len(text) >= _MIN_TOKEN_CHARS and text.isascii() and text.isprintable()
    if not is_valid:
        raise ConfigError(
            f"{path} does not hold a token of at least {_MIN_TOKEN_CHARS} printable ASCII "
            "characters",
            remedy=f"openssl rand -hex 32 > {path}",
        )
    return _hash(text)


def carries_token(request: web.Request, token_hash: bytes) -> bool:
    """Return whether a request carries the token: `Authorization: Bearer …` (RFC 6750, 2.1)."""
    scheme, _, text = request.headers.get("Authorization", "").partition(" ")
    # All hashes have the same length, so the time that the comparison takes reveals nothing.
    is_same = hmac.compare_digest(_hash(text.strip()), token_hash)
    return is_same and scheme.lower() == "bearer"


def _hash(text: str) -> bytes:
    """Return the SHA-256 of a text, which may contain surrogates if a client sent it."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
