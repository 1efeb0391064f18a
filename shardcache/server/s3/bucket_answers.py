"""Answers about buckets: their names, and the objects in them.

`door` calls `BucketAnswers` for requests without a key. `peer` is the user who signed the request.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

from aiohttp import web

from shardcache.access.rules import Peer
from shardcache.cache.objects.permitted_objects import Objects
from shardcache.errors import NotFoundError
from shardcache.origin.objects import ListedPage, PageRequest, RemoteObject
from shardcache.server.s3.error_documents import S3Error, in_xml
from shardcache.server.s3.s3_requests import S3Request

_XML = '<?xml version="1.0" encoding="UTF-8"?>\n'
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_MAX_KEYS = 1000
_MAX_INT = 2**31 - 1  # S3 refuses larger numbers
# The daemon does not know when a bucket was created.
_CREATED = "1970-01-01T00:00:00.000Z"
_REGION = "us-east-1"  # signatures for any region are accepted


@dataclass(frozen=True, slots=True, eq=False)
class BucketAnswers:
    """Answers requests for buckets."""

    _objects: Objects

    async def buckets(self, peer: Peer) -> web.Response:
        """Answer ListBuckets: the buckets that a user's rules of access name."""
        names = {_bucket_in(prefix) for prefix in self._objects.prefixes(peer)}
        rows = [
            f"<Bucket><Name>{in_xml(name)}</Name><CreationDate>{_CREATED}</CreationDate></Bucket>"
            for name in sorted(names)
            if name
        ]
        owner = f"<Owner><ID>{peer.uid}</ID></Owner>"
        return _document(
            "ListAllMyBucketsResult",
            f"{owner}<Buckets>{''.join(rows)}</Buckets>",
        )

    async def head(self, request: S3Request, peer: Peer) -> web.Response:
        """Answer HeadBucket. Raises S3Error, ShardcacheError."""
        await self._check(request, peer)
        return web.Response(headers={"x-amz-bucket-region": _REGION})

    async def location(self, request: S3Request, peer: Peer) -> web.Response:
        """Answer GetBucketLocation. An empty location means us-east-1. Raises as `head`."""
        await self._check(request, peer)
        return _document("LocationConstraint", "")

    async def exists(self, request: S3Request, peer: Peer) -> bool:
        """Return whether a bucket exists; False for one that the user may not read.

        Raises ShardcacheError.
        """
        try:
            return await self._objects.may_read_bucket(f"s3://{request.bucket}/", peer)
        except NotFoundError:
            return False

    async def list_v2(self, request: S3Request, peer: Peer) -> web.Response:
        """Answer ListObjectsV2. Raises S3Error, ShardcacheError."""
        params = request.params
        token = params.get("continuation-token", "")
        after = params.get("start-after", "")
        page = await self._page(request, peer, after=after, token=token)
        fields = _fields(request, page)
        if "continuation-token" in params:
            fields.append(("ContinuationToken", token))
        if page.next_token:
            fields.append(("NextContinuationToken", page.next_token))
        if after:
            fields.append(("StartAfter", _encoding(request)(after)))
        fields.append(("KeyCount", str(len(page.objects) + len(page.folders))))
        return _listing(request, page, fields)

    async def list_v1(self, request: S3Request, peer: Peer) -> web.Response:
        """Answer ListObjects. Raises S3Error, ShardcacheError."""
        marker = request.params.get("marker", "")
        page = await self._page(request, peer, after=marker, token="")
        encoded = _encoding(request)
        fields = [*_fields(request, page), ("Marker", encoded(marker))]
        names = [_key_in(request, obj.url) for obj in page.objects]
        names += [_key_in(request, folder) for folder in page.folders]
        if page.next_token and names:
            # The next page begins after the last name, which may be an object's or a folder's.
            fields.append(("NextMarker", encoded(max(names))))
        return _listing(request, page, fields)

    async def _check(self, request: S3Request, peer: Peer) -> None:
        """Raise S3Error unless the bucket exists, and rules of access name it for the user."""
        try:
            is_allowed = await self._objects.may_read_bucket(f"s3://{request.bucket}/", peer)
        except NotFoundError:
            raise _no_bucket(request) from None
        if not is_allowed:
            raise S3Error("AccessDenied", "the daemon's allow rules do not name this bucket")

    async def _page(self, request: S3Request, peer: Peer, *, after: str, token: str) -> ListedPage:
        """Return the page of a listing that a request asks for. Raises S3Error, ShardcacheError.

        Args:
            after: key after which the first page begins; empty for the first key.
            token: token of the page; empty for the first page.
        """
        params = request.params
        max_keys = _max_keys(request)
        if max_keys == 0:
            # S3 answers such a request with an empty page that is the last one.
            return ListedPage([], [], "")
        wanted = PageRequest(
            f"s3://{request.bucket}/{params.get('prefix', '')}",
            delimiter=params.get("delimiter", ""),
            after=after,
            token=token,
            max_keys=max_keys,
        )
        try:
            return await self._objects.page(wanted, peer)
        except NotFoundError:
            raise _no_bucket(request) from None


