"""Object stores that the transport workers read by HTTP as documented: Google's and Azure's.

A store's fsspec filesystem lists, uploads and finds the credentials; no byte of a shard passes through it.
"""

import asyncio
import base64
import binascii
import math
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, ClassVar
from urllib.parse import quote

import fsspec

from shardcache.errors import NotFoundError, OriginError, ShardcacheError
from shardcache.origin import http_semantics
from shardcache.origin.base import MD5, Checksum, RemoteObject, Setup
from shardcache.origin.fsspec import FsspecOrigin, translated
from shardcache.transport.messages import ECHOED, Answer, Body
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Commit, Flow

_EARLY_S = 300.0
_PAUSE_S = 10.0
_SIGNED_S = 3600
_AZURE_VERSION = "2023-11-03"

# The class that gcsfs registers asks by gRPC of what type each bucket is.
fsspec.register_implementation("gs", "gcsfs.core.GCSFileSystem", clobber=True)
fsspec.register_implementation("gcs", "gcsfs.core.GCSFileSystem", clobber=True)

Headers = Mapping[str, str]
"""Headers of a message; of an answer, names are in lower case."""


@dataclass(frozen=True, slots=True, eq=False)
class Proof:
    """Credentials as requests show them."""

    headers: Headers
    query: str = ""
    until_s: float = math.inf  # time of expiry


class Renewed:
    """A proof that is renewed five minutes before it expires, by one request, however many want it."""

    def __init__(self, prove: Callable[[bool], Awaitable[Proof]]) -> None:
        self._prove = prove
        self._proof = Proof({}, until_s=-math.inf)
        self._due_s = -math.inf
        self._was_refused = False
        self._proving = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Renewed, due in {self._due_s - time.time():.0f} s>"

    async def get(self, url: str) -> Proof:
        """Return the proof for a url; while it is renewed or cannot be, the previous one until that expires."""
        now_s = time.time()
        if now_s >= self._due_s and not (self._proving.locked() and now_s < self._proof.until_s):
            async with self._proving:
                if time.time() >= self._due_s:
                    await self._renew(url)
        return self._proof

    async def _renew(self, url: str) -> None:
        now_s = time.time()
        try:
            with translated(url):
                proof = await self._prove(self._was_refused)
        except ShardcacheError:
            if now_s >= self._proof.until_s:
                raise
            self._due_s = now_s + _PAUSE_S
        else:
            life_s = proof.until_s - now_s
            self._proof, self._was_refused, self._due_s = proof, False, now_s + max(life_s - _EARLY_S, life_s / 2)

    def refuse(self, proof: Proof) -> bool:
        """Record that the store did not accept a proof; return whether it may accept another one."""
        if proof is self._proof and proof.until_s < math.inf:
            self._proof, self._due_s, self._was_refused = Proof({}, until_s=-math.inf), -math.inf, True
        return proof.until_s < math.inf


class StoreOrigin(FsspecOrigin):
    """Buckets with one set of options; redirects are not followed, so that credentials reach no other server.

    Attributes:
        condition: header that requests a version, and the version's form in it.
        versions: names of the version in answers and in listings.
        anonymous: options of the filesystem for requests without credentials.
        defaults: other options of the filesystem.
    """

    condition: ClassVar[tuple[str, str]]
    versions: ClassVar[tuple[str, str]]
    anonymous: ClassVar[dict[str, Any]]
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, setup: Setup) -> None:
        table = setup.table
        options = {"endpoint_url": table.endpoint_url} if table.endpoint_url else {}
        options |= self.defaults | (self.anonymous if table.anon else {}) | table.storage_options
        super().__init__(replace(setup, table=table.model_copy(update={"storage_options": options})))
        self._workers, self._verify_md5 = setup.workers, table.verify_etag
        self._proof = Renewed(self._prove)

    async def stat(self, url: str) -> RemoteObject:
        """As `Origin.stat`; one HEAD."""
        answer = await self._ask("HEAD", url, {})
        assert answer is not None
        if answer.status >= 300:
            what = f"the origin answered a HEAD with status {answer.status}"
            raise http_semantics.error_of(answer.status, what, url, answer.headers)
        version, size_bytes = self._version(answer.headers, url), answer.headers.get("content-length")
        checksum = self._checksum(answer.headers)
        return RemoteObject(url, version, http_semantics.size_of(size_bytes, url), checksum, joinable=True)

    async def fetch(
        self, obj: RemoteObject, parts: Parts, flow: Flow, commit: Commit | None = None
    ) -> list[PartSums] | None:
        """As `Origin.fetch`; one GET of this version."""
        name, form = self.condition
        wanted, ranges = form.format(obj.version), http_semantics.content_ranges(obj, parts.start, parts.stop)
        body = Body(parts, 206, {"content-range": ranges, self.versions[0]: (wanted,)}, held=commit is not None)
        headers = {"Range": http_semantics.range_header(parts.start, parts.stop), name: wanted}
        answer = await self._ask("GET", obj.url, headers, body, flow, commit)
        if answer is None or answer.sums is not None:
            return None if answer is None else answer.sums
        http_semantics.judge(answer, answer.headers.get(self.versions[0], "").strip('"'), obj, parts)

    async def close(self) -> None:
        """As `Origin.close`."""
        await super().close()
        for name in ("_session", "service_client", "credential"):  # of gcsfs, and of adlfs
            if (client := getattr(self._fs, name, None)) is not None:
                await client.close()

    async def _ask(
        self,
        method: str,
        url: str,
        headers: Headers,
        body: Body | None = None,
        flow: Flow | None = None,
        commit: Commit | None = None,
    ) -> Answer | None:
        """Return the answer to a request; it is repeated once if the store does not accept a proof that expires."""
        for is_last in (False, True):
            proof = await self._proof.get(url)
            with http_semantics.translated(url):
                request = http_semantics.request(method, self._target(url) + proof.query, {**proof.headers, **headers})
                if body is None or flow is None:
                    answer: Answer | None = await self._workers.ask(request)
                else:
                    answer = await self._workers.fetch(request, body, flow, commit)
            if is_last or answer is None or answer.status != 401 or not self._proof.refuse(proof):
                break
        return answer

    def _version(self, info: Mapping[str, Any], url: str) -> str:
        version = next((str(info[name]).strip('"') for name in self.versions if info.get(name)), "")
        if not ECHOED.fullmatch(version):
            raise http_semantics.no_version(url)
        return version

    @abstractmethod
    def _target(self, url: str) -> str:
        """Return an object's url for HTTP. Raises OriginError."""

    @abstractmethod
    def _checksum(self, headers: Headers) -> Checksum | None:
        """Return the whole object's checksum, if an answer states it."""

    @abstractmethod
    async def _prove(self, was_refused: bool) -> Proof:
        """Return current credentials; `was_refused` if the store did not accept the last ones. May raise anything."""


