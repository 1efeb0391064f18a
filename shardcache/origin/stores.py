"""Object stores that the transport workers read by HTTP as documented: Google's, Azure's and the Hugging Face Hub.

A store's fsspec filesystem lists, uploads and finds the credentials; no byte of a shard passes through it.
"""

import asyncio
import math
import re
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, ClassVar
from urllib.parse import quote

import fsspec
from yarl import URL

from shardcache.errors import NotAllowedError, NotFoundError, OriginError, ShardcacheError, ShardChangedError
from shardcache.near import is_near
from shardcache.origin import http_semantics
from shardcache.origin.base import GIT_BLOB, MD5, SHA256, Checksum, RemoteObject, Setup, checksum_in
from shardcache.origin.fsspec import FsspecOrigin, translated
from shardcache.origin.web import MAX_REDIRECTS, REDIRECTS, following
from shardcache.transport.messages import ECHOED, Answer, Body
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Commit, Flow

_EARLY_S = 300.0
_PAUSE_S = 10.0
_SIGNED_S = 3600
_LOCATED_S = 600
_MAX_LOCATED = 10_000
_EXPIRED = (400, 401, 403)
_NO_CREDENTIALS = "none: anonymous"
_AZURE_VERSION = "2023-11-03"
_HUB_CHECKSUMS = {64: SHA256, 40: GIT_BLOB}  # by the number of digits

# The class that gcsfs registers asks by gRPC of what type each bucket is.
fsspec.register_implementation("gs", "gcsfs.core.GCSFileSystem", clobber=True)
fsspec.register_implementation("gcs", "gcsfs.core.GCSFileSystem", clobber=True)


@dataclass(frozen=True, slots=True, eq=False)
class Proof:
    """Credentials as requests show them."""

    headers: Mapping[str, str]
    query: str = ""
    until_s: float = math.inf  # time of expiry
    source: str = _NO_CREDENTIALS  # for people


