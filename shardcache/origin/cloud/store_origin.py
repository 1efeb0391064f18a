"""Buckets of an object store, read by HTTP as the store documents it.

This is the base of the origins for Google, Azure and the Hugging Face Hub. Transport workers send
the requests; the store's fsspec filesystem lists, uploads and finds credentials.

- The table is the `[[origin]]` table for the store in the daemon's config.
- A proof is the form in which credentials go into a request: headers, or a signed query.
- An object's location is away if it is on another server, to which the store has redirected.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote

from shardcache.origin.base import Setup
from shardcache.origin.cloud.proofs import Proof, RenewedProof
from shardcache.origin.filesystems.fsspec_origin import FsspecOrigin
from shardcache.origin.http.http_errors import error_of, translate_transport_errors
from shardcache.origin.http.http_semantics import (
    Environment,
    Reading,
    content_ranges,
    no_version,
    plain_etag,
    raise_unusable,
    range_header,
    send,
    size_of,
)
from shardcache.origin.http.redirects import REDIRECTS
from shardcache.origin.objects import MD5, Checksum, RemoteObject, checksum_from_base64
from shardcache.origin.permitted_origin import CredentialedOrigin
from shardcache.shared.exceptions import NotFoundError
from shardcache.transport.between.flow import Commit, Flow
from shardcache.transport.between.messages import Answer, Body
from shardcache.transport.between.parts import Parts, PartSums
from shardcache.transport.http.http_heads import SENDABLE

# Statuses with which a server answers a request to a signed url that has expired.
_EXPIRED = (400, 401, 403)


class Location(NamedTuple):
    """Location from which an object's bytes are requested.

    Attributes:
        url: url of the request; empty for the object's own url at the store.
        is_away: True if the location is on another server, which gets no credentials and states no
            version.
    """

    url: str
    is_away: bool


AT_STORE = Location("", is_away=False)
"""The object's own url at the store."""


