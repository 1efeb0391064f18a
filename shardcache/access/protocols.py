"""The protocols of urls: for each protocol, its origin and what the origin needs.

A protocol is the part of a url before `://`. Its origin is the class that reads its objects. To add
a store, write a module in `origin/` and a row of the table here. The tier is an optional cache that
the nodes of a cluster share.
"""

import enum
from typing import NamedTuple


class PlaceKind(enum.Enum):
    """Kind of place that the urls of a protocol name."""

    STORE = "service at an address fixed by its provider, with credentials given to the daemon"
    WEB = "web servers, which may be any host"
    LOCAL = "files of this node"
    WRAPPER = "fsspec filesystem that reads another url, which rules for its own url do not cover"
    OTHER = "any other fsspec filesystem"


class UrlProtocol(NamedTuple):
    """One protocol.

    Attributes:
        names: the spellings of the protocol that mean the same place, in lower case; urls are
            compared by the first.
        kind: kind of place, which decides who may use the protocol by default, and what its urls
            may look like.
        origin: module and class of the `Origin`, imported on first use.
        package: the package to install if that import fails. If empty, the import error names the
            package.
        settings: of the settings of an `[[origin]]` table that only some protocols support, those
            that this one supports.
        has_tier: True if a cluster's tier can be in front of the protocol's stores.
        presigned_options: the `storage_options` with which objects can be read by presigned urls,
            as a tier needs them. With any other option, they are read by the SDK, without the tier.
            None if the protocol's urls are not presigned: then no option keeps a tier from use.
        load: module and function that loads what the first request needs, if that takes long; the
            function blocks. Empty if there is none.
        variable_prefix: prefix of the environment variables that configure the protocol; empty if
            unknown.
        endpoint_variables: environment variables for the endpoint; the first that is set counts.
        provider_variable: environment variable that, if true, overrides `endpoint_variables`, so
            that the provider's own endpoint is used; empty if there is none.
        has_slashed_secrets: True if the protocol's secret keys may contain a slash: credentials in
            a url may then extend beyond the url's first slash.
    """

    names: tuple[str, ...]
    kind: PlaceKind
    origin: str = "shardcache.origin.filesystems.fsspec_origin:FsspecOrigin"
    package: str = ""
    settings: frozenset[str] = frozenset()
    has_tier: bool = False
    presigned_options: frozenset[str] | None = None
    load: str = ""
    variable_prefix: str = ""
    endpoint_variables: tuple[str, ...] = ()
    provider_variable: str = ""
    has_slashed_secrets: bool = False


_STORE = PlaceKind.STORE
_HTTP = "shardcache.origin.http.web_origin:HttpOrigin"
_FILES = "shardcache.origin.filesystems.local_origin:LocalOrigin"
_GCS = "shardcache.origin.cloud.permitted_stores:PermittedGcs"
_AZURE = "shardcache.origin.cloud.permitted_stores:PermittedAzure"
_HUB = "shardcache.origin.cloud.permitted_stores:PermittedHub"
_ACCESS_SETTINGS = frozenset({"endpoint_url", "anon"})
_GCS_ENDPOINT = ("STORAGE_EMULATOR_HOST",)
# fsspec's filesystems that read other urls.
_WRAPPERS = (
    "asynclocal",
    "async_wrapper",
    "asyncwrapper",
    "blockcache",
    "cached",
    "dask",
    "data",
    "dir",
    "filecache",
    "generic",
    "libarchive",
    "reference",
    "simplecache",
    "tar",
    "zip",
)
# `gs` and `gcs` have a row each, and so do `az`, `abfs` and `abfss`: a rule that allows one of them
# does not allow the others.
_TABLE = (
    UrlProtocol(
        ("s3", "s3a"),
        _STORE,
        "shardcache.origin.s3.permitted_s3:PermittedS3",
        package="s3fs",
        settings=_ACCESS_SETTINGS | {"region", "profile"},
        has_tier=True,
        presigned_options=frozenset({"key", "secret", "token", "endpoint_url", "anon", "use_ssl"}),
        load="shardcache.origin.s3.s3_origin:load",
        variable_prefix="AWS_",
        endpoint_variables=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        provider_variable="AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
        has_slashed_secrets=True,
    ),
    UrlProtocol(("http",), PlaceKind.WEB, _HTTP, has_tier=True),
    UrlProtocol(("https",), PlaceKind.WEB, _HTTP, has_tier=True),
    UrlProtocol(("file", "local"), PlaceKind.LOCAL, _FILES),
    UrlProtocol(
        ("gs",),
        _STORE,
        _GCS,
        package="gcsfs",
        settings=_ACCESS_SETTINGS,
        endpoint_variables=_GCS_ENDPOINT,
    ),
    UrlProtocol(
        ("gcs",),
        _STORE,
        _GCS,
        package="gcsfs",
        settings=_ACCESS_SETTINGS,
        endpoint_variables=_GCS_ENDPOINT,
    ),
    UrlProtocol(("az",), _STORE, _AZURE, package="adlfs", settings=_ACCESS_SETTINGS),
    UrlProtocol(("abfs",), _STORE, _AZURE, package="adlfs", settings=_ACCESS_SETTINGS),
    UrlProtocol(("abfss",), _STORE, _AZURE, package="adlfs", settings=_ACCESS_SETTINGS),
    UrlProtocol(
        ("hf",),
        _STORE,
        _HUB,
        package="huggingface_hub",
        settings=_ACCESS_SETTINGS,
        endpoint_variables=("HF_ENDPOINT",),
    ),
    UrlProtocol(("adl",), _STORE, package="adlfs"),
    UrlProtocol(("oss",), _STORE, package="ossfs"),
    UrlProtocol(("oci",), _STORE, package="ocifs"),
    UrlProtocol(("ocilake",), _STORE, package="ocifs"),
    UrlProtocol(("tos",), _STORE, package="tosfs"),
    UrlProtocol(("tosfs",), _STORE, package="tosfs"),
    UrlProtocol(("lakefs",), _STORE, package="lakefs-spec"),
    UrlProtocol(("smb",), PlaceKind.OTHER, package="smbprotocol"),
    *(UrlProtocol((name,), PlaceKind.WRAPPER) for name in _WRAPPERS),
)
_ROWS = {name: row for row in _TABLE for name in row.names}

PREPARED = tuple(row for row in _TABLE if row.load)
"""Protocols that a daemon loads before the first request, if they are configured."""


def row_of(protocol: str) -> UrlProtocol:
    """Return the row of a protocol, or defaults for one without a row.

    Args:
        protocol: the protocol in lower case.
    """
    return _ROWS.get(protocol) or UrlProtocol((protocol,), PlaceKind.OTHER)


def is_known(protocol: str) -> bool:
    """Return whether a protocol, given in lower case, has a row. fsspec may support others."""
    return protocol in _ROWS


def _names_of(kind: PlaceKind) -> frozenset[str]:
    """Return all spellings of the protocols of a kind."""
    return frozenset(name for name, row in _ROWS.items() if row.kind is kind)


COMMON = ("s3", "gs", "az", "hf", "https", "file")
"""Protocols to name in advice, the most common first."""

STORES = _names_of(PlaceKind.STORE)
WEB = _names_of(PlaceKind.WEB)
LOCAL = _names_of(PlaceKind.LOCAL)
WRAPPERS = _names_of(PlaceKind.WRAPPER)
