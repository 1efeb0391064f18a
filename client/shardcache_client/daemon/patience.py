"""Limits of a reader's waits for a daemon and its shards, and pauses between tries.

Patience holds the limits. A deadline is the end of one wait. An outage is the time during which no
daemon answers; it spaces out the tries to reach one. `DaemonLink` and `Session` use all three.
"""

import logging
import math
import multiprocessing
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from shardcache.shared import exceptions

log = logging.getLogger("shardcache")

T = TypeVar("T")

# How often a waiting reader calls `on_wait` and checks that its training process still runs.
_ON_WAIT_INTERVAL_S = 1.0
# Minimum time for the daemon's explanation, even past the deadline. A daemon that runs gives an
# explanation immediately.
_LAST_REASON_S = 1.0
# Extra wait for the shard after the deadline: it may have come while this process was stopped.
_LAST_LOOK_S = 1.0

# Upper bounds of the pause before the second try, and before any later try.
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
# How long an outage that the daemon announced may last before a warning is logged.
_QUIET_S = 10.0

# Pauses are not drawn from Python's global generator: all ranks may seed it with the same number,
# and a training program may depend on its sequence.
_random = random.SystemRandom()


class Deadline:
    """End of one wait, shared by all steps of the wait: reconnects, greetings and requests.

    Attributes:
        limit_s: how long the wait may last without progress.
        at_s: time at which the wait ends, of `time.monotonic`.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.at_s = time.monotonic() + limit_s

    @property
    def is_over(self) -> bool:
        """True once the wait has lasted too long."""
        return time.monotonic() >= self.at_s

    def restart(self) -> None:
        """Count the limit from now on, as the wait makes progress."""
        self.at_s = time.monotonic() + self.limit_s


class WaitReason(NamedTuple):
    """The daemon's explanation of a wait.

    Attributes:
        text: the reason, for the log.
        done_bytes: number of bytes of the shard that have arrived; 0 for a wait that is not for a
            shard.
    """

    text: str
    done_bytes: int


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits for waiting: for one shard, for a lost daemon, and until a wait is logged.

    Attributes:
        limit_s: time limit of two waits: for a shard, as long as none of its bytes arrive; and for
            a daemon whose connection was lost.
        first_report_s: how long a wait lasts before it is first logged.
        next_report_s: interval between further log lines.
        away_s: shorter limit of the wait for a lost daemon that no other daemon can replace. It has
            no effect if it is longer than `limit_s`.
        grace_s: shorter limit of the wait for the node's daemon if a private daemon can replace it.
            A restart of the node's daemon takes about 2 s.
        retry_s: delay before the node's daemon is first tried again after its replacement.
    """

    limit_s: float = 300.0
    first_report_s: float = 10.0
    next_report_s: float = 60.0
    away_s: float = math.inf
    grace_s: float = 10.0
    retry_s: float = 10.0

    def wait(
        self,
        url: str,
        deadline: Deadline,
        poll: Callable[[float], T | None],
        explain: Callable[[float], WaitReason],
        on_wait: Callable[[], None] | None,
    ) -> T:
        """Wait until `poll` returns the shard, and log the reason of a long wait.

        Args:
            url: url of the shard, for messages.
            deadline: end of the wait; restarts whenever more bytes have arrived.
            poll: waits for the shard until the given time; returns the shard, or None if it has not
                come.
            explain: returns the reason of the wait by the given time.
            on_wait: called each second; None for no call.

        Raises ShardTimeoutError at the deadline.
        """
        start_s = time.monotonic()
        report_s = start_s + self.first_report_s
        max_done_bytes = 0
        while True:
            next_call_s = time.monotonic() + _ON_WAIT_INTERVAL_S
            shard = poll(min(report_s, deadline.at_s, next_call_s))
            if shard is not None:
                return shard

            check_parent()
            if on_wait is not None:
                on_wait()
            if time.monotonic() < min(report_s, deadline.at_s):
                continue

            # The daemon is asked even at the deadline, because the deadline restarts if bytes have
            # arrived since the last report. It then has `_LAST_REASON_S` to answer.
            answer_by_s = max(deadline.at_s, time.monotonic() + _LAST_REASON_S)
            reason, done_bytes = explain(answer_by_s)
            if done_bytes > max_done_bytes:
                max_done_bytes = done_bytes
                deadline.restart()
            if deadline.is_over:
                shard = poll(time.monotonic() + _LAST_LOOK_S)
                if shard is not None:
                    return shard
                raise _timeout(url, deadline.limit_s, max_done_bytes, reason)
            log.warning("waiting for %s for %.0f s: %s", url, time.monotonic() - start_s, reason)
            report_s = time.monotonic() + self.next_report_s


