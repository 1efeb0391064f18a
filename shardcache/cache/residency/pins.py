"""Pinned urls and the shard that each of them keeps in the cache.

A pin is on a url, not on a version: when a new version arrives, it is kept in place of the old one. A pin is valid
whether or not its shard is cached yet. It belongs to the users who made it and lasts until the last one removes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import structlog

from shardcache.cache.loop_turns import Turns
from shardcache.cache.residency.inventory import Inventory
from shardcache.config import Amount
from shardcache.errors import CacheError, CapacityError
from shardcache.store.pinfile import Pin, write_pins
from shardcache.store.shard import Shard
from shardcache.store.store import Store
from shardcache.units import size, user_name

log = structlog.get_logger()

# Every save writes all pins, so changes are batched: new versions of a whole dataset arrive one after another.
_COLLECT_S = 5.0


class Pins:
    """All pins: by whom, of which version, within which limit. The inventory keeps the cached ones in place.

    Args:
        most: limit on the total size of all pins; a percentage is relative to the capacity.
    """

    def __init__(self, store: Store, inventory: Inventory, turns: Turns, most: Amount) -> None:
        self._store = store
        self._inventory = inventory
        self._turns = turns
        self._most = most
        self._pins: dict[str, Pin] = {}
        self._urls: dict[str, str] = {}
        self._size_bytes = 0
        self._unsaved = asyncio.Event()
        self._is_failing = False
        self._changing = asyncio.Lock()  # each change is checked, and the file written, after the one before it
        self._recall()

    def _recall(self) -> None:
        """Restore the pins saved by the previous run."""
        for pin in self._store.pins:
            shard = self._store.shards.get(pin.key)
            self._apply(pin.url, pin if shard is None else replace(pin, size_bytes=shard.kept_bytes))
        if self._size_bytes > self.limit_bytes:
            log.warning("pins exceed their limit; all are kept", **self.to_json())

    def __repr__(self) -> str:
        return f"Pins({len(self._pins)}, {self._size_bytes} of {self.limit_bytes} bytes)"

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._pins.values()))

    def get(self, url: str) -> Pin | None:
        """Return the pin on a url, if there is one."""
        return self._pins.get(url)

    def names(self, key: str) -> bool:
        """Return whether this version of a shard is pinned, cached or not."""
        return key in self._urls

    def is_here(self, pin: Pin) -> bool:
        """Return whether the pinned shard is cached."""
        return pin.key in self._inventory.pinned

    @property
    def limit_bytes(self) -> int:
        """Limit on the total size of all pins."""
        return self._most.of(self._store.space.capacity_bytes)

    def to_json(self) -> dict[str, int]:
        """Return the number of pinned shards, how many of them are missing, their total size and its limit."""
        sizes = {"size_bytes": self._size_bytes, "limit_bytes": self.limit_bytes}
        return {"shards": len(self._pins), "missing": len(self._pins) - len(self._inventory.pinned), **sizes}

    # User operations

    async def add(self, wanted: Sequence[Pin]) -> set[str]:
        """Add pins, each for the users that it names; return the urls that were not pinned before.

        Raises CapacityError if the total would exceed the limit, DiskError if the pins cannot be saved; nothing has
        changed then.
        """
        former = await self._change(wanted, self._joined)
        return {url for url, pin in former.items() if pin is None}

    async def remove(self, pins: Sequence[Pin], uid: int | None) -> dict[str, Pin | None]:
        """Remove one user from pins, or all users if `uid` is None; return what remains of each pin, by url.

        Raises DiskError if the pins cannot be saved; nothing has changed then.
        """
        await self._change(pins, lambda pin: _without(self._pins.get(pin.url), uid))
        return {pin.url: self._pins.get(pin.url) for pin in pins}

    def _check_growth(self, growth_bytes: int) -> None:
        pinned_bytes, limit_bytes = self._size_bytes + growth_bytes, self.limit_bytes
        if growth_bytes > 0 and pinned_bytes > limit_bytes:
            pinned, limit = map(size, (pinned_bytes, limit_bytes))
            raise CapacityError(
                f"pins would take {pinned}, more than their limit of {limit}; the rest is for unpinned shards",
                remedy="pin less, remove pins with `shardcache unpin` (`shardcache pin` lists them), or restart the "
                "daemon with a larger --capacity or --max-pinned",
            )

    # Shard events

    def arrived(self, shard: Shard) -> None:
        """Keep a newly cached shard if its url is pinned; the version kept until now becomes evictable."""
        url = self._urls.get(shard.key) if shard.facts is None else shard.facts.url
        pin = None if url is None else self._pins.get(url)
        if pin is None:
            return
        present = replace(pin, key=shard.key, size_bytes=shard.kept_bytes)
        try:
            self._check_growth(present.size_bytes - pin.size_bytes)
        except CapacityError as exn:
            log.warning("shard has grown beyond the pin limit; unpinned", shard=url, cause=exn.message)
            self._apply(pin.url, None)
            self.note()
        else:
            self._apply(pin.url, present)
        if present.key != pin.key:  # a size alone need not be saved: it is read from the shard at the next start
            self.note()

    def note(self) -> None:
        """Schedule a save of all pins."""
        self._unsaved.set()

    async def run(self) -> None:
        """Save the pins after changes caused by arriving shards; runs until cancelled, then saves once more."""
        try:
            while True:
                await self._unsaved.wait()
                await self._try_to_save()
                await asyncio.sleep(_COLLECT_S)
        finally:
            await self._try_to_save()

    async def save(self) -> None:
        """Save pending changes now. Raises DiskError; the save is then retried later."""
        async with self._changing:
            if self._unsaved.is_set():
                await self._write(dict(self._pins))

    async def _try_to_save(self) -> None:
        try:
            await self.save()
        except CacheError as exn:  # retried later
            if not self._is_failing:
                log.warning("cannot save the pins; retrying later", cause=exn.message)
            self._is_failing = True

    def _joined(self, pin: Pin) -> Pin:
        former = self._pins.get(pin.url)
        if former is None:
            return pin
        # A cached version stays pinned until the origin's present version has arrived.
        return replace(former if self.is_here(former) else pin, uids=former.uids | pin.uids)

    async def _change(self, pins: Sequence[Pin], become: Callable[[Pin], Pin | None]) -> dict[str, Pin | None]:
        """Save what `become` makes of each pin, then apply it; return the former pins, by url.

        `become` is called once more to apply the change: the shard may have arrived in between.
        """
        async with self._changing:
            new: dict[str, Pin | None] = {}
            await self._turns.take(pins, lambda some: new.update((pin.url, become(pin)) for pin in some))
            former = {url: self._pins.get(url) for url in new}
            if new != former:
                self._check_growth(_size_bytes(new) - _size_bytes(former))
                await self._write(self._pins | new)
                try:
                    await self._turns.take(pins, lambda some: self._apply_all(some, become, new))
                except asyncio.CancelledError:
                    self.note()
                    raise
            return former

    def _apply_all(
        self, pins: Sequence[Pin], become: Callable[[Pin], Pin | None], saved: Mapping[str, Pin | None]
    ) -> None:
        for pin in pins:
            present = become(pin)
            self._apply(pin.url, present)
            if present != saved[pin.url]:  # the shard came or went since then
                self.note()

    async def _write(self, pins: Mapping[str, Pin | None]) -> None:
        self._unsaved.clear()
        writing = asyncio.create_task(asyncio.to_thread(write_pins, self._store.layout, filter(None, pins.values())))
        try:
            await asyncio.shield(writing)
        except (CacheError, asyncio.CancelledError):
            self._unsaved.set()
            await asyncio.wait([writing])  # the next writer uses the same temporary file
            writing.exception()
            raise
        self._is_failing = False

    def _apply(self, url: str, pin: Pin | None) -> None:
        former = self._pins.get(url)
        if former is not None:
            self._size_bytes -= former.size_bytes
            self._urls.pop(former.key, None)
            if pin is None or pin.key != former.key:
                self._inventory.unpin(former.key)
        if pin is None:
            self._pins.pop(url, None)
        else:
            self._size_bytes += pin.size_bytes
            self._pins[url], self._urls[pin.key] = pin, url
            self._inventory.pin(pin.key)


def _size_bytes(pins: Mapping[str, Pin | None]) -> int:
    return sum(pin.size_bytes for pin in pins.values() if pin is not None)


def _without(pin: Pin | None, uid: int | None) -> Pin | None:
    uids = frozenset() if pin is None or uid is None else pin.uids - {uid}
    return replace(pin, uids=uids) if pin is not None and uids else None


def pinned_by(pin: Pin) -> str:
    """Return a human-readable statement of the users who pinned a shard."""
    return f"pinned by user {', '.join(map(user_name, sorted(pin.uids)))}; `shardcache unpin` removes the pin"
