"""The shards that one reader has in hand, the next one ahead of them, and those that other processes still look for."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from shardcache_client.daemon.lender import Lender
from shardcache_client.daemon.session import Lease
from shardcache_client.reading.passage import Passage

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover


class Hands:
    """Takes the shards of a declared plan one after another and gives them back in any order.

    Args:
        reads: how many positions the plan has for this epoch.
        partial: whether a shard's beginning will do; None: as the session was told.
    """

    def __init__(self, session: Lender, reads: int, *, partial: bool | None, handover: Handover | None) -> None:
        self._session = session
        self._reads = reads
        self._partial = partial
        self._handover = handover
        self._ahead: deque[Lease] = deque()
        self._asked = 0
        self._taken: list[Passage] = []
        self._leaving: list[Passage] = []
        session.meanwhile = self.let_go  # it may be what others wait for, whom we wait for

    def __repr__(self) -> str:
        return f"Hands(taken={len(self._taken)}, leaving={len(self._leaving)}, asked={self._asked}/{self._reads})"

    def ask(self, ahead: int) -> None:
        """Have so many shards made ready, those asked for before included."""
        while len(self._ahead) < ahead and self._asked < self._reads:
            self._ahead.append(self._session.lease(self._asked, partial=self._partial))
            self._asked += 1

    def take(self, count: int | None, span: tuple[int, int | None] | None = None) -> Passage:
        """Return the next shard, to be opened: `count` and `span` as `Passage` has them."""
        self.ask(1)
        self.let_go()
        passage = Passage(self._session, self._ahead.popleft(), count=count, span=span, handover=self._handover)
        self._session.extend()  # behind the request for a shard, which so begins to come
        self._taken.append(passage)
        return passage

    def give_back(self, passage: Passage) -> None:
        """Let go of a shard, now or as soon as every process has found what it was sent of it."""
        self._taken.remove(passage)
        self._leaving.append(passage)
        self.let_go()

    def empty(self) -> None:
        """Let go of everything: the epoch is over, or nobody wants the rest of it.

        What other processes have still to find stays mapped by its samples, and so in place, see `handover`.
        """
        for passage in (*self._taken, *self._leaving):
            passage.close()
        self._taken, self._leaving = [], []
        self._session.meanwhile = None
        while self._ahead:
            self._session.release(self._ahead.popleft())

    def let_go(self) -> None:
        """Let go of what was given back and has been found by every process that was sent something of it."""
        if self._handover is not None:
            self._handover.settle()  # also what an earlier epoch left
        staying = [passage for passage in self._leaving if not passage.settled]
        for passage in self._leaving:
            if passage not in staying:
                passage.close()
        self._leaving = staying
