"""One s3fs filesystem at a time, replaced when its credentials are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import aiobotocore.session
from botocore.loaders import Loader, create_loader
from s3fs import S3FileSystem

from shardcache.config import OriginTable
from shardcache.errors import ShardcacheError
from shardcache.origin.s3.direct import keep_signature_v4
from shardcache.origin.s3.error_translation import FOREIGN, judge
from shardcache.origin.s3.sdk_http import StoreSession

CONNECT_TIMEOUT_S = 10


@dataclass(slots=True, eq=False)
class _Session:
    fs: S3FileSystem
    client: Any
    users: int = 0
    retired: bool = False


class SdkSessions:
    """Provides the current filesystem, and closes retired ones when their last user is done.

    botocore renews the credentials of roles and tokens by itself. Those that it reads only once, such as keys in a
    file, are read again by a new session after the origin has refused the old ones.

    Args:
        attempts: attempts of each request by the SDK itself.
        read_timeout_s: silence after which a request has failed; None if the caller notices it.
    """

    def __init__(
        self, table: OriginTable, max_connections: int, *, attempts: int = 1, read_timeout_s: float | None = None
    ) -> None:
        self._options = _options(table, max_connections, read_timeout_s)
        self._attempts = attempts
        self._profile = self._options.pop("profile", table.profile)
        self._starting = asyncio.Lock()
        self._present: _Session | None = None

    @asynccontextmanager
    async def use(self, url: str) -> AsyncIterator[S3FileSystem]:
        """Provide the filesystem for one request, and translate every foreign exception of the block."""
        session: _Session | None = None
        try:
            session = await self._borrow()
            yield session.fs
        except ShardcacheError as exn:  # NotFoundError is also an OSError
            exn.url = exn.url or url
            raise
        except FOREIGN as exn:
            verdict = judge(exn, url)
            if verdict.stale_credentials and session is self._present:
                self._retire()
            raise verdict.error from exn
        finally:
            if session is not None:
                await self._give_back(session)

    async def close(self) -> None:
        """Close the current session as soon as it is unused."""
        session = self._present
        if session is not None:
            self._retire()
            session.users += 1
            await self._give_back(session)

    async def _borrow(self) -> _Session:
        async with self._starting:
            session = self._present
            if session is None:
                boto_session = await asyncio.to_thread(_boto_session, self._profile)
                fs = S3FileSystem(session=boto_session, **self._options)
                fs.retries = self._attempts
                client = await fs.set_session()
                for operation in ("GetObject", "HeadObject"):
                    client.meta.events.register_first(f"choose-signer.s3.{operation}", keep_signature_v4)
                session = self._present = _Session(fs, client)
        session.users += 1
        return session

    async def _give_back(self, session: _Session) -> None:
        session.users -= 1
        if session.retired and not session.users:
            await session.client.close()

    def _retire(self) -> None:
        if self._present is not None:
            self._present.retired = True
            self._present = None


@cache
def descriptions() -> Loader:
    """Return botocore's descriptions of S3, loaded once for all sessions. Blocks for some 0.3 s the first time."""
    loader: Loader = create_loader(aiobotocore.session.AioSession().get_config_variable("data_path"))
    for description in ("service-2", "endpoint-rule-set-1", "paginators-1"):
        loader.load_service_model("s3", description)
    for name in ("endpoints", "partitions", "sdk-default-configuration"):
        loader.load_data(name)
    return loader


def _boto_session(profile: str | None) -> aiobotocore.session.AioSession:
    session = aiobotocore.session.AioSession(profile=profile)
    session.register_component("data_loader", descriptions())
    return session


def _options(table: OriginTable, max_connections: int, read_timeout_s: float | None) -> dict[str, Any]:
    given = dict(table.storage_options)
    client = {"region_name": table.region} if table.region else {}
    config = {
        "max_pool_connections": max_connections,
        "retries": {"total_max_attempts": 1},
        "connect_timeout": CONNECT_TIMEOUT_S,
        "http_session_cls": StoreSession,
        "read_timeout": read_timeout_s,
        "response_checksum_validation": "when_required",  # parts have no checksum of their own
    }
    return {
        "anon": table.anon,
        "endpoint_url": table.endpoint_url,
        **given,
        "client_kwargs": client | given.get("client_kwargs", {}),
        "config_kwargs": config | given.get("config_kwargs", {}),
        "asynchronous": True,
        "skip_instance_cache": True,
        "use_listings_cache": False,
    }
