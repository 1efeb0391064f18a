"""The Hugging Face Hub.

The location of a file is the url of its bytes: the Hub's own, or a signed url of another server, to
which the Hub redirects. A host is near if it is this node or its cloud's metadata service, which
users' requests must not reach. The table is the `[[origin]]` table for the Hub in the daemon's
config.
"""

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from yarl import URL

from shardcache.access.near import is_near
from shardcache.origin.base import Setup
from shardcache.origin.cloud.proofs import NO_CREDENTIALS, Proof
from shardcache.origin.cloud.store_origin import Location, StoreOrigin
from shardcache.origin.http.redirects import MAX_REDIRECTS, REDIRECTS, redirect_target
from shardcache.origin.objects import GIT_BLOB, SHA256, Checksum, RemoteObject
from shardcache.shared.credentials.hub_token import HubToken
from shardcache.shared.exceptions import NotAllowedError, NotFoundError, ShardChangedError
from shardcache.transport.between.flow import Received
from shardcache.transport.between.messages import Answer

_BUCKETS = "hf://buckets/"
_LOCATION_LIFE_S = 600  # time for which a file's location is used
_TOKEN_LIFE_S = 600  # time for which a token is used before it is looked up again
# Maximum number of files with a known location, and of repositories that are known to be readable.
# At the maximum, all of them are forgotten, and are found again by a HEAD.
_MAX_LOCATED = 10_000
_MAX_READABLE = 10_000
# The Hub's codes for a missing file or revision in a repository that the token may read.
_WITHIN_REPOSITORY = ("EntryNotFound", "RevisionNotFound")
# Statuses of answers for a repository that the token may not read.
_NOT_PERMITTED = (401, 403, 404)
# Algorithms by the number of hexadecimal digits of their checksums.
_ALGORITHMS = {64: SHA256, 40: GIT_BLOB}


