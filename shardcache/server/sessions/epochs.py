"""Epochs of the jobs, recognised by the plans of their readers."""

from __future__ import annotations

from collections import OrderedDict

from shardcache.cache.readers.jobs import JobKey

# A reader of a job: its rank and its number among the rank's workers.
Place = tuple[int | None, int | None]

# Epochs remembered, of all jobs together.
_MOST_EPOCHS = 1024


class Epochs:
    """The epochs that have begun, and the readers that have declared a plan for each."""

    def __init__(self) -> None:
        self._readers: OrderedDict[tuple[JobKey, int | None], set[Place]] = OrderedDict()

    def begins(self, job: JobKey, epoch: int | None, reader: Place) -> bool:
        """Note a reader's plan; return True if a pass over the epoch begins with it.

        A reader that declares an epoch for the second time begins another pass: the job was started again.
        """
        readers = self._readers.setdefault((job, epoch), set())
        self._readers.move_to_end((job, epoch))
        if len(self._readers) > _MOST_EPOCHS:
            self._readers.popitem(last=False)
        begins = not readers or reader in readers
        if begins:
            readers.clear()
        readers.add(reader)
        return begins
