"""Urls to probe: those given, else one per origin of cached shards and one per [[origin]] table."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardcache.access.protocols import WEB
from shardcache.access.urls import INDEX_SUFFIX, SHARD_SUFFIXES, protocol_of, store_of
from shardcache.config import OriginTable
from shardcache.errors import OriginUnavailableError
from shardcache.origin.listing import expand
from shardcache.origin.registry import Origins
from shardcache.redact import HIDDEN

_LISTING_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """A shard or a pattern for shards, and where its url comes from."""

    url: str
    source: str


def targets(urls: Sequence[str], tables: Sequence[OriginTable], cached: Iterable[str] = ()) -> list[ProbeTarget]:
    """Return the given urls in order, else one target per origin. Sends no request.

    Args:
        urls: urls given by the user.
        tables: the settings' [[origin]] tables.
        cached: urls of cached shards.
    """
    if urls:
        return [ProbeTarget(url, "given on the command line") for url in urls]
    found = [ProbeTarget(place, "the `match` of a table") for table in tables if (place := _place(table.match))]
    by_store = {store_of(target.url): target for target in reversed(found)}
    for url in cached:
        if _can_be_asked(url):
            by_store[store_of(url)] = ProbeTarget(url, "cached by the daemon")
    return list(by_store.values())[::-1]


def _can_be_asked(url: str) -> bool:
    """Return whether the url can be fetched: not with its signature redacted, nor from another process's memory."""
    return HIDDEN not in url and protocol_of(url) != "memory"


def _place(match: str) -> str | None:
    """Return the listable part of a table's prefix; None for a whole protocol, and for http, which has no listings."""
    _, separator, path = match.partition("://")
    if not separator or not path.strip("/") or protocol_of(match) in WEB:
        return match if match.endswith((*SHARD_SUFFIXES, INDEX_SUFFIX)) else None
    return match + "/" if "/" not in path else match[: match.rindex("/") + 1]


async def shard_of(target: ProbeTarget, origins: Origins) -> str:
    """Return the url of one shard that the target matches. Raises as `expand` does."""
    listed = 0

    def received(count: int) -> None:
        nonlocal listed
        listed += count

    try:
        async with asyncio.timeout(_LISTING_LIMIT_S):
            refs = await expand(target.url, origins, received)
    except TimeoutError:
        raise OriginUnavailableError(
            f"its listing did not finish in {_LISTING_LIMIT_S:g} s, after {listed:,} objects",
            url=target.url,
            remedy="give the url of one shard; for training, create an index file once: shardcache index",
        ) from None
    return refs[0].url
