"""Credentials that a private daemon's sessions hand over."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from shardcache.errors import ProtocolError
from shardcache.shared.credentials.handed_credentials import KINDS, Credentials

# Number of credentials of a kind that are kept after their sessions have ended: with them, what was
# asked for is still fetched, and the next job of the same role finds its connections. They are few,
# as a store is asked with each of them if none may read an object.
_MAX_ENDED = 16
_Found = tuple[Credentials, ...]  # at most one of each kind
# Credentials of the session or command for which a task works.
_of_this_task: ContextVar[_Found] = ContextVar("_of_this_task", default=())


class Handed:
    """The credentials that sessions have handed over, by kind.

    Each may permit what no other one does, so all of them are used: those of all sessions that
    last, and the last sixteen of those that have ended.

    Args:
        environment: the daemon's own, with its own credentials.
        is_private: True in a private daemon. No other daemon takes credentials: it would read for
            all of its users with them.

    Attributes:
        changes: number of times that the kept credentials have changed.
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
        self.changes = 0

    def own(self, kind: type[Credentials]) -> Credentials | None:
        """Return the daemon's own of a kind, if its environment has any."""
        return self._own[kind]

    def of_this_task(self, kind: type[Credentials]) -> Credentials | None:
        """Return those of the session or command for which this task works; None if unknown.

        They may be the daemon's own, or be kept no longer.
        """
        for each in _of_this_task.get():
            if isinstance(each, kind):
                return each
        return None

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
        found = self._taken(variables, uid)
        foreign = self._foreign(found)
        for each in foreign:
            self._begin(each)
        before = _of_this_task.set(found)
        try:
            yield
        finally:
            _of_this_task.reset(before)
            for each in foreign:
                self._end(each)

    def hand_over(self, variables: Mapping[str, Any], uid: int) -> None:
        """Keep what a command hands over as if its session had ended; this task works for it.

        Raises as `held` does.
        """
        found = self._taken(variables, uid)
        for each in self._foreign(found):
            self._begin(each)
            self._end(each)
        _of_this_task.set(found)

    def _taken(self, variables: Mapping[str, Any], uid: int) -> _Found:
        """Return the credentials that variables contain. Raises ProtocolError; see `held`."""
        if variables and not (self._is_private and uid == os.geteuid()):
            raise ProtocolError("only a user's own private daemon takes credentials")
        found = [kind.of(variables) for kind in KINDS]
        return tuple(each for each in found if each is not None)

    def _foreign(self, found: _Found) -> list[Credentials]:
        """Return those that are not the daemon's own."""
        return [each for each in found if each != self._own[type(each)]]

    def _begin(self, credentials: Credentials) -> None:
        """Count another session that holds credentials."""
        self._holders[credentials] += 1
        known = self._newest_first[type(credentials)]
        if credentials not in known:
            known.insert(0, credentials)
            self.changes += 1
        ended = self._ended[type(credentials)]
        if credentials in ended:
            ended.remove(credentials)

    def _end(self, credentials: Credentials) -> None:
        """Count such a session no longer; after the last one, keep its credentials for a while."""
        self._holders[credentials] -= 1
        if self._holders[credentials]:
            return
        del self._holders[credentials]
        ended = self._ended[type(credentials)]
        ended.append(credentials)
        if len(ended) > _MAX_ENDED:
            self._newest_first[type(credentials)].remove(ended.pop(0))
            self.changes += 1