def _timeout(
    url: str, limit_s: float, done_bytes: int, reason: str
) -> exceptions.ShardTimeoutError:
    """Return the error for a shard of which nothing, or nothing more, has arrived for too long.

    Args:
        limit_s: time without progress after which the wait ended.
        done_bytes: number of the shard's bytes that have arrived.
        reason: the daemon's explanation.
    """
    what = "no more of it arrived" if done_bytes else "did not arrive"
    return exceptions.ShardTimeoutError(
        f"{what} within {limit_s:g} s: {reason}",
        url=url,
        remedy="fix that cause (`shardcache status` shows the transfers), or raise timeout_s",
    )


class Outage:
    """The time from the loss of a daemon until a daemon answers again.

    Pauses are drawn between 0 and a bound that doubles with each try (full jitter: Brooker,
    "Exponential Backoff and Jitter", AWS Architecture Blog, 2015). All readers of a node lose their
    daemon at the same moment; random pauses spread out their reconnects, yet keep them fast.
    """

    def __init__(self, cause: exceptions.NoDaemonError, begun_s: float) -> None:
        """Begin an outage.

        Args:
            cause: the error that ended the last connection, or prevented the first.
            begun_s: time at which the outage began, of `time.monotonic`.
        """
        self.begun_s = begun_s
        self._cause = cause
        # True for a stop that the daemon has announced, until it lasts longer than a restart.
        self._is_quiet = isinstance(cause, exceptions.StoppingError)
        self._is_logged = False
        self._max_pause_s = _FIRST_PAUSE_S

    def pause(self, deadline_s: float, tried_s: float) -> bool:
        """Wait until the next try is due, or until the deadline if that is earlier.

        Returns False, without waiting, if the last try came after the deadline. It is not enough
        that the deadline is over now: if this process was stopped for a while, no daemon may have
        been tried in that time.

        Args:
            deadline_s: time until which a daemon is tried, of `time.monotonic`.
            tried_s: time of the last try, of `time.monotonic`.
        """
        if tried_s >= deadline_s:
            return False
        now_s = time.monotonic()
        left_s = max(0.0, deadline_s - now_s)

        # An announced stop is logged for information. It is logged again, as a warning, once the
        # outage lasts longer than a restart should.
        if self._is_quiet and now_s - self.begun_s > _QUIET_S:
            self._is_quiet = False
            self._is_logged = False
        if not self._is_logged:
            level = logging.INFO if self._is_quiet else logging.WARNING
            log.log(
                level,
                "%s (%s); retrying for up to %.0f s",
                self._cause.message,
                self._cause.url,
                left_s,
            )
            self._is_logged = True

        time.sleep(min(self.draw_s(), left_s))
        return True

    def given_up(self, last: exceptions.NoDaemonError) -> exceptions.NoDaemonError:
        """Return the last try's error, with the duration of the outage added to its message."""
        lasted_s = round(time.monotonic() - self.begun_s, 1)
        message = f"{last.message}; gave up after {lasted_s:g} s"
        return type(last)(message, url=last.url, remedy=last.remedy)

    def draw_s(self) -> float:
        """Draw the pause before the next try."""
        pause_s = _random.uniform(0, self._max_pause_s)
        self._max_pause_s = min(2 * self._max_pause_s, _LONGEST_PAUSE_S)
        return pause_s


def check_parent() -> None:
    """Raise DaemonError in a worker whose training process has ended, so that it stops waiting."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise exceptions.DaemonError("the training process that this worker reads for has ended")
