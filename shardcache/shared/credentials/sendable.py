"""Secrets that a request to an object store can have. The standard library alone."""

# Of a temporary key's token, the longest there is, at most half; servers take no longer headers.
_MAX_CHARS = 8192


def is_sendable(secret: str) -> bool:
    """Return True if a header can have the secret.

    With any other, such as one that ends with a line break, each request fails before or after it
    is sent, and its error does not say that the secret is the cause. So sessions of other secrets
    must not be served with it.
    """
    return secret.isascii() and secret.isprintable() and len(secret) <= _MAX_CHARS
