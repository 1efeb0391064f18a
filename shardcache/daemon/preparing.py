"""Preparation for the first reader: processes, packages and credentials.

They are prepared concurrently when the daemon starts. A failure here does not end the daemon: the
first request that needs what is missing fails with the same error, which its reader then gets. An
SDK is a store's package, such as s3fs for S3, which takes long to import.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from shardcache.daemon.garbage_collection import creating_long_lived_objects
from shardcache.origin.registry import Origins
from shardcache.store.indexing.indexers import Indexers

log = structlog.get_logger()

# If a store that needs an SDK is configured, such as S3, the daemon waits for the SDK and for a
# transport worker before it serves, at most for this time. A reader's first batch then takes as
# long as any other.
_PREPARED_WITHIN_S = 10.0
# After that, it waits at most for this time for credentials, which may come over the network.
_CREDENTIALS_WITHIN_S = 1.0
# If no such store is configured, the SDKs are loaded after this time: the first job probably needs
# none, and must not wait for them.
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
    there, or after the time limits. Otherwise it returns immediately.
    """
    preparation = group.create_task(_prepare(origins, indexers))
    credentials = group.create_task(_obtain_credentials(origins, preparation))
    if origins.urls_to_prepare:
        await asyncio.wait([preparation], timeout=_PREPARED_WITHIN_S)
        await asyncio.wait([credentials], timeout=_CREDENTIALS_WITHIN_S)
    return [preparation, credentials]


async def prepare_later(origins: Origins) -> None:
    """Prepare, after a pause, the SDKs and workers that the first readers hardly need."""
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
    # `gather` returns an exception of any kind in place of the result. SDKs raise all kinds for
    # faults in users' config files.
    results = await asyncio.gather(preparation, return_exceptions=True)
    failure = results[0]
    if failure is not None:
        log.debug("preparation failed", what=subject, cause=repr(failure))


async def _load_sdks() -> None:
    """Load the SDKs, and exclude their many objects from garbage collection."""
    with creating_long_lived_objects():
        await Origins.load_sdks()
