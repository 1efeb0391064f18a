"""Azure Blob Storage."""

import time
from datetime import UTC, datetime
from typing import Any, ClassVar

import fsspec

from shardcache.errors import OriginError
from shardcache.origin.cloud.proofs import NO_CREDENTIALS, Proof
from shardcache.origin.cloud.store_origin import StoreOrigin, place_of

_API_VERSION = "2023-11-03"
_TOKEN_SCOPE = "https://storage.azure.com/.default"
_SIGNED_S = 3600


class AzureOrigin(StoreOrigin):
    """Azure Blob Storage.

    An account key signs a query that permits reads for an hour; the key itself is not sent.
    """

    endpoint = ""
    anonymous: ClassVar[dict[str, Any]] = {"anon": True}
    # Which its finalizers need; its methods do not.
    defaults: ClassVar[dict[str, Any]] = {"asynchronous": False}

    def _connect(self, cls: type[fsspec.AbstractFileSystem]) -> Any:
        fs = super()._connect(cls)
        endpoint_url = self._setup.table.endpoint_url
        if endpoint_url:  # adlfs knows accounts at https:// alone
            from azure.storage.blob.aio import BlobServiceClient

            _, mark, query = fs.service_client.url.partition("?")
            credential = fs.service_client.credential
            fs.service_client = BlobServiceClient(endpoint_url + mark + query, credential)
        return fs

    @property
    def _account(self) -> str:
        client = self._fs.service_client
        name = getattr(client.credential, "account_name", None)
        return str(name or client.account_name or self._fs.account_name)

    def _path(self, url: str) -> str:
        self._check_account(url)
        return super()._path(url)

    def _check_account(self, url: str) -> None:
        """Raise OriginError if a url names another account than the table's."""
        place = url.partition("://")[2].partition("/")[0]
        account = place.partition("@")[2].partition(".")[0]
        if account not in ("", self._account):
            own = f"the account of the [[origin]] table is {self._account}"
            raise OriginError(
                "the url names another storage account than the daemon uses",
                url=url,
                remedy=f"{own}; each account needs a table",
            )

    def _target(self, url: str) -> str:
        self._check_account(url)
        container, key = place_of(url)
        endpoint = self._fs.service_client.url.partition("?")[0].rstrip("/")
        return f"{endpoint}/{container.partition('@')[0]}/{key}"

    async def _prove(self, was_refused: bool) -> Proof:
        if was_refused:  # the credential has cached the token
            self._fs = self._open()
        headers = {"x-ms-version": _API_VERSION}

        if self._fs.credential is not None:
            token = await self._fs.credential.get_token(_TOKEN_SCOPE)
            headers["Authorization"] = f"Bearer {token.token}"
            return Proof(headers, until_s=token.expires_on, source="token")

        client = self._fs.service_client
        key = getattr(client.credential, "account_key", None)
        if key:
            expiry = datetime.fromtimestamp(time.time() + _SIGNED_S, UTC)
            query = _signed_query(self._account, key, expiry)
            return Proof(headers, f"?{query}", expiry.timestamp(), "account key")

        _, mark, query = client.url.partition("?")
        source = "shared access signature" if query else NO_CREDENTIALS
        return Proof(headers, mark + query, source=source)


def _signed_query(account: str, key: str, expiry: datetime) -> str:
    """Return a query that permits an account's objects to be read."""
    from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

    permissions = AccountSasPermissions(read=True)
    query: str = generate_account_sas(
        account,
        key,
        ResourceTypes(object=True),
        permissions,
        expiry,
    )
    return query
