"""The protocols of urls: one row for each that differs from what fsspec makes of it. Pure.

A new store is a module in `origin/` and a row here.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class PlaceKind(enum.Enum):
    """Kind of place that the urls of a protocol name."""

    STORE = "network service at an address fixed by its provider, accessed with credentials given to the daemon"
    WEB = "web servers, which may be any host"
    LOCAL = "files of this node"
    WRAPPER = "fsspec filesystem that reads another url's bytes: no prefix tells what it reads"
    OTHER = "any other fsspec filesystem"


class UrlProtocol(NamedTuple):
    """One protocol.

    Attributes:
        names: spellings, in lower case, of one and the same place; urls are compared by the first.
        kind: decides who may use it by default, and what its urls may look like.
        origin: module and class of the `Origin` that serves it, imported on first use.
        package: package to install if that import fails; empty if it is the one that could not be imported.
    """

    names: tuple[str, ...]
    kind: PlaceKind
    origin: str = "shardcache.origin.fsspec:FsspecOrigin"
    package: str = ""


_WRAPPERS = (
    *("asynclocal", "async_wrapper", "asyncwrapper", "blockcache", "cached", "dask", "data", "dir", "filecache"),
    *("generic", "libarchive", "reference", "simplecache", "tar", "zip"),
)
S3 = UrlProtocol(("s3", "s3a"), PlaceKind.STORE, "shardcache.origin.s3:S3Origin", "s3fs")
_TABLE = (
    S3,
    UrlProtocol(("http",), PlaceKind.WEB, "shardcache.origin.web:HttpOrigin"),
    UrlProtocol(("https",), PlaceKind.WEB, "shardcache.origin.web:HttpOrigin"),
    UrlProtocol(("file", "local"), PlaceKind.LOCAL, "shardcache.origin.fsspec:LocalOrigin"),
    # gs and gcs, like az and abfs, stay apart: a rule that allows one does not allow the other.
    UrlProtocol(("gs",), PlaceKind.STORE, package="gcsfs"),
    UrlProtocol(("gcs",), PlaceKind.STORE, package="gcsfs"),
    UrlProtocol(("az",), PlaceKind.STORE, package="adlfs"),
    UrlProtocol(("abfs",), PlaceKind.STORE, package="adlfs"),
    UrlProtocol(("abfss",), PlaceKind.STORE, package="adlfs"),
    UrlProtocol(("adl",), PlaceKind.STORE, package="adlfs"),
    UrlProtocol(("hf",), PlaceKind.STORE, package="huggingface_hub"),
    UrlProtocol(("oss",), PlaceKind.STORE, package="ossfs"),
    UrlProtocol(("oci",), PlaceKind.STORE, package="ocifs"),
    UrlProtocol(("ocilake",), PlaceKind.STORE, package="ocifs"),
    UrlProtocol(("tos",), PlaceKind.STORE, package="tosfs"),
    UrlProtocol(("tosfs",), PlaceKind.STORE, package="tosfs"),
    UrlProtocol(("lakefs",), PlaceKind.STORE, package="lakefs-spec"),
    UrlProtocol(("smb",), PlaceKind.OTHER, package="smbprotocol"),
    *(UrlProtocol((name,), PlaceKind.WRAPPER) for name in _WRAPPERS),
)
_ROWS = {name: row for row in _TABLE for name in row.names}


def row_of(protocol: str) -> UrlProtocol:
    """Return the row of a protocol, given in lower case."""
    return _ROWS.get(protocol) or UrlProtocol((protocol,), PlaceKind.OTHER)


def _all(kind: PlaceKind) -> frozenset[str]:
    return frozenset(name for name, row in _ROWS.items() if row.kind is kind)


COMMON = ("s3", "gs", "az", "hf", "https", "file")
"""Protocols to name in advice."""

STORES, WEB, LOCAL, WRAPPERS = map(_all, (PlaceKind.STORE, PlaceKind.WEB, PlaceKind.LOCAL, PlaceKind.WRAPPER))
