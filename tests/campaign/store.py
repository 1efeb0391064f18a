"""A store that misbehaves in every way that HTTP allows: right shards or typed errors, and all is well afterwards."""

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
_QUICK = {Mischief.ERROR_AS_200, Mischief.FLIP, Mischief.HEAD_SILENCE}


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


def _until(done: Callable[[], int], result: Result, least: int) -> Iterator[None]:
    """Yield until so many faults have happened more than now, and keep their number in the result."""
    before = done()
    while result.injected < least:
        yield
        result.injected = done() - before


ROWS = (
    *(Row(kind.value, partial(spoiled, [kind], _SHARE, 125), slow=kind not in _QUICK) for kind in Mischief),
    Row("any of these at random", partial(spoiled, list(Mischief), 2 * _SHARE / len(Mischief), 600)),
    Row("any of these, to a listing", listings, slow=True),
    Row("any of these, to samples that are read as they arrive", dataset),
    Row("the object replaced between two ranges", replaced),
)
