"""Sessions of the S3 SDK (s3fs on aiobotocore), and the connections that they keep.

`S3Origin` and `Uploads` make each request of the SDK with a filesystem that `SdkSessions` provides.
A session is retired when its credentials no longer work: the next request opens a new session.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import aiobotocore.session
from botocore.loaders import Loader, create_loader
from s3fs import S3FileSystem

from shardcache.config.origin_table import OriginTable
from shardcache.origin.s3.credential_process import resolver_of
from shardcache.origin.s3.s3_errors import (
    FOREIGN,
    translation,
    translation_with_temporary_keys,
)
from shardcache.origin.s3.s3_http_session import StoreSession
from shardcache.shared.credentials.aws_keys import AwsKeys
from shardcache.shared.exceptions import ShardcacheError
from shardcache.shared.own_endpoint import DAEMON_AGENT

CONNECT_TIMEOUT_S = 10


@dataclass(slots=True, eq=False)
class _OpenSession:
    """A filesystem and its client.

    Attributes:
        users: number of requests that use the session at present.
        is_retired: True if the session is to be closed after the last of these requests.
    """

    fs: S3FileSystem
    client: Any
    users: int = 0
    is_retired: bool = False


class SdkSessions:
    """Provides the current filesystem, and closes retired ones after their last request.

    botocore renews the credentials of roles and tokens by itself. It reads other credentials, such
    as keys in a file, once per session. After the origin has refused these, a new session reads
    them again.

    Args:
        table: options of the origin.
        max_connections: maximum number of connections of a session.
        keys: the only keys to read with; None for the table's, or those that botocore finds.
        attempts: maximum number of times that the SDK itself makes a request.
        read_timeout_s: time without any received byte after which a request has failed; None if the
            caller watches for stalls itself.
    """

    def __init__(
        self,
        table: OriginTable,
        max_connections: int,
        keys: AwsKeys | None = None,
        *,
        attempts: int = 1,
        read_timeout_s: float | None = None,
    ) -> None:
        self._options = _options(table, max_connections, read_timeout_s)
        self._attempts = attempts
        # The profile is for the SDK's session. The filesystem gets the other options.
        self._profile = self._options.pop("profile", table.profile)
        self._keys = keys
        is_temporary = keys is not None and keys.is_temporary
        self._translation = translation_with_temporary_keys if is_temporary else translation
        self._opening = asyncio.Lock()
        self._current: _OpenSession | None = None

    @asynccontextmanager
    async def use(self, url: str) -> AsyncIterator[S3FileSystem]:
        """Provide the filesystem for one request, and translate foreign exceptions of the block."""
        session: _OpenSession | None = None
        try:
            session = await self._borrow()
            yield session.fs
        # This comes before FOREIGN: a NotFoundError is also an OSError, which FOREIGN includes.
        except ShardcacheError as exn:
            exn.url = exn.url or url
            raise
        except FOREIGN as exn:
            error, may_help_to_reload = self._translation(exn, url)
            # If another request has already retired this session, the next session is kept.
            if may_help_to_reload and session is self._current:
                self._retire_current()
            raise error from exn
        finally:
            if session is not None:
                await self._give_back(session)

    async def close(self) -> None:
        """Close the current session as soon as it is unused."""
        session = self._current
        if session is not None:
            self._retire_current()
            if not session.users:  # otherwise the last user closes it
                await session.client.close()

    async def _borrow(self) -> _OpenSession:
        """Count one more user of the current session, and return it, opened if necessary."""
        async with self._opening:
            session = self._current
            if session is None:
                session = await self._open()
                self._current = session
        session.users += 1
        return session

    async def _open(self) -> _OpenSession:
        """Return a new session, with credentials as they are now."""
        region = self._options["client_kwargs"].get("region_name")
        boto_session = await asyncio.to_thread(_boto_session, self._profile, region)
        keys = self._keys
        if keys is not None:
            boto_session.set_credentials(keys.access_key, keys.secret, keys.token or None)
        fs = S3FileSystem(session=boto_session, **self._options)
        fs.retries = self._attempts
        client = await fs.set_session()
        for operation in ("GetObject", "HeadObject"):
            event = f"choose-signer.s3.{operation}"
            client.meta.events.register_first(event, keep_signature_v4)
        return _OpenSession(fs, client)

    async def _give_back(self, session: _OpenSession) -> None:
        """Count one user less; after the last one, close a retired session."""
        session.users -= 1
        if session.is_retired and not session.users:
            await session.client.close()

    def _retire_current(self) -> None:
        """Retire the current session, so that the next request opens a new one."""
        if self._current is not None:
            self._current.is_retired = True
            self._current = None


_loading_descriptions = threading.Lock()


def descriptions() -> Loader:
    """Return botocore's descriptions of S3, loaded once for all sessions.

    The first call blocks for some 0.3 s.
    """
    with _loading_descriptions:  # without the lock, two threads could both load them
        return _loaded_descriptions()


@cache
def _loaded_descriptions() -> Loader:
    """Return the descriptions. Several threads must not call this at the same time."""
    # A session would also look for this path in its profile, and raise an error for a profile that
    # does not exist. Descriptions need no profile.
    loader: Loader = create_loader(os.environ.get("AWS_DATA_PATH"))
    for description in ("service-2", "endpoint-rule-set-1", "paginators-1"):
        loader.load_service_model("s3", description)
    for name in ("endpoints", "partitions", "sdk-default-configuration"):
        loader.load_data(name)
    return loader


def _boto_session(profile: str | None, region: str | None) -> aiobotocore.session.AioSession:
    """Return a session of the SDK, with the shared descriptions. Blocks.

    `resolver_of` makes programs that print credentials end with the requests that wait for them.
    """
    session = aiobotocore.session.AioSession(profile=profile)
    session.register_component("data_loader", descriptions())
    session.lazy_register_component("credential_provider", lambda: resolver_of(session, region))
    return session


def _options(
    table: OriginTable,
    max_connections: int,
    read_timeout_s: float | None,
) -> dict[str, Any]:
    """Return the options of the filesystem.

    The table's `storage_options` take precedence, except over the last three options, on which this
    module relies.
    """
    storage_options = dict(table.storage_options)
    client_options = {"region_name": table.region} if table.region else {}
    config_options = {
        "max_pool_connections": max_connections,
        "retries": {"total_max_attempts": 1},  # s3fs makes the attempts
        "connect_timeout": CONNECT_TIMEOUT_S,
        "user_agent_extra": DAEMON_AGENT,
        "http_session_cls": StoreSession,
        "read_timeout": read_timeout_s,
        "response_checksum_validation": "when_required",  # parts have no checksum of their own
    }
    return {
        "anon": table.anon,
        "endpoint_url": table.endpoint_url,
        **storage_options,
        "client_kwargs": client_options | storage_options.get("client_kwargs", {}),
        "config_kwargs": config_options | storage_options.get("config_kwargs", {}),
        "asynchronous": True,
        "skip_instance_cache": True,
        "use_listings_cache": False,
    }


def keep_signature_v4(signature_version: str, **_context: Any) -> str | None:
    """Select signature version 4 for urls, as for requests.

    In older regions, botocore would use version 2 for presigned urls. This function handles
    botocore's events `choose-signer.s3.…`; None leaves the choice to botocore.
    """
    if signature_version in ("v4-query", "s3v4-query"):
        return "s3v4-query"
    return None
