"""Objects for those who name one after another, by their user's rules."""

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
    """Objects as far as a user may know and read them.

    Attributes:
        reads: reads of objects that were found here.
    """

    reads: ObjectReads
    _known: KnownObjects
    _origins: Origins
    _downloader: Downloader
    _allow: AllowList

    async def stat(self, url: str, peer: Peer) -> RemoteObject:
        """Return an object as its origin had it lately.

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
        """Ask the origin again, next time: it has another version."""
        self._known.forget(url)

    async def part_span(self, obj: RemoteObject, number: int) -> tuple[int, int] | None:
        """Return start and end of a part in which an object was uploaded; None if there is none.

        Raises the origin's errors.
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
        """Return whether there is a bucket of which a user may read something.

        Raises the origin's errors, but for NotFoundError if there is none.

        Args:
            prefix: of all urls in the bucket.
        """
        if not self._allow.reaches(prefix, peer):
            return False
        await self._page(PageRequest(prefix, max_keys=1))
        return True

    def prefixes(self, peer: Peer) -> list[str]:
        """Return what the urls that a user may request begin with, as far as rules say it."""
        return self._allow.prefixes(peer)

    async def _page(self, wanted: PageRequest) -> ListedPage:
        origin = self._origins.origin(url_in(wanted.prefix))
        return await self._downloader.ask(wanted.prefix, lambda _: origin.list_page(wanted))


def parts_of(obj: RemoteObject) -> int | None:
    """Return in how many parts an object was uploaded, which its ETag ends with, as S3 has it.

    None if it was uploaded as a whole.
    """
    _, dash, parts = obj.version.rpartition("-")
    return int(parts) if dash and parts.isascii() and parts.isdecimal() else None
