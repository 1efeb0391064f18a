"""Redirects of web servers, and urls as they are sent."""

import re
from urllib.parse import quote, urlsplit

from yarl import URL

from shardcache.access.protocols import WEB
from shardcache.errors import OriginError

REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 5

# Characters that a url cannot have: blanks, those beyond ASCII, some others, and a % that encodes
# nothing.
_UNSENDABLE = re.compile(r"[^!-~]|[\"<>\\^`{|}]|%(?![0-9A-Fa-f]{2})")
# Characters to encode in the url of a Location header. Bytes beyond ASCII in it are sent as they
# came.
_BLANKS = re.compile(r"[\x00-\x20\x7f]")


def following(url: str, target: URL, location: str) -> URL:
    """Return the url to which a redirect leads. Raises OriginError unless it can be followed.

    Args:
        url: the user's, which errors name.
        target: the url that was redirected.
        location: the answer's Location header.
    """
    sendable = _BLANKS.sub(lambda blank: quote(blank[0]), location)
    try:
        next_target = _with_host(target.join(URL(sendable, encoded=True)))
    except ValueError as exn:
        raise OriginError(f"the server redirects to an invalid url ({exn})", url=url) from None
    is_insecure = target.scheme == "https" and next_target.scheme == "http"
    if next_target.scheme not in WEB or is_insecure:
        raise OriginError(
            f"redirects from {target.scheme} to {next_target.scheme} are not followed",
            url=url,
            remedy="have the server redirect to https, or use the target's url",
        )
    return next_target


def parsed(url: str) -> URL:
    """Return a user's url, encoded only where it could not be sent otherwise.

    Its other characters stay as they are, as a signature may cover them. Raises OriginError for a
    text that is not a url.
    """
    try:
        server = _with_host(URL(url))
        # yarl would encode the path and the query in its own way; urlsplit leaves them as they are.
        parts = urlsplit(url)
        return verbatim(server, _sendable(parts.path), _sendable(parts.query))
    except ValueError as exn:
        raise OriginError("not a valid web url", url=url) from exn


def verbatim(server: URL, path: str, query: str) -> URL:
    """Return a url with this path and query, which are sent without any further encoding.

    Args:
        server: any url of the server.
    """
    return URL.build(
        scheme=server.scheme,
        authority=server.host_port_subcomponent or "",
        path=path,
        query_string=query,
        encoded=True,
    )


def _sendable(text: str) -> str:
    """Return a path or query with the characters encoded that a url cannot have."""
    return _UNSENDABLE.sub(lambda match: quote(match[0], safe=""), text)


def _with_host(url: URL) -> URL:
    """Return the url. Raises ValueError unless it has a host and a port.

    yarl checks them only on access.
    """
    if url.host is None or url.port is None:
        raise ValueError("no host")
    return url
