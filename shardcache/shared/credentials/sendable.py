"""Secrets that a request to an object store can carry. Uses the standard library alone."""

# Servers accept no longer headers. The longest secret, the token of temporary keys, has at most
# half as many characters.
_MAX_CHARS = 8192


def is_sendable(secret: str) -> bool:
    """Return True if a header can carry the secret.

    Any other secret, such as one that ends with a line break, makes each request fail, before or
    after it is sent, and the error does not name the cause. It must not be tried for the sessions
    of others.
    """
    return secret.isascii() and secret.isprintable() and len(secret) <= _MAX_CHARS
