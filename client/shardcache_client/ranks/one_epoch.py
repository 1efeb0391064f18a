"""Agreement of all ranks on the epoch if `set_epoch` is not called, even if one rank reads some samples alone."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardcache.errors import EpochMismatchError, RanksError
from shardcache_client.ranks.distributed import KeyValueStore, MeetingPlace, attempt
from shardcache_client.ranks.group import Epochs
from shardcache_client.topology import Topology

log = logging.getLogger("shardcache")

_LOG_AFTER_S = 10.0
_MAX_PASSES = 3
_NEXT, _AGAIN = "next", "again"


class OneEpoch(Epochs):
    """Decides which epoch follows after a rank ends one early. Can be pickled for DataLoader workers.

    If all ranks end it early (a loop with a fixed number of steps), the next epoch follows. If a single rank does, that
    rank begins the epoch again, in step with the others, which are in it or have yet to begin it. A rank that takes a
    single batch does not end here: that is a look. One that reads an epoch to its end never waits, but logs a warning
    if some rank has not begun that epoch.

    Ranks communicate over the job's key-value store, under keys made of the epoch and each rank's number of passes over
    it; the first rank to decide decides for all. If ranks share no store, each one counts for itself.
    """

    def __init__(
        self,
        name: str,
        place: MeetingPlace,
        topology: Callable[[], Topology],
        compare: Callable[[], None],
        patience_s: float,
    ) -> None:
        self._name = name  # the same on all ranks, and unique to the dataset
        self._place = place
        self._topology = topology
        self._compare = compare  # raises RanksError if this rank makes other batches than others
        # How long a rank that has ended an epoch early waits for the others to do so. If it was the only one, they wait
        # for it in turn, so this must be well below the timeout of a collective.
        self._patience_s = patience_s

    def __repr__(self) -> str:
        return f"OneEpoch({self._name}, {self._place!r})"

    def follows(self, epoch: int, left: int) -> int:
        """See `Epochs`. Raises EpochMismatchError if this has repeatedly been the only rank to end an epoch early."""
        with self._passes(left) as passes:
            if passes is not None and self._follows(passes) == _AGAIN:
                return left
        return epoch

    def begin(self, epoch: int | None) -> None:
        """Note that this rank reads an epoch, beyond a look. Raises what `compare` raises."""
        self._compare()
        if epoch is None:
            return
        with self._passes(epoch) as passes:
            if passes is None:
                return
            if epoch:
                self._leave_behind(passes.of(epoch - 1))
            passes.begin()

    def leave(self, epoch: int) -> None:
        """Note that this rank has ended an epoch early: a look of another rank need not wait until this one goes on."""
        with self._passes(epoch) as passes:
            if passes is not None:
                passes.leave()

    def end(self, epoch: int) -> None:
        """Note that this rank has read an epoch to its end: those that have left it need not wait for this one."""
        with self._passes(epoch) as passes:
            if passes is not None and passes.by_all():
                passes.close()

    @contextmanager
    def _passes(self, epoch: int) -> "Iterator[_Passes | None]":
        """Lend the record of the ranks' passes, None if they share none; a store that fails is logged."""
        topology = self._topology()
        store = None if topology.world_size == 1 else self._place.store()
        try:
            yield None if store is None else _Passes(store, self._prefix(store, topology), topology, epoch)
        except EpochMismatchError:
            raise
        except RanksError as exn:
            log.warning("cannot check that all ranks read epoch %d: %s", epoch, exn.message)

    def _prefix(self, store: KeyValueStore, topology: Topology) -> str:
        name = f"{self._name}/{topology.world_size}"
        return f"epochs/{attempt()}/{name}/{store.replica(name, topology.rank, topology.world_size)}"

    def _leave_behind(self, passes: "_Passes") -> None:
        if passes.number and not passes.by_all():
            log.warning(
                "rank %d begins epoch %d, but not all ranks have begun epoch %d: they may train on different epochs; "
                "call set_epoch on every rank before each iteration",
                passes.rank,
                passes.epoch + 1,
                passes.epoch,
            )
        passes.close()

    def _follows(self, passes: "_Passes") -> str:
        """Return what follows an epoch that this rank has ended early: the same again, or the next one."""
        if passes.closed():
            return _NEXT
        if passes.alone():
            log.info("only rank %d has read from epoch %d; it begins the epoch again", passes.rank, passes.epoch)
            return passes.decide(_AGAIN)
        return passes.decided() or passes.leave() or self._wait(passes)

    def _wait(self, passes: "_Passes") -> str:
        waiting = f"rank {passes.rank} has ended epoch {passes.epoch} early, but not all other ranks have"
        soon_s = min(_LOG_AFTER_S, self._patience_s)
        if passes.comes_to_close(soon_s):
            return _NEXT
        log.warning("%s; waiting up to %g s for them", waiting, self._patience_s)
        if passes.comes_to_close(self._patience_s - soon_s):
            return _NEXT
        if passes.number >= _MAX_PASSES:
            raise EpochMismatchError(f"{waiting}, for the {passes.number}th time")
        log.warning("%s within %g s; beginning epoch %d again", waiting, self._patience_s, passes.epoch)
        return passes.decide(_AGAIN)


class _Passes:
    """The ranks' passes over an epoch, recorded in the key-value store; `number` counts those that this rank began."""

    def __init__(self, store: KeyValueStore, prefix: str, topology: Topology, epoch: int) -> None:
        self._store, self._prefix, self._topology = store, prefix, topology
        self.rank, self.epoch = topology.rank, epoch
        self._key = f"{prefix}/{epoch}"
        self._mine = f"{self._key}/of/{self.rank}"
        self.number = store.add(self._mine, 0)

    def of(self, epoch: int) -> "_Passes":
        return _Passes(self._store, self._prefix, self._topology, epoch)

    def begin(self) -> None:
        self.number = self._store.add(self._mine, 1)
        if self.number == 1:
            self._store.add(f"{self._key}/ranks", 1)

    def alone(self) -> bool:
        """Return True if no other rank has begun the epoch."""
        return self._begun() == min(1, self.number)

    def by_all(self) -> bool:
        """Return True if all ranks have begun the epoch."""
        return self._begun() == self._topology.world_size

    def _begun(self) -> int:
        return self._store.add(f"{self._key}/ranks", 0)

    def leave(self) -> str | None:
        """Note that this rank has ended its pass early; return what follows if all ranks have."""
        first = self._store.add(f"{self._mine}/{self.number}/left", 1) == 1
        left = self._store.add(f"{self._key}/{self.number}/left", int(first))
        return self.decide(_NEXT) if left == self._topology.world_size else None

    def decided(self) -> str | None:
        """Return what follows the ranks' passes of this number, None if undecided."""
        key = f"{self._key}/{self.number}/follows"
        return self._store.first(key, "") if self._store.has(key) else None

    def decide(self, follows: str) -> str:
        """Decide what follows, unless another rank has; return the decision."""
        decided = self._store.first(f"{self._key}/{self.number}/follows", follows)
        if decided == _NEXT:
            self.close()
        return decided

    def close(self) -> None:
        """Note that this rank is past the epoch."""
        self._store.set(f"{self._key}/closed", "1")

    def comes_to_close(self, timeout_s: float) -> bool:
        """Return True as soon as a rank is past the epoch, False if none is within the timeout."""
        return self._store.get(f"{self._key}/closed", timeout_s) is not None

    def closed(self) -> bool:
        return self._store.has(f"{self._key}/closed")