def _no_bucket(request: S3Request) -> S3Error:
    return S3Error("NoSuchBucket", f"there is no bucket {request.bucket}")


def _bucket_in(prefix: str) -> str:
    """Return the bucket that a canonical prefix names; empty if it does not name an S3 bucket."""
    protocol, _, place = prefix.partition("://")
    bucket, _, _ = place.partition("/")
    return bucket if protocol == "s3" else ""


def _key_in(request: S3Request, url: str) -> str:
    """Return the key of a url in the request's bucket."""
    return url.removeprefix(f"s3://{request.bucket}/")


def _max_keys(request: S3Request) -> int:
    """Return the maximum number of names in a page of a listing. Raises S3Error."""
    asked = request.number("max-keys", lowest=0, highest=_MAX_INT)
    if asked is None:
        return _MAX_KEYS
    return min(asked, _MAX_KEYS)


def _encoding(request: S3Request) -> Callable[[str], str]:
    """Return the function that encodes keys as the request wants.

    The only encoding is percent-encoding; without it, the function returns a key unchanged. Raises
    S3Error for another encoding.
    """
    kind = request.params.get("encoding-type")
    if kind not in (None, "url"):
        raise S3Error("InvalidArgument", "the only encoding-type is url")
    if kind is None:
        return str
    return lambda text: quote(text, safe="/*")  # as in S3's own listings


def _fields(request: S3Request, page: ListedPage) -> list[tuple[str, str]]:
    """Return the XML elements with which both kinds of listings begin, as names and texts."""
    params = request.params
    encoded = _encoding(request)
    fields = [
        ("Name", request.bucket),
        ("Prefix", encoded(params.get("prefix", ""))),
        ("MaxKeys", str(_max_keys(request))),
        ("IsTruncated", "true" if page.next_token else "false"),
    ]
    if params.get("delimiter"):
        fields.append(("Delimiter", encoded(params["delimiter"])))
    if "encoding-type" in params:
        fields.append(("EncodingType", "url"))
    return fields


def _listing(
    request: S3Request,
    page: ListedPage,
    fields: list[tuple[str, str]],
) -> web.Response:
    """Return a listing in XML: its fields, then the objects and folders of a page."""
    parts = [f"<{name}>{in_xml(text)}</{name}>" for name, text in fields]
    parts += _contents(request, page.objects)
    encoded = _encoding(request)
    for folder in page.folders:
        prefix = in_xml(encoded(_key_in(request, folder)))
        parts.append(f"<CommonPrefixes><Prefix>{prefix}</Prefix></CommonPrefixes>")
    return _document("ListBucketResult", "".join(parts))


def _contents(request: S3Request, objects: list[RemoteObject]) -> Iterator[str]:
    """Yield the XML element of each object."""
    encoded = _encoding(request)
    for obj in objects:
        key = in_xml(encoded(_key_in(request, obj.url)))
        stored = datetime.fromtimestamp(obj.modified_s or 0.0, UTC)
        yield (
            f"<Contents><Key>{key}</Key>"
            f"<LastModified>{stored:%Y-%m-%dT%H:%M:%S}.{stored.microsecond // 1000:03}Z"
            f"</LastModified><ETag>&quot;{in_xml(obj.version)}&quot;</ETag>"
            f"<Size>{obj.size_bytes}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )


def _document(name: str, content: str) -> web.Response:
    """Return an answer in XML, with the element `name` around its content."""
    text = f'{_XML}<{name} xmlns="{_NAMESPACE}">{content}</{name}>'
    return web.Response(body=text.encode(), content_type="application/xml")
