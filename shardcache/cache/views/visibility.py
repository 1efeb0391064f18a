"""Urls as a user may see them: without secrets, and hidden if the rules do not permit them."""

from collections.abc import Callable

from shardcache.shared.wording.redact import HIDDEN, redact

Visible = Callable[[str], bool]
"""Function that returns whether a certain user may see a url."""


def shown(url: str, visible: Visible) -> str:
    """Return a url without its secrets, or a placeholder if it is not `visible`."""
    if visible(url):
        return redact(url)
    return HIDDEN
