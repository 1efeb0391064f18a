"""Deadlocks over cache space: readers and transfers hold all of it, and wait for more.

The general conditions apply (E. Coffman, M. Elphick and A. Shoshani, "System Deadlocks", ACM
Computing Surveys 1971): each holder keeps its space while it waits for space that the others hold.
A deadlock ends only if one of the waits is given up.

`Residency` calls `check_progress` now and then while a claim waits for space. A claim (`KeyClaim`)
stands for all transfers of one shard; it is blocked if it can continue only once there is space. A
reader is stuck if it waits for a blocked claim, and has nothing else to read. A lease keeps a shard
in the cache until its reader releases it, and a stuck reader releases none.

A wait is for a whole object or for a range of it. A claim can serve ranges while it waits for the
space of the whole object. Its waits for ranges then need none of that space. A claim that waits for
space may still be fetching parts, for which it has reserved space: these finish, as the downloads
of other claims do, and can then be evicted.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Self

from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cache.waiting.waits import Holder, PostponedError, Wait
from shardcache.shared.exceptions import CapacityError
from shardcache.shared.units import size
from shardcache.store.shard import Shard
from shardcache.store.space import Space


def check_progress(
    claim: KeyClaim,
    claims: Collection[KeyClaim],
    in_use: Collection[Shard],
    space: Space,
) -> None:
    """Raise an error if there is a deadlock, and this claim is the one that has to give up.

    The error is CapacityError, or PostponedError if no reader waits for the claim.

    Args:
        claim: the claim that asks.
        claims: all claims, the asking one included.
        in_use: the shards that have leases.
        space: the space of the cache.
    """
    # 1. A claim that is not blocked has nothing to give up.
    if not _is_blocked(claim):
        return

    # 2. If no reader is stuck, there is no deadlock: each reader reads and releases the shards that
    #    it has.
    blocked = [each for each in claims if _is_blocked(each)]
    if not any(_stuck_waits(each) for each in blocked):
        return

    # 3. If one blocked claim can continue without any lease being released, there is no deadlock:
    #    shards without leases can be evicted, and running downloads finish.
    running = [each for each in claims if not _is_blocked(each)]
    use = _SpaceUse.of(blocked, running, in_use, space)
    if use.has_room:
        return

    # 4. Nor is there one if any lease belongs to a reader that is not stuck, as that reader may end
    #    it. If the stuck readers have as many leases as there are, they have all of them.
    readers = _stuck_readers(blocked)
    lease_count = sum(shard.leases for shard in in_use)
    stuck_lease_count = sum(reader.lease_count() for reader in readers)
    if stuck_lease_count != lease_count:
        return

    # 5. There is a deadlock. One claim gives up, and the check for that one raises the error.
    if claim is not max(blocked, key=_giving_up_rank):
        return
    if not _space_waits(claim):
        raise PostponedError
    raise _deadlock_error(claim, use, space, len(readers))


def _is_blocked(claim: KeyClaim) -> bool:
    """Return whether a claim waits for space, or behind a claim that waits for space."""
    if claim.wanted_bytes > 0:
        return True
    return claim.claim_ahead is not None and _is_blocked(claim.claim_ahead)


def _space_waits(claim: KeyClaim) -> list[Wait]:
    """Return those waits for a blocked claim that end only once the claim has its space."""
    if claim.serves_ranges:
        return claim.whole_waits
    return claim.waits


def _stuck_waits(claim: KeyClaim) -> list[Wait]:
    """Return the waits for a blocked claim whose readers have nothing else to read.

    `Wait.idle_since_s` is the time from which the reader had nothing else to read.
    """
    return [wait for wait in _space_waits(claim) if wait.idle_since_s is not None]


def _stuck_readers(blocked: Collection[KeyClaim]) -> set[Holder]:
    """Return the readers that are stuck on blocked claims, and the readers that these keep waiting.

    If a worker of a loader is stuck, the loader waits for that worker's batch, and requests hardly
    any batches of the other workers in the meantime. So the other workers keep their shards until
    that batch has come, although they do not wait for space themselves.
    """
    waits = [wait for claim in blocked for wait in _stuck_waits(claim)]
    stuck = {wait.holder for wait in waits if wait.holder is not None}
    kept_waiting = [reader.kept_waiting() for reader in stuck]
    return stuck.union(*kept_waiting)


@dataclass(frozen=True, slots=True)
class _SpaceUse:
    """The space that cannot be freed at present, and the space that one claim needs to continue.

    Attributes:
        pinned_bytes: size of pinned shards.
        leased_bytes: size of leased shards that are not pinned.
        reserved_bytes: space reserved by blocked claims. That of running claims, and of parts that
            blocked ones are fetching, is not counted: they finish, and can then be evicted.
        needed_bytes: the least space that a blocked claim waits for.
        possible_bytes: the capacity, or less if the disk has no space for all of it.
    """

    pinned_bytes: int
    leased_bytes: int
    reserved_bytes: int
    needed_bytes: int
    possible_bytes: int

    @classmethod
    def of(
        cls,
        blocked: Collection[KeyClaim],
        running: Collection[KeyClaim],
        in_use: Collection[Shard],
        space: Space,
    ) -> Self:
        """Add up the bytes of all claims and shards.

        Args:
            blocked: the blocked claims.
            running: all other claims.
            in_use: the shards that have leases.
            space: the space of the cache.
        """
        # The filesystem may have allocated space for bytes that downloads have yet to write.
        # The measurement of the disk took that space for space of other files, though it belongs to
        # the cache: `effective_bytes` corrects this.
        reservations = [claim.reservation for claim in running if claim.reservation is not None]
        allocating_bytes = sum(reservation.unwritten_bytes for reservation in reservations)
        allocating_bytes += sum(claim.arriving_bytes for claim in blocked)
        # A claim that is blocked by the claim ahead of it wants no bytes itself. But that claim, or
        # one further ahead, is blocked by a lack of space, so there is at least one number here.
        wanted_bytes = [claim.wanted_bytes for claim in blocked if claim.wanted_bytes]
        return cls(
            pinned_bytes=space.pinned_bytes,
            leased_bytes=sum(shard.kept_bytes for shard in in_use if not shard.pinned),
            reserved_bytes=sum(claim.reserved_bytes - claim.arriving_bytes for claim in blocked),
            needed_bytes=min(wanted_bytes),
            possible_bytes=space.effective_bytes(allocating_bytes),
        )

    @property
    def has_room(self) -> bool:
        """True if one of the blocked claims can continue by eviction alone."""
        staying_bytes = self.pinned_bytes + self.leased_bytes + self.reserved_bytes
        return staying_bytes + self.needed_bytes <= self.possible_bytes


def _deadlock_error(claim: KeyClaim, use: _SpaceUse, space: Space, readers: int) -> CapacityError:
    """Return the error, with its arithmetic, for the readers that wait for the claim.

    Args:
        claim: the claim that gives up.
        use: how the space is used.
        space: the space of the cache.
        readers: number of the stuck readers.
    """
    held = size(use.pinned_bytes + use.leased_bytes)
    facts = [space.explanation]
    if use.pinned_bytes:
        facts.append(f"{held} of it is leased or pinned ({size(use.pinned_bytes)})")
    else:
        facts.append(f"{held} of it is leased")
    if use.reserved_bytes:
        facts.append(f"{size(use.reserved_bytes)} is reserved by transfers")
    facts.append(f"the next shard needs {size(use.needed_bytes)}")
    facts.append(f"and all {readers} reader(s) with leases wait for that space or for each other")

    # A rank mixes the samples of `shuffle_window` shards, while its next shard arrives.
    remedy = (
        "the cache must hold ranks x (shuffle_window + 1) shards, each compressed one also in its "
        f"inflated form: {space.remedy}, or lower shuffle_window or the number of ranks"
    )
    if use.pinned_bytes:
        remedy += ", or unpin shards"
    return CapacityError(f"deadlock: {', '.join(facts)}", url=claim.url, remedy=remedy)


class _GivingUpRank(NamedTuple):
    """Sort key of blocked claims: the claim with the largest key gives up.

    The first field counts most, the last least.
    """

    # 1. Nobody waits for the claim's space, so no reader gets an error.
    is_unawaited: bool
    # 2. A reader of the claim is stuck. Readers of other claims still have something to read.
    is_stuck: bool
    # 3. Readers of the claim hold shards, so giving up frees space for others.
    holds_shards: bool
    # 4. The claim began to wait last. Its readers get the error and end their leases, so the claims
    #    that have waited for longer continue.
    since_s: float


def _giving_up_rank(claim: KeyClaim) -> _GivingUpRank:
    """Return the sort key of a blocked claim."""
    readers = _stuck_readers([claim])
    return _GivingUpRank(
        is_unawaited=not _space_waits(claim),
        is_stuck=bool(_stuck_waits(claim)),
        holds_shards=any(reader.lease_count() for reader in readers),
        since_s=claim.waits_since_s,
    )
