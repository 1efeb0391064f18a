"""The S3 endpoint: any S3 client of this node reads objects through the cache."""
