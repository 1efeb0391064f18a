"""Uploads to S3, by the SDK.

`S3Origin` calls `Uploads`. The SDK is botocore, by s3fs; in this file, `fs` is an s3fs filesystem.
A condition is a header of an upload. With `If-Match`, S3 stores the object only if it replaces a
certain version. With `If-None-Match: *`, S3 stores the object only if there is no object at this
key yet.
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
from shardcache.origin.http.http_semantics import plain_etag, size_of
from shardcache.origin.objects import RemoteObject
from shardcache.origin.s3.s3_headers import etag_in
from shardcache.origin.s3.s3_sdk_requests import head_by_sdk, object_params
from shardcache.origin.s3.s3_sessions import SdkSessions
from shardcache.shared.exceptions import ConfigError

# Size of a part of an upload. Parts are in memory while they are sent. S3 accepts 10,000 parts, so
# this limits a file to 160 GB.
_PART_BYTES = 16 * 1024**2
_CONCURRENT_PARTS = 4
# Part size for an upload with a condition, which must be sent whole. The SDK sends a file in parts
# only if it is larger than a part. No file with a condition is this large: they are small files,
# such as index files.
_NO_PARTS_BYTES = 2**32
_ATTEMPTS = 5
_SILENCE_S = 60  # time without a received byte after which a request has failed

# In an error's text: the store, or this release of botocore, does not support conditions.
_NO_CONDITIONS = re.compile(r"\(NotImplemented\)|Unknown parameter in input")
# In an error's text: the condition is not met.
_NOT_MET = "(PreconditionFailed)"


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
        params = object_params(url)
        if "VersionId" in params:
            raise ConfigError(
                "a version of an object cannot be written",
                url=url,
                remedy="leave ?versionId=… out",
            )
        async with self._sessions.use(url) as fs:
            target = f"{params['Bucket']}/{params['Key']}"
            # fsspec's asynchronous methods begin with an underscore.
            put_file = fs._put_file  # noqa: SLF001
            put = partial(put_file, str(path), target, max_concurrency=_CONCURRENT_PARTS)
            has_file = partial(_has_bytes_of, path, fs, params)
            is_stored = False
            if replaced is not None:
                is_stored = await _put_on_condition(put, replaced, has_file)
            if not is_stored:
                await put(chunksize=_PART_BYTES)

            head = await head_by_sdk(fs, params)
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
        # The SDK repeats a request whose answer was lost. If the store had already carried it out,
        # the object is there, and the repeated request is refused.
        was_repeated = _NOT_MET in reason and await has_file()
        if not was_repeated:
            raise
    return True


async def _has_bytes_of(path: Path, fs: Any, params: Mapping[str, Any]) -> bool:
    """Return whether an object has the bytes of a local file, by its ETag.

    The ETag of an object that was sent whole is the MD5 of its bytes, unless the store encrypts the
    object with a user's key. This returns False for such an object, and for one that cannot be
    read.
    """
    try:
        head = await head_by_sdk(fs, params)
    except OSError:
        return False
    etag = plain_etag(head.get("etag", ""))
    data = await asyncio.to_thread(path.read_bytes)
    return etag == hashlib.md5(data, usedforsecurity=False).hexdigest()
