"""A store that misbehaves in every way that HTTP allows: right shards or typed errors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path

from campaign.harness import Result, Row, scaled
from campaign.store_place import (
    PART_BYTES,
    AzurePlace,
    GooglePlace,
    HubPlace,
    Reading,
    StorePlace,
    shard,
)
from support.stores.mischief import Mischief

_SHARDS = 24
_LEAST_SHARDS = 4
# Half of the answers: some parts come at the first try, some later, and some shards not at all.
_SHARE = 0.5
# What a listing can tell to be wrong: it has no checksum, and no ranges.
_OF_LISTINGS = (
    Mischief.STALL,
    Mischief.SILENCE,
    Mischief.LATE,
    Mischief.DRIP,
    Mischief.RESET,
    Mischief.RESET_AT_ONCE,
    Mischief.TRUNCATE,
    Mischief.HALF_HEAD,
    Mischief.LENGTH_LESS,
    Mischief.LENGTH_MORE,
    Mischief.LENGTH_NONE,
    Mischief.INTERNAL_ERROR,
    Mischief.SLOW_DOWN,
    Mischief.TOO_MANY,
    Mischief.FORBIDDEN,
    Mischief.TIMEOUT,
    Mischief.ERROR_AS_200,
    Mischief.EMPTY,
    Mischief.GARBAGE,
    Mischief.ENDLESS_HEAD,
)
_READS_OF_LISTINGS = 20
_Act = Callable[[StorePlace, Result, float], None]
# Of the kinds that differ little to a reader, the quick tests play one; tests of web servers play
# each.
_QUICK = {Mischief.ERROR_AS_200, Mischief.FLIP, Mischief.HEAD_SILENCE}


@contextmanager
def ground(folder: Path, scale: float) -> Iterator[StorePlace]:
    """Run a store, a proxy before it, and a daemon that knows the store's kind of ETags."""
    with ExitStack() as stack:
        yield StorePlace(folder, scaled(_SHARDS, scale, _LEAST_SHARDS), stack)


def spoiled(
    kinds: Sequence[Mischief],
    share: float,
    full: int,
    place: StorePlace,
    result: Result,
    scale: float,
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
    """Have a dataset read while answers are spoiled; what failed comes when asked for again."""
    kinds = [mischief for mischief in Mischief if mischief not in place.wrong_bytes]
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
            place.replace(
                number, shard(number, edition=edition), before=2 * PART_BYTES, result=result
            )
        place.recover(result, place.read(result))
        place.settle()
        place.recover(result, place.read(result))  # the new edition, and nothing else
        if result.injected >= scaled(60, scale):
            break


def _elsewhere(
    kind: type[StorePlace], act: _Act, place: StorePlace, result: Result, scale: float
) -> None:
    act(place.other(kind), result, scale)


def _rows(kind: type[StorePlace], module: str) -> Iterator[Row]:
    """Yield the rows of another store, whose package may be missing."""
    skip = "" if find_spec(module) else f"{module} is not installed"
    kinds = [mischief for mischief in Mischief if kind is not HubPlace or mischief.method == "GET"]
    acts: dict[str, _Act] = {
        mischief.value: partial(spoiled, [mischief], _SHARE, 50) for mischief in kinds
    }
    acts["any of these, to samples that are read as they arrive"] = dataset
    if kind is not HubPlace:  # there, a url leads to one version
        acts["the object replaced between two ranges"] = replaced
    acts["any of these at random"] = partial(spoiled, kinds, 2 * _SHARE / len(kinds), 600)
    for fault, act in acts.items():
        yield Row(
            f"{kind.prefix[:5]} {fault}", partial(_elsewhere, kind, act), slow=True, skip=skip
        )


def _until(done: Callable[[], int], result: Result, least: int) -> Iterator[None]:
    """Yield until so many more faults have happened, and keep their number in the result."""
    before = done()
    while result.injected < least:
        yield
        result.injected = done() - before


ROWS = (
    *(
        Row(kind.value, partial(spoiled, [kind], _SHARE, 125), slow=kind not in _QUICK)
        for kind in Mischief
    ),
    Row(
        "any of these at random", partial(spoiled, list(Mischief), 2 * _SHARE / len(Mischief), 600)
    ),
    Row("any of these, to a listing", listings, slow=True),
    Row("any of these, to samples that are read as they arrive", dataset),
    Row("the object replaced between two ranges", replaced),
    *_rows(GooglePlace, "gcsfs"),
    *_rows(AzurePlace, "adlfs"),
    *_rows(HubPlace, "huggingface_hub"),
)