class HubOrigin(StoreOrigin):
    """Repositories of the Hugging Face Hub.

    For files of git LFS, the Hub redirects to signed urls of other servers. The version of such a
    file is its SHA-256, and the version of any other file is git's SHA-1. Both are checksums, which
    would show that the parts of a file are of different versions. A mirror of the Hub may state
    neither; a file without a checksum is fetched in one answer instead of in parts.
    """

    listed_version = "blob_id"  # git's SHA-1 in a listing
    endpoint = "endpoint"  # the filesystem's option for a mirror's url
    anonymous: ClassVar[dict[str, Any]] = {"token": False}
    credentials_kind = HubToken

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._home = URL(self._fs.endpoint)
        # Only a Hub that is itself near, such as a mirror on this node, may redirect to near hosts.
        self._far_only = not is_near(self._home.host or "")
        # By url: the file and its location.
        self._located: dict[str, tuple[RemoteObject, URL]] = {}
        self._readable: set[str] = set()  # repositories that the token may read

    @classmethod
    def options_of(cls, credentials: HubToken) -> dict[str, Any]:
        """As `StoreOrigin.options_of`."""
        return {"token": credentials.value}

    async def stat(self, url: str, _first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`; one HEAD, and another for each redirect within the Hub."""
        answer, location = await self._find(url)
        if self._far_only and is_near(location.host or ""):
            raise NotAllowedError(
                f"the Hub redirects to {location.host}, which is this node or its metadata service",
                url=url,
            )
        obj = self._object(url, answer)
        if obj.checksum is None:
            # The file is on a mirror, and its parts could be of several versions, so it is fetched
            # as one stream. The mirror may redirect to a url that serves any version, so the
            # version is checked again after the download.
            obj = replace(obj, has_ranges=False, is_guarded=False)
        if len(self._located) >= _MAX_LOCATED:
            self._located.clear()
        self._located[url] = (obj, location)
        return obj

    @staticmethod
    def bucket(url: str) -> str:
        """As `CredentialedOrigin.bucket`: the repository."""
        return _repository(url)

    def not_found_is_final(self, url: str) -> bool:
        """As `CredentialedOrigin.not_found_is_final`: True if the token may read the repository.

        If the token may not read the repository, the Hub answers as if it did not exist.
        """
        return _repository(url) in self._readable

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
        """As `Origin.prepare`, but this gets the credentials without opening connections.

        `Origin.prepare` opens connections by sending a HEAD for the url. The Hub signs a new url
        for each HEAD, and a server may then refuse urls that were signed before, even a url that a
        reader's GET is using.
        """
        await self.obtain_credentials(url)

    async def _find(self, url: str) -> tuple[Answer, URL]:
        """Return the answer to a HEAD that describes a file, and the file's location."""
        location = URL(self._http_url(url), encoded=True)
        for _ in range(MAX_REDIRECTS):
            at_hub = Location(str(location), is_away=False)
            answer = await self._head(url, location=at_hub)
            redirect = answer.headers.get("location")
            if answer.status not in REDIRECTS or not redirect:
                break
            location = redirect_target(url, location, redirect)
            # Another server has the bytes. The token must not be sent to that server.
            if location.origin() != self._home.origin():
                break
        self._record_permission(url, answer)
        return answer, location

    def _record_permission(self, url: str, answer: Answer) -> None:
        """Record whether an answer shows that the token may read the repository."""
        is_missing_within = answer.headers.get("x-error-code") in _WITHIN_REPOSITORY
        if answer.status < 400 or is_missing_within:
            if len(self._readable) >= _MAX_READABLE:
                self._readable.clear()
            self._readable.add(_repository(url))
        elif answer.status in _NOT_PERMITTED:
            self._readable.discard(_repository(url))

    async def _locate(self, obj: RemoteObject, *, again: bool) -> Location:
        """As `StoreOrigin._locate`: the url to which the Hub has redirected a HEAD."""
        if again or self._is_outdated(obj.url):
            await self.stat(obj.url)
        current, location = self._located[obj.url]
        if current.version != obj.version:
            raise ShardChangedError(
                "the Hub holds another version than requested",
                url=obj.url,
            )
        is_away = location.origin() != self._home.origin()
        return Location(str(location), is_away)

    def _is_outdated(self, url: str) -> bool:
        """Return whether a file's location is unknown, or was found too long ago."""
        if url not in self._located:
            return True
        obj, _location = self._located[url]
        age_s = time.monotonic() - obj.reported_s
        return age_s > _LOCATION_LIFE_S

    def _http_url(self, url: str) -> str:
        """As `StoreOrigin._http_url`. Raises NotFoundError for a url that does not name a file."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import parse_hf_uri

        _check_repository(url)
        try:
            uri = parse_hf_uri(url)
            target = hf_hub_url(
                uri.id,
                uri.path_in_repo,
                repo_type=uri.type,
                revision=uri.revision,
                endpoint=self._fs.endpoint,
            )
        except ValueError as exn:
            message = f"not the url of a file on the Hub: {exn}"
            raise NotFoundError(message, url=url) from None
        return str(target)

    def _version(self, info: Mapping[str, Any], url: str) -> str:
        """As `StoreOrigin._version`; the SHA-256 for a file of git LFS."""
        lfs_version = info.get("x-linked-etag")  # in the headers of an answer
        if info.get("lfs"):  # in an entry of a listing
            lfs_version = info["lfs"]["sha256"]
        if lfs_version:
            return super()._version({"etag": lfs_version}, url)
        return super()._version(info, url)

    def _checksum(self, headers: Mapping[str, str], url: str) -> Checksum | None:
        """As `StoreOrigin._checksum`: the version, if it has the form of a checksum."""
        version = self._version(headers, url)
        algorithm = _ALGORITHMS.get(len(version))
        if algorithm is None or not re.fullmatch("[0-9a-f]+", version):
            return None
        return Checksum(algorithm, int(version, 16))

    async def _new_proof(self, _was_refused: bool) -> Proof:
        """As `StoreOrigin._new_proof`: the session's or the table's token, if there is one.

        Otherwise the token is looked up in the environment and the user's login. Each call looks it
        up anew, whether or not the last token was refused.
        """
        from huggingface_hub.utils import build_hf_headers

        # The filesystem's option: a token, or None to look for one, or False to send none.
        token_option = self._fs.token
        headers = await asyncio.to_thread(build_hf_headers, token=token_option)
        source = "token" if "authorization" in headers else NO_CREDENTIALS
        return Proof(headers, expires_s=time.time() + _TOKEN_LIFE_S, source=source)


def _check_repository(url: str) -> None:
    """Raise NotFoundError for the url of a storage bucket, which is not in a repository.

    Over hf://, a GET of a bucket's file cannot name a version, so its parts could be of several
    versions.
    """
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
        uri = parse_hf_uri(url)
    except ValueError:
        return url
    return f"{uri.type} {uri.id}"
