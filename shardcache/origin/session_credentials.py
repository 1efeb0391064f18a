"""Credentials that a private daemon's sessions hand over.

A private daemon is one that a reader has started for its own user. A session is a reader's
connection to the daemon; it hands over the credentials of the reader's environment.
`PermittedOrigin` reads with the credentials of all sessions. A kind of credentials is the class for
one provider, such as `AwsKeys`, and a set of credentials is an instance of it. A holder of
credentials is an open session that has handed them over.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from shardcache.shared.credentials.handed_credentials import KINDS, Credentials
from shardcache.shared.exceptions import ProtocolError

# Number of credentials of a kind that are kept after their sessions have ended. Transfers that a
# session has requested continue with them, and the next job with the same credentials finds open
# connections. The number is small, because all credentials are tried on an object that none of them
# may read.
_MAX_ENDED = 16
# Credentials of one session or command: at most one of each kind.
_HandedSet = tuple[Credentials, ...]
# Credentials of the session or command for which the current asyncio task works.
_task_credentials: ContextVar[_HandedSet] = ContextVar("_task_credentials", default=())


class SessionCredentials:
    """The credentials that sessions have handed over, by kind.

    Each set may permit reads that no other one does, so all of them are used. A set is kept while
    it has a holder. Of the sets without a holder, the last `_MAX_ENDED` of each kind are kept.

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
        # By kind: all credentials that are kept, the newest first.
        self._kept: dict[type[Credentials], list[Credentials]] = {kind: [] for kind in KINDS}
        # By kind: those kept without a holder, in the order in which their last sessions ended.
        self._ended: dict[type[Credentials], list[Credentials]] = {kind: [] for kind in KINDS}
        self._holders: Counter[Credentials] = Counter()  # number of holders
        self.changes = 0

    def own(self, kind: type[Credentials]) -> Credentials | None:
        """Return the daemon's own credentials of a kind, if its environment has any."""
        return self._own[kind]

    def of_this_task(self, kind: type[Credentials]) -> Credentials | None:
        """Return the credentials of the session or command for which this task works.

        Returns None if the session has no credentials of this kind. The credentials may be the
        daemon's own, or may have been dropped from those that are kept.
        """
        for credentials in _task_credentials.get():
            if isinstance(credentials, kind):
                return credentials
        return None

    def newest_first(self, kind: type[Credentials]) -> list[Credentials]:
        """Return all credentials of a kind that are kept, without the daemon's own.

        They are ordered by the time at which they were first handed over. A session that began long
        ago hands over the same credentials when it reconnects, which does not make them newer.
        """
        return self._kept[kind]

    @contextmanager
    def held(self, variables: Mapping[str, Any], uid: int) -> Iterator[None]:
        """Keep the credentials that a session hands over, during the block.

        The block is the whole session, and the current task works for the session in it.

        Args:
            variables: values of environment variables, by name.
            uid: id of the session's user.

        Raises ProtocolError if there are variables, and this is not the user's private daemon.
        """
        handed = self._credentials_in(variables, uid)
        foreign = self._without_own(handed)
        for credentials in foreign:
            self._add_holder(credentials)
        previous = _task_credentials.set(handed)
        try:
            yield
        finally:
            _task_credentials.reset(previous)
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
        _task_credentials.set(handed)

    def _credentials_in(self, variables: Mapping[str, Any], uid: int) -> _HandedSet:
        """Return the credentials that variables contain. Raises ProtocolError; see `held`."""
        if not variables:
            return ()
        is_users_own = self._is_private and uid == os.geteuid()
        if not is_users_own:
            raise ProtocolError("only a user's own private daemon takes credentials")
        of_each_kind = [kind.of(variables) for kind in KINDS]
        return tuple(each for each in of_each_kind if each is not None)

    def _without_own(self, handed: _HandedSet) -> list[Credentials]:
        """Return the credentials that differ from the daemon's own."""
        return [each for each in handed if each != self._own[type(each)]]

    def _add_holder(self, credentials: Credentials) -> None:
        """Count one more holder of credentials, and keep them."""
        self._holders[credentials] += 1
        kept = self._kept[type(credentials)]
        if credentials not in kept:
            kept.insert(0, credentials)
            self.changes += 1
        ended = self._ended[type(credentials)]
        if credentials in ended:
            ended.remove(credentials)

    def _remove_holder(self, credentials: Credentials) -> None:
        """Count one holder less.

        Credentials that have lost their last holder become the newest of those without one, and the
        oldest of these are dropped if there are more than `_MAX_ENDED`.
        """
        self._holders[credentials] -= 1
        if self._holders[credentials]:
            return
        del self._holders[credentials]
        ended = self._ended[type(credentials)]
        ended.append(credentials)
        if len(ended) > _MAX_ENDED:
            oldest = ended.pop(0)
            self._kept[type(credentials)].remove(oldest)
            self.changes += 1
