"""The epoch that all ranks read if `set_epoch` is not called, even if one reads samples alone."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from shardcache import errors
from shardcache_client.order.sequences.rounds import Topology
from shardcache_client.ranks.group import Epochs
from shardcache_client.ranks.key_value_store import KeyValueStore, MeetingPlace, attempt

log = logging.getLogger("shardcache")

_LOG_AFTER_S = 10.0  # length of a wait that is not worth a warning
_MAX_PASSES = 3  # over one epoch, of a rank that alone ends it early
# What follows an epoch that a rank has ended early.
_NEXT = "next"
_AGAIN = "again"


@dataclass(frozen=True, eq=False, slots=True)
class OneEpoch(Epochs):
    """Decides which epoch follows after a rank ends one early.

    Can be pickled for DataLoader workers.

    If all ranks end it early (a loop with a fixed number of steps), the next epoch follows. If a
    single rank does, that rank begins the epoch again, in step with the others, which are in it or
    have yet to begin it. A rank that takes a single batch does not end here: that is a look. If it
    was the first to begin the epoch, it waits some seconds to see if others do, too. One that reads
    an epoch to its end never waits, but logs a warning if some rank has not begun that epoch.

    Ranks communicate over the job's key-value store, under keys made of the epoch and each rank's
    number of passes over it; the first rank to decide decides for all. If ranks share no store,
    each one counts for itself.

    Attributes:
        name: the same on all ranks, and unique to the dataset.
        place: where the key-value store is.
        topology: returns the place of this process in the job.
        compare: raises RanksError if this rank makes other batches than others.
        patience_s: how long a rank that has ended an epoch early waits for the others to do so. If
            it was the only one, they wait for it in turn, so this must be well below the timeout of
            a collective.
    """

    name: str
    place: MeetingPlace
    topology: Callable[[], Topology]
    compare: Callable[[], None]
    patience_s: float

    def __repr__(self) -> str:
        return f"OneEpoch({self.name}, {self.place!r})"

    def follows(self, epoch: int, ended: int, *, is_held: bool = False) -> int:
        """See `Epochs`.

        Raises EpochMismatchError if this has repeatedly been the only rank to end an epoch early.
        """
        decide = _follows_held if is_held else self._follows
        if self._with_passes(ended, decide) == _AGAIN:
            return ended
        return epoch

    def begin(self, epoch: int | None) -> None:
        """Note that this rank reads an epoch, beyond a look. Raises what `compare` raises."""
        self.compare()
        if epoch is not None:
            self._with_passes(epoch, self._begin)

    def leave(self, epoch: int) -> None:
        """Note that this rank has ended an epoch early.

        A look of another rank need not wait until this one goes on.
        """
        self._with_passes(epoch, _Passes.leave)

    def end(self, epoch: int) -> None:
        """Note that this rank has read an epoch to its end.

        Those that have left it need not wait for this one.
        """
        self._with_passes(epoch, _Passes.end)

    def _with_passes(self, epoch: int, act: "Callable[[_Passes], str | None]") -> str | None:
        """Call a function with the ranks' passes over an epoch, and return its result.

        None if the ranks share no store, or the store fails.
        """
        topology = self.topology()
        store = None if topology.world_size == 1 else self.place.store()
        if store is None:
            return None
        try:
            return act(_Passes(store, self._prefix(store, topology), topology, epoch))
        except errors.EpochMismatchError:
            raise
        except errors.RanksError as exn:
            log.warning("cannot check that all ranks read epoch %d: %s", epoch, exn.message)
            return None

    def _prefix(self, store: KeyValueStore, topology: Topology) -> str:
        name = f"{self.name}/{topology.world_size}"
        replica = store.replica(name, topology.rank, topology.world_size)
        return f"epochs/{attempt()}/{name}/{replica}"

    def _begin(self, passes: "_Passes") -> None:
        """Note that this rank begins an epoch; warn if some rank has not begun the one before."""
        if passes.epoch:
            before = passes.of(passes.epoch - 1)
            if before.number and not before.is_begun_by_all():
                log.warning(
                    "rank %d begins epoch %d, but not all ranks have begun epoch %d: they may "
                    "train on different epochs; call set_epoch on every rank before each "
                    "iteration",
                    passes.rank,
                    passes.epoch,
                    before.epoch,
                )
            before.close()
        passes.begin()

    def _follows(self, passes: "_Passes") -> str:
        """Return what follows an epoch that was ended early: the same again, or the next one."""
        if passes.is_closed():
            return _NEXT
        soon_s = min(_LOG_AFTER_S, self.patience_s)
        if passes.is_alone() and not passes.is_joined_within(soon_s):
            log.info(
                "only rank %d has read from epoch %d; it begins the epoch again",
                passes.rank,
                passes.epoch,
            )
            return passes.decide(_AGAIN)

        decision = passes.decision()
        if decision is None:
            decision = passes.leave()
        if decision is None:
            decision = self._wait(passes)
        return decision

    def _wait(self, passes: "_Passes") -> str:
        """Wait for the other ranks to end the epoch; return what follows.

        Raises EpochMismatchError if this rank has been alone in ending it too often.
        """
        waiting = (
            f"rank {passes.rank} has ended epoch {passes.epoch} early, but not all other ranks have"
        )
        soon_s = min(_LOG_AFTER_S, self.patience_s)
        if passes.is_closed_within(soon_s):
            return _NEXT

        log.warning("%s; waiting up to %g s for them", waiting, self.patience_s)
        if passes.is_closed_within(self.patience_s - soon_s):
            return _NEXT
        if passes.number >= _MAX_PASSES:
            raise errors.EpochMismatchError(f"{waiting}; this has happened {passes.number} times")
        log.warning(
            "%s within %g s; beginning epoch %d again", waiting, self.patience_s, passes.epoch
        )
        return passes.decide(_AGAIN)


def _follows_held(passes: "_Passes") -> str:
    """Return what follows an epoch while an iterator of it is held.

    If no other rank has begun the epoch, the iterator was a look; else all ranks replace theirs.
    """
    is_look = passes.is_alone() and not passes.is_closed()
    return _AGAIN if is_look else _NEXT


class _Passes:
    """The ranks' passes over an epoch, recorded in the key-value store.

    Attributes:
        rank: this one.
        epoch: number of the epoch.
        number: of passes that this rank began.
    """

    def __init__(self, store: KeyValueStore, prefix: str, topology: Topology, epoch: int) -> None:
        self.rank = topology.rank
        self.epoch = epoch
        self._store = store
        self._prefix = prefix
        self._topology = topology
        self._key = f"{prefix}/{epoch}"
        self._own_key = f"{self._key}/of/{self.rank}"
        self.number = store.add(self._own_key, 0)  # adds nothing: returns the number

    def of(self, epoch: int) -> "_Passes":
        """Return the passes over another epoch."""
        return _Passes(self._store, self._prefix, self._topology, epoch)

    def begin(self) -> None:
        """Note that this rank begins the epoch.

        No-op if its last pass has not ended: the iterations are nested.
        """
        if self.number and not (self._has_left() or self.decision()):
            return
        self.number = self._store.add(self._own_key, 1)
        if self.number == 1 and self._store.add(f"{self._key}/ranks", 1) > 1:
            self._store.set(f"{self._key}/joined", "1")

    def _has_left(self) -> bool:
        """Return True if this rank has ended its last pass early."""
        return self._store.has(f"{self._own_key}/{self.number}/left")

    def is_alone(self) -> bool:
        """Return True if no other rank has begun the epoch."""
        own = 1 if self.number else 0
        return self._ranks_begun() == own

    def is_joined_within(self, timeout_s: float) -> bool:
        """Return True as soon as a second rank has begun the epoch; False at the timeout."""
        return self._store.get(f"{self._key}/joined", timeout_s) is not None

    def is_begun_by_all(self) -> bool:
        """Return True if all ranks have begun the epoch."""
        return self._ranks_begun() == self._topology.world_size

    def _ranks_begun(self) -> int:
        """Return the number of ranks that have begun the epoch."""
        return self._store.add(f"{self._key}/ranks", 0)

    def leave(self) -> str | None:
        """Note that this rank has ended its pass early; return what follows if all ranks have."""
        is_first_time = self._store.add(f"{self._own_key}/{self.number}/left", 1) == 1
        ranks_left = self._store.add(f"{self._key}/{self.number}/left", int(is_first_time))
        if ranks_left != self._topology.world_size:
            return None
        return self.decide(_NEXT)

    def end(self) -> None:
        """Note that this rank has read the epoch to its end."""
        if self.is_begun_by_all():
            self.close()

    def decision(self) -> str | None:
        """Return what follows the ranks' passes of this number, None if undecided."""
        key = f"{self._key}/{self.number}/follows"
        if not self._store.has(key):
            return None
        return self._store.first(key, "")

    def decide(self, follows: str) -> str:
        """Decide what follows, unless another rank has; return the decision."""
        decision = self._store.first(f"{self._key}/{self.number}/follows", follows)
        if decision == _NEXT:
            self.close()
        return decision

    def close(self) -> None:
        """Note that this rank is past the epoch."""
        self._store.set(f"{self._key}/closed", "1")

    def is_closed_within(self, timeout_s: float) -> bool:
        """Return True as soon as a rank is past the epoch, False if none is within the timeout."""
        return self._store.get(f"{self._key}/closed", timeout_s) is not None

    def is_closed(self) -> bool:
        """Return True if a rank is past the epoch."""
        return self._store.has(f"{self._key}/closed")