class Renewed:
    """A proof that is renewed five minutes before it expires, by one request, however many want it."""

    def __init__(self, prove: Callable[[bool], Awaitable[Proof]]) -> None:
        self._prove, self._proving = prove, asyncio.Lock()
        self._proof, self._was_refused = Proof({}, until_s=-math.inf), False
        self._due_s = self._failed_s = -math.inf
        self._failure: ShardcacheError  # of all requests that were waiting for a proof then

    async def get(self, url: str) -> Proof:
        """Return the proof for a url; while it is renewed or cannot be, the previous one until that expires."""
        now_s = time.time()
        if now_s >= self._due_s and not (self._proving.locked() and now_s < self._proof.until_s):
            async with self._proving:
                if self._failed_s > now_s:
                    raise type(self._failure)(self._failure.message, url=url, remedy=self._failure.remedy)
                if time.time() >= self._due_s:
                    await self._renew(url)
        return self._proof

    async def _renew(self, url: str) -> None:
        now_s = time.time()
        try:
            with translated(url):
                proof = await self._prove(self._was_refused)
        except ShardcacheError as exn:
            self._failure, self._failed_s = exn, time.time()
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
    """Buckets with one set of options; redirects are not followed, so that credentials reach no other server."""

    condition: ClassVar[tuple[str, str]] = ("If-Match", '"{}"')  # header that requests a version, and its form there
    versions: ClassVar[tuple[str, str]] = ("etag", "etag")  # names of the version in answers and in listings
    endpoint: ClassVar[str] = "endpoint_url"  # option of the filesystem for another endpoint, if it has one
    anonymous: ClassVar[dict[str, Any]]  # its options for requests without credentials
    defaults: ClassVar[dict[str, Any]] = {}  # its other options
    _is_far = True

    def __init__(self, setup: Setup) -> None:
        table = setup.table
        options = {self.endpoint: table.endpoint_url} if table.endpoint_url and self.endpoint else {}
        options |= self.defaults | (self.anonymous if table.anon else {}) | table.storage_options
        super().__init__(replace(setup, table=table.model_copy(update={"storage_options": options})))
        self._workers, self._verify_md5 = setup.workers, table.verify_etag
        self._proof, self._environment = Renewed(self._prove), http_semantics.Environment()

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`; one HEAD."""
        return self._object(url, await self._ask("HEAD", url, {}, first_bytes=first_bytes))

    def _object(self, url: str, answer: Answer | None) -> RemoteObject:
        """Return the object that an answer to HEAD describes. Raises the error for any other answer."""
        assert answer is not None
        headers = answer.headers
        if answer.status >= 300 and not (answer.status in REDIRECTS and "x-linked-etag" in headers):
            what = f"the origin answered a HEAD with status {answer.status}"
            raise http_semantics.error_of(answer.status, what, url, headers)
        size_bytes = http_semantics.size_of(
            headers.get("x-linked-size" if "x-linked-etag" in headers else "content-length"), url
        )
        return RemoteObject(url, self._version(headers, url), size_bytes, self._checksum(headers, url), joinable=True)

    async def fetch(
        self, obj: RemoteObject, parts: Parts, flow: Flow, commit: Commit | None = None
    ) -> list[PartSums] | None:
        """As `Origin.fetch`; one GET of this version, and another one if a signed url has expired."""
        for is_last in (False, True):
            place, away = await self._locate(obj, again=is_last)
            headers, body = self._ask_for(obj, parts, away=away, held=commit is not None)
            answer = await self._ask("GET", obj.url, headers, body, flow, commit, place=place, away=away)
            if answer is None or answer.sums is not None:
                return None if answer is None else answer.sums
            if is_last or not away or answer.status not in _EXPIRED:
                version = obj.version if away else _plain(answer.headers.get(self.versions[0], ""))
                http_semantics.judge(answer, version, obj, parts)
        return None

    def _ask_for(self, obj: RemoteObject, parts: Parts, *, away: bool, held: bool) -> tuple[dict[str, str], Body]:
        """Return the headers that request parts, and the expected body; `away` if another server has them.

        That server knows nothing of the store's versions.
        """
        headers: dict[str, str] = {}
        expected: dict[str, Sequence[str | None]] = {}
        if obj.ranges:
            headers["Range"] = http_semantics.range_header(parts.start, parts.stop)
            expected["content-range"] = http_semantics.content_ranges(obj, parts.start, parts.stop)
        if not away:
            name, form = self.condition
            wanted = form.format(obj.version)
            headers[name] = wanted
            expected[self.versions[0]] = (wanted, f"W/{wanted}")
        status = 206 if obj.ranges else 200
        return headers, Body(parts, status, expected, held=held, encoded_chunks=obj.ranges)

    async def credentials(self, url: str) -> str:
        """As `Origin.credentials`."""
        return (await self._proof.get(url)).source

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
        headers: Mapping[str, str],
        *reading: Any,
        place: str = "",
        away: bool = False,
        first_bytes: int = 0,
    ) -> Answer | None:
        """Return the answer to a request; it is repeated once if the store does not accept a proof that expires.

        `place` is the url to use in place of the object's own; `away` if it is another server's, without credentials.
        """
        for is_last in (away, True):
            proof = Proof({}) if away else await self._proof.get(url)
            target, shown = (place or self._target(url)) + proof.query, {**proof.headers, **headers}
            with http_semantics.translated(url):
                request = self._environment.request(method, target, shown, far_only=away and self._is_far)
                workers, ahead = self._workers, request.beginning(first_bytes)
                asked = workers.fetch(request, *reading) if reading else workers.ask(request, ahead)
                answer: Answer | None = await asked
            if is_last or answer is None or answer.status != 401 or not self._proof.refuse(proof):
                break
        return answer

    async def _locate(self, _obj: RemoteObject, *, again: bool) -> tuple[str, bool]:
        """Return `place` and `away` of a request for an object; `again` if the last url has expired."""
        return "", False

    def _version(self, info: Mapping[str, Any], url: str) -> str:
        version = next((_plain(str(info[name])) for name in self.versions if info.get(name)), "")
        if not ECHOED.fullmatch(version):
            raise http_semantics.no_version(url)
        return version

    @abstractmethod
    def _target(self, url: str) -> str:
        """Return an object's url for HTTP. Raises OriginError."""

    def _checksum(self, headers: Mapping[str, str], url: str) -> Checksum | None:
        """Return the whole object's checksum, if an answer states it. Raises OriginUnavailableError."""
        if "content-md5" not in headers or not self._verify_md5:
            return None
        return checksum_in(MD5, headers["content-md5"], url)

    @abstractmethod
    async def _prove(self, was_refused: bool) -> Proof:
        """Return current credentials; `was_refused` if the store did not accept the last ones."""


class GcsOrigin(StoreOrigin):
    """Google Cloud Storage by its XML API."""

    condition = ("x-goog-if-generation-match", "{}")
    versions = ("x-goog-generation", "generation")
    anonymous: ClassVar[dict[str, Any]] = {"token": "anon"}

    def _target(self, url: str) -> str:
        return "/".join((self._fs._location.rstrip("/"), *_place(url)))

    def _checksum(self, headers: Mapping[str, str], url: str) -> Checksum | None:
        hashes = (part.strip().partition("=") for part in headers.get("x-goog-hash", "").split(","))
        return next((checksum_in(name, value, url) for name, _, value in hashes if name == "crc32c"), None)

    async def _prove(self, was_refused: bool) -> Proof:
        google, headers = self._fs.credentials, {"Accept-Encoding": "gzip"}  # else Google inflates what is stored so
        if was_refused:
            await asyncio.to_thread(google.maybe_refresh, math.inf)
        await asyncio.to_thread(google.apply, headers)
        if payer := self._fs.requester_pays:
            headers["x-goog-user-project"] = payer if isinstance(payer, str) else self._fs.project
        expiry = google.credentials and google.credentials.expiry
        until_s = expiry.replace(tzinfo=UTC).timestamp() if expiry else math.inf
        found = google.credentials and type(google.credentials).__module__.removeprefix("google.")
        return Proof(headers, until_s=until_s, source=found or _NO_CREDENTIALS)


class AzureOrigin(StoreOrigin):
    """Azure Blob Storage. An account key signs a query that permits reads for an hour; the key itself is not sent."""

    endpoint = ""
    anonymous: ClassVar[dict[str, Any]] = {"anon": True}
    defaults: ClassVar[dict[str, Any]] = {"asynchronous": False}  # which its finalizers need; its methods do not

    def _connect(self, cls: type[fsspec.AbstractFileSystem]) -> Any:
        fs = super()._connect(cls)
        if endpoint_url := self._setup.table.endpoint_url:  # adlfs knows accounts at https:// alone
            from azure.storage.blob.aio import BlobServiceClient

            _, mark, query = fs.service_client.url.partition("?")
            fs.service_client = BlobServiceClient(endpoint_url + mark + query, fs.service_client.credential)
        return fs

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

    async def _prove(self, was_refused: bool) -> Proof:
        if was_refused:  # the credential has cached the token
            self._fs = self._open()
        client, now_s, version = self._fs.service_client, time.time(), {"x-ms-version": _AZURE_VERSION}
        if self._fs.credential is not None:
            token = await self._fs.credential.get_token("https://storage.azure.com/.default")
            return Proof(version | {"Authorization": f"Bearer {token.token}"}, "", token.expires_on, "token")
        if key := getattr(client.credential, "account_key", None):
            from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

            may, expiry = AccountSasPermissions(read=True), datetime.fromtimestamp(now_s + _SIGNED_S, UTC)
            query = generate_account_sas(self._account, key, ResourceTypes(object=True), may, expiry)
            return Proof(version, f"?{query}", expiry.timestamp(), "account key")
        _, mark, query = client.url.partition("?")
        return Proof(version, mark + query, source="shared access signature" if query else _NO_CREDENTIALS)


class HubOrigin(StoreOrigin):
    """Repositories of the Hugging Face Hub, which redirects to signed urls of other servers for files of git LFS.

    The version is the SHA-256 of such a file, and git's SHA-1 of any other: both are checksums as well. A mirror of the
    Hub may have neither. Nothing then tells what its servers hold of which version, so the file comes in one answer.
    """

    versions = ("etag", "blob_id")
    endpoint = "endpoint"
    anonymous: ClassVar[dict[str, Any]] = {"token": False}

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._home = URL(self._fs.endpoint)
        self._is_far = not is_near(self._home.host or "")
        self._located: dict[str, tuple[RemoteObject, URL]] = {}

    async def stat(self, url: str, _first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`; a HEAD, and one more for each redirect within the Hub."""
        place = URL(self._target(url), encoded=True)
        for _ in range(MAX_REDIRECTS):
            answer = await self._ask("HEAD", url, {}, place=str(place))
            location = answer.headers.get("location") if answer and answer.status in REDIRECTS else None
            place = following(url, place, location) if location else place
            if not location or place.origin() != self._home.origin():  # where the token must not be sent
                break
        if self._is_far and is_near(place.host or ""):
            raise NotAllowedError(f"the Hub leads to {place.host}, which is this node or its metadata service", url=url)
        if len(self._located) >= _MAX_LOCATED:
            self._located.clear()
        obj = self._object(url, answer)
        if obj.checksum is None:
            obj = replace(obj, ranges=False, guarded=False)
        self._located[url] = obj, place
        return obj

    async def prepare(self, url: str) -> None:
        """As `Origin.prepare`; the credentials alone.

        Each HEAD has the Hub sign another url, and a server may refuse those that were signed
        before, also the one by which a reader's GET is on its way.
        """
        await self.credentials(url)

    async def _locate(self, obj: RemoteObject, *, again: bool) -> tuple[str, bool]:
        known = self._located.get(obj.url)
        if known is None or again or time.monotonic() - known[0].reported_s > _LOCATED_S:
            await self.stat(obj.url)
        found, place = self._located[obj.url]
        if found.version != obj.version:
            raise ShardChangedError("the Hub holds another version than requested", url=obj.url)
        return str(place), place.origin() != self._home.origin()

    def _target(self, url: str) -> str:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import parse_hf_uri

        try:
            at = parse_hf_uri(url)
            repository = {"repo_type": at.type, "revision": at.revision, "endpoint": self._fs.endpoint}
            return str(hf_hub_url(at.id, at.path_in_repo, **repository))
        except ValueError as exn:
            raise NotFoundError(f"not the url of a file on the Hub: {exn}", url=url) from None

    def _version(self, info: Mapping[str, Any], url: str) -> str:
        linked = info["lfs"]["sha256"] if info.get("lfs") else info.get("x-linked-etag")
        return super()._version({"etag": linked} if linked else info, url)

    def _checksum(self, headers: Mapping[str, str], url: str) -> Checksum | None:
        version = self._version(headers, url)
        algorithm = _HUB_CHECKSUMS.get(len(version))
        if algorithm is None or not re.fullmatch("[0-9a-f]+", version):
            return None
        return Checksum(algorithm, int(version, 16))

    async def _prove(self, _was_refused: bool) -> Proof:
        from huggingface_hub.utils import build_hf_headers

        headers = await asyncio.to_thread(build_hf_headers, token=self._fs.token)
        source = "token" if "authorization" in headers else _NO_CREDENTIALS
        return Proof(headers, until_s=time.time() + _LOCATED_S, source=source)


def _plain(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')


def _place(url: str) -> tuple[str, str]:
    """Return bucket and key of a url, quoted. Raises NotFoundError without a key."""
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket or not key:
        raise NotFoundError("this is a bucket", url=url, remedy="end the url with / to take every shard in the bucket")
    return quote(bucket, safe="@"), quote(key, safe="/~")
