"""Secrets that a request to an object store can carry.

The client imports this module, so it uses the standard library alone.
"""

# Maximum length of a secret: servers do not accept longer headers. The longest secrets are tokens
# of temporary keys, which have at most half as many characters.
_MAX_CHARS = 8192


def is_sendable(secret: str) -> bool:
    """Return True if a header can carry a secret.

    Any other secret, such as a secret that ends with a line break, makes each request fail, before
    or after it is sent, and the error does not name the cause. Such a secret must not be tried for
    other sessions.
    """
    return secret.isascii() and secret.isprintable() and len(secret) <= _MAX_CHARS
