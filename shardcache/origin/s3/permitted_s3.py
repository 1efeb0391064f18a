"""S3, read with whichever of a user's keys has the permission."""

from shardcache.origin.permitted_origin import PermittedOrigin
from shardcache.origin.s3.s3_origin import S3Origin


class PermittedS3(PermittedOrigin):
    """S3 and compatible object stores, read with whichever of a user's keys has the permission."""

    store_class = S3Origin
