"""Redirects of web servers, and urls as they are sent.

A user's url is changed as little as possible before it is sent, because its signature may cover
every character.
"""

import re
from urllib.parse import quote, urlsplit

from yarl import URL

from shardcache.access.protocols import WEB
from shardcache.shared.exceptions import OriginError

REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 5

# Characters that a url cannot have: blanks, characters beyond ASCII, some others, and a % that
# encodes nothing.
_UNSENDABLE = re.compile(r"[^!-~]|[\"<>\\^`{|}]|%(?![0-9A-Fa-f]{2})")
# Characters that are encoded in a Location header. The header's bytes beyond ASCII are sent back as
# they were received.
_BLANKS = re.compile(r"[\x00-\x20\x7f]")


def redirect_target(url: str, redirected: URL, location: str) -> URL:
    """Return the url to which a redirect leads. Raises OriginError if it must not be followed.

    Args:
        url: the user's url, which errors name.
        redirected: the url that the server has redirected.
        location: the answer's Location header.
    """
    sendable = _BLANKS.sub(lambda blank: quote(blank[0]), location)
    try:
        target = redirected.join(URL(sendable, encoded=True))
        _check_host(target)
    except ValueError as exn:
        raise OriginError(f"the server redirects to an invalid url ({exn})", url=url) from None
    is_insecure = redirected.scheme == "https" and target.scheme == "http"
    if target.scheme not in WEB or is_insecure:
        raise OriginError(
            f"redirects from {redirected.scheme} to {target.scheme} are not followed",
            url=url,
            remedy="have the server redirect to https, or use the target's url",
        )
    return target


def sendable_url(url: str) -> URL:
    """Return a user's url, with only those characters encoded that could not be sent.

    All other characters stay as they are, because a signature may cover them. Raises OriginError
    for a text that is not a url.
    """
    try:
        server = URL(url)
        _check_host(server)
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
    """Return a path or query, with those characters encoded that a url cannot have."""
    return _UNSENDABLE.sub(lambda match: quote(match[0], safe=""), text)


def _check_host(url: URL) -> None:
    """Raise ValueError unless a url has a valid host and port."""
    # yarl checks the host and the port only when they are accessed.
    if url.host is None or url.port is None:
        raise ValueError("no host")
