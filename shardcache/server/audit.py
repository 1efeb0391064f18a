"""The audit log: a line for each epoch of a job, and for each request that changes something.

Sessions report the plans of their readers, and `app` reports requests. A place is the position of a
reader among the readers of its job.
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

# Limits on the number of epochs that are remembered, for all jobs together, and on the number of
# readers of each epoch. Limits are necessary because clients may name any number of epochs and
# readers.
_MAX_EPOCHS = 256
_MAX_READERS = 1024
# Maximum number of lines per user and period; further events are only counted.
_MAX_LINES = 120
_PERIOD_S = 60.0


class Audit:
    """Writes the audit lines, each with a user's id.

    The rate of lines is limited per user, so that requests cannot fill the node's disk.
    """

    def __init__(self) -> None:
        self._period_began_s = time.monotonic()
        self._lines: Counter[int] = Counter()
        self._epochs: OrderedDict[tuple[JobKey, int | None], set[Place]] = OrderedDict()

    def note(self, event: str, uid: int, **fields: object) -> None:
        """Log an event, unless the user is over the limit."""
        now_s = time.monotonic()
        if now_s - self._period_began_s > _PERIOD_S:
            self._log_suppressed()
            self._period_began_s = now_s
            self._lines.clear()

        self._lines[uid] += 1
        if self._lines[uid] <= _MAX_LINES:
            log.info(event, uid=uid, **fields)

    def plan(self, job: JobKey, epoch: int | None, reader: Place, **fields: object) -> None:
        """Log the first plan of a job's epoch; later plans of other readers are not logged.

        If a reader declares an epoch for the second time, the job was started again: this is logged
        as another start of the epoch.
        """
        readers = self._epochs.setdefault((job, epoch), set())
        self._epochs.move_to_end((job, epoch))
        if len(self._epochs) > _MAX_EPOCHS:
            self._epochs.popitem(last=False)

        is_new_pass = not readers or reader in readers
        if is_new_pass:
            readers.clear()
            _, uid = job
            self.note("session started", uid, epoch=epoch, **fields)
        if len(readers) < _MAX_READERS:
            readers.add(reader)

    def _log_suppressed(self) -> None:
        """Log the number of events beyond the limit in the period that has ended."""
        for uid, lines in self._lines.items():
            if lines > _MAX_LINES:
                log.info("audit lines suppressed", uid=uid, events=lines - _MAX_LINES)
