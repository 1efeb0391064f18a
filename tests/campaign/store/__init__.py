"""A store that misbehaves in every way that HTTP allows: right shards or typed errors, and all is well afterwards."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from campaign.result import Result
from campaign.store.place import HANG_S, PART, PART_BYTES, SAMPLES, StorePlace, shard
from campaign.store.reading import Reading
from campaign.store.secure import behind_tls
from support.disks.shim import HAS_CC
from support.programs.daemon import eventually
from support.stores.mischief import Mischief

MOST_SHARDS = 24
_EACH = 125  # of every kind at scale 1
_MIXED = 600
_LISTED = 150
_REPLACED = 60
_FORGOTTEN = 30
_SILENT = 250
_TRAILING = 120
_HANGING = 20
# Beyond what a store that hangs may cost the readers of cached shards, far below a wait for each of them.
_PROMPT_S = 10.0
_HOLE_BYTES = 4096
# Half of the answers: some parts come at the first try, some later, and some shards not at all.
_SHARE = 0.5

# Wrong samples are noticed when the shard is whole; who reads it as it arrives has had them by then.
_WRONG_BYTES = {Mischief.FLIP, Mischief.OTHER_BYTES}

# What a listing can tell to be wrong: it has no checksum, and no ranges.
_OF_LISTINGS = (
    *(Mischief.STALL, Mischief.SILENCE, Mischief.LATE, Mischief.DRIP, Mischief.RESET, Mischief.RESET_AT_ONCE),
    *(Mischief.TRUNCATE, Mischief.HALF_HEAD, Mischief.LENGTH_LESS, Mischief.LENGTH_MORE, Mischief.LENGTH_NONE),
    *(Mischief.INTERNAL_ERROR, Mischief.SLOW_DOWN, Mischief.TOO_MANY, Mischief.FORBIDDEN, Mischief.TIMEOUT),
    *(Mischief.ERROR_AS_200, Mischief.EMPTY, Mischief.GARBAGE, Mischief.ENDLESS_HEAD),
)
_READS_OF_LISTINGS = 20


def run(scale: float, folder: Path) -> Iterator[Result]:
    """Spoil answers of each kind by itself, then of all kinds at once, then replace shards while they are read."""
    shards = min(MOST_SHARDS, max(6, int(MOST_SHARDS * scale)))
    with StorePlace(folder, shards) as place:
        begin(place)
        for mischief in Mischief:
            yield one_kind(place, mischief, _scaled(_EACH, scale))
        yield all_kinds(place, _scaled(_MIXED, scale))
        yield listings(place, _scaled(_LISTED, scale))
        yield dataset(place, _scaled(_MIXED, scale))
        yield trailing(place, _scaled(_TRAILING, scale))
        yield hanging(place, _scaled(_HANGING, scale))
        yield replaced(place, _scaled(_REPLACED, scale))
        yield forgotten(place, _scaled(_FORGOTTEN, scale))
        yield from behind_tls(place, folder / "authorities", _scaled(_EACH, scale))
        if HAS_CC:
            yield silent_first(place, _scaled(_SILENT, scale))


def one_kind(place: StorePlace, mischief: Mischief, least: int) -> Result:
    """Spoil answers in one way, at least so many."""
    result = Result(PART, mischief.value)
    _spoil(place, [mischief], _SHARE, result, least)
    return result


def all_kinds(place: StorePlace, least: int) -> Result:
    """Spoil answers in all ways at once."""
    result = Result(PART, "any of these at random")
    _spoil(place, list(Mischief), 2 * _SHARE / len(Mischief), result, least)
    return result


def listings(place: StorePlace, least: int) -> Result:
    """Spoil answers to listings: the whole list or a typed error."""
    result = Result(PART, "any of these, to a listing")
    before = place.proxy.done.total()
    while result.injected < least:
        for mischief in _OF_LISTINGS:
            place.proxy.fail(mischief, key="", share=_SHARE / len(_OF_LISTINGS))
        for _ in range(_READS_OF_LISTINGS):
            place.list(result)
        place.proxy.heal()
        result.injected = place.proxy.done.total() - before
    if not place.list(result):
        result.fail("lost", "a healed store is not listed")
    return result


def dataset(place: StorePlace, least: int) -> Result:
    """Let a dataset read while answers are spoiled; what it went on without comes when it is asked for again."""
    result = Result(PART, "any of these, to samples that are read as they arrive")
    kinds = [mischief for mischief in Mischief if mischief not in _WRONG_BYTES]
    before = place.proxy.done.total()
    while result.injected < least:
        place.evict()
        for mischief in kinds:
            place.proxy.fail(mischief, share=_SHARE / len(kinds))
        reading = Reading(place, result)
        reading.epoch()
        place.proxy.heal()
        reading.make_up()
        result.injected = place.proxy.done.total() - before
    return result


def replaced(place: StorePlace, least: int) -> Result:
    """Replace objects between two of their ranges: what is read is one version or the other."""
    result, numbers = Result(PART, "the object replaced between two ranges"), range(len(place.keys))
    for edition in count(1):
        place.evict()
        for number in numbers:
            place.replace(number, shard(number, edition=edition), before=2 * PART_BYTES, result=result)
        place.recover(result, place.read(result))
        place.settle()
        place.recover(result, place.read(result))  # the new edition, and nothing else
        if result.injected >= least:
            break
    return result


def trailing(place: StorePlace, least: int) -> Result:
    """Store tars with data behind their end: each is a typed error, and comes once it is mended."""
    result = Result(PART, "a tar with a hole of zeros, or with a second tar behind it")
    while result.injected < least:
        place.evict()
        for number, body in enumerate(place.bodies):
            place.put(number, body + body if number // 2 % 2 else _with_hole(body))
        reading = Reading(place, result)
        reading.epoch()
        failures = place.read(result)
        result.injected += len(place.bodies)
        for number, body in enumerate(place.bodies):
            place.put(number, body)
        place.recover(result, failures)
        reading.make_up()
    return result


def hanging(place: StorePlace, least: int) -> Result:
    """Let the store answer nothing while all shards are cached: they are served promptly, and new editions later."""
    result = Result(PART, "a store that hangs while all shards are cached")
    before = place.proxy.done[Mischief.HEAD_SILENCE]
    while result.injected < least:
        place.recover(result, place.read(result))
        place.proxy.fail(Mischief.HEAD_SILENCE)
        begun_s = time.monotonic()
        for failure in place.read(result):
            result.fail("lost", f"{failure.url} is cached and failed: {failure.error}")
        if (took_s := time.monotonic() - begun_s) > _PROMPT_S:
            result.fail("hangs", f"{len(place.urls)} cached shards took {took_s:.0f} s")
        place.proxy.heal()
        _notice(place, result)
        result.injected = place.proxy.done[Mischief.HEAD_SILENCE] - before
    return result


def _notice(place: StorePlace, result: Result) -> None:
    """Replace a cached shard, and take the time until the daemon has an answer again and serves the new edition."""
    former, healed_s = place.bodies[0], time.monotonic()
    for body in (shard(0, edition=1), former):
        place.bodies[0] = body
        place.put(0, body)
        try:
            eventually(lambda: _is_current(place, 0), limit_s=HANG_S)
        except TimeoutError:
            result.fail("hangs", f"{result.fault}: a healed store is not asked for {place.urls[0]}")
    result.recovery_s.append(time.monotonic() - healed_s)


def _is_current(place: StorePlace, number: int) -> bool:
    """Read a shard; return whether it is the store's."""
    look = Result(PART, "nothing")
    return not place.read(look, [number]) and not look.wrong


