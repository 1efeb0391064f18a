"""Changes that others make to the cache folder: shards that are gone from it, or back in it.

`DiskHealth` calls this when the folder has changed, for example because a user deleted files, or
the disk was unmounted and mounted again.
"""

import asyncio

import structlog

from shardcache.cache.space.pins import Pins
from shardcache.cache.space.residency import Residency
from shardcache.store.folder.folder_contents import compare_folder
from shardcache.store.store import Store

log = structlog.get_logger()


async def reconcile(store: Store, residency: Residency, pins: Pins) -> None:
    """Forget shards that are no longer in the folder, and serve unknown shards that are in it.

    Raises DiskError.
    """
    # Corrupt shards could not go to quarantine while the disk failed.
    await store.quarantine_damaged()
    changes = await asyncio.to_thread(
        compare_folder,
        store.layout,
        store.known_keys(),
        tuple(store.leftovers.by_key.values()),
    )

    gone = 0
    for key in changes.missing:
        is_shard = key in store.shards  # otherwise, it is a damaged shard or a leftover
        if store.forget(key):
            gone += 1
        if is_shard:
            residency.gone(key)

    # The files of a key that is being fetched belong to its transfer.
    known = store.known_keys() | residency.claims.keys()
    returned = [shard for shard in changes.shards if shard.key not in known]
    for shard in returned:
        store.restore(shard)
        residency.arrived(shard)
    # Interrupted downloads are leftovers, unless a transfer or a file of parts has their files.
    for download in changes.downloads:
        if download.key not in residency.claims and download.key not in store.parts:
            store.leftovers.keep(download)

    pins.schedule_save()  # the file with the pins may have been lost with the folder
    if gone or returned:
        log.warning("the cache folder has changed", gone=gone, shards_back=len(returned))
