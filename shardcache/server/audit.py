"""The audit log: a line for each epoch of a job, and for each request that changes something."""

import time
from collections import Counter, OrderedDict

import structlog

from shardcache.cache.waiting.waits import JobKey

log = structlog.get_logger()

Place = tuple[int | None, int | None]
"""A reader of a job: its rank and its number among the rank's workers."""

# Limits on the epochs that are remembered, of all jobs together, and on the readers of each:
# clients may name any number.
_MAX_EPOCHS = 256
_MAX_READERS = 1024
# Maximum lines per user and period; further events are only counted.
_MAX_LINES = 120
_PERIOD_S = 60.0


class Audit:
    """Writes the audit lines, each with a user's id.

    Their rate is limited per user, so that requests cannot fill the node's disk.
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
        """Log the first plan of a job's epoch.

        A reader that declares an epoch for the second time begins another pass: the job was started
        again.
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
