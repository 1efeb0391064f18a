"""Objects for clients that request one at a time, such as S3 clients, as far as the rules permit.

The S3 endpoint looks objects up here, lists them, and gets the reads of their bytes. A peer is the
user who is connected; the rules say which urls that user may see and request.
"""

from dataclasses import dataclass

from shardcache.access.deceptive import url_with_prefix
from shardcache.access.rules import AllowList, Peer
from shardcache.cache.objects.known_objects import KnownObjects
from shardcache.cache.objects.object_reads import ObjectReads
from shardcache.fetch.download import Downloader
from shardcache.origin.objects import ListedPage, PageRequest, RemoteObject
from shardcache.origin.registry import Origins


@dataclass(frozen=True, slots=True, eq=False)
class Objects:
    """The objects that users may see and read.

    Attributes:
        reads: reads of the bytes of objects that `stat` or `known` returned.
    """

    reads: ObjectReads
    _known: KnownObjects
    _origins: Origins
    _downloader: Downloader
    _allow: AllowList

    async def stat(self, url: str, peer: Peer) -> RemoteObject:
        """Return an object; its origin is asked unless it has answered a short time ago.

        Raises NotAllowedError, which comes before any request to the origin, and the origin's
        errors.
        """
        self._allow.check(url, peer)
        return await self._known.current(url)

    def known(self, url: str, peer: Peer) -> RemoteObject | None:
        """Return an object as `stat` does; None if the origin has to be asked first.

        Raises NotAllowedError.
        """
        self._allow.check(url, peer)
        return self._known.fresh(url)

    def forget(self, url: str) -> None:
        """Have the next `stat` ask the origin, which has another version by now."""
        self._known.forget(url)

    async def part_span(self, obj: RemoteObject, number: int) -> tuple[int, int] | None:
        """Return start and end of a part of a multipart upload; None if there is no such part.

        An object that was uploaded as a whole has one part. Raises the origin's errors.

        Args:
            obj: the object.
            number: number of the part, counted from 1 as S3 does.
        """
        upload_parts = count_upload_parts(obj) or 1
        if number > upload_parts:
            return None
        if upload_parts == 1:
            return 0, obj.size_bytes
        origin = self._origins.origin(obj.url)
        return await self._downloader.ask(obj.url, lambda _received: origin.part_span(obj, number))

    async def page(self, wanted: PageRequest, peer: Peer) -> ListedPage:
        """Return one page of a listing, from the origin. Raises as `stat` does.

        Args:
            wanted: the prefix, and which page of its listing.
            peer: the user, who must be permitted the prefix.
        """
        self._allow.check_prefix(wanted.prefix, peer)
        return await self._page(wanted)

    async def may_read_bucket(self, prefix: str, peer: Peer) -> bool:
        """Return whether the user may read anything in a bucket.

        Raises NotFoundError if there is no such bucket, and the origin's other errors.

        Args:
            prefix: the beginning of all urls in the bucket.
            peer: the user.
        """
        if not self._allow.may_reach(prefix, peer):
            return False
        # A listing of one key is a cheap request that fails if there is no such bucket.
        await self._page(PageRequest(prefix, max_keys=1))
        return True

    def prefixes(self, peer: Peer) -> list[str]:
        """Return the prefixes of the rules by which the user may request urls."""
        return self._allow.prefixes(peer)

    async def _page(self, wanted: PageRequest) -> ListedPage:
        """Return one page of a listing, without asking the rules."""
        origin = self._origins.origin(url_with_prefix(wanted.prefix))
        return await self._downloader.ask(wanted.prefix, lambda _received: origin.list_page(wanted))


def count_upload_parts(obj: RemoteObject) -> int | None:
    """Return the number of parts of a multipart upload; None for an object uploaded as a whole.

    The ETag that S3 gives to a multipart upload ends with a dash and this number.
    """
    _, dash, count = obj.version.rpartition("-")
    if dash and count.isascii() and count.isdecimal():
        return int(count)
    return None
