"""Azure Blob Storage.

A container is Azure's bucket. Each container belongs to a storage account. The table is the
`[[origin]]` table for Azure in the daemon's config. A proof is the form in which credentials go
into a request: headers, or a signed query. A shared access signature is a signed query.
"""

import asyncio
import binascii
import os
import time
from datetime import UTC, datetime
from typing import Any, ClassVar

import fsspec

from shardcache.origin.cloud.proofs import NO_CREDENTIALS, Proof
from shardcache.origin.cloud.store_origin import StoreOrigin, quoted_bucket_and_key
from shardcache.shared.credentials.azure_secret import AzureSecret
from shardcache.shared.exceptions import AccessDeniedError, OriginError

# The environment variable of Azure's own SDK, which adlfs does not read.
_IDENTITY_SECRET = "AZURE_CLIENT_SECRET"
# Options of adlfs, by the environment variables of the same secrets.
_OPTIONS = {
    "AZURE_STORAGE_CONNECTION_STRING": "connection_string",
    "AZURE_STORAGE_ACCOUNT_KEY": "account_key",
    "AZURE_STORAGE_SAS_TOKEN": "sas_token",
    "AZURE_STORAGE_CLIENT_SECRET": "client_secret",
    _IDENTITY_SECRET: "client_secret",
}
_API_VERSION = "2023-11-03"
_TOKEN_SCOPE = "https://storage.azure.com/.default"
# Time for which a query that is signed with the account key permits reads.
_SIGNATURE_LIFE_S = 3600


class AzureOrigin(StoreOrigin):
    """Azure Blob Storage.

    adlfs finds credentials and lists containers. Objects are read over HTTP with the credentials
    that adlfs has found: a token, a shared access signature, or an account key. An account key
    itself is not sent, but signs a query that permits reads for an hour.

    A url has the form az://CONTAINER/KEY or abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/KEY.
    """

    # adlfs has no option for another endpoint. `_connect` replaces the client of the filesystem.
    endpoint = ""
    anonymous: ClassVar[dict[str, Any]] = {"anon": True}
    # With this, adlfs closes its clients when the filesystem is garbage-collected. In spite of the
    # option's name, the methods that are used here are asynchronous.
    defaults: ClassVar[dict[str, Any]] = {"asynchronous": False}
    credentials_kind = AzureSecret
    # The options of adlfs that are credentials. If a table has one, no session's secret is used.
    secrets = frozenset(_OPTIONS.values()) | {"credential"}

    @classmethod
    def options_of(cls, credentials: AzureSecret) -> dict[str, Any]:
        """As `StoreOrigin.options_of`."""
        variables = credentials.variables
        options: dict[str, Any] = {}
        # The order is reversed, so that the first of two variables for the same option wins.
        for name, value in reversed(variables.items()):
            options[_OPTIONS[name]] = value
        # If the only secret is that of the SDK's variable, the identity and its tenant are named by
        # variables of the SDK, too, which adlfs does not read. They are not sent by the session,
        # but have the same values here: readers with another identity have another private daemon.
        if variables.keys() == {_IDENTITY_SECRET}:
            options["client_id"] = os.environ.get("AZURE_CLIENT_ID")
            options["tenant_id"] = os.environ.get("AZURE_TENANT_ID")
        return options

    def _connect(self, cls: type[fsspec.AbstractFileSystem]) -> Any:
        """Open the filesystem. If the table has an endpoint, its client connects there."""
        fs = super()._connect(cls)
        endpoint_url = self._setup.table.endpoint_url
        if endpoint_url:
            from azure.storage.blob.aio import BlobServiceClient

            # The new client has the credentials of the client that adlfs has made: an object, or a
            # shared access signature in the url.
            _, signature = _split_query(fs.service_client.url)
            credential = fs.service_client.credential
            fs.service_client = BlobServiceClient(endpoint_url + signature, credential)
        return fs

    @property
    def _account(self) -> str:
        """Name of the storage account, which may be known only from a connection string."""
        # An account key has its account's name with it. Otherwise the client takes the name from
        # its url, and a url of another endpoint may have none.
        client = self._fs.service_client
        name_beside_key = getattr(client.credential, "account_name", None)
        return str(name_beside_key or client.account_name or self._fs.account_name)

    def _path(self, url: str) -> str:
        """As `FsspecOrigin._path`. Raises OriginError for another account's url."""
        self._check_account(url)
        return super()._path(url)

    def _check_account(self, url: str) -> None:
        """Raise OriginError if a url names another account than the table's."""
        # A url such as az://CONTAINER/KEY names no account: host and account are empty then.
        container_and_host = self.bucket(url)
        _container, _, host = container_and_host.partition("@")
        account, _, _ = host.partition(".")
        if account not in ("", self._account):
            raise OriginError(
                "the url names another storage account than the daemon uses",
                url=url,
                remedy=f"the account of the [[origin]] table is {self._account}; each account "
                "needs a table",
            )

    def _http_url(self, url: str) -> str:
        """As `StoreOrigin._http_url`. Raises OriginError for another account's url."""
        self._check_account(url)
        bucket, key = quoted_bucket_and_key(url)
        container = bucket.partition("@")[0]
        endpoint, _ = _split_query(self._fs.service_client.url)
        return f"{endpoint.rstrip('/')}/{container}/{key}"

    async def _new_proof(self, was_refused: bool) -> Proof:
        """As `StoreOrigin._new_proof`.

        By the credentials that adlfs has found, the proof is a token, a query signed with the
        account key, or a shared access signature.
        """
        if was_refused:
            # The old filesystem's credential would return the same token again.
            self._fs = await asyncio.to_thread(self._open)
        headers = {"x-ms-version": _API_VERSION}

        # adlfs has an object here only for credentials that give tokens, such as an identity's.
        if self._fs.credential is not None:
            token = await self._fs.credential.get_token(_TOKEN_SCOPE)
            headers["Authorization"] = f"Bearer {token.token}"
            return Proof(headers, expires_s=token.expires_on, source="token")

        client = self._fs.service_client
        account_key = getattr(client.credential, "account_key", None)
        if account_key:
            expiry = datetime.fromtimestamp(time.time() + _SIGNATURE_LIFE_S, UTC)
            query = _signed_query(self._account, account_key, expiry)
            return Proof(headers, f"?{query}", expires_s=expiry.timestamp(), source="account key")

        _, signature = _split_query(client.url)
        if signature:
            return Proof(headers, signature, source="shared access signature")
        return Proof(headers, source=NO_CREDENTIALS)


def _split_query(url: str) -> tuple[str, str]:
    """Return a client's url without its query, and the query with its "?".

    The query is a shared access signature, or empty.
    """
    endpoint, _, query = url.partition("?")
    if not query:
        return endpoint, ""
    return endpoint, f"?{query}"


def _signed_query(account: str, account_key: str, expiry: datetime) -> str:
    """Return a query that permits an account's objects to be read.

    Raises AccessDeniedError for a key that is not in base64.
    """
    from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

    permissions = AccountSasPermissions(read=True)
    try:
        query: str = generate_account_sas(
            account,
            account_key,
            ResourceTypes(object=True),
            permissions,
            expiry,
        )
    except binascii.Error as exn:
        raise AccessDeniedError(
            f"the key of Azure's account {account} is not in base64: {exn}",
            remedy="copy the whole key to AZURE_STORAGE_ACCOUNT_KEY, or to the connection string",
        ) from exn
    return query
