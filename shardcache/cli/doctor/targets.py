"""Which urls are tried: those given, else one for each store that the daemon has read from or has a table for."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from shardcache.cli.client import AdminClient
from shardcache.cli.doctor.case import Case
from shardcache.errors import OriginUnavailableError
from shardcache.origin.listing import expand
from shardcache.origin.registry import Origins
from shardcache.origin.urls import INDEX_SUFFIX, SHARD_SUFFIXES, WEB, protocol_of, store_of
from shardcache.redact import HIDDEN

# Of what is cached, so many rows are looked at for stores; and a listing has so long to come to its end.
_MOST_ROWS = 10_000
_LISTING_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Target:
    """What to try: a shard, or what stands for shards; and where that was found."""

    url: str
    source: str


async def targets(case: Case) -> list[Target]:
    """Return them, in the order given, or by store. Nothing is asked of any store yet."""
    if case.urls:
        return [Target(url, "given on the command line") for url in case.urls]
    tables = () if case.settings is None else (table.match for table in case.settings.origin)
    found = [Target(url, "cached by the daemon") for url in await _cached(case)]
    found += [Target(place, "the `match` of a table") for match in tables if (place := _place(match))]
    return list({store_of(target.url): target for target in reversed(found)}.values())[::-1]


async def _cached(case: Case) -> list[str]:
    """Return the url of a shard for each store of which any is cached."""
    if case.running is None:
        return []
    stores: dict[str, str] = {}
    async with AdminClient(case.socket) as daemon, aclosing(daemon.shards("")) as rows:
        seen = 0
        async for row in rows:
            if _can_be_asked(row["url"]):
                stores.setdefault(store_of(row["url"]), row["url"])
            seen += 1
            if seen == _MOST_ROWS:
                break
    return list(stores.values())


def _can_be_asked(url: str) -> bool:
    """Whether it is more than a name: a signature that was left out, or another process's memory, opens nothing."""
    return HIDDEN not in url and protocol_of(url) != "memory"


def _place(match: str) -> str | None:
    """Return what of a table's prefix can be listed; None for a whole protocol, and for the web, which has no lists."""
    _, separator, path = match.partition("://")
    if not separator or not path.strip("/") or protocol_of(match) in WEB:
        return match if match.endswith((*SHARD_SUFFIXES, INDEX_SUFFIX)) else None
    return match + "/" if "/" not in path else match[: match.rindex("/") + 1]


async def shard_of(target: Target, origins: Origins) -> str:
    """Return the url of one shard that a target stands for. Raises what `expand` does."""
    listed = 0

    def received(count: int) -> None:
        nonlocal listed
        listed += count

    try:
        async with asyncio.timeout(_LISTING_LIMIT_S):
            refs = await expand(target.url, origins, received)
    except TimeoutError:
        raise OriginUnavailableError(
            f"its listing did not end within {_LISTING_LIMIT_S:g} s, after {listed:,} objects",
            url=target.url,
            remedy="give the url of one shard; for training, make an index file once: shardcache index",
        ) from None
    return refs[0].url
