"""Agreement of all ranks on the epoch if `set_epoch` is not called, even if one rank reads some samples alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from shardcache.errors import EpochMismatchError, RanksError
from shardcache_client.ranks.distributed import KeyValueStore, MeetingPlace
from shardcache_client.topology import Ranks

log = logging.getLogger("shardcache")

_LOG_AFTER_S = 10.0
_MAX_PASSES = 3
_NEXT, _AGAIN = "next", "again"


class OneEpoch:
    """Decides which epoch follows after a rank ends one early. Can be pickled for DataLoader workers.

    If all ranks end it early (a loop with a fixed number of steps), the next epoch follows. If a single rank does, that
    rank begins the epoch again, in step with the others, which are in it or have yet to begin it. A rank that takes a
    single batch does not end here: that is a look. One that reads an epoch to its end never waits, but logs a warning
    if some rank has not begun that epoch.

    Ranks communicate over the job's key-value store, under keys made of the epoch and each rank's number of passes over
    it; the first rank to decide decides for all. If ranks share no store, each one counts for itself.

    Args:
        name: the same on all ranks, and unique to the dataset.
        place: finds the key-value store.
        patience_s: how long a rank that has ended an epoch early waits for the others to do so. If it was the only one,
            they wait for it in turn, so this must be well below the timeout of a collective.
    """

    def __init__(self, name: str, place: MeetingPlace, patience_s: float) -> None:
        self._name = name
        self._place = place
        self._patience_s = patience_s

    def __repr__(self) -> str:
        return f"OneEpoch({self._name}, {self._place!r})"

    def follows(self, ranks: Ranks, epoch: int, left: int) -> int:
        """Return the epoch that follows after this rank has ended one early.

        Args:
            epoch: the next one by its own count.
            left: the epoch that it ended early.

        Raises EpochMismatchError if it has repeatedly been the only rank to end an epoch early.
        """
        with self._passes(ranks, left) as passes:
            if passes is not None and self._follows(passes, left) == _AGAIN:
                return left
        return epoch

    def begin(self, ranks: Ranks, epoch: int) -> None:
        """Note that this rank reads an epoch."""
        with self._passes(ranks, epoch) as passes:
            if passes is not None:
                if epoch:
                    self._warn_if_ahead(passes, epoch)
                    passes.close(epoch - 1)
                passes.begin(epoch)

    def leave(self, ranks: Ranks, epoch: int) -> None:
        """Note that this rank has ended an epoch early: a look of another rank need not wait until this one goes on."""
        with self._passes(ranks, epoch) as passes:
            if passes is not None:
                passes.leave(epoch, passes.number(epoch))

    def end(self, ranks: Ranks, epoch: int) -> None:
        """Note that this rank has read an epoch to its end: those that have left it need not wait for this one."""
        with self._passes(ranks, epoch) as passes:
            if passes is not None and passes.by_all(epoch):
                passes.close(epoch)

    @contextmanager
    def _passes(self, ranks: Ranks, epoch: int) -> Iterator[_Passes | None]:
        """Lend the record of the ranks' passes, None if they share none; a store that fails is logged."""
        store = None if ranks.world_size == 1 else self._place.store()
        try:
            yield None if store is None else _Passes(store, self._prefix(store, ranks), ranks)
        except EpochMismatchError:
            raise
        except RanksError as exn:
            log.warning("cannot check that all ranks read epoch %d: %s", epoch, exn.message)

    def _prefix(self, store: KeyValueStore, ranks: Ranks) -> str:
        # Processes restarted by torchrun count from the start.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"{self._name}/{ranks.world_size}"
        return f"epochs/{attempt}/{name}/{store.replica(name, ranks)}"

    def _warn_if_ahead(self, passes: _Passes, epoch: int) -> None:
        if passes.number(epoch - 1) and not passes.by_all(epoch - 1):
            log.warning(
                "rank %d begins epoch %d, but not all ranks have begun epoch %d: they may train on different epochs; "
                "call set_epoch on every rank before each iteration",
                passes.ranks.rank,
                epoch,
                epoch - 1,
            )

    def _follows(self, passes: _Passes, epoch: int) -> str:
        """Return what follows an epoch that this rank has ended early: the same again, or the next one."""
        number = passes.number(epoch)
        if passes.closed(epoch):
            return _NEXT
        if passes.alone(epoch):
            log.info("only rank %d has read from epoch %d; it begins the epoch again", passes.ranks.rank, epoch)
            return passes.decide(epoch, number, _AGAIN)
        decided = passes.decided(epoch, number) or passes.leave(epoch, number)
        return decided or self._wait(passes, epoch, number)

    def _wait(self, passes: _Passes, epoch: int, number: int) -> str:
        told = f"rank {passes.ranks.rank} has ended epoch {epoch} early, but not all other ranks have"
        soon_s = min(_LOG_AFTER_S, self._patience_s)
        if passes.comes_to_close(epoch, soon_s):
            return _NEXT
        log.warning("%s; waiting up to %g s for them", told, self._patience_s)
        if passes.comes_to_close(epoch, self._patience_s - soon_s):
            return _NEXT
        if number >= _MAX_PASSES:
            raise EpochMismatchError(f"{told}, for the {number}th time")
        log.warning("%s within %g s; beginning epoch %d again", told, self._patience_s, epoch)
        return passes.decide(epoch, number, _AGAIN)


