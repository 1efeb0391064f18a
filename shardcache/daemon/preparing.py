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

# If a store that needs an SDK is configured, such as S3, the daemon serves only once that is loaded
# and a transport worker is up, so that a reader's first batch takes as long as any other. These
# limit that wait, and the one for credentials, which may come over the network.
_PREPARED_WITHIN_S = 10.0
_CREDENTIALS_WITHIN_S = 1.0
# Otherwise the SDKs are loaded later: a job with other urls waits for something else at first.
_SDKS_AFTER_S = 1.0
# One transport worker is enough for the first requests: the others start later.
_OTHER_WORKERS_AFTER_S = 5.0


async def start_preparing(
    group: asyncio.TaskGroup,
    origins: Origins,
    indexers: Indexers,
) -> list[asyncio.Task[None]]:
    """Start the preparation, and return its tasks.

    If a store with an SDK is configured, returns once it is prepared, or after the time limits.
    """
    preparation = group.create_task(_prepare(origins, indexers))
    credentials = group.create_task(_obtain_credentials(origins, preparation))
    if origins.prepared_urls:
        await asyncio.wait([preparation], timeout=_PREPARED_WITHIN_S)
        await asyncio.wait([credentials], timeout=_CREDENTIALS_WITHIN_S)
    return [preparation, credentials]


async def prepare_later(origins: Origins) -> None:
    """Prepare the SDKs and workers that the first readers hardly need, after a pause."""
    await asyncio.sleep(_SDKS_AFTER_S)
    if not origins.prepared_urls:
        await _attempt("SDKs", _load_sdks())
    await asyncio.sleep(_OTHER_WORKERS_AFTER_S - _SDKS_AFTER_S)
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


async def _attempt(subject: str, preparation: Coroutine[Any, Any, None]) -> None:
    """Await a preparation; if it fails, log why."""
    # With any exception: SDKs raise all kinds of them over the user's config files.
    outcomes = await asyncio.gather(preparation, return_exceptions=True)
    failure = outcomes[0]
    if failure is not None:
        log.debug("preparation failed", what=subject, cause=repr(failure))


async def _load_sdks() -> None:
    """Load the SDKs, and freeze their many objects."""
    with building():
        await Origins.load_sdks()
