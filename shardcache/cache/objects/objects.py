"""Objects for clients that name one at a time, such as those of S3, by the rules for their user."""

from dataclasses import dataclass

from shardcache.access.deceptive import url_in
from shardcache.access.rules import AllowList, Peer
from shardcache.cache.objects.known_objects import KnownObjects
from shardcache.cache.objects.object_reads import ObjectReads
from shardcache.fetch.download import Downloader
from shardcache.origin.objects import ListedPage, PageRequest, RemoteObject
from shardcache.origin.registry import Origins


@dataclass(frozen=True, slots=True, eq=False)
class Objects:
    """The objects that a user may see and read.

    Attributes:
        reads: reads of the objects that `stat` or `known` returned.
    """

    reads: ObjectReads
    _known: KnownObjects
    _origins: Origins
    _downloader: Downloader
    _allow: AllowList

    async def stat(self, url: str, peer: Peer) -> RemoteObject:
        """Return an object; its origin is asked, unless it was a short time ago.

        Raises NotAllowedError before any request to the origin, and the origin's errors.
        """
        self._allow.check(url, peer)
        return await self._known.present(url)

    def known(self, url: str, peer: Peer) -> RemoteObject | None:
        """Return an object as `stat` does; None if the origin has to be asked first.

        Raises NotAllowedError.
        """
        self._allow.check(url, peer)
        return self._known.fresh(url)

    def forget(self, url: str) -> None:
        """Have the next `stat` ask the origin: it has another version."""
        self._known.forget(url)

    async def part_span(self, obj: RemoteObject, number: int) -> tuple[int, int] | None:
        """Return start and end of a part of a multipart upload; None if there is no such part.

        An object that was uploaded as a whole has one part. Raises the origin's errors.

        Args:
            number: number of the part, counted from 1.
        """
        parts = parts_of(obj) or 1
        if number > parts:
            return None
        if parts == 1:
            return 0, obj.size_bytes
        origin = self._origins.origin(obj.url)
        return await self._downloader.ask(obj.url, lambda _: origin.part_span(obj, number))

    async def page(self, wanted: PageRequest, peer: Peer) -> ListedPage:
        """Return one page of a listing, from the origin. Raises as `stat` does."""
        self._allow.check_prefix(wanted.prefix, peer)
        return await self._page(wanted)

    async def has_bucket(self, prefix: str, peer: Peer) -> bool:
        """Return whether the user may read something in a bucket.

        Raises NotFoundError if there is no such bucket, and the origin's other errors.

        Args:
            prefix: the beginning of all urls in the bucket.
        """
        if not self._allow.reaches(prefix, peer):
            return False
        await self._page(PageRequest(prefix, max_keys=1))  # raises if there is no bucket
        return True

    def prefixes(self, peer: Peer) -> list[str]:
        """Return the prefixes of the rules by which the user may request urls."""
        return self._allow.prefixes(peer)

    async def _page(self, wanted: PageRequest) -> ListedPage:
        origin = self._origins.origin(url_in(wanted.prefix))
        return await self._downloader.ask(wanted.prefix, lambda _: origin.list_page(wanted))


def parts_of(obj: RemoteObject) -> int | None:
    """Return the number of parts of a multipart upload; None for an object uploaded as a whole.

    S3's ETags of multipart uploads end with it, after a dash.
    """
    _, dash, parts = obj.version.rpartition("-")
    if dash and parts.isascii() and parts.isdecimal():
        return int(parts)
    return None
