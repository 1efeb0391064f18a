"""Pinned urls, and the version that each of them keeps in the cache.

A pin keeps a shard from eviction. It is on a url, not on a version: when a new version arrives, the
new version is kept in place of the old one. A pin is valid whether or not its shard is cached yet.
It belongs to the users who made it, and lasts until the last of them removes it. Pins are in a file
of their own, so they outlast restarts, and the loss of the cache folder's database.

`Cache.pin` and `Cache.unpin` change the pins. `Residency` reports each shard that arrives.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import structlog

from shardcache.cache.waiting.turns import Turns
from shardcache.config.amounts import DiskAmount
from shardcache.shared.exceptions import CacheError, CapacityError
from shardcache.shared.units import size, user_name
from shardcache.shared.urls.url_names import is_stored_as_is
from shardcache.shared.wording.redact import HIDDEN
from shardcache.store.disk.finishing import finished
from shardcache.store.folder.pins_file import Pin, read_pins, write_pins
from shardcache.store.keys import is_key_of_own_bytes
from shardcache.store.shard import Shard
from shardcache.store.store import Store

log = structlog.get_logger()

# Minimum interval between saves in the background. Every save writes all pins, and the new versions
# of a whole dataset arrive one after another, so many changes are saved at once.
_SAVE_INTERVAL_S = 5.0


class Pins:
    """All pins: the users who made each, the version that it keeps, and the limit of all.

    `Residency` asks this class which of the cached shards must not be evicted.

    Args:
        store: the cache folder, which has the file with the pins.
        turns: divides changes of many pins into short turns on the event loop.
        limit: limit of the size of all pinned shards together.
    """

    def __init__(self, store: Store, turns: Turns, limit: DiskAmount) -> None:
        self._store = store
        self._turns = turns
        self._limit_bytes = limit.of(store.space.capacity_bytes)
        self._by_url: dict[str, Pin] = {}
        self._url_by_key: dict[str, str] = {}  # by the key of the pinned version
        self._size_bytes = 0  # size of all pinned shards together
        self._report: Callable[[str], None] = lambda key: None  # does nothing until `watch`
        self._unsaved = asyncio.Event()  # set while the file lacks a change
        # Held while a change is checked and written, so that changes are made one after another.
        self._changing = asyncio.Lock()
        # During a change, the shards that have arrived since it began; None at other times.
        self._arrivals: list[Shard] | None = None
        for pin in read_pins(store.layout):
            shard = store.shards.get(pin.key)
            if shard is None:
                self._put(pin.url, pin)
            else:  # the size in the file is an estimate if it was saved before the shard arrived
                self._put(pin.url, replace(pin, size_bytes=shard.kept_bytes))
        if self._size_bytes > self._limit_bytes:
            log.warning("pins exceed their limit; all are kept", **self.to_json())

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._by_url.values()))  # a copy: pins may change during the iteration

    def watch(self, report: Callable[[str], None]) -> None:
        """Call `report` with every pinned key, and with each that is pinned or unpinned later."""
        self._report = report
        for key in self._url_by_key:
            report(key)

    def get(self, url: str) -> Pin | None:
        """Return the pin on a url, if there is one."""
        return self._by_url.get(url)

    def is_pinned(self, key: str) -> bool:
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

        If several pins are on one url, the last of them counts. After CapacityError or DiskError,
        nothing has changed.
        """
        async with self._changing:
            last_by_url = {pin.url: pin for pin in wanted}
            pins = list(last_by_url.values())
            self._check_growth(sum(self._growth_bytes(pin) for pin in pins))
            previous = await self._change(pins, self._joined)
            return {url for url, pin in previous.items() if pin is None}

    async def remove(self, pins: Sequence[Pin], uid: int | None) -> dict[str, Pin | None]:
        """Remove a user from pins; return, for each url, the pin that remains, or None.

        A pin remains if other users have it, too. After DiskError, nothing has changed.

        Args:
            pins: the pins.
            uid: id of the user; None to remove all users.
        """

        def without_user(pin: Pin) -> Pin | None:
            """Return what is left of the present pin on this pin's url."""
            present = self._by_url.get(pin.url)
            return None if present is None else _without(present, uid)

        async with self._changing:
            await self._change(pins, without_user)
            return {pin.url: self._by_url.get(pin.url) for pin in pins}

    def arrived(self, shard: Shard) -> None:
        """Keep a cached shard if its url is pinned, in place of the version kept so far.

        If the shard would exceed the limit of all pins, its url is unpinned instead.
        """
        if self._arrivals is not None:
            self._arrivals.append(shard)
        self._keep_if_pinned(shard)

    def _keep_if_pinned(self, shard: Shard) -> None:
        """Make a cached shard the version that the pin on its url keeps; see `arrived`."""
        pin = self._pin_on(shard)
        # A pin keeps the form of a shard that readers of samples use, such as the decompressed tar.
        # The compressed tar may be cached as well, under another key, but is not pinned.
        if pin is None or _is_unconverted(shard):
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
        # The shard's url is in its sidecar, which has not been read since a restart. But if this
        # version is pinned, its pin has the url.
        url = self._url_by_key.get(shard.key)
        if url is None:
            return None
        return self._by_url.get(url)

    def schedule_save(self) -> None:
        """Have all pins saved soon."""
        self._unsaved.set()

    async def run(self) -> None:
        """Save the pins soon after each `schedule_save`; after an error, try again later.

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
        """Save pending changes now. After DiskError, `run` tries again later."""
        async with self._changing:
            if self._unsaved.is_set():
                await self._write()

    async def _change(
        self,
        pins: Sequence[Pin],
        replacement: Callable[[Pin], Pin | None],
    ) -> dict[str, Pin | None]:
        """Replace pins, and save all; return the previous pins, by url.

        If the replacements cannot be saved, the previous pins are put back.

        Args:
            pins: the pins.
            replacement: returns the pin to put in a pin's place; None to remove the pin.
        """
        previous: dict[str, Pin | None] = {}

        def replace_each(piece: Sequence[Pin]) -> None:
            """Replace some of the pins, and remember the previous ones."""
            for pin in piece:
                previous.setdefault(pin.url, self._by_url.get(pin.url))
                self._put(pin.url, replacement(pin))

        # If the task is cancelled before `_write`, the pins replaced so far stay, and `run` saves
        # them.
        self._unsaved.set()
        arrivals: list[Shard] = []
        self._arrivals = arrivals
        try:
            # The pins may be those of a whole dataset, so they are replaced piece by piece.
            await self._turns.take(pins, replace_each)
            await self._write()
        except CacheError:
            for url, pin in previous.items():
                self._put(url, pin)
            # The previous pins have the versions from before these shards arrived.
            for shard in arrivals:
                self._keep_if_pinned(shard)
            raise
        finally:
            self._arrivals = None
        return previous

    async def _write(self) -> None:
        """Write the file. If the task is cancelled, wait for the end of the writing first."""
        # This comes before the writing: a shard that arrives during it needs another save.
        self._unsaved.clear()
        pins = list(self._by_url.values())
        try:
            # The next save uses the same temporary file, so this one has to end before.
            await finished(asyncio.to_thread(write_pins, self._store.layout, pins))
        except (CacheError, asyncio.CancelledError):
            self._unsaved.set()
            raise

    def _check_growth(self, growth_bytes: int) -> None:
        """Raise CapacityError if the pins would grow beyond their limit.

        After a restart with a lower limit, they may be beyond it already. They may only shrink
        then.
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
        """Return the number of bytes that a wanted pin would add to the size of all pins."""
        previous = self._by_url.get(pin.url)
        if previous is None:
            return pin.size_bytes
        return self._joined(pin).size_bytes - previous.size_bytes

    def _joined(self, pin: Pin) -> Pin:
        """Return a new pin combined with the pin that is on its url already, if there is one.

        The combined pin has the users of both. It keeps the previous version if that is cached,
        otherwise the version of the new pin.
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
        """Set the pin on a url, in place of the one that may be there. This does not save.

        Args:
            url: the url.
            pin: the pin; None to remove the one that is there.
        """
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
        # The previous version may be unpinned now, and the other one pinned.
        keys = {each.key for each in (previous, pin) if each is not None}
        for key in keys:
            self._report(key)


def _is_unconverted(shard: Shard) -> bool:
    """Return whether a shard is an object's own bytes, and samples are read from another form."""
    facts = shard.facts
    if facts is None:  # its pin was found by its key, so it is the form that the pin keeps
        return False
    if HIDDEN in facts.url:
        # The key is a hash of the url with its secret, which was removed from this url. So the form
        # is inferred: an object's own bytes have the size in the origin, and no index of samples.
        has_own_bytes = facts.samples is None and facts.size_bytes == facts.origin_bytes
        return has_own_bytes and not is_stored_as_is(facts.url)
    return is_key_of_own_bytes(shard.key, facts.url, facts.version)


def _without(pin: Pin, uid: int | None) -> Pin | None:
    """Return a pin without a user; None if no other user has it, or `uid` is None for all users."""
    if uid is None:
        return None
    uids = pin.uids - {uid}
    if not uids:
        return None
    return replace(pin, uids=uids)


def describe_pin(pin: Pin) -> str:
    """Return a sentence for users: who pinned a shard, and how to remove the pin."""
    users = ", ".join(user_name(uid) for uid in sorted(pin.uids))
    return f"pinned by user {users}; `shardcache unpin` removes the pin"
