"""The Hugging Face Hub."""

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from yarl import URL

from shardcache.access.near import is_near
from shardcache.errors import NotAllowedError, NotFoundError, ShardChangedError
from shardcache.origin.base import Setup
from shardcache.origin.cloud.proofs import NO_CREDENTIALS, Proof
from shardcache.origin.cloud.store_origin import StoreOrigin
from shardcache.origin.http.redirects import MAX_REDIRECTS, REDIRECTS, following
from shardcache.origin.objects import GIT_BLOB, SHA256, Checksum, RemoteObject
from shardcache.shared.credentials.hub_token import HubToken
from shardcache.transport.between.flow import Received
from shardcache.transport.between.messages import Answer

_BUCKETS = "hf://buckets/"
# Time for which a file's place is used, and for which the token is not looked up again.
_LOCATED_S = 600
_MAX_LOCATED = 10_000
_MAX_SEEN = 10_000
# What the Hub says of a 404 if the repository may be read.
_WITHIN_REPOSITORY = ("EntryNotFound", "RevisionNotFound")
_NOT_PERMITTED = (401, 403, 404)
# Algorithms by the number of a checksum's digits.
_ALGORITHMS = {64: SHA256, 40: GIT_BLOB}


class HubOrigin(StoreOrigin):
    """Repositories of the Hugging Face Hub.

    It redirects to signed urls of other servers for files of git LFS. The version is the SHA-256 of
    such a file, and git's SHA-1 of any other: both are checksums as well. A mirror of the Hub may
    have neither. Nothing then tells what its servers hold of which version, so the file comes in
    one answer.
    """

    versions = ("etag", "blob_id")
    endpoint = "endpoint"
    anonymous: ClassVar[dict[str, Any]] = {"token": False}
    handed = HubToken

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._home = URL(self._fs.endpoint)
        self._is_far = not is_near(self._home.host or "")
        self._located: dict[str, tuple[RemoteObject, URL]] = {}  # where files lie, by url
        self._seen: set[str] = set()  # repositories that the Hub has shown the token

    @classmethod
    def options_of(cls, credentials: HubToken) -> dict[str, Any]:
        """As `StoreOrigin.options_of`."""
        return {"token": credentials.value}

    async def stat(self, url: str, _first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`; a HEAD, and one more for each redirect within the Hub."""
        answer, place = await self._find(url)
        if self._is_far and is_near(place.host or ""):
            raise NotAllowedError(
                f"the Hub redirects to {place.host}, which is this node or its metadata service",
                url=url,
            )
        if len(self._located) >= _MAX_LOCATED:
            self._located.clear()
        obj = self._object(url, answer)
        if obj.checksum is None:  # a mirror's file, whose parts may be of several versions
            obj = replace(obj, ranges=False, guarded=False)
        self._located[url] = (obj, place)
        return obj

    async def _find(self, url: str) -> tuple[Answer | None, URL]:
        """Return the answer that describes a file, and the url at which it lies."""
        place = URL(self._target(url), encoded=True)
        for _ in range(MAX_REDIRECTS):
            answer = await self._ask("HEAD", url, {}, place=str(place))
            location = None
            if answer is not None and answer.status in REDIRECTS:
                location = answer.headers.get("location")
            if not location:
                break
            place = following(url, place, location)
            if place.origin() != self._home.origin():  # where the token must not be sent
                break
        self._note(url, answer)
        return answer, place

    @staticmethod
    def bucket(url: str) -> str:
        """As `CredentialedOrigin.bucket`: the repository."""
        return _repository(url)

    def lacks(self, url: str) -> bool:
        """As `CredentialedOrigin.lacks`: True if the token may read the repository.

        If it may not, the Hub answers as if there were none.
        """
        return _repository(url) in self._seen

    def _note(self, url: str, answer: Answer | None) -> None:
        """Record whether an answer shows that the token may read the repository."""
        assert answer is not None  # as in `_object`
        is_within = answer.headers.get("x-error-code") in _WITHIN_REPOSITORY
        if answer.status < 400 or is_within:
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen.add(_repository(url))
        elif answer.status in _NOT_PERMITTED:
            self._seen.discard(_repository(url))

    async def list_prefix(
        self,
        prefix: str,
        received: Received,
        *,
        flat: bool = False,
    ) -> list[RemoteObject]:
        """As `Origin.list_prefix`."""
        _check_repository(prefix)
        return await super().list_prefix(prefix, received, flat=flat)

    async def prepare(self, url: str) -> None:
        """As `Origin.prepare`; the credentials alone.

        Each HEAD has the Hub sign another url, and a server may refuse those that were signed
        before, also the one by which a reader's GET is on its way.
        """
        await self.credentials(url)

    async def _locate(self, obj: RemoteObject, *, again: bool) -> tuple[str, bool]:
        """As `StoreOrigin._locate`: where the Hub has redirected a HEAD."""
        known = self._located.get(obj.url)
        if known is None or again or _is_old(known[0]):
            await self.stat(obj.url)
        found, place = self._located[obj.url]
        if found.version != obj.version:
            raise ShardChangedError(
                "the Hub holds another version than requested",
                url=obj.url,
            )
        return str(place), place.origin() != self._home.origin()

    def _target(self, url: str) -> str:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import parse_hf_uri

        _check_repository(url)
        try:
            at = parse_hf_uri(url)
            target = hf_hub_url(
                at.id,
                at.path_in_repo,
                repo_type=at.type,
                revision=at.revision,
                endpoint=self._fs.endpoint,
            )
        except ValueError as exn:
            message = f"not the url of a file on the Hub: {exn}"
            raise NotFoundError(message, url=url) from None
        return str(target)

    def _version(self, info: Mapping[str, Any], url: str) -> str:
        linked = info.get("x-linked-etag")
        if info.get("lfs"):
            linked = info["lfs"]["sha256"]
        if linked:
            return super()._version({"etag": linked}, url)
        return super()._version(info, url)

    def _checksum(self, headers: Mapping[str, str], url: str) -> Checksum | None:
        version = self._version(headers, url)
        algorithm = _ALGORITHMS.get(len(version))
        if algorithm is None or not re.fullmatch("[0-9a-f]+", version):
            return None
        return Checksum(algorithm, int(version, 16))

    async def _prove(self, _was_refused: bool) -> Proof:
        from huggingface_hub.utils import build_hf_headers

        headers = await asyncio.to_thread(build_hf_headers, token=self._fs.token)
        source = "token" if "authorization" in headers else NO_CREDENTIALS
        return Proof(headers, until_s=time.time() + _LOCATED_S, source=source)


def _check_repository(url: str) -> None:
    """Raise NotFoundError for a storage bucket: a GET of its files names no version."""
    if url.startswith(_BUCKETS):
        raise NotFoundError(
            "storage buckets of the Hub cannot be read over hf://",
            url=url,
            remedy="read it as s3://…, from the Hub's S3 gateway at https://s3.hf.co (set "
            "AWS_ENDPOINT_URL), with S3 credentials of an access token, made in its settings",
        )


def _repository(url: str) -> str:
    """Return the kind and name of a url's repository; the url itself if it names none."""
    from huggingface_hub.utils import parse_hf_uri

    try:
        at = parse_hf_uri(url)
    except ValueError:
        return url
    return f"{at.type} {at.id}"


def _is_old(obj: RemoteObject) -> bool:
    return time.monotonic() - obj.reported_s > _LOCATED_S