class _Passes:
    """The ranks' passes over each epoch, recorded in the key-value store."""

    def __init__(self, store: KeyValueStore, prefix: str, ranks: Ranks) -> None:
        self._store = store
        self._prefix = prefix
        self.ranks = ranks

    def begin(self, epoch: int) -> None:
        """Note that this rank begins a pass."""
        if self._store.add(self._mine(epoch), 1) == 1:
            self._store.add(f"{self._prefix}/{epoch}/ranks", 1)

    def number(self, epoch: int) -> int:
        """Return the number of passes that this rank has begun."""
        return self._store.add(self._mine(epoch), 0)

    def alone(self, epoch: int) -> bool:
        """Return True if no other rank has begun the epoch."""
        return self._begun(epoch) == min(1, self.number(epoch))

    def by_all(self, epoch: int) -> bool:
        """Return True if all ranks have begun the epoch."""
        return self._begun(epoch) == self.ranks.world_size

    def _begun(self, epoch: int) -> int:
        return self._store.add(f"{self._prefix}/{epoch}/ranks", 0)

    def leave(self, epoch: int, number: int) -> str | None:
        """Note that this rank has ended its pass of this number early; return what follows if all ranks have."""
        first = self._store.add(f"{self._mine(epoch)}/{number}/left", 1) == 1
        left = self._store.add(f"{self._prefix}/{epoch}/{number}/left", int(first))
        return self.decide(epoch, number, _NEXT) if left == self.ranks.world_size else None

    def decided(self, epoch: int, number: int) -> str | None:
        """Return what follows the ranks' passes of this number, None if undecided."""
        key = f"{self._prefix}/{epoch}/{number}/follows"
        return self._store.first(key, "") if self._store.has(key) else None

    def decide(self, epoch: int, number: int, follows: str) -> str:
        """Decide what follows, unless another rank has; return the decision."""
        decided = self._store.first(f"{self._prefix}/{epoch}/{number}/follows", follows)
        if decided == _NEXT:
            self.close(epoch)
        return decided

    def close(self, epoch: int) -> None:
        """Note that this rank is past the epoch."""
        self._store.set(f"{self._prefix}/{epoch}/closed", "1")

    def closed(self, epoch: int) -> bool:
        """Return True if some rank is past the epoch."""
        return self._store.has(f"{self._prefix}/{epoch}/closed")

    def comes_to_close(self, epoch: int, timeout_s: float) -> bool:
        """Return True as soon as a rank is past the epoch, False if none is within the timeout."""
        return self._store.get(f"{self._prefix}/{epoch}/closed", timeout_s) is not None

    def _mine(self, epoch: int) -> str:
        return f"{self._prefix}/{epoch}/of/{self.ranks.rank}"
