"""Choice of a reader's daemon: the node's, or the private one that replaces it for a while."""

import time
from pathlib import Path

from shardcache_client.daemon.choice import DaemonChoice, status_at
from shardcache_client.daemon.patience import Deadline, Outage, Patience

# Longest pause before the node's daemon is tried again.
_MAX_RETRY_S = 300.0
# Failures after which a file counts as unreadable: at the first, it may only have been evicted for
# a more urgent shard.
_UNREADABLE_TIMES = 2
_NO_POSITION = -1


class Failover:
    """Decides which daemon serves a reader; the reader's session carries it out.

    The private daemon replaces the node's if the choice allows it, and

    1. the node's has an error of its own, or does not answer while it is given time to restart;
    2. it does not answer in a reader's wait, nor to others: it is frozen;
    3. this process cannot read its files.

    The node's is tried again after a pause, which doubles each time until it has granted a shard.

    Attributes:
        is_private: True while a private daemon serves.
        alive_s: when the daemon last showed a sign of life during a wait, of `time.monotonic`.
    """

    def __init__(self, choice: DaemonChoice, patience: Patience) -> None:
        self.is_private = choice.node is None
        self.alive_s = 0.0
        self._choice = choice
        self._patience = patience
        self._has_answered = False
        self._retry_at_s = 0.0  # when the node's is tried again
        self._pause_s = patience.retry_s  # the pause after the next replacement
        self._unreadable_position = _NO_POSITION  # that of the last file that could not be read
        self._unreadable_times = 0

    def __repr__(self) -> str:
        return "private" if self.is_private else str(self._choice.node)

    @property
    def can_replace(self) -> bool:
        """True while the node's daemon serves this reader, and the private one could."""
        return self._choice.fallback and not self.is_private

    def tried_until_s(self, deadline: Deadline, outage: Outage | None) -> float:
        """Return the time until which a daemon is tried: the deadline, or earlier.

        A daemon that went away gets time to restart; but not one that has never answered, if the
        private one can replace it.
        """
        if outage is None:
            return deadline.at_s
        if not self.can_replace:  # no other daemon could serve instead
            restart_s = min(self._patience.limit_s, self._patience.away_s)
        elif self._has_answered:
            restart_s = self._patience.grace_s
        else:
            restart_s = 0.0
        return min(deadline.at_s, outage.begun_s + restart_s)

    # What happens to the session

    def record_answer(self) -> None:
        """Record that the daemon has answered."""
        self._has_answered = True

    def record_grant(self) -> None:
        """Record that the daemon has granted a shard."""
        if not self.is_private:
            self._pause_s = self._patience.retry_s

    def begin_wait(self) -> None:
        """Begin a wait for an answer, in which the daemon has to show signs of life."""
        self.alive_s = time.monotonic()

    def is_frozen(self, socket: Path) -> bool:
        """Return True if the daemon at a socket, which has not answered in a wait, is frozen.

        It is asked for its health once half of its time limit is over.
        """
        limit_s = self._patience.grace_s if self.can_replace else self._patience.away_s
        silent_s = time.monotonic() - self.alive_s
        if silent_s <= limit_s / 2:
            return False
        if status_at(socket) is not None:
            self.alive_s = time.monotonic()
            return False
        return silent_s > limit_s

    def record_unreadable(self, position: int) -> None:
        """Record that the file at a position of the plan could not be read."""
        if position != self._unreadable_position:
            self._unreadable_position = position
            self._unreadable_times = 0
        self._unreadable_times += 1

    def forget_unreadable(self) -> None:
        """Forget the files that could not be read, as the plan or the daemon has changed."""
        self._unreadable_position = _NO_POSITION
        self._unreadable_times = 0

    def is_unreadable(self, position: int) -> bool:
        """Return True if a file could not be read repeatedly, and the private daemon may help."""
        if not self.can_replace or position != self._unreadable_position:
            return False
        return self._unreadable_times >= _UNREADABLE_TIMES

    # Changes from one daemon to the other

    def change_to_private(self) -> None:
        """Let the private daemon serve for a while."""
        self.is_private = True
        self.forget_unreadable()
        self._retry_at_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_RETRY_S)

    def return_to_node(self) -> bool:
        """Let the node's daemon serve again, if it is due to be tried and healthy.

        Return True if it serves again.
        """
        may_return = self._choice.fallback and self.is_private
        if not may_return or time.monotonic() < self._retry_at_s:
            return False
        self._retry_at_s = time.monotonic() + self._patience.retry_s
        if self._choice.node_status() != "ok":
            return False
        self.is_private = False
        self.forget_unreadable()
        return True
