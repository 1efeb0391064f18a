"""Presigned urls of S3, modelled on the SDK's own, which take three times as long to make.

A presigned url carries the signature that permits a request. `S3Origin` reads by these urls. The
SDK is botocore, used through s3fs. It makes the first url of each bucket, which shows the form of
all urls of that bucket.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from botocore.utils import percent_encode

SIGNED_FOR_S = 600  # minimum validity of a presigned url
_HOUR_S = 3600

_quoted: Callable[[str], str] = partial(percent_encode, safe="/~")
_METHODS = {"get_object": "GET", "head_object": "HEAD"}
_FIELD_PREFIX = "X-Amz-"
# The fields that botocore's signature adds to a url, named without the prefix. A url with further
# fields cannot be made here.
_SIGNATURE_FIELDS = {
    "Algorithm",
    "Credential",
    "Date",
    "Expires",
    "SignedHeaders",
    "Signature",
    "Security-Token",
}
_VERSION_FIELD = "versionId"
# Accepted names of regions. A region becomes part of a host name, and must not change what follows
# in that host name.
_REGION = re.compile(r"[a-z0-9-]{1,32}")
# The beginning of an AWS url, as in https://BUCKET.s3.REGION.amazonaws.com/. The region may be
# missing. In the urls of any other store, the host does not depend on the region.
_AWS_SERVICE = r"https?://(?:[^/]+\.)?s3(?:-fips)?(?:\.dualstack)?"
_AWS_REGION = r"\.[a-z0-9-]+"
_AWS_DOMAIN = r"\.amazonaws\.com(?:\.cn)?[:/]"
_AWS_HOST = re.compile(rf"^(?P<service>{_AWS_SERVICE})(?:{_AWS_REGION})?(?P<domain>{_AWS_DOMAIN})")


class HourlyAuth(S3SigV4QueryAuth):  # type: ignore[misc]
    """Signs with the time of the beginning of the hour.

    All nodes with the same credentials then make the same url. A tier, which is a cache that the
    nodes of a cluster share in front of the object store, asks the store once whether it permits a
    url, and recognises the url by its signature.
    """

    def _modify_request_before_signing(self, request: AWSRequest) -> None:
        """As botocore's own method, with an earlier time."""
        to_the_hour = request.context["timestamp"][: len("YYYYMMDDTHH")]
        request.context["timestamp"] = f"{to_the_hour}0000Z"
        super()._modify_request_before_signing(request)


Auth = Callable[[ReadOnlyCredentials | None, str, str], S3SigV4QueryAuth]
"""Creates botocore's signer for credentials, the service's name and a region."""

# Signatures for requests to the store itself, and for requests through a tier. The latter are dated
# up to an hour ago, so they are valid for an hour longer.
DIRECT: Auth = partial(S3SigV4QueryAuth, expires=SIGNED_FOR_S)
BEHIND_TIER: Auth = partial(HourlyAuth, expires=_HOUR_S + SIGNED_FOR_S)


@dataclass(frozen=True, slots=True)
class _UrlForm:
    """The form that the urls of all objects of a bucket have in common.

    Attributes:
        root: the urls' beginning, up to the key.
        region: region for which the urls are signed; None if they are not signed.
    """

    root: str
    region: str | None

    def moved(self, region: str) -> "_UrlForm":
        """Return the form for the same bucket in another region."""
        if self.region == region:
            return self
        # The root of a store that is not AWS stays as it is.
        root = _AWS_HOST.sub(rf"\g<service>.{region}\g<domain>", self.root)
        is_signed = self.region is not None
        return _UrlForm(root, region if is_signed else None)

    def fits(self, credentials: ReadOnlyCredentials | None) -> bool:
        """Return whether urls of this form can be made with these credentials.

        Urls that are signed need credentials; for urls that are not, there must be none.
        """
        is_signed = self.region is not None
        has_credentials = credentials is not None
        return is_signed == has_credentials

    def url(
        self,
        method: str,
        key: str,
        headers: Mapping[str, str],
        credentials: ReadOnlyCredentials | None,
        auth: Auth,
        version: str = "",
    ) -> str:
        """Return the url of an object, signed for a method and headers.

        Args:
            credentials: credentials to sign with; None if urls are not signed.
            auth: creates the signer: `DIRECT` or `BEHIND_TIER`.
            version: id of the object's version; empty for the present one.
        """
        unsigned = self.root + _quoted(key)
        if version:
            unsigned += f"?{_VERSION_FIELD}={percent_encode(version)}"
        request = AWSRequest(method, unsigned, headers)
        if self.region is not None:
            auth(credentials, "s3", self.region).add_auth(request)
        url: str = request.url
        return url


