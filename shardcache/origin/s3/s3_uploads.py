"""Uploads to S3, by the SDK.

`S3Origin` calls `Uploads`. A condition is a header of an upload. With `If-Match`, S3 stores the
object only if it replaces a certain version. With `If-None-Match: *`, S3 stores the object only if
there is no object at this key yet.
"""

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from botocore.exceptions import ParamValidationError

from shardcache.config.origin_table import OriginTable
from shardcache.errors import ConfigError
from shardcache.origin.http.http_semantics import plain_etag, size_of
from shardcache.origin.objects import RemoteObject
from shardcache.origin.s3.s3_headers import etag_in
from shardcache.origin.s3.s3_sdk_requests import head_by_sdk, object_params
from shardcache.origin.s3.s3_sessions import SdkSessions

# Size of a part of an upload. Parts are in memory while they are sent. S3 accepts 10,000 parts, so
# files have at most 160 GB.
_PART_BYTES = 16 * 1024**2
_CONCURRENT_PARTS = 4
# Size of a part of an upload with a condition. The SDK sends a file in parts only if it is larger
# than a part. Uploads with a condition are of small files, such as index files, so no such file is
# larger than this, and each is sent whole.
_NO_PARTS_BYTES = 2**32
_ATTEMPTS = 5
_SILENCE_S = 60  # time without a received byte after which a request has failed

# Texts of the errors of stores, and of releases of botocore, that do not support conditions for
# uploads.
_NO_CONDITIONS = re.compile(r"\(NotImplemented\)|Unknown parameter in input")
# Part of the text of the error if a condition is not met.
_REFUSED = "(PreconditionFailed)"


class Uploads:
    """Uploads by sessions of the SDK that retry requests and notice stalls."""

    def __init__(self, table: OriginTable, max_connections: int) -> None:
        self._sessions = SdkSessions(
            table,
            max_connections,
            attempts=_ATTEMPTS,
            read_timeout_s=_SILENCE_S,
        )

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """As `Origin.upload`.

        A large file is sent in parts, and S3 creates the object only after the last part. A file
        that replaces a certain version is sent whole, because parts cannot have conditions. If the
        store does not support conditions, another upload in the meantime goes unnoticed.
        """
        where = object_params(url)
        if "VersionId" in where:
            raise ConfigError(
                "a version of an object cannot be written",
                url=url,
                remedy="leave ?versionId=… out",
            )
        async with self._sessions.use(url) as fs:
            target = f"{where['Bucket']}/{where['Key']}"
            # fsspec's asynchronous methods begin with an underscore.
            put_file = fs._put_file  # noqa: SLF001
            put = partial(put_file, str(path), target, max_concurrency=_CONCURRENT_PARTS)
            is_stored = False
            if replaced is not None:
                is_stored = await _put_on_condition(put, replaced, partial(_has, fs, where, path))
            if not is_stored:
                await put(chunksize=_PART_BYTES)

            head = await head_by_sdk(fs, where)
            version = etag_in(head.get("etag"), url)
            return RemoteObject(url, version, size_of(head["content-length"], url))

    async def close(self) -> None:
        """Close connections."""
        await self._sessions.close()


async def _put_on_condition(
    put: Callable[..., Awaitable[None]],
    replaced: str,
    has_file: Callable[[], Awaitable[bool]],
) -> bool:
    """Upload a file on the condition that it replaces a certain version.

    Returns False, and has uploaded nothing, if the store or botocore does not support conditions.

    Args:
        put: uploads the file with the given options.
        replaced: the version to replace; "" if there must be no object yet.
        has_file: returns whether the store has an object with the bytes of the file.
    """
    condition = {"IfMatch": f'"{replaced}"'} if replaced else {"IfNoneMatch": "*"}
    try:
        await put(chunksize=_NO_PARTS_BYTES, **condition)
    except (OSError, ParamValidationError) as exn:
        reason = f"{exn!r} {exn.__cause__!r}"
        if _NO_CONDITIONS.search(reason):
            return False
        # The SDK repeats a request whose answer was lost. If the store had carried it out, the
        # object is there, and the repeated request is refused.
        is_refused = _REFUSED in reason
        if not is_refused or not await has_file():
            raise
    return True


async def _has(fs: Any, where: Mapping[str, Any], path: Path) -> bool:
    """Return whether an object has the bytes of a local file, by its ETag.

    The ETag of an object that was sent whole is the MD5 of its bytes, unless the store encrypts it
    with a key of a user; then this returns False, as it does if the object cannot be read.
    """
    try:
        head = await head_by_sdk(fs, where)
    except OSError:
        return False
    etag = plain_etag(head.get("etag", ""))
    data = await asyncio.to_thread(path.read_bytes)
    return etag == hashlib.md5(data, usedforsecurity=False).hexdigest()
