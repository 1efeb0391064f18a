"""Credentials that a private daemon's sessions hand over."""

import os
from collections.abc import Mapping
from typing import Any

from shardcache.errors import ProtocolError
from shardcache.shared.credentials.handed_credentials import KINDS, Credentials

# Where none of them may read an object, the store is asked with each.
_MAX_CREDENTIALS = 16


class Handed:
    """The credentials that sessions have handed over, by kind.

    Each may permit what no other one does, so all of them are used.

    Args:
        environment: the daemon's own, with its own credentials.
        is_private: True in a private daemon. No other daemon takes credentials: it would read for
            all of its users with them.
    """

    def __init__(self, environment: Mapping[str, str], *, is_private: bool = False) -> None:
        self._is_private = is_private
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

    def take(self, variables: Mapping[str, Any], uid: int) -> None:
        """Take what a session hands over, by the names of its variables.

        Raises ProtocolError if there is anything, and this is not the private daemon of the user.
        """
        if variables and not (self._is_private and uid == os.geteuid()):
            raise ProtocolError("only a user's own private daemon takes credentials")
        for kind, known in self._newest_first.items():
            credentials = kind.of(variables)
            if credentials is None or credentials == self._own[kind] or credentials in known:
                continue
            known.insert(0, credentials)
            del known[_MAX_CREDENTIALS:]
