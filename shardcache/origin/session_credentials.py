"""Credentials that a private daemon's sessions hand over.

A private daemon is one that a reader has started for its own user. Each reader's session hands over
the credentials of the reader's environment. `PermittedOrigin` reads with all of them. A kind of
credentials is the class for one provider, such as `AwsKeys`. A holder is a session that has handed
over the credentials and is still open.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from shardcache.errors import ProtocolError
from shardcache.shared.credentials.handed_credentials import KINDS, Credentials

# Number of credentials of a kind that are kept after their sessions have ended. Requested transfers
# go on with them, and the next job with the same credentials finds open connections. The number is
# small, because all credentials are tried on an object that none of them may read.
_MAX_ENDED = 16
# Credentials of one session or command: at most one of each kind.
_HandedSet = tuple[Credentials, ...]
# Credentials of the session or command for which the current asyncio task works.
_of_this_task: ContextVar[_HandedSet] = ContextVar("_of_this_task", default=())


class SessionCredentials:
    """The credentials that sessions have handed over, by kind.

    Each set may permit reads that no other set permits, so all of them are used: those of all open
    sessions, and the last `_MAX_ENDED` of sessions that have ended.

    Args:
        environment: the daemon's environment, with the daemon's own credentials.
        is_private: True in a private daemon. Any other daemon refuses credentials, because it would
            read with them for all of its users.

    Attributes:
        changes: number of times that the kept credentials have changed.
    """

    def __init__(self, environment: Mapping[str, str], *, is_private: bool = False) -> None:
        self._is_private = is_private
        self._own = {kind: kind.of(environment) for kind in KINDS}
        # By kind: all credentials that are kept, and those of them that have no holder, which are
        # in the order in which their last sessions ended.
        self._newest_first: dict[type[Credentials], list[Credentials]] = {}
        self._ended: dict[type[Credentials], list[Credentials]] = {}
        for kind in KINDS:
            self._newest_first[kind] = []
            self._ended[kind] = []
        self._holders: Counter[Credentials] = Counter()
        self.changes = 0

    def own(self, kind: type[Credentials]) -> Credentials | None:
        """Return the daemon's own credentials of a kind, if its environment has any."""
        return self._own[kind]

    def of_this_task(self, kind: type[Credentials]) -> Credentials | None:
        """Return the credentials of the session or command for which this task works.

        Returns None if the session has no credentials of this kind. The credentials may be the
        daemon's own, or may have been dropped from those that are kept.
        """
        for credentials in _of_this_task.get():
            if isinstance(credentials, kind):
                return credentials
        return None

    def newest_first(self, kind: type[Credentials]) -> list[Credentials]:
        """Return all credentials of a kind that are kept, without the daemon's own.

        They are ordered by the time at which they were first handed over. A session that began long
        ago hands over the same credentials when it reconnects, which does not make them newer.
        """
        return self._newest_first[kind]

    @contextmanager
    def held(self, variables: Mapping[str, Any], uid: int) -> Iterator[None]:
        """Keep the credentials that a session hands over, during the block.

        The block is the whole session. The current task works for the session during the block.

        Args:
            variables: values of environment variables, by name.
            uid: id of the session's user.

        Raises ProtocolError if there are variables, and this is not the user's private daemon.
        """
        handed = self._credentials_in(variables, uid)
        foreign = self._without_own(handed)
        for credentials in foreign:
            self._add_holder(credentials)
        previous = _of_this_task.set(handed)
        try:
            yield
        finally:
            _of_this_task.reset(previous)
            for credentials in foreign:
                self._remove_holder(credentials)

    def hand_over(self, variables: Mapping[str, Any], uid: int) -> None:
        """Keep the credentials that a command hands over, as if its session had just ended.

        The current task works for that command from now on. Arguments and errors are the same as
        for `held`.
        """
        handed = self._credentials_in(variables, uid)
        for credentials in self._without_own(handed):
            self._add_holder(credentials)
            self._remove_holder(credentials)
        _of_this_task.set(handed)

    def _credentials_in(self, variables: Mapping[str, Any], uid: int) -> _HandedSet:
        """Return the credentials that variables contain. Raises ProtocolError; see `held`."""
        if variables and not (self._is_private and uid == os.geteuid()):
            raise ProtocolError("only a user's own private daemon takes credentials")
        of_each_kind = [kind.of(variables) for kind in KINDS]
        return tuple(credentials for credentials in of_each_kind if credentials is not None)

    def _without_own(self, handed: _HandedSet) -> list[Credentials]:
        """Return the credentials that differ from the daemon's own."""
        return [each for each in handed if each != self._own[type(each)]]

    def _add_holder(self, credentials: Credentials) -> None:
        """Count another session that holds credentials."""
        self._holders[credentials] += 1
        known = self._newest_first[type(credentials)]
        if credentials not in known:
            known.insert(0, credentials)
            self.changes += 1
        ended = self._ended[type(credentials)]
        if credentials in ended:
            ended.remove(credentials)

    def _remove_holder(self, credentials: Credentials) -> None:
        """Remove a session from the count of those that hold credentials.

        After the last session, the credentials are among the `_MAX_ENDED` that are still kept.
        """
        self._holders[credentials] -= 1
        if self._holders[credentials]:
            return
        del self._holders[credentials]
        ended = self._ended[type(credentials)]
        ended.append(credentials)
        if len(ended) > _MAX_ENDED:
            self._newest_first[type(credentials)].remove(ended.pop(0))
            self.changes += 1
