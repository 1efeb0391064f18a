"""Companion files, which describe the shards next to them, for formats that need one.

`ShardIndexing` gives a shard's companion to the process that indexes the shard. An example is the
`index.json` in a folder of LitData chunks.
"""

import asyncio
from collections import OrderedDict

from shardcache.access.urls import join
from shardcache.fetch.download import Downloader
from shardcache.origin.patterns.index_files import MAX_INDEX_BYTES
from shardcache.origin.registry import Origins
from shardcache.origin.whole_object import read_object
from shardcache.shared.exceptions import CorruptShardError, NotFoundError
from shardcache.shared.formats.format import Format
from shardcache.shared.units import size
from shardcache.shared.urls.url_names import format_of
from shardcache.transport.between.flow import Flow, Received

_MAX_KNOWN = 100  # number of companion files whose content is kept in memory


class Companions:
    """Contents of companion files, each of them read once for each version.

    The content is in the form that `Format.companion_of` makes of the file.
    """

    def __init__(self, origins: Origins, downloader: Downloader) -> None:
        self._origins = origins
        self._downloader = downloader
        # By url and version, least recently used first.
        self._known: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def of(self, url: str) -> str | None:
        """Return the content of a shard's companion; None if shards of its format have none.

        Raises NotFoundError if the companion is missing, ShardError if it is not a valid one, and
        the origin's errors.
        """
        format_ = format_of(url)
        companion_name = format_.companion_name
        if companion_name is None:
            return None
        companion_url = join(url, companion_name)

        async def attempt(received: Received) -> str:
            """Read the companion once; `Downloader.ask` makes several attempts if necessary."""
            return await self._read(companion_url, format_, received)

        try:
            return await self._downloader.ask(companion_url, attempt)
        except NotFoundError as exn:
            raise NotFoundError(
                f"{exn.message}: without it, the {format_.name} shards next to it cannot be read",
                url=companion_url,
                remedy=f"upload the {companion_name} that was written with the shards",
            ) from exn

    async def _read(self, url: str, format_: Format, received: Received) -> str:
        """Return the content of a companion file; read it unless its present version is known.

        Args:
            url: url of the companion file.
            format_: the format of the shards next to it.
            received: called as bytes arrive.
        """
        origin = self._origins.origin(url)
        obj = await origin.stat(url)
        key = (url, obj.version)
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        if obj.size_bytes > MAX_INDEX_BYTES:
            raise CorruptShardError(
                f"the file is too large to describe shards ({size(obj.size_bytes)})", url=url
            )
        data = await read_object(origin, obj, Flow(received))
        companion = await asyncio.to_thread(format_.companion_of, data, url)
        self._known[key] = companion
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return companion
