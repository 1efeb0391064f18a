"""Secrets that a request to an object store can carry.

The client imports this module, so it uses the standard library alone.
"""

# Maximum length of a secret: servers do not accept longer headers. The longest secrets, which are
# tokens of temporary keys, have half as many characters at most.
_MAX_CHARS = 8192


def is_sendable(secret: str) -> bool:
    """Return True if a header can carry a secret.

    With any other secret, such as one that ends with a line break, each request fails, and the
    error does not name the cause. As a daemon tries the credentials of all its sessions, such a
    secret would make the requests of other sessions fail as well.
    """
    return secret.isascii() and secret.isprintable() and len(secret) <= _MAX_CHARS
