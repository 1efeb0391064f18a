"""Signed urls that their servers accepted lately.

A signed url has parameters that permit a read of its object until the url expires. The daemon
gives the object's cached bytes only to a client whose signed url the server has accepted.
"""

import hashlib
import time

from shardcache.shared.urls.signed_urls import expiry_s, is_signed

_REMEMBERED_S = 3600.0  # time for which an accepted url is remembered
_MAX_URLS = 200_000  # each url takes a hash and a number: some 30 MB together


class Signatures:
    """Signed urls that were accepted. Each counts until it expires, but for an hour at most.

    The urls are secrets, so only their hashes are kept.
    """

    def __init__(self) -> None:
        # By hash of the url: the time by the monotonic clock at which it was accepted last. The
        # oldest is first.
        self._accepted: dict[bytes, float] = {}

    def __repr__(self) -> str:
        return f"<Signatures of {len(self._accepted)} urls>"

    def record_accepted(self, url: str) -> None:
        """Record that the server has just accepted a url. No-op for a url that is not signed."""
        if not is_signed(url):
            return
        digest = _hash(url)
        self._accepted.pop(digest, None)
        self._accepted[digest] = time.monotonic()
        if len(self._accepted) > _MAX_URLS:
            del self._accepted[next(iter(self._accepted))]

    def record_refused(self, url: str) -> None:
        """Record that the server has refused a url."""
        self._accepted.pop(_hash(url), None)

    def allows(self, url: str) -> bool:
        """Return whether cached bytes may be given to a client that has this url.

        Returns True for a url that is not signed.
        """
        if not is_signed(url):
            return True
        accepted_s = self._accepted.get(_hash(url))
        if accepted_s is None or time.monotonic() - accepted_s > _REMEMBERED_S:
            return False
        expires_s = expiry_s(url)  # by the wall clock; None if the url does not state it
        return expires_s is None or time.time() < expires_s


def _hash(url: str) -> bytes:
    """Return the SHA-256 of a url, which may contain surrogates."""
    return hashlib.sha256(url.encode(errors="surrogateescape")).digest()
