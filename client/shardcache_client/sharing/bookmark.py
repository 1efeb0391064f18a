"""Where a dataset is: which epoch the next iteration reads, and from where in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardcache.errors import ConfigError
from shardcache_client.order.partition import Cut
from shardcache_client.order.state import Resumption, State, find_states, resume
from shardcache_client.sharing.board import Board
from shardcache_client.sharing.epoch import Epochs
from shardcache_client.topology import Topology


@dataclass(frozen=True, slots=True)
class Loader:
    """One of the workers of a DataLoader.

    Attributes:
        number: shared by all workers that the loader started together.
    """

    number: int
    worker: int
    workers: int


class Bookmark:
    """Shared by the processes of a dataset, but for what a worker was told to load.

    Args:
        board: where they meet.
        datasets: tells states of this dataset from those of others, whether samples are counted (True) or not (False).
    """

    def __init__(self, board: Board, datasets: Mapping[bool, str]) -> None:
        self.datasets = datasets
        self._board = board
        self._epochs = Epochs(board)
        self._loaded_here: Sequence[State] = ()
        self._next_here: int | None = None  # the epoch that this process reads next, whatever others do

    def __repr__(self) -> str:
        return f"Bookmark(next={self.next_epoch}, loaded={len(self._loaded_here)})"

    @property
    def next_epoch(self) -> int:
        """The epoch that an iteration would read which began now."""
        return self._epochs.next if self._next_here is None else self._next_here

    @property
    def workers(self) -> int:
        """How many workers the loader has that began an iteration last; 0 where it was begun without."""
        workers: int = self._board.read().get("workers", 0)
        return workers

    @property
    def epoch_begun(self) -> int:
        """The epoch that was begun last, else the next one."""
        epoch: int = self._board.read().get("begun_epoch", self.next_epoch)
        return epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that every iteration reads from now on."""
        if epoch < 0:
            raise ConfigError(f"epoch {epoch} is negative")
        self._next_here = None
        self._epochs.set(epoch)

    def begin(self, loader: Loader | None) -> int:
        """Return the epoch that an iteration reads which begins in this process, whether a loader's worker or not."""
        epoch, self._next_here = self._next_here, None
        if loader is None:
            epoch = self._epochs.begin()
        elif epoch is None:
            epoch = self._epochs.join(loader.number, loader.worker, loader.workers)
        with self._board.edit() as notes:
            notes |= {"workers": 0 if loader is None else loader.workers, "begun_epoch": epoch}
        return epoch

    def load(self, data: object, *, worker: bool) -> None:
        """Go on from a state, at the next iteration.

        Args:
            data: what `State.to_json` gave, or whatever holds such states, of several workers or ranks.
            worker: whether this is a loader's worker. Its siblings are told the same.

        Raises ConfigError when there is none in it, or one of another dataset.
        """
        states = find_states(data)
        if states[0].dataset != self.datasets.get(states[0].counted):
            raise ConfigError(
                "the state is of another dataset, or its shards hold other numbers of samples now",
                remedy="make the dataset with the urls, seed, shuffle and samples_per_epoch that it had",
            )
        epoch = states[0].epoch
        if worker:
            self._loaded_here, self._next_here = states, epoch
        else:
            with self._board.edit() as notes:
                loaded = [state.to_json() for state in states]
                notes |= {"workers": 0, "begun_epoch": epoch, "loaded": loaded}
        self._epochs.go_on(epoch + 1 if worker else epoch)

    def counted(self, epoch: int) -> bool | None:
        """Return whether the epoch was begun with counted samples; None where it was not begun."""
        states = self._loaded(epoch)
        return states[0].counted if states else None

    def start(self, epoch: int, cut: Cut, topology: Topology) -> Resumption:
        """Return from where a reader goes on in an epoch. Raises what `resume` raises."""
        states = self._loaded(epoch)
        return resume(states, cut, topology) if states else Resumption(epoch)

    def _loaded(self, epoch: int) -> Sequence[State]:
        """Return the states that were loaded of an epoch, by this worker or else for all."""
        if self._loaded_here and self._loaded_here[0].epoch == epoch:
            return self._loaded_here
        states = self._board.read().get("loaded", [])
        return find_states(states) if states and states[0]["epoch"] == epoch else ()
