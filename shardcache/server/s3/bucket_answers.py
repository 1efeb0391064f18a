"""Answers about buckets: their names, and the objects in them.

`s3_endpoint` calls `BucketAnswers` for requests without a key. A peer is the user who signed a
request; the daemon's access rules say which urls this user may read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from urllib.parse import quote

from aiohttp import web

from shardcache.access.rules import Peer
from shardcache.cache.objects.permitted_objects import Objects
from shardcache.origin.objects import ListedPage, PageRequest, RemoteObject
from shardcache.server.s3.error_documents import S3Error, escape_xml
from shardcache.server.s3.s3_requests import S3Request
from shardcache.shared.exceptions import NotFoundError

_XML_DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>\n'
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_MAX_KEYS = 1000  # maximum number of names in a page of a listing, as in S3
_MAX_INT = 2**31 - 1  # S3 refuses larger numbers
_CREATED = "1970-01-01T00:00:00.000Z"  # the daemon does not know when a bucket was created
_REGION = "us-east-1"  # signatures for any region are accepted


@dataclass(frozen=True, slots=True, eq=False)
class BucketAnswers:
    """Answers requests for buckets."""

    _objects: Objects

    async def list_buckets(self, peer: Peer) -> web.Response:
        """Answer ListBuckets with the buckets that the user's access rules name."""
        names = {_bucket_in(prefix) for prefix in self._objects.prefixes(peer)}
        rows = [
            f"<Bucket><Name>{escape_xml(name)}</Name>"
            f"<CreationDate>{_CREATED}</CreationDate></Bucket>"
            for name in sorted(names)
            if name
        ]
        owner = f"<Owner><ID>{peer.uid}</ID></Owner>"
        buckets = f"<Buckets>{''.join(rows)}</Buckets>"
        return _xml_response("ListAllMyBucketsResult", owner + buckets)

    async def head(self, request: S3Request, peer: Peer) -> web.Response:
        """Answer HeadBucket. Raises S3Error, ShardcacheError."""
        await self._check_access(request, peer)
        return web.Response(headers={"x-amz-bucket-region": _REGION})

    async def location(self, request: S3Request, peer: Peer) -> web.Response:
        """Answer GetBucketLocation. Raises S3Error, ShardcacheError."""
        await self._check_access(request, peer)
        # An empty location means us-east-1.
        return _xml_response("LocationConstraint", "")

    async def is_readable(self, request: S3Request, peer: Peer) -> bool:
        """Return whether the bucket exists and the user may read it. Raises ShardcacheError."""
        try:
            return await self._objects.may_read_bucket(request.bucket_url, peer)
        except NotFoundError:
            return False

    async def list_v2(self, request: S3Request, peer: Peer) -> web.Response:
        """Answer ListObjectsV2. Raises S3Error, ShardcacheError."""
        params = request.params
        token = params.get("continuation-token", "")
        after = params.get("start-after", "")
        page = await self._fetch_page(request, peer, after=after, token=token)
        encode = _key_encoder(request)
        fields = _common_fields(request, page)
        if "continuation-token" in params:
            fields.append(("ContinuationToken", token))
        if page.next_token:
            fields.append(("NextContinuationToken", page.next_token))
        if after:
            fields.append(("StartAfter", encode(after)))
        fields.append(("KeyCount", str(len(page.objects) + len(page.folders))))
        return _listing_response(request, page, fields)

    async def list_v1(self, request: S3Request, peer: Peer) -> web.Response:
        """Answer ListObjects. Raises S3Error, ShardcacheError."""
        marker = request.params.get("marker", "")
        page = await self._fetch_page(request, peer, after=marker, token="")
        encode = _key_encoder(request)
        fields = _common_fields(request, page)
        fields.append(("Marker", encode(marker)))
        names = [_key_in(request, obj.url) for obj in page.objects]
        names += [_key_in(request, folder) for folder in page.folders]
        if page.next_token and names:
            # The next page begins after the last name, which may be an object's or a folder's.
            fields.append(("NextMarker", encode(max(names))))
        return _listing_response(request, page, fields)

    async def _check_access(self, request: S3Request, peer: Peer) -> None:
        """Raise S3Error unless the bucket exists, and the user's access rules name it."""
        try:
            is_allowed = await self._objects.may_read_bucket(request.bucket_url, peer)
        except NotFoundError:
            raise _no_bucket(request) from None
        if not is_allowed:
            raise S3Error("AccessDenied", "the daemon's allow rules do not name this bucket")

    async def _fetch_page(
        self,
        request: S3Request,
        peer: Peer,
        *,
        after: str,
        token: str,
    ) -> ListedPage:
        """Return the requested page of a listing. Raises S3Error, ShardcacheError.

        Args:
            after: key after which the listing begins; empty to begin with the first key.
            token: `next_token` of the previous page; empty for the first page.
        """
        params = request.params
        max_keys = _max_keys(request)
        wanted = PageRequest(
            request.bucket_url + params.get("prefix", ""),
            delimiter=params.get("delimiter", ""),
            after=after,
            token=token,
            max_keys=max(1, max_keys),
        )
        try:
            page = await self._objects.page(wanted, peer)
        except NotFoundError:
            raise _no_bucket(request) from None
        if max_keys == 0:
            # S3 answers such a request with an empty page that is the last one.
            return ListedPage([], [], "")
        return page


