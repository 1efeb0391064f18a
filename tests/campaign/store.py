"""A store that misbehaves in every way that HTTP allows: right shards or typed errors, and all is well afterwards."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from campaign.harness import Result, Row, scaled
from campaign.store_place import HANG_S, PART_BYTES, Reading, StorePlace, shard
from support.programs.daemon import eventually
from support.stores.mischief import Mischief

_SHARDS, _LEAST_SHARDS = 24, 4
# Beyond what a store that hangs may cost the readers of cached shards, far below a wait for each of them.
_PROMPT_S = 10.0
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
# Of the kinds that differ little to a reader, the quick tests play one; tests of web servers play each.
_QUICK = {Mischief.STALL, Mischief.ERROR_AS_200, Mischief.FLIP, Mischief.HEAD_SILENCE, Mischief.LENGTH_NONE}


@contextmanager
def ground(folder: Path, scale: float) -> Iterator[StorePlace]:
    """Run a store, a proxy before it and a daemon that has read all, and so seen of what kind the store's ETags are."""
    with ExitStack() as stack:
        place = StorePlace(folder, scaled(_SHARDS, scale, _LEAST_SHARDS), stack)
        eventually(lambda: not place.read(Result("nothing")), limit_s=HANG_S)
        yield place


def spoiled(
    kinds: Sequence[Mischief], share: float, full: int, place: StorePlace, result: Result, scale: float
) -> None:
    """Spoil a share of the answers in some ways."""
    for _ in _until(lambda: place.proxy.done.total(), result, scaled(full, scale)):
        place.evict()
        for mischief in kinds:
            place.proxy.fail(mischief, share=share)
        place.recover(result, place.read(result))


def listings(place: StorePlace, result: Result, scale: float) -> None:
    """Spoil answers to listings: the whole list or a typed error."""
    for _ in _until(lambda: place.proxy.done.total(), result, scaled(150, scale, 10)):
        for mischief in _OF_LISTINGS:
            place.proxy.fail(mischief, key="", share=_SHARE / len(_OF_LISTINGS))
        for _ in range(_READS_OF_LISTINGS):
            place.list_all(result)
        place.proxy.heal()
    if not place.list_all(result):
        result.fail("lost", "a healed store is not listed")


def dataset(place: StorePlace, result: Result, scale: float) -> None:
    """Have a dataset read while answers are spoiled; what it went on without comes when it is asked for again."""
    kinds = [mischief for mischief in Mischief if mischief not in _WRONG_BYTES]
    for _ in _until(lambda: place.proxy.done.total(), result, scaled(600, scale, 10)):
        place.evict()
        for mischief in kinds:
            place.proxy.fail(mischief, share=_SHARE / len(kinds))
        reading = Reading(place, result)
        reading.epoch()
        place.proxy.heal()
        reading.make_up()


def replaced(place: StorePlace, result: Result, scale: float) -> None:
    """Replace objects between two of their ranges: what is read is one version or the other."""
    for edition in count(1):
        place.evict()
        for number in range(len(place.keys)):
            place.replace(number, shard(number, edition=edition), before=2 * PART_BYTES, result=result)
        place.recover(result, place.read(result))
        place.settle()
        place.recover(result, place.read(result))  # the new edition, and nothing else
        if result.injected >= scaled(60, scale):
            break


def hanging(place: StorePlace, result: Result, scale: float) -> None:
    """Have the store answer nothing while all shards are cached: they are served promptly, and new editions later."""
    for _ in _until(lambda: place.proxy.done[Mischief.HEAD_SILENCE], result, scaled(20, scale)):
        place.recover(result, place.read(result))
        place.proxy.fail(Mischief.HEAD_SILENCE)
        begun_s = time.monotonic()
        for failure in place.read(result):
            result.fail("lost", f"{failure.url} is cached and failed: {failure.error}")
        if (took_s := time.monotonic() - begun_s) > _PROMPT_S:
            result.fail("hangs", f"{len(place.urls)} cached shards took {took_s:.0f} s")
        place.proxy.heal()
        _notice(place, result)


def _notice(place: StorePlace, result: Result) -> None:
    """Replace a cached shard, and take the time until the daemon has an answer again and serves the new edition."""
    former, healed_s = place.bodies[0], time.monotonic()
    for body in (shard(0, edition=1), former):
        place.bodies[0] = body
        place.put(0, body)
        try:
            eventually(lambda: _is_current(place, 0), limit_s=HANG_S)
        except TimeoutError:
            result.fail("hangs", f"a healed store is not asked for {place.urls[0]}")
    result.recovery_s.append(time.monotonic() - healed_s)


def _is_current(place: StorePlace, number: int) -> bool:
    look = Result("nothing")
    return not place.read(look, [number]) and not look.wrong


def _until(done: Callable[[], int], result: Result, least: int) -> Iterator[None]:
    """Yield until so many faults have happened more than now, and keep their number in the result."""
    before = done()
    while result.injected < least:
        yield
        result.injected = done() - before


ROWS = (
    *(Row(kind.value, partial(spoiled, [kind], _SHARE, 125), slow=kind not in _QUICK) for kind in Mischief),
    Row("any of these at random", partial(spoiled, list(Mischief), 2 * _SHARE / len(Mischief), 600)),
    Row("any of these, to a listing", listings),
    Row("any of these, to samples that are read as they arrive", dataset),
    Row("a store that hangs while all shards are cached", hanging),
    Row("the object replaced between two ranges", replaced),
)
