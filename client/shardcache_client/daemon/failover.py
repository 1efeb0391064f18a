"""The decision which daemon serves a reader now: the node's, or the user's private daemon.

The node's daemon serves all users of the node. The private daemon belongs to one user, and can
replace the node's for a while if the reader was made with `fallback="private"`. This module only
decides; `DaemonLink` connects to the daemons.
"""

import time
from pathlib import Path

from shardcache_client.daemon.choice import DaemonChoice, status_at
from shardcache_client.daemon.patience import Deadline, Outage, Patience

# Longest pause before the node's daemon is tried again.
_MAX_RETRY_S = 300.0
# Number of failures after which a file counts as unreadable. After the first failure, the file may
# merely have been evicted for a more urgent shard.
_UNREADABLE_TIMES = 2
_NO_POSITION = -1  # stands for "no file was unreadable"


class Failover:
    """Decides which daemon serves a reader; the reader's session acts on the decision.

    The private daemon replaces the node's daemon if the reader's choice allows it, and

    1. the node's daemon reports an error of its cache, or has not come back after the time that it
       is given for a restart;
    2. the node's daemon is frozen: it answers neither this reader nor a request for its health;
    3. this process cannot read the files of the node's cache.

    The node's daemon is tried again after a pause. The pause doubles with each replacement, until
    the node's daemon has granted a shard.

    Args:
        choice: the daemon, and whether a private daemon may replace it.
        patience: limits of the waits for a daemon.

    Attributes:
        is_private: True while a private daemon serves.
        alive_s: time of the last sign of life from the daemon during a wait, of `time.monotonic`.
    """

    def __init__(self, choice: DaemonChoice, patience: Patience) -> None:
        self.is_private = choice.node_socket is None
        self.alive_s = 0.0
        self._choice = choice
        self._patience = patience
        self._has_answered = False
        self._retry_at_s = 0.0  # time at which the node's daemon is tried again
        self._pause_s = patience.retry_s  # pause after the next replacement
        self._unreadable_position = _NO_POSITION  # plan position of the last unreadable file
        self._unreadable_times = 0  # number of failures in a row to read that file

    def __repr__(self) -> str:
        return "private" if self.is_private else str(self._choice.node_socket)

    @property
    def may_change_to_private(self) -> bool:
        """True while the node's daemon serves, if the private daemon may replace it."""
        return self._choice.may_fall_back and not self.is_private

    def tried_until_s(self, deadline: Deadline, outage: Outage | None) -> float:
        """Return the time until which a daemon is tried: the deadline, or earlier.

        A daemon that went away gets time to restart. A daemon that has never answered gets none if
        the private daemon can replace it.

        Args:
            deadline: end of the present wait.
            outage: None if there is no outage: the deadline alone counts then.
        """
        if outage is None:
            return deadline.at_s
        if not self.may_change_to_private:
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
        """Return True if the daemon that this reader waits for is frozen.

        The daemon is asked for its health once it has been silent for half of its time limit. It
        is frozen if it has given no sign of life for all of the limit.
        """
        if self.may_change_to_private:
            limit_s = self._patience.grace_s
        else:
            limit_s = self._patience.away_s  # infinite by default: only the deadline counts then
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

    def should_change_for(self, position: int) -> bool:
        """Return True if the private daemon should serve, as a position's file is unreadable."""
        if not self.may_change_to_private or position != self._unreadable_position:
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
        """Let the node's daemon serve again if the pause is over and the daemon is healthy.

        Returns True if the node's daemon serves again.
        """
        # Without a fallback, a private daemon is the user's choice and stays.
        may_return = self._choice.may_fall_back and self.is_private
        if not may_return or time.monotonic() < self._retry_at_s:
            return False
        self._retry_at_s = time.monotonic() + self._patience.retry_s
        if self._choice.node_status() != "ok":
            return False
        self.is_private = False
        self.forget_unreadable()
        return True
