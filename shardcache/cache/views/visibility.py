"""Urls as a user may see them: without secrets, and hidden if the rules do not permit them."""

from collections.abc import Callable

from shardcache.redact import HIDDEN, redact

Visible = Callable[[str], bool]
"""Predicate: may the caller see this url?"""


def shown(url: str, visible: Visible) -> str:
    """Return a url without its secrets; if it is not `visible`, return a text in its place."""
    if visible(url):
        return redact(url)
    return HIDDEN
