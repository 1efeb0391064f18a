"""Credentials that a private daemon's sessions hand over."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shardcache.errors import ProtocolError
from shardcache.shared.credentials.handed_credentials import KINDS, Credentials

# Of a kind, without a session: what has been asked for is still fetched, and the next job of the
# same role finds its connections. Where none may read an object, the store is asked with each.
_MAX_ENDED = 16


class Handed:
    """The credentials that sessions have handed over, by kind.

    Each may permit what no other one does, so all of them are used: those of all sessions that
    last, and the last sixteen of those that have ended.

    Args:
        environment: the daemon's own, with its own credentials.
        is_private: True in a private daemon. No other daemon takes credentials: it would read for
            all of its users with them.
    """

    def __init__(self, environment: Mapping[str, str], *, is_private: bool = False) -> None:
        self._is_private = is_private
        self._own = {kind: kind.of(environment) for kind in KINDS}
        self._newest_first: dict[type[Credentials], list[Credentials]] = {}
        self._ended: dict[type[Credentials], list[Credentials]] = {}
        for kind in KINDS:
            self._newest_first[kind] = []
            self._ended[kind] = []
        self._holders: Counter[Credentials] = Counter()

    def newest_first(self, kind: type[Credentials]) -> list[Credentials]:
        """Return all of a kind that are kept, without the daemon's own.

        The order is that in which they were first handed over: a session that began long ago hands
        its own over again when it reconnects, and they are no newer for that.
        """
        return self._newest_first[kind]

    @contextmanager
    def held(self, variables: Mapping[str, Any], uid: int) -> Iterator[None]:
        """Keep what a session of a user hands over, by the names of its variables, for its time.

        Raises ProtocolError if there is anything, and this is not the private daemon of the user.
        """
        if variables and not (self._is_private and uid == os.geteuid()):
            raise ProtocolError("only a user's own private daemon takes credentials")
        found = [kind.of(variables) for kind in KINDS]
        others = [each for each in found if each is not None and each != self._own[type(each)]]
        for each in others:
            self._begin(each)
        try:
            yield
        finally:
            for each in others:
                self._end(each)

    def _begin(self, credentials: Credentials) -> None:
        self._holders[credentials] += 1
        known = self._newest_first[type(credentials)]
        if credentials not in known:
            known.insert(0, credentials)
        ended = self._ended[type(credentials)]
        if credentials in ended:
            ended.remove(credentials)

    def _end(self, credentials: Credentials) -> None:
        self._holders[credentials] -= 1
        if self._holders[credentials]:
            return
        del self._holders[credentials]
        ended = self._ended[type(credentials)]
        ended.append(credentials)
        if len(ended) > _MAX_ENDED:
            self._newest_first[type(credentials)].remove(ended.pop(0))
