"""Answers of origins about objects that are about to be downloaded."""

from __future__ import annotations

import time

from shardcache.origin.base import RemoteObject

_MOST = 10_000


class Answers:
    """Keeps what origins reported when a command asked for sizes, so that its downloads need not ask again.

    Each answer is used once: if the object has been replaced since, the next attempt asks.

    Args:
        ttl_s: age up to which an answer is used; 0 keeps none.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._kept: dict[str, RemoteObject] = {}  # oldest first

    def __repr__(self) -> str:
        return f"<Answers about {len(self._kept)} objects>"

    def keep(self, obj: RemoteObject) -> None:
        """Keep an answer that has just arrived, if there is space for it."""
        self._kept.pop(obj.url, None)
        while self._kept and self._is_old(next(iter(self._kept.values()))):
            del self._kept[next(iter(self._kept))]
        if len(self._kept) < _MOST:
            self._kept[obj.url] = obj

    def take(self, url: str, version: str | None) -> RemoteObject | None:
        """Remove and return the answer about an object; None if there is no recent one about this version."""
        obj = self._kept.pop(url, None)
        if obj is None or version not in (None, obj.version) or self._is_old(obj):
            return None
        return obj

    def _is_old(self, obj: RemoteObject) -> bool:
        return time.monotonic() - obj.reported_s >= self._ttl_s
