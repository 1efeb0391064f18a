"""Google Cloud Storage.

A generation is Google's version of an object. A proof is the form in which credentials go into a
request: here, headers. Google's client libraries renew the credentials, through gcsfs.
"""

import asyncio
import importlib
import math
from collections.abc import Mapping
from datetime import UTC
from typing import Any, ClassVar

import fsspec

from shardcache.origin.cloud.proofs import Proof
from shardcache.origin.cloud.store_origin import StoreOrigin, quoted_bucket_and_key
from shardcache.origin.objects import Checksum, checksum_from_base64
from shardcache.shared.credentials.google_key import GoogleKey
from shardcache.shared.exceptions import AccessDeniedError

# The scope that gcsfs also requests for its credentials.
_SCOPE = "https://www.googleapis.com/auth/devstorage.full_control"


class GcsOrigin(StoreOrigin):
    """Google Cloud Storage by its XML API."""

    condition_header = "x-goog-if-generation-match"
    condition_form = "{}"
    version_header = "x-goog-generation"
    listed_version = "generation"
    anonymous: ClassVar[dict[str, Any]] = {"token": "anon"}
    credentials_kind = GoogleKey

    @classmethod
    def options_of(cls, credentials: GoogleKey) -> dict[str, Any]:
        """As `StoreOrigin.options_of`."""
        fields = credentials.fields
        options: dict[str, Any] = {"token": _credentials_in(fields)}
        if fields.get("project_id"):
            options["project"] = fields["project_id"]
        return options

    def _filesystem_class(self) -> type[fsspec.AbstractFileSystem]:
        """As `FsspecOrigin._filesystem_class`."""
        # The class that gcsfs registers sends a gRPC request for the type of each bucket. This is
        # the class behind it.
        cls: type[fsspec.AbstractFileSystem] = importlib.import_module("gcsfs.core").GCSFileSystem
        return cls

    def _http_url(self, url: str) -> str:
        """As `StoreOrigin._http_url`."""
        bucket, key = quoted_bucket_and_key(url)
        endpoint = self._fs._location.rstrip("/")  # noqa: SLF001  # gcsfs has no public name for it
        return f"{endpoint}/{bucket}/{key}"

    def _checksum(self, headers: Mapping[str, str], url: str) -> Checksum | None:
        """As `StoreOrigin._checksum`: the CRC32C, if the answer states it."""
        # The header has the form "crc32c=BASE64,md5=BASE64".
        for field in headers.get("x-goog-hash", "").split(","):
            name, _, value = field.strip().partition("=")
            if name == "crc32c":
                return checksum_from_base64(name, value, url)
        return None

    async def _new_proof(self, was_refused: bool) -> Proof:
        """As `StoreOrigin._new_proof`: the headers that gcsfs's credentials add to a request."""
        connection = self._fs.credentials  # gcsfs's object that holds Google's credentials
        if was_refused:
            # The argument is a time to expiry, below which credentials are renewed. Infinity renews
            # credentials that are still valid, too.
            await asyncio.to_thread(connection.maybe_refresh, math.inf)

        # Without this header, Google decompresses objects that are stored as gzip.
        headers = {"Accept-Encoding": "gzip"}
        await asyncio.to_thread(connection.apply, headers)
        # The option is a project's name, or True for the project of the filesystem.
        payer = self._fs.requester_pays
        if payer:
            project = payer if isinstance(payer, str) else self._fs.project
            headers["x-goog-user-project"] = project

        credentials = connection.credentials
        if not credentials:  # requests are anonymous
            return Proof(headers)
        expires_s = math.inf
        if credentials.expiry:  # in UTC, but without a time zone
            expires_s = credentials.expiry.replace(tzinfo=UTC).timestamp()
        # The module names the kind of credentials, such as "oauth2.service_account".
        source = type(credentials).__module__.removeprefix("google.")
        return Proof(headers, expires_s=expires_s, source=source)


def _credentials_in(fields: Mapping[str, Any]) -> Any:
    """Return Google's credentials for the fields of a key file. Raises AccessDeniedError."""
    from google.auth.exceptions import GoogleAuthError
    from google.oauth2.credentials import Credentials as UserCredentials
    from google.oauth2.service_account import Credentials as AccountCredentials

    try:
        if fields["type"] == "service_account":
            return AccountCredentials.from_service_account_info(fields, scopes=[_SCOPE])
        return UserCredentials.from_authorized_user_info(fields)
    except (ValueError, GoogleAuthError) as exn:
        raise AccessDeniedError(
            f"the key file that GOOGLE_APPLICATION_CREDENTIALS names cannot be used: {exn}",
            remedy="create another key for the account, and name its file",
        ) from exn
