"""Origins whose module is loaded on first use.

`registry` returns a `DeferredOrigin` without delay, and the first request imports the module and
SDK of the real origin. A key split is a mark at the end of a url that says how the names in a tar
are split into a sample's key and a field. The store does not know this mark, so it is removed from
the url here.
"""

import asyncio
import contextlib
import importlib
from dataclasses import replace
from pathlib import Path

from shardcache.access.protocols import row_of
from shardcache.origin.base import Origin, Setup
from shardcache.origin.objects import ListedPage, PageRequest, RemoteObject
from shardcache.origin.tier.tier_state import Route
from shardcache.shared import exceptions
from shardcache.shared.tarindex.key_splits import key_split_in
from shardcache.transport.between.flow import Commit, Flow, Received
from shardcache.transport.between.messages import Answer
from shardcache.transport.between.parts import Parts, PartSums

# Limit on the time of a preparation: see `DeferredOrigin.start_preparing`.
_PREPARATION_S = 30.0


class DeferredOrigin(Origin):
    """An origin that is loaded in a thread on first use: importing an SDK takes a second.

    Any method may raise MissingPackageError or ConfigError as well.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._loading = asyncio.Lock()
        self._origin: Origin | None = None
        self._preparing: asyncio.Task[None] | None = None

    async def loaded(self) -> Origin:
        """Return the real origin, loaded if necessary."""
        async with self._loading:
            if self._origin is None:
                self._origin = await asyncio.to_thread(_load, self._setup)
        return self._origin

    def start_preparing(self, url: str) -> None:
        """Start to prepare for a first request: load the origin, get credentials, and connect.

        Errors are ignored, because the first request will fail in the same way and report the
        error.
        """
        if self._preparing is None:
            self._preparing = asyncio.create_task(self._prepare(url))

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`. If the url is signed, it also records whether the store accepted it."""
        origin = await self.loaded()
        signatures = self._setup.signatures
        object_url, _ = key_split_in(url)
        try:
            obj = await origin.stat(object_url, first_bytes)
        except exceptions.AccessDeniedError:
            signatures.record_refused(url)
            raise
        signatures.record_accepted(url)
        return obj if url == object_url else replace(obj, url=url)

    async def fetch(
        self,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow,
        commit: Commit | None = None,
    ) -> list[PartSums] | None:
        """As `Origin.fetch`."""
        origin = await self.loaded()
        return await origin.fetch(_without_key_split(obj), parts, flow, commit)

    async def ask_tier(
        self,
        route: Route,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow | None,
    ) -> Answer | None:
        """As `Origin.ask_tier`."""
        origin = await self.loaded()
        return await origin.ask_tier(route, _without_key_split(obj), parts, flow)

    async def list_prefix(
        self,
        prefix: str,
        received: Received,
        *,
        flat: bool = False,
    ) -> list[RemoteObject]:
        """As `Origin.list_prefix`."""
        origin = await self.loaded()
        return await origin.list_prefix(prefix, received, flat=flat)

    async def list_page(self, wanted: PageRequest) -> ListedPage:
        """As `Origin.list_page`."""
        origin = await self.loaded()
        return await origin.list_page(wanted)

    async def part_span(self, obj: RemoteObject, number: int) -> tuple[int, int] | None:
        """As `Origin.part_span`."""
        origin = await self.loaded()
        return await origin.part_span(_without_key_split(obj), number)

    async def obtain_credentials(self, url: str) -> str:
        """As `Origin.obtain_credentials`."""
        origin = await self.loaded()
        return await origin.obtain_credentials(url)

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """As `Origin.upload`."""
        origin = await self.loaded()
        return await origin.upload(path, url, replaced)

    async def close(self) -> None:
        """Close the origin if it was loaded."""
        if self._preparing is not None:
            self._preparing.cancel()
        if self._origin is not None:
            await self._origin.close()

    async def _prepare(self, url: str) -> None:
        """Load the origin and prepare it for the first requests."""
        with contextlib.suppress(exceptions.ShardcacheError, TimeoutError):
            async with asyncio.timeout(_PREPARATION_S):
                origin = await self.loaded()
                object_url, _ = key_split_in(url)
                await origin.prepare(object_url)


def _without_key_split(obj: RemoteObject) -> RemoteObject:
    """Return an object with the url that its store knows, which has no key split."""
    url, _ = key_split_in(obj.url)
    return obj if url == obj.url else replace(obj, url=url)


def _load(setup: Setup) -> Origin:
    """Import the class of a protocol's origin, and create the origin. Blocks.

    Raises MissingPackageError, ConfigError.
    """
    row = row_of(setup.protocol)
    module_name, _, class_name = row.origin.partition(":")
    try:
        module = importlib.import_module(module_name)
        origin_class = getattr(module, class_name)
        origin: Origin = origin_class(setup)  # may import a package as well
    except ImportError as exn:
        missing = (exn.name or "").partition(".")[0]
        raise _missing_package(setup.protocol, row.package or missing, exn) from exn
    return origin


def _missing_package(
    protocol: str,
    package: str,
    exn: ImportError,
) -> exceptions.MissingPackageError:
    """Return the error for an import that failed.

    Args:
        package: name of the missing package; empty if it is not known.
    """
    if package:
        needed = f"the Python package {package}"
        remedy = f"pip install {package}"
    else:
        needed = f"a Python package ({exn})"
        remedy = "install the package for the daemon"
    return exceptions.MissingPackageError(
        f"{protocol}:// urls need {needed}, which is not installed",
        remedy=remedy,
    )
