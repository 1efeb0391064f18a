"""Credentials that a private daemon's sessions hand over."""

from collections.abc import Mapping
from typing import Any

from shardcache.shared.credentials.handed_credentials import KINDS, Credentials

# Where none of them may read an object, the store is asked with each.
_MAX_CREDENTIALS = 16


class Handed:
    """The credentials that sessions have handed over, by kind.

    Each may permit what no other one does, so all of them are used.

    Args:
        environment: the daemon's own, with its own credentials.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._own = {kind: kind.of(environment) for kind in KINDS}
        self._newest_first: dict[type[Credentials], list[Credentials]] = {}
        for kind in KINDS:
            self._newest_first[kind] = []

    def newest_first(self, kind: type[Credentials]) -> list[Credentials]:
        """Return the last sixteen of a kind, without the daemon's own.

        The order is that in which they were first handed over: a session that began long ago hands
        its own over again when it reconnects, and they are no newer for that.
        """
        return self._newest_first[kind]

    def take(self, variables: Mapping[str, Any]) -> None:
        """Take what a session hands over, by the names of its variables."""
        for kind, known in self._newest_first.items():
            credentials = kind.of(variables)
            if credentials is None or credentials == self._own[kind] or credentials in known:
                continue
            known.insert(0, credentials)
            del known[_MAX_CREDENTIALS:]
