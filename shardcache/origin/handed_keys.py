"""Temporary keys that a private daemon's sessions hand over: it uses the newest valid ones."""

from collections.abc import Iterable

from shardcache.shared.temporary_keys import TemporaryKeys

_MAX_KEYS = 64  # of sessions that have not ended; older ones have expired


class HandedKeys:
    """Temporary keys, by when they were first handed over.

    A session that began long ago hands its keys over again when it reconnects: they are no newer
    for that.
    """

    def __init__(self, first: Iterable[TemporaryKeys] = ()) -> None:
        self._keys = list(first)  # the newest first
        self._refused: set[TemporaryKeys] = set()

    @property
    def current(self) -> TemporaryKeys | None:
        """The newest that the object store has not refused, else the newest; None without any."""
        valid = (keys for keys in self._keys if keys not in self._refused)
        return next(valid, None) or next(iter(self._keys), None)

    def add(self, keys: TemporaryKeys) -> None:
        """Take keys that a session has."""
        if keys in self._keys:
            return
        self._keys.insert(0, keys)
        self._refused.difference_update(self._keys[_MAX_KEYS:])
        del self._keys[_MAX_KEYS:]

    def refuse(self, keys: TemporaryKeys | None) -> None:
        """Record that the object store takes keys for expired or invalid."""
        if keys is not None:
            self._refused.add(keys)
