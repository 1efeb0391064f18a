"""The audit log: a line for each epoch of a job, and for each request that changes something.

`ReaderSession` reports the plans of readers, and `app` reports requests. A place is the position of
a reader among the readers of its job.
"""

import time
from collections import Counter, OrderedDict

import structlog

from shardcache.cache.waiting.waits import JobKey

log = structlog.get_logger()

Place = tuple[int | None, int | None]
"""A reader's position in its job: its rank, and its number among the rank's workers.

A number is None if the client does not state it.
"""

# Clients may name any number of epochs and readers, so the audit remembers only this number of
# epochs, of all jobs together, and this number of readers of each.
_MAX_EPOCHS = 256
_MAX_READERS = 1024
# Maximum number of lines per user and period. Requests could fill the node's disk otherwise.
_MAX_LINES = 120
_PERIOD_S = 60.0


class Audit:
    """Writes the audit lines, each with a user's id. The rate of lines is limited per user."""

    def __init__(self) -> None:
        self._period_began_s = time.monotonic()
        self._events: Counter[int] = Counter()  # number of events in this period by user id
        # By job and epoch, the readers that have declared a plan; the latest epoch is last.
        self._epochs: OrderedDict[tuple[JobKey, int | None], set[Place]] = OrderedDict()

    def note(self, event: str, uid: int, **fields: object) -> None:
        """Log an event, unless the user has reached the limit of this period."""
        now_s = time.monotonic()
        if now_s - self._period_began_s > _PERIOD_S:
            self._log_suppressed()
            self._period_began_s = now_s
            self._events.clear()

        self._events[uid] += 1
        if self._events[uid] <= _MAX_LINES:
            log.info(event, uid=uid, **fields)

    def note_plan(self, job: JobKey, epoch: int | None, reader: Place, **fields: object) -> None:
        """Log the start of a job's epoch: the first plan that one of its readers declares.

        If a reader declares a second plan for an epoch, the job has been started again. This is
        logged as another start of the epoch.

        Args:
            epoch: the epoch; None if the client has not named it.
            fields: further fields of the line.
        """
        readers = self._epochs.setdefault((job, epoch), set())
        self._epochs.move_to_end((job, epoch))
        if len(self._epochs) > _MAX_EPOCHS:
            self._epochs.popitem(last=False)

        is_start = not readers or reader in readers
        if is_start:
            readers.clear()
            _, uid = job
            self.note("session started", uid, epoch=epoch, **fields)
        if len(readers) < _MAX_READERS:
            readers.add(reader)

    def _log_suppressed(self) -> None:
        """Log the number of events beyond the limit in the period that has ended."""
        for uid, events in self._events.items():
            if events > _MAX_LINES:
                log.info("audit lines suppressed", uid=uid, events=events - _MAX_LINES)
