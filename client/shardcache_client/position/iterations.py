"""An iteration over a dataset: its epoch, its progress, and its role in the dataset's position."""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardcache_client.position.state import SavedState

Role = Literal["look", "main", "overtaken"]
"""The role of an iteration in its dataset's position; see `bookmark.Bookmark`.

- "look": the user has taken at most one batch, perhaps only to look at the data.
- "main": the iteration is the main iteration of its dataset, or was.
- "overtaken": the iteration can never become the main iteration, as another one has read a later
  epoch.
"""

ReadingProgress = Literal["open", "read", "over"]
"""The progress of an iteration.

- "open": it has more to yield, or may have.
- "read": it has yielded its last sample or batch.
- "over": the user has asked for more after that.
"""


@dataclass(slots=True, eq=False)
class Iteration:
    """One iteration over a dataset, in the process that reads it.

    Attributes:
        loader: number that identifies a plain DataLoader to the workers that it has started; None
            in any other process.
        worker: number of this worker; meaningless if `loader` is None.
        workers: number of the loader's workers; meaningless if `loader` is None.
        epoch: the epoch that the iteration reads.
        states: states from which it resumes; empty if it begins at the epoch's beginning.
        is_epoch_set: True if the user has set the epoch, False if it follows from the count.
        position: record of how far the iteration has come in the epoch: an `EpochRun`, or the
            position of a loader.
        reading: progress of the iteration.
        role: its role in the dataset's position.
        number: number of the iteration in this process, from 1.
        loads: number of times that states had been loaded when the iteration began.
    """

    loader: int | None = None
    worker: int = 0
    workers: int = 1
    epoch: int = 0
    states: Sequence[SavedState] = ()
    is_epoch_set: bool = False
    position: Any = None
    reading: ReadingProgress = "open"
    role: Role = "look"
    number: int = 0
    loads: int = 0
    _generator: weakref.ref[Iterator[Any]] | None = None

    def attach(self, generator: Iterator[Any]) -> None:
        """Record the generator that the user reads from."""
        self._generator = weakref.ref(generator)

    @property
    def live(self) -> bool:
        """True until the generator has ended, or the user has dropped it."""
        generator = None if self._generator is None else self._generator()
        # A generator that has ended has no frame.
        return getattr(generator, "gi_frame", None) is not None
