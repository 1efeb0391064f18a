"""Signed urls that their servers accepted lately: a client that has one may read its object."""

import hashlib
import time

from shardcache.shared.urls.signed_urls import expiry_s, is_signed

_REMEMBERED_S = 3600.0
_MAX_URLS = 200_000  # a hash and a number each, some 30 MB


class Signatures:
    """Signed urls that were accepted, each until it expires, and for an hour at most.

    Kept as hashes: they are secrets.
    """

    def __init__(self) -> None:
        # By hash, the time of the monotonic clock at which each was accepted last, oldest first.
        self._accepted: dict[bytes, float] = {}

    def __repr__(self) -> str:
        return f"<Signatures of {len(self._accepted)} urls>"

    def accept(self, url: str) -> None:
        """Note that the server has just accepted a url. No-op for one that is not signed."""
        if not is_signed(url):
            return
        digest = _hash(url)
        self._accepted.pop(digest, None)
        self._accepted[digest] = time.monotonic()
        if len(self._accepted) > _MAX_URLS:
            del self._accepted[next(iter(self._accepted))]

    def refuse(self, url: str) -> None:
        """Note that the server has refused a url."""
        self._accepted.pop(_hash(url), None)

    def allow(self, url: str) -> bool:
        """Return whether cached bytes may be given to a client that has this url.

        True for one that is not signed.
        """
        if not is_signed(url):
            return True
        accepted_s = self._accepted.get(_hash(url))
        if accepted_s is None or time.monotonic() - accepted_s > _REMEMBERED_S:
            return False
        until_s = expiry_s(url)
        return until_s is None or time.time() < until_s


def _hash(url: str) -> bytes:
    return hashlib.sha256(url.encode(errors="surrogateescape")).digest()
