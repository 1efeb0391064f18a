"""Signed urls of objects. The SDK shows, once for each bucket, what they look like there; the others are made alike.

It takes a processor three times as long to find host, path and region anew for every object. Where its url is not of
the plain kind, it goes on making them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from botocore.utils import percent_encode

SIGNED_FOR_S = 600

_METHODS = {"get_object": "GET", "head_object": "HEAD"}
_FIELDS = {"Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature", "Security-Token"}
_PREFIX = "X-Amz-"
# What a store may call a region: part of a host's name, and nothing that would change the rest of it.
_REGION = re.compile(r"[a-z0-9-]{1,32}")
# S3's own hosts, from scheme to path; any other serves all of its regions by itself.
_AWS_HOST = re.compile(
    r"^(https?://(?:[^/]+\.)?s3(?:-fips)?(?:\.dualstack)?)(?:\.[a-z0-9-]+)?(\.amazonaws\.com(?:\.cn)?[:/])"
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the urls of a bucket's objects have in common.

    Attributes:
        root: what stands before the key.
        region: None where urls are not signed.
    """

    root: str
    region: str | None

    def moved(self, region: str) -> _Kind:
        """Return the kind for a bucket that turns out to be in another region."""
        if self.region == region:
            return self
        signed_for = None if self.region is None else region
        return _Kind(_AWS_HOST.sub(rf"\1.{region}\2", self.root), signed_for)

    def url(self, method: str, key: str, headers: Mapping[str, str], credentials: ReadOnlyCredentials | None) -> str:
        """Return an object's url, signed for a method and headers."""
        request = AWSRequest(method, self.root + _quoted(key), headers)
        if self.region is not None:
            S3SigV4QueryAuth(credentials, "s3", self.region, expires=SIGNED_FOR_S).add_auth(request)
        url: str = request.url
        return url


class Signer:
    """Makes urls for one filesystem of s3fs after the other; each may have other credentials."""

    def __init__(self) -> None:
        self._fs: Any = None
        self._kinds: dict[tuple[str, str], _Kind | None] = {}

    async def url(self, fs: Any, operation: str, params: Mapping[str, str], headers: Mapping[str, str]) -> str:
        """Return a url that is good for `SIGNED_FOR_S`. Raises what botocore does.

        Args:
            operation: "get_object" or "head_object".
            params: bucket, key and what else the SDK is to be told.
            headers: the same once more as HTTP has it: what will be sent, and has to be signed.
        """
        if fs is not self._fs:
            self._fs, self._kinds = fs, {}
        place = operation, params["Bucket"]
        kind, credentials = self._kinds.get(place), await _credentials(fs)
        if kind is None or (kind.region is None) != (credentials is None):
            url: str = await fs.s3.generate_presigned_url(operation, Params=params, ExpiresIn=SIGNED_FOR_S)
            if place not in self._kinds:
                self._kinds[place] = _kind(url, params["Key"], credentials)
            return url
        return kind.url(_METHODS[operation], params["Key"], headers, credentials)

    def move(self, bucket: str, region: str) -> bool:
        """Sign for the region that a store says a bucket is in, and return whether that makes a difference."""
        if not _REGION.fullmatch(region):
            return False
        kinds = {place: kind for place, kind in self._kinds.items() if kind is not None and place[1] == bucket}
        moved = {place: kind.moved(region) for place, kind in kinds.items()}
        self._kinds |= moved
        return moved != kinds


def _quoted(key: str) -> str:
    quoted: str = percent_encode(key, safe="/~")
    return quoted


def _kind(url: str, key: str, credentials: ReadOnlyCredentials | None) -> _Kind | None:
    """Return what a url of the SDK shows; None where there is more to it than this module knows."""
    root, _, query = url.partition("?")
    if not root.endswith("/" + _quoted(key)) or "#" in root:
        return None
    root = root.removesuffix(_quoted(key))
    fields = {name.removeprefix(_PREFIX): values[0] for name, values in parse_qs(query).items()}
    if not fields:
        return _Kind(root, None) if credentials is None else None
    if credentials is None or not fields.keys() <= _FIELDS or fields.get("Algorithm") != "AWS4-HMAC-SHA256":
        return None
    access_key, _date, region, service, _ = fields["Credential"].rsplit("/", 4)
    return _Kind(root, region) if (access_key, service) == (credentials.access_key, "s3") else None


async def _credentials(fs: Any) -> ReadOnlyCredentials | None:
    """Return those that the SDK signs with, renewed where they are such as expire; None where there are none."""
    if fs.anon:
        return None
    if fs.key:
        return ReadOnlyCredentials(fs.key, fs.secret, fs.token)
    found = await fs.session.get_credentials()
    return None if found is None else await found.get_frozen_credentials()
