"""Pinned urls, the version that each of them keeps in the cache, and the file with a line of JSON for each.

A pin is on a url, not on a version: when a new version arrives, it is kept in place of the old one. A pin is valid
whether or not its shard is cached yet. It belongs to the users who made it and lasts until the last one removes it,
through restarts and the loss of the catalogue.
"""

import asyncio
import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import structlog

from shardcache.cache.waits import Turns
from shardcache.config import Amount
from shardcache.errors import CacheError, CapacityError
from shardcache.store.disk.disk_errors import disk_error, disk_errors, is_exhaustion
from shardcache.store.disk.file_operations import replace_file
from shardcache.store.folder.layout import Layout
from shardcache.store.keys import is_key
from shardcache.store.shard import Shard
from shardcache.store.store import Store
from shardcache.units import size, user_name

log = structlog.get_logger()

# Every save writes all pins, so changes are batched: new versions of a whole dataset arrive one after another.
_COLLECT_S = 5.0


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned shard."""

    url: str  # redacted as in its sidecar
    key: str  # of the pinned version
    size_bytes: int  # in the cache; an estimate until it is cached
    uids: frozenset[int]  # the users who pinned it

    def to_line(self) -> str:
        """Return the pin's line in the file, a JSON array."""
        return json.dumps([self.url, self.key, self.size_bytes, sorted(self.uids)]) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Pin | None":
        """Return the pin of a line; None if it is damaged."""
        with contextlib.suppress(ValueError):
            match json.loads(line):
                case [str(url), str(key), int(size_bytes), [*uids]] if is_key(key) and size_bytes >= 0 and uids:
                    if all(type(uid) is int for uid in uids):
                        return cls(url, key, size_bytes, frozenset(uids))
        return None


class Pins:
    """All pins: by whom, of which version, within which limit. `Residency` keeps the cached ones in place."""

    def __init__(self, store: Store, turns: Turns, limit: Amount) -> None:
        self._store = store
        self._turns = turns
        self._limit_bytes = limit.of(store.space.capacity_bytes)
        self._pins: dict[str, Pin] = {}
        self._urls: dict[str, str] = {}  # by key
        self._size_bytes = 0
        self._changed: Callable[[str], None] = lambda key: None
        self._unsaved = asyncio.Event()
        self._changing = asyncio.Lock()  # each change is checked and written after the one before it
        for pin in read_pins(store.layout):
            shard = store.shards.get(pin.key)
            self._apply(pin.url, pin if shard is None else replace(pin, size_bytes=shard.kept_bytes))
        if self._size_bytes > self._limit_bytes:
            log.warning("pins exceed their limit; all are kept", **self.to_json())

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._pins.values()))

    def watch(self, changed: Callable[[str], None]) -> None:
        """Call `changed` with every pinned key, now, and with each that is pinned or unpinned later."""
        self._changed = changed
        for key in self._urls:
            changed(key)

    def get(self, url: str) -> Pin | None:
        """Return the pin on a url, if there is one."""
        return self._pins.get(url)

    def has(self, key: str) -> bool:
        """Return whether this version of a shard is pinned, cached or not."""
        return key in self._urls

    def to_json(self) -> dict[str, int]:
        """Return the number of pinned shards, how many of them are missing, their total size and its limit."""
        missing = len(self._urls.keys() - self._store.shards.keys())
        sizes = {"size_bytes": self._size_bytes, "limit_bytes": self._limit_bytes}
        return {"shards": len(self._pins), "missing": missing, **sizes}

    async def add(self, wanted: Sequence[Pin]) -> set[str]:
        """Add pins; return the urls that were not pinned before. Raises CapacityError, DiskError, changing nothing."""
        async with self._changing:
            by_url = {pin.url: pin for pin in wanted}
            self._check_growth(sum(map(self._growth_bytes, by_url.values())))
            previous = await self._change(wanted, self._joined)
        return {url for url, pin in previous.items() if pin is None}

    async def remove(self, pins: Sequence[Pin], uid: int | None) -> dict[str, Pin | None]:
        """Remove one user, or all, from pins; return what remains, by url. Raises DiskError, changing nothing."""
        async with self._changing:
            await self._change(pins, lambda pin: _without(self._pins.get(pin.url), uid))
        return {pin.url: self._pins.get(pin.url) for pin in pins}

    def arrived(self, shard: Shard) -> None:
        """Keep a newly cached shard if its url is pinned; the version kept until now becomes evictable."""
        url = self._urls.get(shard.key) if shard.facts is None else shard.facts.url
        pin = None if url is None else self._pins.get(url)
        if pin is None:
            return
        present: Pin | None = replace(pin, key=shard.key, size_bytes=shard.kept_bytes)
        try:
            self._check_growth(shard.kept_bytes - pin.size_bytes)
        except CapacityError as exn:
            log.warning("shard has grown beyond the pin limit; unpinned", shard=url, cause=exn.message)
            present = None
        self._apply(pin.url, present)
        self.schedule_save()

    def schedule_save(self) -> None:
        """Have all pins saved soon."""
        self._unsaved.set()

    async def run(self) -> None:
        """Save the pins after changes caused by arriving shards; runs until cancelled, then saves once more."""
        failing = False
        try:
            while True:
                await self._unsaved.wait()
                try:
                    await self.save()
                    failing = False
                except CacheError as exn:
                    if not failing:
                        log.warning("cannot save the pins; retrying later", cause=exn.message)
                    failing = True
                await asyncio.sleep(_COLLECT_S)
        finally:
            with contextlib.suppress(CacheError):
                await self.save()

    async def save(self) -> None:
        """Save pending changes now. Raises DiskError; the save is then retried later."""
        async with self._changing:
            if self._unsaved.is_set():
                await self._write()

    async def _change(self, pins: Sequence[Pin], become: Callable[[Pin], Pin | None]) -> dict[str, Pin | None]:
        """Apply what `become` makes of each pin, and save; return the previous pins, by url. On an error, undo it."""
        previous: dict[str, Pin | None] = {}

        def apply(some: Sequence[Pin]) -> None:
            for pin in some:
                previous.setdefault(pin.url, self._pins.get(pin.url))
                self._apply(pin.url, become(pin))

        self._unsaved.set()
        await self._turns.take(pins, apply)
        try:
            await self._write()
        except CacheError:
            for url, pin in previous.items():
                self._apply(url, pin)
            raise
        return previous

    async def _write(self) -> None:
        self._unsaved.clear()
        pins = list(self._pins.values())
        writing = asyncio.create_task(asyncio.to_thread(write_pins, self._store.layout, pins))
        try:
            await asyncio.shield(writing)
        except (CacheError, asyncio.CancelledError):
            self._unsaved.set()
            await asyncio.wait([writing])  # the next writer uses the same temporary file
            writing.exception()
            raise

    def _check_growth(self, growth_bytes: int) -> None:
        pinned_bytes = self._size_bytes + growth_bytes
        if growth_bytes > 0 and pinned_bytes > self._limit_bytes:
            pinned, limit = map(size, (pinned_bytes, self._limit_bytes))
            raise CapacityError(
                f"pins would take {pinned}, more than their limit of {limit}; the rest is for unpinned shards",
                remedy="pin less, remove pins with `shardcache unpin` (`shardcache pin` lists them), or restart the "
                "daemon with a larger --capacity or --max-pinned",
            )

    def _growth_bytes(self, pin: Pin) -> int:
        previous = self._pins.get(pin.url)
        return pin.size_bytes if previous is None else self._joined(pin).size_bytes - previous.size_bytes

    def _joined(self, pin: Pin) -> Pin:
        previous = self._pins.get(pin.url)
        if previous is None:
            return pin
        # A cached version stays pinned until the origin's present version has arrived.
        return replace(previous if previous.key in self._store.shards else pin, uids=previous.uids | pin.uids)

    def _apply(self, url: str, pin: Pin | None) -> None:
        previous = self._pins.get(url)
        if previous is not None:
            self._size_bytes -= previous.size_bytes
            self._urls.pop(previous.key, None)
        if pin is None:
            self._pins.pop(url, None)
        else:
            self._size_bytes += pin.size_bytes
            self._pins[url], self._urls[pin.key] = pin, url
        for key in {each.key for each in (previous, pin) if each is not None}:
            self._changed(key)