class Signer:
    """Makes presigned urls for the current s3fs filesystem.

    The SDK makes the first url for each bucket, and this class models the others on that url. The
    SDK would sign only for its client's region, and takes 0.25 ms for a url instead of 0.08. If the
    first url has features that this module does not know, the SDK makes all urls of the bucket.
    """

    def __init__(self, auth: Auth = DIRECT) -> None:
        self._auth = auth
        self._fs: Any = None
        # By bucket; None if the bucket's urls have features that this module does not know.
        self._forms: dict[str, _UrlForm | None] = {}

    async def url(
        self,
        fs: Any,
        operation: str,
        params: Mapping[str, str],
        headers: Mapping[str, str],
    ) -> str:
        """Return a url that is valid for `SIGNED_FOR_S` at least. Raises what botocore raises.

        Args:
            operation: "get_object" or "head_object".
            params: bucket, key and other parameters of the operation in the SDK.
            headers: HTTP headers that express those other parameters. The request has to have the
                same headers, as they are signed.
        """
        if fs is not self._fs:  # a new filesystem may have other credentials
            self._fs = fs
            self._forms = {}
        bucket = params["Bucket"]
        form = self._forms.get(bucket)
        credentials = await _credentials(fs)

        if form is None or not form.fits(credentials):
            sdk_url: str = await fs.s3.generate_presigned_url(
                operation,
                Params=params,
                ExpiresIn=SIGNED_FOR_S,
            )
            # Another request may have set the form in the meantime.
            if bucket not in self._forms:
                self._forms[bucket] = _form_of(sdk_url, params["Key"], credentials)
            form = self._forms[bucket]
            if form is None or not form.fits(credentials):
                return sdk_url
            # Otherwise the SDK's url is only the model: `auth` may give the signature another time.

        return form.url(
            _METHODS[operation],
            params["Key"],
            headers,
            credentials,
            self._auth,
            params.get("VersionId", ""),
        )

    def move(self, bucket: str, region: str) -> bool:
        """Sign for the region that the origin states for a bucket.

        Returns whether this changes the bucket's urls.

        Args:
            region: name of the region; empty if the origin states none.
        """
        form = self._forms.get(bucket)
        if form is None or not _REGION.fullmatch(region):
            return False
        moved = form.moved(region)
        self._forms[bucket] = moved
        return moved != form


def _form_of(url: str, key: str, credentials: ReadOnlyCredentials | None) -> _UrlForm | None:
    """Return the form of a url made by the SDK; None if it has features unknown to this module.

    Args:
        key: key of the url's object.
        credentials: credentials that have signed the url; None if it is not signed.
    """
    root, _, query = url.partition("?")
    if not root.endswith("/" + _quoted(key)):
        return None
    if "#" in root:  # the rest is a fragment, which is neither signed nor sent
        return None
    root = root.removesuffix(_quoted(key))

    fields: dict[str, str] = {}
    for name, values in parse_qs(query).items():
        fields[name.removeprefix(_FIELD_PREFIX)] = values[0]
    fields.pop(_VERSION_FIELD, None)  # the version belongs to this object, not to the form
    is_signed = bool(fields)
    if is_signed != (credentials is not None):
        return None
    if credentials is None:
        return _UrlForm(root, region=None)
    if not fields.keys() <= _SIGNATURE_FIELDS:
        return None
    if fields.get("Algorithm") != "AWS4-HMAC-SHA256":
        return None

    access_key, _date, region, service, _ = fields["Credential"].rsplit("/", 4)
    if access_key != credentials.access_key or service != "s3":
        return None
    return _UrlForm(root, region)


async def _credentials(fs: Any) -> ReadOnlyCredentials | None:
    """Return the SDK's credentials, renewed if they expire; None without credentials."""
    if fs.anon:
        return None
    if fs.key:
        return ReadOnlyCredentials(fs.key, fs.secret, fs.token)
    credentials = await fs.session.get_credentials()
    if credentials is None:
        return None
    return await credentials.get_frozen_credentials()
