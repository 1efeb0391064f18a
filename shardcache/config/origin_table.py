"""`OriginTable`: the options for the urls of one store.

The config has one `[[origin]]` table per store. `origin.registry` opens an origin for each table in
use. The tier is an optional cache that the nodes of a cluster share; the front is the Unix socket
of this node's nginx, by which requests reach the tier.
"""

import os
from collections.abc import Sequence
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, Field

from shardcache.access.protocols import row_of
from shardcache.access.urls import protocol_of
from shardcache.shared.front import FRONT
from shardcache.shared.unix_socket import MAX_SOCKET_BYTES

_MAX_PRICE = 1e15  # a limit, so that every cost is a finite number


def _checked_front(text: str | None) -> str | None:
    """Return the path of a tier's front unchanged. Raises ValueError if it cannot be a socket."""
    if text is None:
        return None
    is_socket_path = text.startswith("/") and len(os.fsencode(text)) <= MAX_SOCKET_BYTES
    if not is_socket_path:
        raise ValueError(f"{text!r} is not the path of a Unix socket, such as {FRONT}")
    return text


class OriginTable(pydantic.BaseModel):
    """One `[[origin]]` table: access settings for the urls that begin with `match`."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    match: str = Field(description="url prefix that this table applies to; the longest match wins")
    endpoint_url: str | None = Field(
        None,
        description="endpoint of S3, Google Cloud Storage, Azure or the Hugging Face Hub",
    )
    region: str | None = Field(None, description="S3 region")
    profile: str | None = Field(None, description="profile in the AWS config files")
    anon: bool = Field(
        False,
        description="send unsigned requests to these object stores, without credentials",
    )
    tier: Annotated[str | None, AfterValidator(_checked_front)] = Field(
        None,
        description="socket of this node's nginx in the cluster's tier, which is asked before "
        "the origin",
    )
    require_end: bool = Field(
        True,
        description="reject tars without an end-of-archive block; false accepts them as complete",
    )
    ignore_trailing_data: bool = Field(
        False,
        description="accept tars with data after the end-of-archive block and ignore that data, "
        "as tar does",
    )
    require_adjacent: bool = Field(
        True,
        description="reject tars in which members of a sample are not adjacent; false takes the "
        "later members for another sample, as webdataset does, and reads a shard "
        "only once it is complete",
    )
    verify_etag: bool = Field(
        True,
        description="verify S3's ETag if it may be an MD5 and S3 has no checksum, and Azure's "
        "Content-MD5",
    )
    price_per_gb: float | None = Field(
        None,
        ge=0,
        le=_MAX_PRICE,
        description="price of 10^9 bytes from this store, in any currency",
    )
    price_per_1000_requests: float | None = Field(
        None,
        ge=0,
        le=_MAX_PRICE,
        description="price of 1,000 requests to this store",
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        description="options for the fsspec filesystem; for web servers: headers, cookies, "
        "params and proxy",
        repr=False,
    )

    @pydantic.field_validator("endpoint_url", "region", "profile", "anon")
    @classmethod
    def _reject_without_effect(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Return a setting unchanged. Raises ValueError if the protocol of `match` ignores it."""
        match = info.data.get("match", "")
        if "://" not in match:  # such a match may be a prefix of urls of several protocols
            return value
        protocol = protocol_of(match)
        if info.field_name not in row_of(protocol).settings:
            raise ValueError(
                f"{protocol}:// has no such setting; remove it, or set an option of its fsspec "
                "filesystem in storage_options"
            )
        return value

    def cost(self, size_bytes: int, requests: int) -> float | None:
        """Return the cost of bytes and requests; None if no price is set."""
        if self.price_per_gb is None and self.price_per_1000_requests is None:
            return None
        bytes_cost = size_bytes / 1e9 * (self.price_per_gb or 0)
        requests_cost = requests / 1e3 * (self.price_per_1000_requests or 0)
        return bytes_cost + requests_cost


_NO_TABLE = OriginTable(match="")  # type: ignore[call-arg]  # the other fields have defaults


def table_of(tables: Sequence[OriginTable], url: str) -> OriginTable:
    """Return the table with the longest `match` that a url begins with.

    If no table matches, a table of defaults is returned.
    """
    matching = (each for each in tables if url.startswith(each.match))
    return max(matching, key=lambda each: len(each.match), default=_NO_TABLE)