class StoreOrigin(FsspecOrigin, CredentialedOrigin):
    """Buckets with one set of options.

    The workers follow no redirects, so that credentials reach no other server. A subclass whose
    store redirects returns the other server's url from `_locate`.

    Attributes:
        condition_header: header that requests a version.
        condition_form: format string for the version in that header.
        version_header: header of answers that states the version.
        listed_version: field of the filesystem's listings that states the version.
        endpoint: name of the filesystem's option for another endpoint; empty if there is none.
        anonymous: the filesystem's options for requests without credentials.
        defaults: the filesystem's options that are always set, unless the table has others.
    """

    condition_header: ClassVar[str] = "If-Match"
    condition_form: ClassVar[str] = '"{}"'
    version_header: ClassVar[str] = "etag"
    listed_version: ClassVar[str] = "etag"
    endpoint: ClassVar[str] = "endpoint_url"
    anonymous: ClassVar[dict[str, Any]]
    defaults: ClassVar[dict[str, Any]] = {}
    # True to refuse redirects to this node or its cloud's metadata service (`Request.far_only`).
    _far_only = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(self._with_options(setup))
        self._workers = setup.workers
        self._verify_md5 = setup.table.verify_etag
        self._proofs = RenewedProof(self._new_proof)
        self._environment = Environment()

    @classmethod
    def options_of(cls, credentials: Any) -> dict[str, Any]:
        """Return the options of the filesystem for a session's credentials. Blocks.

        Args:
            credentials: an instance of `credentials_kind`; see `CredentialedOrigin`.

        Raises AccessDeniedError, ConfigError.
        """
        raise NotImplementedError

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`; one HEAD."""
        answer = await self._head(url, first_bytes=first_bytes)
        return self._object(url, answer)

    async def fetch(
        self,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow,
        commit: Commit | None = None,
    ) -> list[PartSums] | None:
        """As `Origin.fetch`; one GET, and a second if another server's signed url has expired."""
        location = await self._locate(obj, again=False)
        answer = await self._get(obj, parts, flow, commit, location)
        if location.is_away and answer is not None and answer.status in _EXPIRED:
            # The object is located again, which returns a new url.
            location = await self._locate(obj, again=True)
            answer = await self._get(obj, parts, flow, commit, location)
        if answer is None:  # `commit` returned False
            return None
        # The answer has checksums only if it was as expected, so that its body was written.
        if answer.sums is None:
            version = self._version_sent(answer, obj, is_away=location.is_away)
            raise_unusable(answer, version, obj, parts)
        return answer.sums

    async def obtain_credentials(self, url: str) -> str:
        """As `Origin.obtain_credentials`."""
        proof = await self._proofs.get(url)
        return proof.source

    async def close(self) -> None:
        """As `Origin.close`."""
        await super().close()
        # gcsfs has its client in `_session`; adlfs has two, in the other attributes.
        for name in ("_session", "service_client", "credential"):
            client = getattr(self._fs, name, None)
            if client is not None:
                await client.close()

    def _with_options(self, setup: Setup) -> Setup:
        """Return the setup with the table's settings as options of the filesystem.

        Later options override earlier ones. They are the endpoint, the defaults, the options for
        requests without credentials, the table's options, and finally the session's credentials.
        """
        table = setup.table
        options: dict[str, Any] = {}
        if table.endpoint_url and self.endpoint:
            options[self.endpoint] = table.endpoint_url
        options |= self.defaults
        if table.anon:
            options |= self.anonymous
        options |= table.storage_options
        if setup.credentials is not None:
            options |= self.options_of(setup.credentials)
        return replace(setup, table=table.model_copy(update={"storage_options": options}))

    def _object(self, url: str, answer: Answer) -> RemoteObject:
        """Return the object that an answer to a HEAD describes.

        Raises the error for any other answer.
        """
        headers = answer.headers
        # For a file of git LFS, the Hub redirects to the server that has the bytes. The redirect
        # itself states version and size, so it is as good as an answer with a status below 300.
        is_linked = "x-linked-etag" in headers
        is_good_redirect = answer.status in REDIRECTS and is_linked
        if answer.status >= 300 and not is_good_redirect:
            problem = f"the origin answered a HEAD with status {answer.status}"
            raise error_of(answer.status, problem, url, headers)
        size_header = "x-linked-size" if is_linked else "content-length"
        size_bytes = size_of(headers.get(size_header), url)
        # A read may fetch several parts, as the workers write the bytes as they arrive.
        return RemoteObject(
            url,
            version=self._version(headers, url),
            size_bytes=size_bytes,
            checksum=self._checksum(headers, url),
            is_joinable=True,
        )

    def _version_sent(self, answer: Answer, obj: RemoteObject, *, is_away: bool) -> str:
        """Return the version of the bytes in an answer.

        Args:
            is_away: True if another server sent the answer. That server states no version, but the
                store has named its url for this version only.
        """
        if is_away:
            return obj.version
        return plain_etag(answer.headers.get(self.version_header, ""))

    def _headers_and_body(
        self,
        obj: RemoteObject,
        parts: Parts,
        *,
        is_away: bool,
        held: bool,
    ) -> tuple[dict[str, str], Body]:
        """Return the headers that request parts, and the expected body.

        Args:
            is_away: True if the request goes to another server.
            held: True if the body stays in memory until `commit` permits it to be written.
        """
        headers: dict[str, str] = {}
        expected: dict[str, Sequence[str | None]] = {}  # permitted values by header
        status = 200
        if obj.has_ranges:
            status = 206
            headers["Range"] = range_header(parts.start, parts.stop)
            expected["content-range"] = content_ranges(obj, parts.start, parts.stop)
        if not is_away:
            wanted = self.condition_form.format(obj.version)
            headers[self.condition_header] = wanted
            # A proxy on the way may mark the ETag as weak, with "W/".
            expected[self.version_header] = (wanted, f"W/{wanted}")
        # A server without ranged reads may compress objects as it sends them. The body would then
        # have other bytes than the object, so a compressed body is refused.
        return headers, Body(parts, status, expected, held=held, encoded_chunks=obj.has_ranges)

    async def _head(
        self,
        url: str,
        *,
        location: Location = AT_STORE,
        first_bytes: int = 0,
    ) -> Answer:
        """Return the answer to a HEAD; see `_ask`."""
        answer = await self._ask("HEAD", url, {}, location=location, first_bytes=first_bytes)
        assert answer is not None  # only a read with `commit` may have no answer
        return answer

    async def _get(
        self,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow,
        commit: Commit | None,
        location: Location,
    ) -> Answer | None:
        """Return the answer to a GET of parts of this version; None if `commit` returned False."""
        held = commit is not None
        headers, body = self._headers_and_body(obj, parts, is_away=location.is_away, held=held)
        reading = Reading(body, flow, commit)
        return await self._ask("GET", obj.url, headers, reading, location=location)

    async def _ask(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        reading: Reading | None = None,
        *,
        location: Location = AT_STORE,
        first_bytes: int = 0,
    ) -> Answer | None:
        """Return the answer to a request.

        If the store does not accept a proof that expires, the request is repeated once, with a new
        proof. Returns None if the `commit` of `reading` drops the body.

        Args:
            reading: the expected body and its destination; None to read no body.
            location: location to which the request is sent.
            first_bytes: number of the object's first bytes to request at the same time.
        """

        async def ask_with(proof: Proof) -> Answer | None:
            target = location.url or self._http_url(url)
            all_headers = {**proof.headers, **headers}
            far_only = location.is_away and self._far_only
            with translate_transport_errors(url):
                request = self._environment.request(
                    method,
                    target + proof.query,
                    all_headers,
                    far_only=far_only,
                )
                return await send(self._workers, request, reading, first_bytes)

        if location.is_away:
            # Another server gets no credentials: the empty proof has neither headers nor a query.
            return await ask_with(Proof({}))

        proof = await self._proofs.get(url)
        answer = await ask_with(proof)
        is_refused = answer is not None and answer.status == 401
        if is_refused:
            may_be_renewed = self._proofs.record_refusal(proof)
            if may_be_renewed:
                new_proof = await self._proofs.get(url)
                answer = await ask_with(new_proof)
        return answer

    async def _locate(self, _obj: RemoteObject, *, again: bool) -> Location:
        """Return the location of an object.

        By default, the store itself has all objects. A subclass may return another server's url.

        Args:
            again: True if the url of the last location has expired, so that a new one is needed.
        """
        return AT_STORE

    def _version(self, info: Mapping[str, Any], url: str) -> str:
        """Return the version in an answer's headers or in a listing.

        Args:
            info: headers of an answer, or an entry of the filesystem's listing.

        Raises OriginUnavailableError if there is no version, or if a request could not send it
        back.
        """
        version = ""
        for name in (self.version_header, self.listed_version):
            if info.get(name):
                version = plain_etag(str(info[name]))
                break
        if not SENDABLE.fullmatch(version):
            raise no_version(url)
        return version

    @abstractmethod
    def _http_url(self, url: str) -> str:
        """Return the HTTP url of an object at the store. Raises OriginError."""

    def _checksum(self, headers: Mapping[str, str], url: str) -> Checksum | None:
        """Return the whole object's checksum; None if the answer does not state it.

        Raises OriginUnavailableError for a value that is not a checksum.
        """
        if "content-md5" not in headers or not self._verify_md5:
            return None
        return checksum_from_base64(MD5, headers["content-md5"], url)

    @abstractmethod
    async def _new_proof(self, was_refused: bool) -> Proof:
        """Return a new proof, from the credentials as they are now.

        Args:
            was_refused: True if the store did not accept the last proof.
        """


def quoted_bucket_and_key(url: str) -> tuple[str, str]:
    """Return the bucket and the key of a url, percent-encoded.

    Raises NotFoundError for a url without a key.
    """
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket or not key:
        raise NotFoundError(
            "this is a bucket",
            url=url,
            remedy="end the url with / to take every shard in the bucket",
        )
    return quote(bucket, safe="@"), quote(key, safe="/~")
