"""Marks by which a daemon recognises the S3 endpoint of a daemon, its own or another's.

The endpoint of a daemon must not be a daemon's object store: the daemon would send requests to
itself, or everything would be cached twice.
"""

DAEMON_AGENT = "shardcache-daemon"
"""Part of the User-Agent in requests that the SDK of a daemon sends."""

ENDPOINT_HEADER = "x-shardcache-endpoint"
"""Header that every answer of a daemon's S3 endpoint has."""

OWN_ENDPOINT = "the origin is the S3 endpoint of a shardcache daemon, and no object store"
"""Message of the error for an object store that is a daemon's endpoint."""

OWN_ENDPOINT_REMEDY = (
    "start the daemon with AWS_ENDPOINT_URL and AWS_ENDPOINT_URL_S3 unset, or set to the store; "
    "they are for programs that read through a daemon"
)