def forgotten(place: StorePlace, least: int) -> Result:
    """Let all idle connections die without a word: each shard comes all the same, and none fails."""
    result = Result(PART, "idle connections that died silently")
    before = place.proxy.swallowed
    while result.injected < least:
        place.evict()
        place.proxy.forget()
        for failure in place.read(result):
            result.fail("lost", f"{failure.url} failed: {failure.error}")
        result.injected = place.proxy.swallowed - before
    return result


def silent_first(place: StorePlace, least: int) -> Result:
    """Let the store's name lead to a silent address first: each shard and each listing comes from the second."""
    result = Result(PART, "a host whose first address is silent")
    with place.silent_first() as lead:
        while result.injected < least:
            place.evict()
            place.proxy.forget()  # so that the daemon connects anew
            if not place.list(result):
                result.fail("lost", "the store is not listed")
            for failure in place.read(result):
                result.fail("lost", f"{failure.url} failed: {failure.error}")
            result.injected = lead.attempts
    return result


def begin(place: StorePlace) -> None:
    """Read all once while nothing is wrong: the daemon sees of what kind the store's ETags are."""
    eventually(lambda: not place.read(Result(PART, "nothing")), limit_s=HANG_S)


def _spoil(place: StorePlace, kinds: Sequence[Mischief], share: float, result: Result, least: int) -> None:
    before = place.proxy.done.total()
    while result.injected < least:
        place.evict()
        for mischief in kinds:
            place.proxy.fail(mischief, share=share)
        place.recover(result, place.read(result))
        result.injected = place.proxy.done.total() - before


def _with_hole(body: bytes) -> bytes:
    """Return a shard with zeros in place of a sample's header and a part of its data."""
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        at = tar.getmembers()[SAMPLES // 2].offset
    return body[:at] + bytes(_HOLE_BYTES) + body[at + _HOLE_BYTES :]


def _scaled(full: int, scale: float) -> int:
    return max(1, round(full * scale))
