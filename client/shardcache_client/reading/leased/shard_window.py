"""The window of the shards that a reader holds, on its way through a declared plan.

A plan is the order of shards that the session has declared to the daemon. The reader asks for
shards ahead (the window then requests leases), takes them one after another, and gives back each
one that it has read. A shard that was given back stays leased while samples of it are still on the
way to other processes; once they have mapped its file, the shard is settled, and is released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from shardcache_client.daemon.lease import LeaseRequest
from shardcache_client.daemon.session import Session
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.reading.leased.joined_samples import JoinFacts
from shardcache_client.reading.leased.leased_shard import JoinedColumn, LeasedShard
from shardcache_client.samples.sample_view import WHOLE, View

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover


@dataclass(slots=True, eq=False, repr=False)
class ShardWindow:
    """The shards that a reader holds: taken in the order of the plan, and given back in any order.

    Attributes:
        partial: True if a shard may be granted before all of it has arrived; None for the session's
            default.
        handover: passes the samples' values to other processes without a copy; None for values that
            stay in this process.
        view_of: returns the form in which a shard's samples are read, given the shard's number and
            None; or the form of their partners in a joined source, given the shard's number and the
            prefix of that source.
    """

    _session: Session
    _plan: Plan
    _: KW_ONLY
    partial: bool | None
    handover: Handover | None = None
    view_of: Callable[[int, str | None], View] = lambda number, column: WHOLE
    # Leases that were requested and not taken yet. Each list is for a shard, followed by the shards
    # that are joined with it.
    _ahead: deque[list[LeaseRequest]] = field(default_factory=deque, init=False)
    _asked: int = field(default=0, init=False)  # number of plan positions requested so far
    _taken: list[LeasedShard] = field(default_factory=list, init=False)
    # Shards still held for other processes, which have yet to receive samples of these shards.
    _given_back: list[LeasedShard] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        # While this reader waits, other readers may be waiting for the space of settled shards.
        self._session.on_wait = self.release_settled

    def __repr__(self) -> str:
        taken = len(self._taken)
        given_back = len(self._given_back)
        asked = f"{self._asked}/{self._plan.reads}"
        return f"ShardWindow(taken={taken}, given_back={given_back}, asked={asked})"

    def ask(self, ahead: int) -> None:
        """Request shards until `ahead` of them are requested and not taken yet."""
        manifest = self._plan.manifest
        # Joining matches samples by the keys of whole shards, so no beginning of a shard will do.
        partial = False if manifest.columns else self.partial
        while len(self._ahead) < ahead and self._asked < self._plan.reads:
            # Each shard is followed in the plan by the shards that are joined with it.
            first = self._asked
            shards = manifest.with_joined(self._plan.order[first])
            self._asked += len(shards)
            leases = []
            for position in range(first, self._asked):
                lease = self._session.lease(position, partial=partial, unpublished=True)
                leases.append(lease)
            self._ahead.append(leases)

    def take(
        self,
        number: int,
        count: int | None,
        span: tuple[int, int | None] | None = None,
        *,
        is_fresh: bool = False,
    ) -> LeasedShard:
        """Return the plan's next shard, to be opened by the caller.

        Args:
            number: the shard's number in the manifest.
            count: number of the shard's samples; None if unknown.
            span: start and end of the samples to read in order; None to read by number.
            is_fresh: True if nobody has been given samples of the shard in this epoch, so that
                another version of it may be read.
        """
        self.ask(1)
        self.release_settled()
        lease, *others = self._ahead.popleft()
        manifest = self._plan.manifest
        join_facts = JoinFacts(
            repeated_keys=manifest.repeated_in(number),
            columns_by_key=manifest.paired_by_tables(number),
        )
        leased_shard = LeasedShard(
            self._session,
            lease,
            count=count,
            span=span,
            handover=self.handover,
            view=self.view_of(number, None),  # None: the view of the shard, not of a column
            columns=self._columns(number, iter(others)),
            join_facts=join_facts,
            replaceable=is_fresh and manifest.is_replaceable,
        )
        # The next piece of the plan is sent after the request for the shard, so as not to delay it.
        # With the plan's first shard, no piece is sent, since the reader is waiting for that shard.
        if lease.position > 0:
            self._session.extend()
        self._taken.append(leased_shard)
        return leased_shard

    def _columns(self, number: int, leases: Iterator[LeaseRequest]) -> list[JoinedColumn]:
        """Return the columns that are joined with a shard.

        Args:
            number: the shard's number in the manifest.
            leases: one lease for each shard of the columns, in their order.
        """
        manifest = self._plan.manifest
        columns: list[JoinedColumn] = []
        for prefix, numbers in manifest.joined_to(number).items():
            view = self.view_of(number, prefix)
            shards = []
            for joined_number in numbers:
                leased_shard = LeasedShard(
                    self._session,
                    next(leases),
                    count=manifest.planned[joined_number].samples,
                    handover=self.handover,
                    view=view,
                )
                shards.append(leased_shard)
            columns.append(JoinedColumn(view, shards))
        return columns

    def give_back(self, leased_shard: LeasedShard) -> None:
        """Release a shard, now or as soon as every process has received the samples sent to it."""
        self._taken.remove(leased_shard)
        self._given_back.append(leased_shard)
        self.release_settled()

    def empty(self) -> None:
        """Release everything, at the end of the epoch or when the rest is no longer wanted.

        With a handover, the files that other processes have yet to map stay mapped by this process,
        and the cache does not evict mapped files.
        """
        for leased_shard in (*self._taken, *self._given_back):
            leased_shard.close()
        self._taken.clear()
        self._given_back.clear()
        self._session.on_wait = None
        while self._ahead:
            for lease in self._ahead.popleft():
                self._session.release(lease)

    def release_settled(self) -> None:
        """Release the shards that were given back and whose samples have all arrived."""
        if self.handover is not None:
            self.handover.settle()  # releases files that were lent in earlier epochs
        settled = [leased_shard for leased_shard in self._given_back if leased_shard.is_settled]
        for leased_shard in settled:
            self._given_back.remove(leased_shard)
            leased_shard.close()
