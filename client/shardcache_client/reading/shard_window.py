"""The window of shards that one reader holds, with the next one requested ahead and those that await a hand-over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardcache_client.daemon.session import LeaseRequest, Session
from shardcache_client.files.blocks import WHOLE, View
from shardcache_client.reading.leased_shard import LeasedShard

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover


def _whole(_shard: int) -> View:
    """Return the view of all members: the default."""
    return WHOLE


class ShardWindow:
    """Takes the shards of a declared plan one after another and releases them in any order.

    Args:
        reads: number of positions of the plan that belong to this epoch.
        partial: True if a shard's beginning will do; None: the session's default.
        handover: as for `LeasedShard`.
        view_of: returns the view for the LeasedShard of a shard, given its number in the manifest.
    """

    def __init__(
        self,
        session: Session,
        reads: int,
        *,
        partial: bool | None,
        handover: Handover | None,
        view_of: Callable[[int], View] = _whole,
    ) -> None:
        self._session = session
        self._reads = reads
        self._partial = partial
        self._handover = handover
        self._view_of = view_of
        self._ahead: deque[LeaseRequest] = deque()
        self._asked = 0
        self._taken: list[LeasedShard] = []
        self._leaving: list[LeasedShard] = []
        session.on_wait = self.let_go  # while we wait, others may be waiting for space that this frees

    def __repr__(self) -> str:
        return f"ShardWindow(taken={len(self._taken)}, leaving={len(self._leaving)}, asked={self._asked}/{self._reads})"

    def ask(self, ahead: int) -> None:
        """Request shards ahead until there are `ahead` of them, earlier requests included."""
        while len(self._ahead) < ahead and self._asked < self._reads:
            self._ahead.append(self._session.lease(self._asked, partial=self._partial))
            self._asked += 1

    def take(self, number: int, count: int | None, span: tuple[int, int | None] | None = None) -> LeasedShard:
        """Return the next shard, to be opened.

        Args:
            number: its number in the manifest.
            count, span: as for `LeasedShard`.
        """
        self.ask(1)
        self.let_go()
        leased_shard = LeasedShard(
            self._session,
            self._ahead.popleft(),
            count=count,
            span=span,
            handover=self._handover,
            view=self._view_of(number),
        )
        self._session.extend()  # after the request for the shard, so as not to delay it
        self._taken.append(leased_shard)
        return leased_shard

    def give_back(self, leased_shard: LeasedShard) -> None:
        """Release a shard, now or as soon as every process has received the samples sent to it."""
        self._taken.remove(leased_shard)
        self._leaving.append(leased_shard)
        self.let_go()

    def empty(self) -> None:
        """Release everything, at the end of the epoch or when the rest is no longer wanted.

        Files that other processes have yet to map stay mapped by their samples, and so stay cached; see `handover`.
        """
        for leased_shard in (*self._taken, *self._leaving):
            leased_shard.close()
        self._taken, self._leaving = [], []
        self._session.on_wait = None
        while self._ahead:
            self._session.release(self._ahead.popleft())

    def let_go(self) -> None:
        """Release the shards given back whose samples have been received by every process they were sent to."""
        if self._handover is not None:
            self._handover.settle()  # including those of earlier epochs
        staying = [leased_shard for leased_shard in self._leaving if not leased_shard.settled]
        for leased_shard in self._leaving:
            if leased_shard not in staying:
                leased_shard.close()
        self._leaving = staying
