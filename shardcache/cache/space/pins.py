"""Pinned urls, and the version that each of them keeps in the cache.

A pin is on a url, not on a version: when a new version arrives, it is kept in place of the old
one. A pin is valid whether or not its shard is cached yet. It belongs to the users who made it and
lasts until the last one removes it, through restarts and the loss of the catalogue.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import structlog

from shardcache.cache.waiting.turns import Turns
from shardcache.config.amounts import DiskAmount
from shardcache.errors import CacheError, CapacityError
from shardcache.shared.units import size, user_name
from shardcache.store.folder.pins_file import Pin, read_pins, write_pins
from shardcache.store.shard import Shard
from shardcache.store.store import Store

log = structlog.get_logger()

# Every save writes all pins, so changes are batched: new versions of a whole dataset arrive one
# after another.
_SAVE_INTERVAL_S = 5.0


class Pins:
    """All pins: by whom, of which version, within which limit.

    `Residency` keeps the cached ones in place.
    """

    def __init__(self, store: Store, turns: Turns, limit: DiskAmount) -> None:
        self._store = store
        self._turns = turns
        self._limit_bytes = limit.of(store.space.capacity_bytes)
        self._by_url: dict[str, Pin] = {}
        self._url_by_key: dict[str, str] = {}  # by the key of the pinned version
        self._size_bytes = 0  # of all pins together
        self._report: Callable[[str], None] = lambda key: None
        self._unsaved = asyncio.Event()  # set while the file lacks a change
        self._changing = asyncio.Lock()  # each change is checked and written after the one before
        for pin in read_pins(store.layout):
            shard = store.shards.get(pin.key)
            if shard is None:
                self._put(pin.url, pin)
            else:
                self._put(pin.url, replace(pin, size_bytes=shard.kept_bytes))
        if self._size_bytes > self._limit_bytes:
            log.warning("pins exceed their limit; all are kept", **self.to_json())

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._by_url.values()))

    def watch(self, report: Callable[[str], None]) -> None:
        """Call `report` with every pinned key, and with each that is pinned or unpinned later."""
        self._report = report
        for key in self._url_by_key:
            report(key)

    def get(self, url: str) -> Pin | None:
        """Return the pin on a url, if there is one."""
        return self._by_url.get(url)

    def has_version(self, key: str) -> bool:
        """Return whether this version of a shard is pinned, cached or not."""
        return key in self._url_by_key

    def to_json(self) -> dict[str, int]:
        """Return the number of pins, how many of their shards are missing, and their total size."""
        return {
            "shards": len(self._by_url),
            "missing": len(self._url_by_key.keys() - self._store.shards.keys()),
            "size_bytes": self._size_bytes,
            "limit_bytes": self._limit_bytes,
        }

    async def add(self, wanted: Sequence[Pin]) -> set[str]:
        """Add pins; return the urls that were not pinned before.

        Of several on one url, the last counts. Raises CapacityError, DiskError, changing nothing.
        """
        async with self._changing:
            last_by_url = {pin.url: pin for pin in wanted}
            growth_bytes = sum(self._growth_bytes(pin) for pin in last_by_url.values())
            self._check_growth(growth_bytes)
            previous = await self._change(wanted, self._joined)
        return {url for url, pin in previous.items() if pin is None}

    async def remove(self, pins: Sequence[Pin], uid: int | None) -> dict[str, Pin | None]:
        """Remove a user from pins; return those that remain by url, None for any other url.

        Raises DiskError, changing nothing.

        Args:
            uid: None to remove all users.
        """
        async with self._changing:
            await self._change(pins, lambda pin: _without(self._by_url.get(pin.url), uid))
        return {pin.url: self._by_url.get(pin.url) for pin in pins}

    def arrived(self, shard: Shard) -> None:
        """Keep a cached shard if its url is pinned, in place of the version kept so far.

        One that would exceed the limit is unpinned instead.
        """
        pin = self._pin_on(shard)
        if pin is None:
            return
        try:
            self._check_growth(shard.kept_bytes - pin.size_bytes)
        except CapacityError as exn:
            log.warning(
                "shard has grown beyond the pin limit; unpinned",
                shard=pin.url,
                cause=exn.message,
            )
            self._put(pin.url, None)
        else:
            self._put(pin.url, replace(pin, key=shard.key, size_bytes=shard.kept_bytes))
        self.schedule_save()

    def _pin_on(self, shard: Shard) -> Pin | None:
        """Return the pin on a shard's url, if there is one."""
        if shard.facts is not None:
            return self._by_url.get(shard.facts.url)
        # Since a restart, its sidecar has not been read. If this version is pinned, the pin has its
        # url.
        url = self._url_by_key.get(shard.key)
        if url is None:
            return None
        return self._by_url.get(url)

    def schedule_save(self) -> None:
        """Have all pins saved soon."""
        self._unsaved.set()

    async def run(self) -> None:
        """Save the pins soon after each `schedule_save`, and after changes that failed to be saved.

        Runs until cancelled, then saves once more.
        """
        was_logged = False  # True once the present failure is in the log
        try:
            while True:
                await self._unsaved.wait()
                try:
                    await self.save()
                    was_logged = False
                except CacheError as exn:
                    if not was_logged:
                        log.warning("cannot save the pins; retrying later", cause=exn.message)
                    was_logged = True
                await asyncio.sleep(_SAVE_INTERVAL_S)
        finally:
            with contextlib.suppress(CacheError):
                await self.save()

    async def save(self) -> None:
        """Save pending changes now. Raises DiskError; the save is then retried later."""
        async with self._changing:
            if self._unsaved.is_set():
                await self._write()

    async def _change(
        self,
        pins: Sequence[Pin],
        replacement: Callable[[Pin], Pin | None],
    ) -> dict[str, Pin | None]:
        """Put each pin's replacement in its place, and save; return the previous pins, by url.

        If the replacements cannot be saved, the previous ones are put back.
        """
        previous: dict[str, Pin | None] = {}

        def replace_each(piece: Sequence[Pin]) -> None:
            for pin in piece:
                previous.setdefault(pin.url, self._by_url.get(pin.url))
                self._put(pin.url, replacement(pin))

        self._unsaved.set()  # first: if this task is cancelled, replaced pins are saved later
        await self._turns.take(pins, replace_each)  # of a whole dataset: not all at once
        try:
            await self._write()
        except CacheError:
            for url, pin in previous.items():
                self._put(url, pin)
            raise
        return previous

    async def _write(self) -> None:
        """Write the file, to the end even if this task is cancelled meanwhile."""
        self._unsaved.clear()  # first: a shard that arrives meanwhile needs another save
        pins = list(self._by_url.values())
        writing = asyncio.create_task(asyncio.to_thread(write_pins, self._store.layout, pins))
        try:
            await asyncio.shield(writing)
        except (CacheError, asyncio.CancelledError):
            self._unsaved.set()
            await asyncio.wait([writing])  # the next writer uses the same temporary file
            writing.exception()  # or asyncio would log that nobody has looked at it
            raise

    def _check_growth(self, growth_bytes: int) -> None:
        """Raise CapacityError if the pins would grow beyond their limit.

        They may be beyond it already, after a restart with a lower one; then they may only shrink.
        """
        pinned_bytes = self._size_bytes + growth_bytes
        if growth_bytes > 0 and pinned_bytes > self._limit_bytes:
            limit = size(self._limit_bytes)
            raise CapacityError(
                f"the pins would take {size(pinned_bytes)}; their limit is {limit}, "
                "because the rest of the cache is for unpinned shards",
                remedy="pin less, remove pins with `shardcache unpin` (`shardcache pin` lists "
                "them), or restart the daemon with a larger --capacity or --max-pinned",
            )

    def _growth_bytes(self, pin: Pin) -> int:
        """Return how much a wanted pin would add to the pinned bytes."""
        previous = self._by_url.get(pin.url)
        if previous is None:
            return pin.size_bytes
        return self._joined(pin).size_bytes - previous.size_bytes

    def _joined(self, pin: Pin) -> Pin:
        """Return the pin on a url and an added one as one pin, with the users of both.

        Of their two versions, it has the one to keep for now.
        """
        previous = self._by_url.get(pin.url)
        if previous is None:
            return pin
        uids = previous.uids | pin.uids
        # A cached version stays pinned until the origin's present version has arrived.
        if previous.key in self._store.shards:
            return replace(previous, uids=uids)
        return replace(pin, uids=uids)

    def _put(self, url: str, pin: Pin | None) -> None:
        """Replace the pin on a url, if there is one; with None, remove it. Does not save."""
        previous = self._by_url.get(url)
        if previous is not None:
            self._size_bytes -= previous.size_bytes
            self._url_by_key.pop(previous.key, None)
        if pin is None:
            self._by_url.pop(url, None)
        else:
            self._size_bytes += pin.size_bytes
            self._by_url[url] = pin
            self._url_by_key[pin.key] = url
        keys = {each.key for each in (previous, pin) if each is not None}
        for key in keys:
            self._report(key)


def _without(pin: Pin | None, uid: int | None) -> Pin | None:
    """Return a pin without a user, or without all of them; None if nobody is left."""
    if pin is None or uid is None:
        return None
    uids = pin.uids - {uid}
    if not uids:
        return None
    return replace(pin, uids=uids)


def pinned_by(pin: Pin) -> str:
    """Return a human-readable statement of the users who pinned a shard."""
    users = ", ".join(user_name(uid) for uid in sorted(pin.uids))
    return f"pinned by user {users}; `shardcache unpin` removes the pin"