def _without(pin: Pin | None, uid: int | None) -> Pin | None:
    uids = frozenset() if pin is None or uid is None else pin.uids - {uid}
    return replace(pin, uids=uids) if pin is not None and uids else None


def pinned_by(pin: Pin) -> str:
    """Return a human-readable statement of the users who pinned a shard."""
    return f"pinned by user {', '.join(map(user_name, sorted(pin.uids)))}; `shardcache unpin` removes the pin"


def read_pins(layout: Layout) -> list[Pin]:
    """Return the pins that can be read; of a damaged file a copy is kept. Blocks. Raises ExhaustedError."""
    aside = layout.pins.with_name(f"{layout.pins.name}.damaged")
    try:
        lines = layout.pins.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as exn:
        if is_exhaustion(exn):
            raise disk_error(exn, layout.pins) from exn
        log.error("cannot read pins; nothing is pinned", file=str(aside), cause=str(exn))
        with contextlib.suppress(OSError):  # the next pin must not overwrite the old file
            layout.pins.rename(aside)
        return []
    pins = [pin for line in lines if (pin := Pin.from_line(line)) is not None]
    if len(pins) < len(lines):
        log.error("pin file damaged; some pins lost", lost=len(lines) - len(pins), file=str(aside))
        with contextlib.suppress(OSError, CacheError):  # a disk that cannot be written: the next start logs it again
            shutil.copy(layout.pins, aside)
            write_pins(layout, pins)
    return pins


def write_pins(layout: Layout, pins: Iterable[Pin]) -> None:
    """Replace the pin file. Blocks. Raises DiskError, which leaves the old file intact."""
    with disk_errors(layout.pins):
        replace_file(layout.pins, layout.unfinished(layout.pins), (pin.to_line() for pin in pins))