def _no_bucket(request: S3Request) -> S3Error:
    return S3Error("NoSuchBucket", f"there is no bucket {request.bucket}")


def _bucket_in(prefix: str) -> str:
    """Return the bucket in a url prefix of an access rule; empty if it names no S3 bucket."""
    protocol, _, bucket_and_key = prefix.partition("://")
    if protocol != "s3":
        return ""
    bucket, _, _ = bucket_and_key.partition("/")
    return bucket


def _key_in(request: S3Request, url: str) -> str:
    """Return the key of a url in the request's bucket."""
    return url.removeprefix(request.bucket_url)


def _max_keys(request: S3Request) -> int:
    """Return the maximum number of names in a page of a listing. Raises S3Error."""
    max_keys = request.number("max-keys", lowest=0, highest=_MAX_INT)
    if max_keys is None:
        return _MAX_KEYS
    return min(max_keys, _MAX_KEYS)


def _key_encoder(request: S3Request) -> Callable[[str], str]:
    """Return the function that encodes keys for a listing, as `encoding-type` asks.

    Raises S3Error for an encoding that S3 does not have.
    """
    encoding = request.params.get("encoding-type")
    if encoding is None:
        return str  # keys are not encoded
    if encoding != "url":
        raise S3Error("InvalidArgument", "the only encoding-type is url")
    return partial(quote, safe="/*")  # S3's own listings leave these characters as well


def _common_fields(request: S3Request, page: ListedPage) -> list[tuple[str, str]]:
    """Return name and text of the XML elements with which both versions of listings begin."""
    params = request.params
    encode = _key_encoder(request)
    fields = [
        ("Name", request.bucket),
        ("Prefix", encode(params.get("prefix", ""))),
        ("MaxKeys", str(_max_keys(request))),
        ("IsTruncated", "true" if page.next_token else "false"),
    ]
    if params.get("delimiter"):
        fields.append(("Delimiter", encode(params["delimiter"])))
    if "encoding-type" in params:
        fields.append(("EncodingType", "url"))
    return fields


def _listing_response(
    request: S3Request,
    page: ListedPage,
    fields: list[tuple[str, str]],
) -> web.Response:
    """Return a listing in XML: its fields, then the objects and folders of a page.

    Args:
        fields: name and text of the elements before the objects.
    """
    elements = [f"<{name}>{escape_xml(text)}</{name}>" for name, text in fields]
    elements += _object_elements(request, page.objects)
    encode = _key_encoder(request)
    for folder in page.folders:
        prefix = encode(_key_in(request, folder))
        elements.append(f"<CommonPrefixes><Prefix>{escape_xml(prefix)}</Prefix></CommonPrefixes>")
    return _xml_response("ListBucketResult", "".join(elements))


def _object_elements(request: S3Request, objects: list[RemoteObject]) -> Iterator[str]:
    """Yield the XML element of each object."""
    encode = _key_encoder(request)
    for obj in objects:
        key = encode(_key_in(request, obj.url))
        modified_s = obj.modified_s or 0.0  # clients need a time, even if it is not known
        yield (
            f"<Contents><Key>{escape_xml(key)}</Key>"
            f"<LastModified>{_iso_time(modified_s)}</LastModified>"
            f"<ETag>&quot;{escape_xml(obj.version)}&quot;</ETag>"
            f"<Size>{obj.size_bytes}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )


def _iso_time(seconds: float) -> str:
    """Return a time in seconds since the Unix epoch as, for example, 1970-01-01T00:00:00.000Z."""
    time = datetime.fromtimestamp(seconds, UTC)
    return time.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def _xml_response(root: str, content: str) -> web.Response:
    """Return an answer in XML: the root element, with its content."""
    text = f'{_XML_DECLARATION}<{root} xmlns="{_NAMESPACE}">{content}</{root}>'
    return web.Response(body=text.encode(), content_type="application/xml")
