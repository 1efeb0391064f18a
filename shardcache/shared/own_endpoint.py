"""Marks by which a daemon recognises a daemon's S3 endpoint, which is not an object store."""

DAEMON_AGENT = "shardcache-daemon"
"""Part of the User-Agent in requests that the SDK of a daemon sends."""

ENDPOINT_HEADER = "x-shardcache-endpoint"
"""Header of every answer of a daemon's S3 endpoint."""

OWN_ENDPOINT = "the origin is the S3 endpoint of a shardcache daemon, and no object store"
OWN_ENDPOINT_REMEDY = (
    "start the daemon with AWS_ENDPOINT_URL and AWS_ENDPOINT_URL_S3 unset, or set to the store; "
    "they are for programs that read through a daemon"
)
