"""Preparation for the first reader: processes, packages and credentials, side by side.

Nothing that fails here ends the daemon: the request that needs it fails again, and tells its
reader.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from shardcache.daemon.garbage_collection import building
from shardcache.origin.registry import Origins
from shardcache.store.indexing.indexers import Indexers

log = structlog.get_logger()

# Where a store with an SDK is configured, as S3 has, the daemon serves once that is loaded and a
# transport worker is up: a reader's first batch then takes as long as any. These are the limits on
# that, and on the credentials, which may come from far away.
_PREPARED_WITHIN_S = 10.0
_CREDENTIALS_WITHIN_S = 1.0
# Where nothing says that such a store will be used, its SDK is loaded after what a job with other
# urls waits for at first.
_UNCONFIGURED_S = 1.0
# At first, a daemon that is started for a job has other things to do than to start more transport
# workers.
_OTHERS_AFTER_S = 5.0


async def start_preparing(
    group: asyncio.TaskGroup,
    origins: Origins,
    indexers: Indexers,
) -> list[asyncio.Task[None]]:
    """Start to prepare, and return the tasks that do.

    If a store with an SDK is configured, returns once it is prepared, or the limits are over.
    """
    preparation = group.create_task(_prepare(origins, indexers))
    credentials = group.create_task(_obtain_credentials(origins, preparation))
    if origins.prepared_urls:
        await asyncio.wait([preparation], timeout=_PREPARED_WITHIN_S)
        await asyncio.wait([credentials], timeout=_CREDENTIALS_WITHIN_S)
    return [preparation, credentials]


async def prepare_later(origins: Origins) -> None:
    """Prepare what the first readers hardly need."""
    await asyncio.sleep(_UNCONFIGURED_S)
    if not origins.prepared_urls:
        await _attempt("SDKs", _load_sdks())
    await asyncio.sleep(_OTHERS_AFTER_S - _UNCONFIGURED_S)
    await _attempt("transport workers", origins.start_other_workers())


async def _prepare(origins: Origins, indexers: Indexers) -> None:
    """Start processes, and load the SDK of a store that is configured, side by side."""
    preparations = [
        _attempt("transport worker", origins.start_worker()),
        _attempt("indexer", indexers.prepare()),
    ]
    if origins.prepared_urls:
        preparations.append(_attempt("SDKs", _load_sdks()))
    await asyncio.gather(*preparations)


async def _obtain_credentials(origins: Origins, preparation: asyncio.Task[None]) -> None:
    """Obtain the credentials of stores that are configured, once their SDKs are loaded."""
    await asyncio.wait([preparation])
    await _attempt("credentials", origins.prepare_credentials())


async def _attempt(what: str, preparation: Coroutine[Any, Any, None]) -> None:
    # Not by type: SDKs raise what they like over the user's files.
    for outcome in await asyncio.gather(preparation, return_exceptions=True):
        if outcome is not None:
            log.debug("preparation failed", what=what, cause=repr(outcome))


async def _load_sdks() -> None:
    """Load the SDKs, and freeze their many objects."""
    with building():
        await Origins.load_sdks()
