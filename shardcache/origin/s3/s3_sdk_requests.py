"""Requests that the SDK makes, in cases where a presigned url cannot be used.

`S3Origin` calls these functions. The SDK is botocore, by s3fs. In this file, `fs` is an s3fs
filesystem, and `params` is an object's bucket and key as parameters of the SDK.
"""

from collections.abc import Mapping
from typing import Any

from botocore.exceptions import ClientError

from shardcache.origin.http.http_semantics import check_range, range_header, read_exactly
from shardcache.origin.objects import RemoteObject
from shardcache.origin.s3.s3_headers import Headers, etag_in
from shardcache.shared.exceptions import OriginError, ShardChangedError
from shardcache.shared.urls.url_names import version_in
from shardcache.transport.between.flow import Flow
from shardcache.transport.between.parts import Parts


def object_params(url: str) -> dict[str, str]:
    """Return a url as parameters of the SDK: `Bucket`, `Key`, and perhaps `VersionId`.

    Raises OriginError for a url without a bucket.
    """
    path, version = version_in(url)
    bucket, key = bucket_and_key(path)
    params = {"Bucket": bucket, "Key": key}
    if version:
        params["VersionId"] = version
    return params


def bucket_and_key(path: str) -> tuple[str, str]:
    """Return the bucket of a url without a version, or of the beginning of urls, and the rest.

    An access point's ARN, which contains a slash, counts as the bucket. Raises OriginError for a
    url without a bucket.
    """
    bucket, _, key = path.partition("://")[2].partition("/")
    if bucket.startswith("arn:"):
        name, _, key = key.partition("/")
        bucket += f"/{name}"
    if not bucket:
        raise OriginError("no bucket in the url", url=path, remedy="write s3://bucket/key")
    return bucket, key


async def call(fs: Any, operation: str, **params: Any) -> Any:
    """Return the SDK's answer to one request.

    Args:
        fs: an s3fs filesystem.
        operation: the request's name in botocore, such as "get_object".
        params: the request's parameters in botocore.
    """
    # fsspec's asynchronous methods begin with an underscore.
    return await fs._call_s3(operation, **params)  # noqa: SLF001


async def read_by_sdk(
    fs: Any,
    params: Mapping[str, str],
    obj: RemoteObject,
    parts: Parts,
    flow: Flow,
) -> memoryview:
    """Return the bytes of parts of exactly this version.

    Raises ShardChangedError for another version, and OriginUnavailableError for other bytes.
    """
    condition = {}
    if obj.version.isascii():
        # The SDK would send a character beyond ASCII in UTF-8, which are other bytes than those of
        # the ETag. Without the condition, the version is still checked: by the answer's ETag.
        condition["IfMatch"] = f'"{obj.version}"'
    span = range_header(parts.start, parts.stop)
    answer = await call(fs, "get_object", **params, Range=span, **condition)
    # This does not use `as body`: in aiobotocore 2, that is another object, which reads the whole
    # body at once.
    async with answer["Body"]:
        status = int(answer["ResponseMetadata"]["HTTPStatusCode"])
        check_range(obj, parts.start, parts.stop, status, answer.get("ContentRange"))
        if etag_in(answer.get("ETag"), obj.url) != obj.version:
            raise ShardChangedError(
                "the origin sent a different version than requested",
                url=obj.url,
            )
        return await read_exactly(parts.size_bytes, answer["Body"].read, flow, obj.url)


async def head_by_sdk(fs: Any, params: Mapping[str, Any]) -> Headers:
    """Return the headers of the answer to a HEAD.

    Args:
        params: bucket and key, and other parameters of the HEAD.
    """
    try:
        answer = await call(fs, "head_object", ChecksumMode="ENABLED", **params)
    except OSError as exn:
        if not isinstance(exn.__cause__, ClientError):
            raise
        # The answer to a HEAD has no body, so it states no reason. A GET should fail in the same
        # way: its error, which states the reason, is raised instead.
        # S3 refuses a GET with both a range and the number of a part.
        span = {} if "PartNumber" in params else {"Range": "bytes=0-0"}
        answer = await call(fs, "get_object", **span, **params)
        answer["Body"].close()
        raise
    headers: Headers = answer["ResponseMetadata"]["HTTPHeaders"]
    return headers
