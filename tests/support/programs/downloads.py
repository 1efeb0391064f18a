"""Downloads outside a daemon."""

from collections.abc import Callable
from pathlib import Path

from shardcache.config.origin_table import OriginTable
from shardcache.config.settings import Settings
from shardcache.fetch.download import Downloader
from shardcache.fetch.limits.slot_claims import Priority
from shardcache.fetch.retry import Backoff
from shardcache.origin.objects import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.store.folder.layout import Layout
from shardcache.store.partial import Partial
from shardcache.telemetry.metrics import Counters

PART = 64 * 1024
PLANNED = Priority(2)


class Rig:
    """A downloader with what it needs, and a cache folder to download into."""

    def __init__(self, root: Path, *tables: OriginTable) -> None:
        self.counters = Counters()
        self.origins = Origins(tables, max_connections=4)
        self.layout = Layout(root)
        self.layout.partial.mkdir(parents=True)
        self.progress: list[int] = []
        self.downloader = self.make()

    def make(self, *, hedged_share: float = 0.0, **options: object) -> Downloader:
        """Return a downloader that hardly pauses and asks for nothing twice unless told to.

        Args:
            options: settings of the daemon.
        """
        usual = {
            "max_connections": 4,
            "shard_connections": 3,
            "part_size": PART,
            "attempts": 3,
            "stall_timeout_s": 60.0,
            "listing_ttl_s": 0.0,
        }
        settings = Settings.load({**usual, **options})
        return Downloader(
            settings, self.counters, backoff=Backoff(base_s=0.001), hedged_share=hedged_share
        )

    async def stat(self, url: str) -> RemoteObject:
        return await self.downloader.stat(self.origins.origin(url), url)

    async def download(
        self,
        obj: RemoteObject,
        priority: Priority = PLANNED,
        *,
        part_bytes: int = PART,
        progress: Callable[[int], None] | None = None,
    ) -> Partial:
        partial = Partial.open(self.layout, obj, part_bytes)
        origin = self.origins.origin(obj.url)
        await self.downloader.download(
            origin, partial, priority=lambda: priority, progress=progress or self.progress.append
        )
        return partial
