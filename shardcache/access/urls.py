"""Meaning of a url: its parts, its canonical form, and names relative to a url.

Rules, caches and origins use these functions, which look only at the text of a url. The canonical
form is the form in which urls are compared. A mark is an addition to a url that is no part of the
object's name, such as `?versionId=ID` in urls of S3; `path_of` removes it. A glob is a url with
wildcards.
"""

import posixpath
import re
from urllib.parse import urlsplit

from shardcache.access.protocols import WEB, row_of
from shardcache.shared.urls.url_names import path_of

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_WILDCARD = re.compile(r"[*?\[]")


def protocol_of(url: str) -> str:
    """Return the part before `://`; a plain path is `file`."""
    protocol, separator, _ = url.partition("://")
    return protocol.lower() if separator else "file"


def without_protocol(url: str) -> str:
    """Return the part after `://`, which begins with the bucket or host; a plain path unchanged."""
    _, separator, path = url.partition("://")
    return path if separator else url


def store_of(url: str) -> str:
    """Return protocol and bucket or host, without credentials.

    Limits on requests, and statistics, are kept by this name.
    """
    _, _, after_protocol = url.partition("://")
    authority, _, _ = after_protocol.partition("/")
    _, _, host = authority.rpartition("@")
    return f"{protocol_of(url)}://{host}"


def host_of(url: str) -> str:
    """Return the host of a web url in lower case, without port and brackets."""
    return (urlsplit(url).hostname or "").lower()


def canonical(url: str) -> str:
    """Return the url in a form for comparison.

    A path becomes a `file://` url. The protocol has its first spelling, such as `s3` for `s3a`. Web
    hosts are in lower case, without the default port. Everything after the host is kept: two
    spellings of a path are two urls.
    """
    spellings = row_of(protocol_of(url)).names
    protocol = spellings[0]
    path = without_protocol(url)
    if protocol in WEB:
        authority, slash, below_host = path.partition("/")
        host = authority.lower().removesuffix(_DEFAULT_PORTS[protocol])
        path = f"{host}{slash}{below_host}"
    return f"{protocol}://{path}"


def is_glob(url: str) -> bool:
    """Return whether the url has wildcards.

    In web urls, only `*` is a wildcard: `?` begins the query, and `[` an IPv6 address. In other
    urls, `*`, `?` and `[` are wildcards, except the `?` of the mark `?versionId=`.
    """
    if protocol_of(url) in WEB:
        before_query, _, _ = url.partition("?")
        return "*" in before_query
    without_marks = path_of(url)
    return _WILDCARD.search(without_marks) is not None


def glob_prefix(pattern: str) -> str:
    """Return the literal beginning of a glob, up to its first wildcard.

    This is the prefix to list. Web servers cannot list files, so it does not matter here that `?`
    and `[` are no wildcards in web urls.
    """
    return _WILDCARD.split(pattern, maxsplit=1)[0]


def join(base: str, relative: str) -> str:
    """Return the url of a shard that an index file names.

    Args:
        base: url of the index file.
        relative: the shard's name in the file, relative to the file's folder; or the shard's url,
            which is returned unchanged.
    """
    if "://" in relative:
        return relative
    # For a plain path, protocol and separator are empty.
    protocol, separator, path = path_of(base).rpartition("://")
    root = f"{protocol}{separator}"
    # A local path begins right after the separator, any other path after the bucket or host.
    if separator and protocol_of(base) != "file":
        bucket_or_host, _, path = path.partition("/")
        root += bucket_or_host
    absolute = posixpath.join("/", posixpath.dirname(path), relative)
    return root + posixpath.normpath(absolute)
