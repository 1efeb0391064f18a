"""Map of the cached shards: one cell per shard, coloured by its next use, updated incrementally.

Looking up every shard in every plan each second would take a tenth of a CPU core at ten thousand shards. The colours
are coarse, so each is updated every few seconds, in turn; new, evicted and leased shards show immediately.

A page is sent what changed: all cells would be 1.5 MB of JSON, 0.25 MB compressed, and 20 ms of a core, each time.
"""

from __future__ import annotations

import bisect
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardcache.cache.loop_turns import Turns
from shardcache.cache.planner import Planner
from shardcache.plan.schedule import Schedule
from shardcache.plan.timeline import NEVER
from shardcache.redact import redact
from shardcache.store.shard import Facts, Shard
from shardcache.store.store import Store

# Bands: needed within this many seconds; after these, needed later; then in no plan.
BANDS_S = (60.0, 300.0, 900.0, 3600.0)
LEASED, UNPLANNED = -1, len(BANDS_S) + 1

# As many cells as a picture can show; a larger cache is shown in part.
_MOST_CELLS = 20_000
_LOOKED_AT = 1_024
_REMEMBERED = 20_000
# After this long without a refresh, all colours are out of date.
_FORGOTTEN_S = 15.0
# After a restart only the shards' keys are known: each refresh reads sidecars for this long.
_READING_S = 0.5
_READ_AT_ONCE = 256

Sight = Callable[[str], bool]


@dataclass(slots=True, eq=False)
class Cell:
    """One shard of the map.

    Attributes:
        number: id of the cell in all updates.
        band: next use: an index into `BANDS_S`, the index after it for later, `LEASED` or `UNPLANNED`.
        pinned: True if the shard is pinned.
        round: number of the refresh that last changed the cell.
    """

    number: int
    shard: Shard
    url: str
    band: int
    pinned: bool
    round: int


class ShardMap:
    """The cells and their recent changes."""

    def __init__(self, store: Store, planner: Planner, turns: Turns) -> None:
        self._store = store
        self._planner = planner
        self._turns = turns
        self._run = secrets.token_hex(4)
        self._round = 0  # completed refreshes
        self._looked_at_s = -math.inf
        self._shards = 0  # cached at the last refresh, shown or not
        self._numbers = 0
        self._cells: dict[str, Cell] = {}  # most recently changed last
        self._gone: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)  # round, number
        self._to_look_at: deque[Cell] = deque()
        self._unreadable: set[str] = set()

    def __repr__(self) -> str:
        return f"ShardMap(cells={len(self._cells)}, round={self._round})"

    @property
    def mark(self) -> str:
        """Mark to pass to `changes` later for the changes since the last refresh."""
        return f"{self._run}.{self._round}"

    # Updating

    @property
    def complete(self) -> bool:
        """True if the map shows all that it can; false after a restart, until all sidecars have been read."""
        return len(self._cells) + len(self._unreadable) >= min(len(self._store.shards), _MOST_CELLS)

    async def look(self) -> None:
        """Refresh the map."""
        self._shards = len(self._store.shards)
        due = self._take_stock() + self._in_turn()
        await self._turns.take(due, self._tint)
        await self._add_new()
        self._round += 1

    def _in_turn(self) -> list[Cell]:
        """Return the cells with the oldest colours; all cells after a long time without a refresh."""
        former_s, self._looked_at_s = self._looked_at_s, time.monotonic()
        if self._looked_at_s - former_s > _FORGOTTEN_S:
            return list(self._cells.values())
        if not self._to_look_at:
            self._to_look_at.extend(self._cells.values())
        return [self._to_look_at.popleft() for _ in range(min(_LOOKED_AT, len(self._to_look_at)))]

    def _take_stock(self) -> list[Cell]:
        """Drop the cells of shards no longer cached; return the cells that are out of date."""
        shards, old, gone = self._store.shards, [], []
        for cell in self._cells.values():
            shard = cell.shard
            if shards.get(shard.key) is not shard:
                gone.append(cell)
            elif (shard.leases > 0) != (cell.band == LEASED) or shard.pinned != cell.pinned:
                old.append(cell)
        for cell in gone:
            del self._cells[cell.shard.key]
            self._gone.append((self._round + 1, cell.number))
        self._unreadable &= shards.keys()
        return old

    async def _add_new(self) -> None:
        shards = self._store.shards
        new = [shards[key] for key in shards.keys() - self._cells.keys() - self._unreadable]
        del new[_MOST_CELLS - len(self._cells) :]
        await self._turns.take([(shard, shard.facts) for shard in new if shard.facts is not None], self._add)
        await self._add_unread([shard for shard in new if shard.facts is None])

    async def _add_unread(self, new: Sequence[Shard]) -> None:
        until_s = time.monotonic() + _READING_S
        for first in range(0, len(new), _READ_AT_ONCE):
            some = new[first : first + _READ_AT_ONCE]
            await self._turns.take(list(zip(some, await self._store.peek(some), strict=True)), self._add)
            if time.monotonic() > until_s:
                return

    def _add(self, found: Iterable[tuple[Shard, Facts | None]]) -> None:
        now = self._planner.now
        for shard, facts in found:
            if facts is None:  # damaged: its next use or check quarantines it
                self._unreadable.add(shard.key)
                continue
            self._numbers += 1
            band = self._band(shard, now)
            self._cells[shard.key] = Cell(self._numbers, shard, facts.url, band, shard.pinned, self._round + 1)

    def _tint(self, cells: Iterable[Cell]) -> None:
        now = self._planner.now
        for cell in cells:
            band, pinned = self._band(cell.shard, now), cell.shard.pinned
            if (band, pinned) != (cell.band, cell.pinned) and self._cells.get(cell.shard.key) is cell:
                cell.band, cell.pinned, cell.round = band, pinned, self._round + 1
                self._cells[cell.shard.key] = self._cells.pop(cell.shard.key)

    @staticmethod
    def _band(shard: Shard, now: Schedule) -> int:
        if shard.leases:
            return LEASED
        use_s = now.next_use_s(shard.key)
        return UNPLANNED if use_s == NEVER else bisect.bisect_left(BANDS_S, use_s - now.now_s)

    # Reporting

    async def changes(self, mark: str, sight: Sight) -> dict[str, Any]:
        """Return the changes since a mark; all cells, with `whole` set, if the mark is unknown or too old.

        `cells` are rows of number, band, url, size in bytes, and 1 if pinned; cells whose urls `sight` rejects are
        omitted.
        """
        since, now = self._round_of(mark), self.mark
        rows: list[list[Any]] = []
        changed = list(self._changed(since))
        gone = [number for round_, number in self._gone if since is not None and round_ > since]

        def tell(cells: Iterable[Cell]) -> None:
            rows.extend(self._row(cell) for cell in cells if sight(cell.url))

        await self._turns.take(changed, tell)
        return {"mark": now, "whole": since is None, "shards": self._shards, "cells": rows, "gone": gone}

    def _round_of(self, mark: str) -> int | None:
        run, _, number = mark.partition(".")
        if run != self._run or not number.isdecimal():
            return None
        full = len(self._gone) == self._gone.maxlen
        since = int(number)
        return None if since > self._round or (full and since < self._gone[0][0]) else since

    def _changed(self, since: int | None) -> Iterator[Cell]:
        for cell in reversed(self._cells.values()):
            if since is not None and cell.round <= since:
                return
            yield cell

    @staticmethod
    def _row(cell: Cell) -> list[Any]:
        return [cell.number, cell.band, redact(cell.url), cell.shard.size_bytes, int(cell.pinned)]
