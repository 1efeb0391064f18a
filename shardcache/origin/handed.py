"""Credentials that a private daemon's sessions hand over."""

from collections.abc import Iterable, Mapping
from typing import Any

from shardcache.shared.credentials.handed_credentials import KINDS, Credentials
from shardcache.shared.credentials.temporary_keys import TemporaryKeys

_MAX_KEYS = 64  # of sessions that have not ended; older ones have expired

# Where none of them may read an object, the store is asked with each.
_MAX_SECRETS = 16


class HandedKeys:
    """Temporary keys of AWS, by when they were first handed over: the newest valid ones are used.

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


class HandedSecrets:
    """Credentials of one kind. Each may permit what no other one does, so all of them are used.

    Attributes:
        newest_first: the last sixteen, without the daemon's own, by when they were first handed
            over.
    """

    def __init__(self, own: Credentials | None = None) -> None:
        self._own = own
        self.newest_first: list[Credentials] = []

    def add(self, secret: Credentials) -> None:
        """Take credentials that a session has."""
        if secret == self._own or secret in self.newest_first:
            return
        self.newest_first.insert(0, secret)
        del self.newest_first[_MAX_SECRETS:]


class Handed:
    """All credentials that sessions have handed over.

    Args:
        environment: the daemon's own, with its own credentials.

    Attributes:
        keys: temporary keys of AWS, the daemon's own included.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        own = TemporaryKeys.of(environment)
        self.keys = HandedKeys([] if own is None else [own])
        self._secrets: dict[type[Credentials], HandedSecrets] = {}
        for kind in KINDS:
            if kind is not TemporaryKeys:
                self._secrets[kind] = HandedSecrets(kind.of(environment))

    def newest_first(self, kind: type[Credentials]) -> list[Credentials]:
        """Return the credentials of a kind, without the daemon's own."""
        return self._secrets[kind].newest_first

    def take(self, variables: Mapping[str, Any]) -> None:
        """Take what a session hands over, by the names of its variables."""
        keys = TemporaryKeys.of(variables)
        if keys is not None:
            self.keys.add(keys)
        for kind, secrets in self._secrets.items():
            secret = kind.of(variables)
            if secret is not None:
                secrets.add(secret)
