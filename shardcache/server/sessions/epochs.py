"""Epochs of the jobs, recognised by the plans of their readers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from shardcache.cache.waits import JobKey

# A reader of a job: its rank and its number among the rank's workers.
Place = tuple[int | None, int | None]

# Epochs remembered, of all jobs together, and readers of each: clients name both.
_MOST_EPOCHS = 256
_MOST_READERS = 1024


class Epochs:
    """The epochs that have begun, and the readers that have declared a plan for each."""

    def __init__(self) -> None:
        self._readers: OrderedDict[tuple[JobKey, int | None], set[Place]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of epochs remembered."""
        return len(self._readers)

    def __iter__(self) -> Iterator[set[Place]]:
        """Yield the readers of each."""
        return iter(self._readers.values())

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
        if len(readers) < _MOST_READERS:
            readers.add(reader)
        return begins