class GcsOrigin(StoreOrigin):
    """Google Cloud Storage by its XML API."""

    condition = ("x-goog-if-generation-match", "{}")
    versions = ("x-goog-generation", "generation")
    anonymous: ClassVar[dict[str, Any]] = {"token": "anon"}

    def _target(self, url: str) -> str:
        return "/".join((self._fs._location.rstrip("/"), *_place(url)))

    def _checksum(self, headers: Headers) -> Checksum | None:
        hashes = (part.strip().partition("=") for part in headers.get("x-goog-hash", "").split(","))
        return next((_decoded(name, value) for name, _, value in hashes if name == "crc32c"), None)

    async def _prove(self, was_refused: bool) -> Proof:
        google, headers = self._fs.credentials, {"Accept-Encoding": "gzip"}  # else Google inflates what is stored so
        if was_refused:
            await asyncio.to_thread(google.maybe_refresh, math.inf)
        await asyncio.to_thread(google.apply, headers)
        if payer := self._fs.requester_pays:
            headers["x-goog-user-project"] = payer if isinstance(payer, str) else self._fs.project
        expiry = google.credentials and google.credentials.expiry
        return Proof(headers, until_s=expiry.replace(tzinfo=UTC).timestamp() if expiry else math.inf)


class AzureOrigin(StoreOrigin):
    """Azure Blob Storage. An account key signs a query that permits reads for an hour; the key itself is not sent."""

    condition = ("If-Match", '"{}"')
    versions = ("etag", "etag")
    anonymous: ClassVar[dict[str, Any]] = {"anon": True}
    defaults: ClassVar[dict[str, Any]] = {"asynchronous": False}  # which its finalizers need; its methods do not

    @property
    def _account(self) -> str:
        client = self._fs.service_client
        return str(getattr(client.credential, "account_name", None) or client.account_name or self._fs.account_name)

    def _path(self, url: str) -> str:
        self._check_account(url)
        return super()._path(url)

    def _check_account(self, url: str) -> None:
        account = url.partition("://")[2].partition("/")[0].partition("@")[2].partition(".")[0]
        if account not in ("", self._account):
            remedy = f"the account of the [[origin]] table is {self._account}; each account needs a table"
            raise OriginError("the url names another storage account than the daemon uses", url=url, remedy=remedy)

    def _target(self, url: str) -> str:
        self._check_account(url)
        container, key = _place(url)
        endpoint = self._fs.service_client.url.partition("?")[0].rstrip("/")
        return f"{endpoint}/{container.partition('@')[0]}/{key}"

    def _checksum(self, headers: Headers) -> Checksum | None:
        return _decoded(MD5, headers["content-md5"]) if "content-md5" in headers and self._verify_md5 else None

    async def _prove(self, _was_refused: bool) -> Proof:
        client, now_s, version = self._fs.service_client, time.time(), {"x-ms-version": _AZURE_VERSION}
        if self._fs.credential is not None:
            token = await self._fs.credential.get_token("https://storage.azure.com/.default")
            return Proof(version | {"Authorization": f"Bearer {token.token}"}, until_s=token.expires_on)
        if key := getattr(client.credential, "account_key", None):
            from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

            may, expiry = AccountSasPermissions(read=True), datetime.fromtimestamp(now_s + _SIGNED_S, UTC)
            query = generate_account_sas(self._account, key, ResourceTypes(object=True), may, expiry)
            return Proof(version, f"?{query}", expiry.timestamp())
        _, mark, query = client.url.partition("?")
        return Proof(version, mark + query)


def _place(url: str) -> tuple[str, str]:
    """Return bucket and key of a url, quoted. Raises NotFoundError without a key."""
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket or not key:
        raise NotFoundError("this is a bucket", url=url, remedy="end the url with / to take every shard in the bucket")
    return quote(bucket, safe="@"), quote(key, safe="/~")


def _decoded(algorithm: str, value: str) -> Checksum | None:
    """Return a checksum from its Base64; None from anything else."""
    try:
        return Checksum(algorithm, int.from_bytes(base64.b64decode(value, validate=True), "big"))
    except binascii.Error:
        return None
