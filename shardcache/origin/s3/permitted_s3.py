"""S3, read with any of a user's keys."""

from shardcache.origin.permitted_origin import PermittedOrigin
from shardcache.origin.s3.s3_origin import S3Origin


class PermittedS3(PermittedOrigin):
    """S3 and compatible object stores, read with any of a user's keys."""

    store = S3Origin
