"""Urls as a user may see them."""

from collections.abc import Callable

from shardcache.redact import HIDDEN, redact

Visible = Callable[[str], bool]
"""Predicate: may the caller see this url?"""


def shown(url: str, visible: Visible) -> str:
    """Return a url without its secrets, hidden unless it is `visible`."""
    if visible(url):
        return redact(url)
    return HIDDEN
