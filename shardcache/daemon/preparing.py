"""Preparation for the first reader: processes, packages and credentials.

They are prepared concurrently when the daemon starts. A failure here does not end the daemon: the
request that needs the failed part fails with the same error, and its reader gets that error. An SDK
is a store's package, such as s3fs for S3, which takes long to import.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from shardcache.daemon.garbage_collection import building
from shardcache.origin.registry import Origins
from shardcache.store.indexing.indexers import Indexers

log = structlog.get_logger()

# If a store that needs an SDK is configured, such as S3, the daemon waits for the SDK and for a
# transport worker before it serves, so that a reader's first batch takes as long as any other. The
# first limit is for that wait. The second is for credentials, which may come over the network.
_PREPARED_WITHIN_S = 10.0
_CREDENTIALS_WITHIN_S = 1.0
# If no such store is configured, the SDKs are loaded after this time: the first job probably reads
# other urls, and must not wait for the SDKs.
_SDKS_AFTER_S = 1.0
# One transport worker is enough for the first requests. The others start after this time.
_OTHER_WORKERS_AFTER_S = 5.0


async def start_preparing(
    group: asyncio.TaskGroup,
    origins: Origins,
    indexers: Indexers,
) -> list[asyncio.Task[None]]:
    """Start the preparation, and return its tasks.

    If a store with an SDK is configured, this returns once the SDK and the store's credentials are
    there, or after the time limits. Otherwise it returns at once.
    """
    preparation = group.create_task(_prepare(origins, indexers))
    credentials = group.create_task(_obtain_credentials(origins, preparation))
    if origins.urls_to_prepare:
        await asyncio.wait([preparation], timeout=_PREPARED_WITHIN_S)
        await asyncio.wait([credentials], timeout=_CREDENTIALS_WITHIN_S)
    return [preparation, credentials]


async def prepare_later(origins: Origins) -> None:
    """Prepare the SDKs and workers that the first readers hardly need, after a pause."""
    await asyncio.sleep(_SDKS_AFTER_S)
    if not origins.urls_to_prepare:
        await _attempt("SDKs", _load_sdks())
    await asyncio.sleep(_OTHER_WORKERS_AFTER_S - _SDKS_AFTER_S)
    await _attempt("transport workers", origins.start_other_workers())


async def _prepare(origins: Origins, indexers: Indexers) -> None:
    """Start processes, and load the SDKs if a store that needs one is configured."""
    preparations = [
        _attempt("transport worker", origins.start_worker()),
        _attempt("indexer", indexers.prepare()),
    ]
    if origins.urls_to_prepare:
        preparations.append(_attempt("SDKs", _load_sdks()))
    await asyncio.gather(*preparations)


async def _obtain_credentials(origins: Origins, preparation: asyncio.Task[None]) -> None:
    """Obtain the credentials of stores that are configured, once their SDKs are loaded."""
    await asyncio.wait([preparation])
    await _attempt("credentials", origins.prepare_credentials())


async def _attempt(subject: str, preparation: Coroutine[Any, Any, None]) -> None:
    """Await a preparation; if it fails, log why.

    Args:
        subject: name of the thing that is prepared, for the log.
    """
    # `gather` returns any exception in place of a result: SDKs raise all kinds of exceptions for
    # faults in users' config files.
    outcomes = await asyncio.gather(preparation, return_exceptions=True)
    failure = outcomes[0]  # the only preparation's
    if failure is not None:
        log.debug("preparation failed", what=subject, cause=repr(failure))


async def _load_sdks() -> None:
    """Load the SDKs, and exclude their many objects from garbage collection."""
    with building():
        await Origins.load_sdks()
