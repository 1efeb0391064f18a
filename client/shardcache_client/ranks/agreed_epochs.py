"""Agreement of all ranks on the epoch that each reads next, where `set_epoch` is not called.

One rank may have read alone, for example to print a sample. The ranks still have to train on the
same epoch afterwards. `position.bookmark` reports to this module when its rank begins or ends an
epoch. After an epoch that was ended early, it asks which epoch the rank reads next.

- A pass is one iteration of a rank over an epoch.
- A look is an iteration of which only one batch was taken.
- An epoch is closed once some rank has gone on to a later one. All other ranks then do so, too.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from shardcache.shared import exceptions
from shardcache_client.order.topology import Topology
from shardcache_client.ranks.group import Epochs
from shardcache_client.ranks.key_value_store import KeyValueStore, StoreLocator, restart_count

log = logging.getLogger("shardcache")

_LOG_AFTER_S = 10.0  # A wait that is longer is logged as a warning.
_MAX_PASSES = 3  # maximum number of passes of a rank over an epoch that it alone ends early
# The two decisions about an epoch that was ended early: to read the next epoch, or the same again.
# They are stored as these texts.
_NEXT = "next"
_AGAIN = "again"


@dataclass(frozen=True, eq=False, slots=True)
class AgreedEpochs(Epochs):
    """Decides which epoch a rank reads after one that it has ended early.

    If all ranks end an epoch early, as in a loop with a fixed number of steps, they go on to the
    next epoch. If a single rank does, it reads the same epoch again, because the other ranks are
    still reading it or will begin it later. A look does not count as ending an epoch early.

    A rank waits only after it has ended an epoch early. If no other rank has begun that epoch, it
    waits for a few seconds for one to do so; otherwise it waits up to `patience_s` for all others
    to end the epoch, too. A rank that reads an epoch to its end never waits. It logs a warning if
    some rank has not begun that epoch.

    Ranks communicate over the job's key-value store; `_Passes` lists the keys. The first rank that
    decides does so for all. If ranks share no store, each counts epochs for itself.

    An object of this class can be pickled for DataLoader workers.

    Attributes:
        name: name that is the same on all ranks and unique to the dataset.
        locator: finds the job's key-value store.
        topology: returns the rank of this process, and the number of ranks.
        compare_options: raises RanksError if this rank makes other batches than other ranks.
        patience_s: maximum time for which a rank waits for the others to end an epoch early. They
            may be in a collective that waits for this rank, so the time must be well below the
            timeout of collectives.
    """

    name: str
    locator: StoreLocator
    topology: Callable[[], Topology]
    compare_options: Callable[[], None]
    patience_s: float

    def __repr__(self) -> str:
        return f"AgreedEpochs({self.name}, {self.locator!r})"

    def epoch_after(self, ended: int, *, counted_next: int, is_held: bool = False) -> int:
        """Return the epoch to read after one that was ended early; see `Epochs`.

        Raises EpochMismatchError if this rank has repeatedly been the only one to end it early.
        """
        decide = _decide_while_held if is_held else self._decide
        decision = self._with_passes(ended, decide)
        return ended if decision == _AGAIN else counted_next

    def begin(self, epoch: int | None) -> None:
        """Record that this rank reads an epoch, and not only for a look.

        Args:
            epoch: number of the epoch; None for an epoch that the user has set, which needs no
                agreement.

        Raises RanksError if this rank makes other batches than other ranks.
        """
        self.compare_options()
        if epoch is not None:
            self._with_passes(epoch, self._begin)

    def leave(self, epoch: int) -> None:
        """Record that this rank has ended an epoch early, so that other ranks need not wait for it.

        Without this, they would wait until this rank calls `epoch_after`.
        """
        self._with_passes(epoch, _Passes.leave_and_decide)

    def end(self, epoch: int) -> None:
        """Record that this rank has read an epoch to its end.

        Ranks that have ended the epoch early then need not wait for this rank.
        """
        self._with_passes(epoch, _Passes.end)

    def _with_passes(self, epoch: int, act: "Callable[[_Passes], str | None]") -> str | None:
        """Call `act` with the ranks' passes over an epoch, and return what it returns.

        Returns None if the ranks share no store, or if the store fails.
        """
        topology = self.topology()
        store = None if topology.world_size == 1 else self.locator.store()
        if store is None:
            return None
        try:
            return act(_Passes(store, self._prefix(store, topology), topology, epoch))
        except exceptions.EpochMismatchError:
            raise
        except exceptions.RanksError as exn:
            log.warning("cannot check that all ranks read epoch %d: %s", epoch, exn.message)
            return None

    def _prefix(self, store: KeyValueStore, topology: Topology) -> str:
        """Return the beginning of the keys that this process shares with one process of each rank.

        In a mesh, several processes may read for one rank; see `KeyValueStore.claim_replica`.
        """
        name = f"{self.name}/{topology.world_size}"
        replica = store.claim_replica(name, topology.rank, topology.world_size)
        return f"epochs/{restart_count()}/{name}/{replica}"

    def _begin(self, passes: "_Passes") -> None:
        """Record that this rank begins an epoch, and is past the previous one.

        Logs a warning if this rank has begun the previous epoch, and another rank has not.
        """
        if passes.epoch > 0:
            previous = passes.of_epoch(passes.epoch - 1)
            if previous.own_passes and not previous.is_begun_by_all():
                log.warning(
                    "rank %d begins epoch %d, but not all ranks have begun epoch %d: they may "
                    "train on different epochs; call set_epoch on every rank before each "
                    "iteration",
                    passes.rank,
                    passes.epoch,
                    previous.epoch,
                )
            previous.close()
        passes.begin()

    def _decide(self, passes: "_Passes") -> str:
        """Return the decision about an epoch that was ended early: `_AGAIN` or `_NEXT`.

        May wait for the other ranks.
        """
        if passes.is_closed():
            return _NEXT
        if passes.is_alone() and not passes.is_joined_within(self._unlogged_wait_s):
            log.info(
                "only rank %d has read from epoch %d; it begins the epoch again",
                passes.rank,
                passes.epoch,
            )
            return passes.decide(_AGAIN)

        decision = passes.decision()
        if decision is None:
            decision = passes.leave_and_decide()
        if decision is None:
            decision = self._decide_after_wait(passes)
        return decision

    def _decide_after_wait(self, passes: "_Passes") -> str:
        """Wait for the other ranks to end the epoch, and return the decision.

        Raises EpochMismatchError if this rank alone has ended the epoch early too often.
        """
        mismatch = (
            f"rank {passes.rank} has ended epoch {passes.epoch} early, but not all other ranks have"
        )
        if passes.is_closed_within(self._unlogged_wait_s):
            return _NEXT

        log.warning("%s; waiting up to %g s for them", mismatch, self.patience_s)
        if passes.is_closed_within(self.patience_s - self._unlogged_wait_s):
            return _NEXT
        if passes.own_passes >= _MAX_PASSES:
            times = passes.own_passes
            raise exceptions.EpochMismatchError(f"{mismatch}; this has happened {times} times")
        log.warning(
            "%s within %g s; beginning epoch %d again", mismatch, self.patience_s, passes.epoch
        )
        return passes.decide(_AGAIN)

    @property
    def _unlogged_wait_s(self) -> float:
        """The time for which a rank waits before it logs that it waits."""
        return min(_LOG_AFTER_S, self.patience_s)


def _decide_while_held(passes: "_Passes") -> str:
    """Return the decision about an epoch while the user still holds an iterator of it.

    If no other rank has begun the epoch, the iterator was a look, and the epoch is still to be
    read. Otherwise all ranks are assumed to replace their iterators, and the next epoch is read.
    """
    is_look = passes.is_alone() and not passes.is_closed()
    return _AGAIN if is_look else _NEXT


class _Passes:
    """The ranks' passes over an epoch, recorded in the key-value store.

    These are the keys, after the prefix and the number of the epoch. P is the number of a pass.

    - "of/RANK": number of passes that the rank has begun.
    - "of/RANK/P/left": number of times that the rank has recorded that it ended pass P early.
    - "ranks": number of ranks that have begun the epoch. "joined": set once there are two.
    - "P/left": number of ranks that have ended pass P early.
    - "P/follows": the decision that the first rank has made about pass P.
    - "closed": set once some rank is past the epoch.

    Args:
        store: the job's store.
        prefix: beginning of all keys, the same on all ranks.
        topology: rank of this process, and number of ranks.
        epoch: number of the epoch.

    Attributes:
        rank: this process's rank.
        epoch: number of the epoch.
        own_passes: number of passes over the epoch that this rank has begun, and so also the
            number of its last pass.
    """

    def __init__(self, store: KeyValueStore, prefix: str, topology: Topology, epoch: int) -> None:
        self.rank = topology.rank
        self.epoch = epoch
        self._store = store
        self._prefix = prefix
        self._topology = topology
        self._key = f"{prefix}/{epoch}"
        self._own_key = f"{self._key}/of/{self.rank}"
        self.own_passes = store.add(self._own_key, 0)  # Adding 0 returns the number unchanged.

    def of_epoch(self, epoch: int) -> "_Passes":
        """Return the passes over another epoch."""
        return _Passes(self._store, self._prefix, self._topology, epoch)

    def begin(self) -> None:
        """Record that this rank begins the epoch.

        No-op during a pass of this rank: then one iteration is nested in another.
        """
        if self.own_passes:
            # A rank that alone had begun the epoch decides about its pass without recording that it
            # has left. So a decision, too, shows that the pass has ended.
            has_ended = self._has_left() or self.decision() is not None
            if not has_ended:
                return
        self.own_passes = self._store.add(self._own_key, 1)
        if self.own_passes == 1 and self._store.add(f"{self._key}/ranks", 1) > 1:
            self._store.set(f"{self._key}/joined", "1")

    def _has_left(self) -> bool:
        """Return True if this rank has ended its last pass early."""
        return self._store.has(f"{self._own_key}/{self.own_passes}/left")

    def is_alone(self) -> bool:
        """Return True if no other rank has begun the epoch."""
        own = 1 if self.own_passes else 0
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

    def leave_and_decide(self) -> str | None:
        """Record that this rank has ended its pass early; return the decision if all ranks have.

        Returns None if some rank has not.
        """
        is_first_time = self._store.add(f"{self._own_key}/{self.own_passes}/left", 1) == 1
        # A rank is counted once, even if it leaves the same pass several times.
        newly_left = 1 if is_first_time else 0
        ranks_left = self._store.add(f"{self._key}/{self.own_passes}/left", newly_left)
        if ranks_left != self._topology.world_size:
            return None
        return self.decide(_NEXT)

    def end(self) -> None:
        """Record that this rank has read the epoch to its end."""
        if self.is_begun_by_all():
            self.close()

    def decision(self) -> str | None:
        """Return the decision about this pass of the ranks; None if there is none yet."""
        return self._store.peek(f"{self._key}/{self.own_passes}/follows")

    def decide(self, own_decision: str) -> str:
        """Decide about this pass of the ranks, unless another rank has decided already.

        Args:
            own_decision: this rank's decision: `_AGAIN` or `_NEXT`.

        Returns:
            The decision of the rank that decided first.
        """
        decision = self._store.set_if_unset(f"{self._key}/{self.own_passes}/follows", own_decision)
        if decision == _NEXT:
            self.close()
        return decision

    def close(self) -> None:
        """Record that this rank is past the epoch."""
        self._store.set(f"{self._key}/closed", "1")

    def is_closed_within(self, timeout_s: float) -> bool:
        """Return True as soon as a rank is past the epoch; False at the timeout."""
        return self._store.get(f"{self._key}/closed", timeout_s) is not None

    def is_closed(self) -> bool:
        """Return True if a rank is past the epoch."""
        return self._store.has(f"{self._key}/closed")
